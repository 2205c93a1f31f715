# Fails unless OBJECT defines exactly one external symbol, the entry point of
# TARGET: cmake -DNM=... -DOBJECT=... -DTARGET=... -P check_exports.cmake

execute_process(COMMAND "${NM}" -g --defined-only "${OBJECT}"
                OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(STRIP "${symbols}" symbols)
string(REPLACE "\n" ";" symbols "${symbols}")
foreach(symbol IN LISTS symbols)
  string(TOLOWER "${symbol}" lower)
  if(NOT lower MATCHES "k${TARGET}target")
    message(FATAL_ERROR
      "csrc/cpu/target_${TARGET}.cc defines more than its entry point: "
      "'${symbol}'. Give it internal linkage: compiled for ${TARGET}, it could "
      "replace another target's.")
  endif()
endforeach()
list(LENGTH symbols count)
if(NOT count EQUAL 1)
  message(FATAL_ERROR "${OBJECT} defines these, one is wanted: ${symbols}")
endif()
