# The HIP kernels, compiled to one code object for each AMD architecture and embedded
# in the extension. The clang of the ziglang package does it, or the one that
# ZYFA_ROCM_CLANG names (ROCm's amdclang++, or clang 20 and newer, with its lld).
#
# Sets ZYFA_ROCM_BUILT (architectures) and ZYFA_ROCM_WHY_NOT;
# zyfa_link_rocm_kernels(module) adds them to the extension.

option(ZYFA_ROCM "Build the kernels for AMD GPUs" ON)
set(ZYFA_ROCM_ARCHS gfx950 CACHE STRING
    "AMD architectures to build kernels for, each a folder of csrc/rocm")
set(ZYFA_GFX950_CHORD_BLOCKS 1 CACHE STRING
    "of four blocks of keys, how many get the more exact FP8 probabilities (docs/gfx950.md)")
set(ZYFA_ROCM_CLANG "" CACHE FILEPATH
    "clang that compiles the kernels for AMD GPUs; empty: that of ziglang")

set(ZYFA_ROCM_BUILT)
set(ZYFA_ROCM_WHY_NOT)
if(NOT ZYFA_ROCM)
  set(ZYFA_ROCM_WHY_NOT "ZYFA_ROCM is off")
elseif(ZYFA_ROCM_CLANG)
  find_program(zyfa_rocm_lld NAMES ld.lld lld HINTS "${ZYFA_ROCM_CLANG}/..")
  if(zyfa_rocm_lld)
    set(zyfa_rocm_clang "${ZYFA_ROCM_CLANG}")
    set(zyfa_rocm_link "${zyfa_rocm_lld}")
  else()
    set(ZYFA_ROCM_WHY_NOT "no ld.lld beside ${ZYFA_ROCM_CLANG}")
  endif()
else()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / 'zig')"
    OUTPUT_VARIABLE zyfa_zig
    RESULT_VARIABLE status
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(status EQUAL 0)
    set(zyfa_rocm_clang "${zyfa_zig}" clang)
    set(zyfa_rocm_link "${zyfa_zig}" ld.lld)
  else()
    set(ZYFA_ROCM_WHY_NOT
        "no ziglang package and no ZYFA_ROCM_CLANG")
  endif()
endif()

if(NOT ZYFA_ROCM_WHY_NOT)
  foreach(arch IN LISTS ZYFA_ROCM_ARCHS)
    if(NOT IS_DIRECTORY "${CMAKE_SOURCE_DIR}/csrc/rocm/${arch}")
      message(FATAL_ERROR "ZYFA_ROCM_ARCHS takes the folders of csrc/rocm, got ${arch}")
    endif()
  endforeach()
  set(ZYFA_ROCM_BUILT ${ZYFA_ROCM_ARCHS})
endif()

# Zig's clang cannot link for a GPU in one step, so there are three: HIP to bitcode,
# bitcode to an object, the object to a code object. All kernels are one translation
# unit: each object brings a table of its kernels, and readers may stop at the first.
function(zyfa_add_code_object arch output)
  file(GLOB kernels CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/csrc/rocm/${arch}/*.hip")
  file(GLOB headers CONFIGURE_DEPENDS
       "${CMAKE_SOURCE_DIR}/csrc/gpu/quantize_args.h"
       "${CMAKE_SOURCE_DIR}/csrc/rocm/*.h" "${CMAKE_SOURCE_DIR}/csrc/rocm/${arch}/*.h"
       "${CMAKE_SOURCE_DIR}/csrc/numerics/*.h")
  set(unit "${CMAKE_BINARY_DIR}/${arch}/kernels")
  set(includes)
  foreach(kernel IN LISTS kernels)
    string(APPEND includes "#include \"${kernel}\"\n")
  endforeach()
  file(CONFIGURE OUTPUT "${unit}.hip" CONTENT "${includes}" @ONLY)
  # No contraction: only the fused operations written down are fused, so that FP8 codes
  # are those of every other kernel. No packing of float32 arithmetic that is not
  # written so: packed instructions wait for the matrix unit.
  set(options "-DZYFA_GFX950_CHORD_BLOCKS=${ZYFA_GFX950_CHORD_BLOCKS}" -nogpulib -O3 -ffp-contract=off -fno-slp-vectorize
              -mllvm -disable-vector-combine)
  add_custom_command(
    OUTPUT "${output}"
    COMMAND ${zyfa_rocm_clang} -x hip --offload-arch=${arch} --cuda-device-only
            -nogpuinc -std=c++17 ${options} -Wall -Wextra
            "-I${CMAKE_SOURCE_DIR}" -emit-llvm -c "${unit}.hip" -o "${unit}.bc"
    COMMAND ${zyfa_rocm_clang} -target amdgcn-amd-amdhsa -mcpu=${arch} ${options}
            -x ir -c "${unit}.bc" -o "${unit}.o"
    COMMAND ${zyfa_rocm_link} -shared "${unit}.o" -o "${output}"
    DEPENDS "${unit}.hip" ${kernels} ${headers}
    COMMENT "Compiling the kernels for ${arch}"
    VERBATIM)
endfunction()

function(zyfa_link_rocm_kernels module)
  if(NOT ZYFA_ROCM_BUILT)
    return()
  endif()
  set(code_objects)
  set(arguments)
  foreach(arch IN LISTS ZYFA_ROCM_BUILT)
    set(code_object "${CMAKE_BINARY_DIR}/${arch}.co")
    zyfa_add_code_object(${arch} "${code_object}")
    list(APPEND code_objects "${code_object}")
    list(APPEND arguments ${arch} "${code_object}")
  endforeach()
  set(embedded "${CMAKE_BINARY_DIR}/rocm_code_objects.cc")
  add_custom_command(
    OUTPUT "${embedded}"
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_SOURCE_DIR}/cmake/embed_code_objects.py"
            "${embedded}" rocm ${arguments}
    DEPENDS ${code_objects} "${CMAKE_SOURCE_DIR}/cmake/embed_code_objects.py"
    COMMENT "Embedding the code objects"
    VERBATIM)
  target_sources(${module} PRIVATE "${embedded}")
  target_compile_definitions(${module} PRIVATE ZYFA_WITH_ROCM)
endfunction()
