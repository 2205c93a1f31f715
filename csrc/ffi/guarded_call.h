// Handlers are called from C: no exception may leave them.

#ifndef ZYFA_FFI_GUARDED_CALL_H_
#define ZYFA_FFI_GUARDED_CALL_H_

#include <exception>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace zyfa {

// What `call` returns; an exception becomes an error that begins with `target`.
template <class Call>
xla::ffi::Error GuardedCall(const char* target, const Call& call) {
  try {
    return call();
  } catch (const std::exception& e) {
    return xla::ffi::Error::Internal(std::string(target) + ": " + e.what());
  }
}

}  // namespace zyfa

#endif  // ZYFA_FFI_GUARDED_CALL_H_
