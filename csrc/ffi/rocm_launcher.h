// What the handlers of the platform "ROCM" share.

#ifndef ZYFA_FFI_ROCM_LAUNCHER_H_
#define ZYFA_FFI_ROCM_LAUNCHER_H_

#include "csrc/gpu/launcher.h"

namespace zyfa {

// The process's one launcher of kernels for AMD GPUs.
gpu::Launcher& RocmLauncher();

}  // namespace zyfa

#endif  // ZYFA_FFI_ROCM_LAUNCHER_H_
