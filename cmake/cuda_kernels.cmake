# The CUDA kernels, compiled to one cubin for each NVIDIA architecture and embedded in
# the extension, by the nvcc that ZYFA_CUDA_NVCC names, or the one of CUDACXX,
# CUDA_HOME or PATH, or the one of NVIDIA's compiler packages.
#
# Sets ZYFA_CUDA_BUILT (architectures) and ZYFA_CUDA_WHY_NOT;
# zyfa_link_cuda_kernels(module) adds them to the extension.

option(ZYFA_CUDA "Build the kernels for NVIDIA GPUs where nvcc is found" ON)
set(ZYFA_CUDA_NVCC "" CACHE STRING
    "nvcc that compiles the kernels for NVIDIA GPUs; 'wheels': of the package \
nvidia-cuda-nvcc; empty: of CUDACXX, CUDA_HOME, PATH or that package")

set(zyfa_cuda_oldest 12.8)
set(ZYFA_CUDA_BUILT)
set(ZYFA_CUDA_WHY_NOT)

# The packages share the folder nvidia/cu13, the nvcc is in its bin.
function(zyfa_find_packaged_nvcc variable)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import pathlib, nvidia; print(next(x for y in nvidia.__path__ for x in pathlib.Path(y).glob('cu*/bin/nvcc')))"
    OUTPUT_VARIABLE found
    RESULT_VARIABLE status
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(status EQUAL 0)
    set(${variable} "${found}" PARENT_SCOPE)
  endif()
endfunction()

set(zyfa_nvcc)
if(NOT ZYFA_CUDA)
  set(ZYFA_CUDA_WHY_NOT "ZYFA_CUDA is off")
elseif(ZYFA_CUDA_NVCC STREQUAL "wheels")
  zyfa_find_packaged_nvcc(zyfa_nvcc)
  if(NOT zyfa_nvcc)
    message(FATAL_ERROR
      "ZYFA_CUDA_NVCC is 'wheels', and ${Python_EXECUTABLE} has no package "
      "nvidia-cuda-nvcc. 'ZYFA_CUDA_NVCC=wheels pip install .' fetches it")
  endif()
elseif(ZYFA_CUDA_NVCC)
  set(zyfa_nvcc "${ZYFA_CUDA_NVCC}")
else()
  find_program(zyfa_found_nvcc NAMES nvcc
    HINTS "$ENV{CUDACXX}" "$ENV{CUDACXX}/.." "$ENV{CUDA_HOME}/bin" /usr/local/cuda/bin
    NO_CACHE)
  if(zyfa_found_nvcc)
    set(zyfa_nvcc "${zyfa_found_nvcc}")
  else()
    zyfa_find_packaged_nvcc(zyfa_nvcc)
  endif()
  if(NOT zyfa_nvcc)
    set(ZYFA_CUDA_WHY_NOT
        "no nvcc; 'ZYFA_CUDA_NVCC=wheels pip install .' fetches one")
  endif()
endif()
if(NOT ZYFA_CUDA_WHY_NOT)
  execute_process(COMMAND "${zyfa_nvcc}" --version OUTPUT_VARIABLE zyfa_nvcc_says
                  RESULT_VARIABLE status ERROR_QUIET)
  string(REGEX MATCH "release ([0-9.]+)" matched "${zyfa_nvcc_says}")
  if(NOT status EQUAL 0 OR NOT matched)
    set(ZYFA_CUDA_WHY_NOT "${zyfa_nvcc} does not run")
  elseif(CMAKE_MATCH_1 VERSION_LESS zyfa_cuda_oldest)
    set(ZYFA_CUDA_WHY_NOT
        "${zyfa_nvcc} is ${CMAKE_MATCH_1}, below ${zyfa_cuda_oldest}")
  else()
    set(ZYFA_CUDA_BUILT sm_90)
  endif()
endif()

function(zyfa_link_cuda_kernels module)
  if(NOT ZYFA_CUDA_BUILT)
    return()
  endif()
  file(GLOB headers CONFIGURE_DEPENDS
       "${CMAKE_SOURCE_DIR}/csrc/cuda/*.h" "${CMAKE_SOURCE_DIR}/csrc/cuda/sm90/*.h"
       "${CMAKE_SOURCE_DIR}/csrc/gpu/quantize_args.h"
       "${CMAKE_SOURCE_DIR}/csrc/numerics/*.h")
  # One translation unit, since a cubin is of one.
  file(GLOB kernels CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/csrc/cuda/sm90/*.cu")
  set(includes)
  foreach(kernel IN LISTS kernels)
    string(APPEND includes "#include \"${kernel}\"\n")
  endforeach()
  set(unit "${CMAKE_BINARY_DIR}/sm_90.cu")
  file(CONFIGURE OUTPUT "${unit}" CONTENT "${includes}" @ONLY)
  set(cubin "${CMAKE_BINARY_DIR}/sm_90.cubin")
  add_custom_command(
    OUTPUT "${cubin}"
    COMMAND "${zyfa_nvcc}" -std=c++17 -O3 --expt-relaxed-constexpr -cubin
            -gencode=arch=compute_90a,code=sm_90a -ccbin "${CMAKE_CXX_COMPILER}"
            "-I${CMAKE_SOURCE_DIR}" "${unit}" -o "${cubin}"
    DEPENDS "${unit}" ${kernels} ${headers}
    COMMENT "Compiling the kernels for sm_90"
    VERBATIM)
  set(embedded "${CMAKE_BINARY_DIR}/cuda_code_objects.cc")
  add_custom_command(
    OUTPUT "${embedded}"
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_SOURCE_DIR}/cmake/embed_code_objects.py"
            "${embedded}" cuda sm_90 "${cubin}"
    DEPENDS "${cubin}" "${CMAKE_SOURCE_DIR}/cmake/embed_code_objects.py"
    COMMENT "Embedding the kernels for sm_90"
    VERBATIM)
  target_sources(${module} PRIVATE "${embedded}")
  target_compile_definitions(${module} PRIVATE ZYFA_WITH_CUDA)
endfunction()
