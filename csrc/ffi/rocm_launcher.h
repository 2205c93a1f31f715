// What the handlers of the platform "ROCM" share.

#ifndef ZYFA_FFI_ROCM_LAUNCHER_H_
#define ZYFA_FFI_ROCM_LAUNCHER_H_

#include <cstdint>

#include "csrc/gpu/launcher.h"

namespace zyfa {

// The process's one launcher of kernels for AMD GPUs.
gpu::Launcher& RocmLauncher();

// HIP takes fewer than 2^32 threads along a dimension.
constexpr int64_t MaxGroups(int threads) {
  return (int64_t{1} << 32) / threads - 1;
}

}  // namespace zyfa

#endif  // ZYFA_FFI_ROCM_LAUNCHER_H_
