# The CPU kernel once for each instruction set that the compiler knows, each in an
# object library of its own with its own flags.
#
# Sets ZYFA_CPU_TARGETS and ZYFA_CPU_TARGETS_LEFT_OUT; zyfa_link_cpu_targets(module)
# adds the objects to the extension.

include(CheckCXXCompilerFlag)

set(ZYFA_CPU_TARGETS portable)
set(ZYFA_CPU_TARGETS_LEFT_OUT)

# No contraction: only the fused operations written down are fused, so that every
# instruction set gives the same FP8 codes.
set(zyfa_kernel_flags -O3 -ffp-contract=off -fno-math-errno -Wall -Wextra
                      -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized)

set(zyfa_flags_portable)
set(zyfa_flags_avx2 -mavx2 -mfma -mf16c)
set(zyfa_flags_avx512 ${zyfa_flags_avx2} -mavx512f -mavx512bw -mavx512vl
                      -mavx512dq -mprefer-vector-width=512)
set(zyfa_flags_avx512vnni ${zyfa_flags_avx512} -mavx512vnni)
set(zyfa_flags_amx ${zyfa_flags_avx512} -mavx512bf16 -mamx-tile -mamx-bf16)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  foreach(target IN ITEMS avx2 avx512 avx512vnni amx)
    string(REPLACE ";" " " flags "${zyfa_flags_${target}}")
    check_cxx_compiler_flag("${flags}" ZYFA_COMPILES_${target})
    if(ZYFA_COMPILES_${target})
      list(PREPEND ZYFA_CPU_TARGETS ${target})
    else()
      list(PREPEND ZYFA_CPU_TARGETS_LEFT_OUT ${target})
    endif()
  endforeach()
endif()

function(zyfa_link_cpu_targets module)
  foreach(target IN LISTS ZYFA_CPU_TARGETS)
    set(library zyfa_cpu_${target})
    add_library(${library} OBJECT csrc/cpu/target_${target}.cc)
    target_include_directories(${library} PRIVATE "${CMAKE_SOURCE_DIR}")
    target_compile_options(${library} PRIVATE ${zyfa_kernel_flags}
                                              ${zyfa_flags_${target}})
    target_sources(${module} PRIVATE $<TARGET_OBJECTS:${library}>)
    string(TOUPPER ${target} upper)
    target_compile_definitions(${module} PRIVATE ZYFA_WITH_${upper})

    if(ZYFA_SANITIZE)
      # With full optimisation, instrumented kernels take minutes to compile.
      target_compile_options(${library} PRIVATE
        -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined
        -fno-omit-frame-pointer)
    elseif(CMAKE_NM)
      # A second definition with other flags would be the linker's to choose, so
      # each object defines its entry point and nothing else that it could see.
      add_custom_command(TARGET ${module} PRE_LINK
        COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM}
                -DOBJECT=$<TARGET_OBJECTS:${library}> -DTARGET=${target}
                -P "${CMAKE_SOURCE_DIR}/cmake/check_exports.cmake"
        VERBATIM)
    endif()
  endforeach()
endfunction()
