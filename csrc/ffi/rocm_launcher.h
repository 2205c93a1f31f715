// What the handlers of the platform "ROCM" share.

#ifndef ZYFA_FFI_ROCM_LAUNCHER_H_
#define ZYFA_FFI_ROCM_LAUNCHER_H_

#include <cstdint>

#include "csrc/gpu/driver.h"
#include "csrc/gpu/launcher.h"
#include "xla/ffi/api/ffi.h"

namespace zyfa {

// The process's one launcher of kernels for AMD GPUs.
gpu::Launcher& RocmLauncher();

// Success where there is no error; `call` begins the message.
xla::ffi::Error ToFfiError(const char* call, const gpu::MaybeError& error);

// HIP takes fewer than 2^32 threads along a dimension.
constexpr int64_t MaxGroups(int threads) {
  return (int64_t{1} << 32) / threads - 1;
}

}  // namespace zyfa

#endif  // ZYFA_FFI_ROCM_LAUNCHER_H_
