// What the handlers of the platform "CUDA" share.

#ifndef ZYFA_FFI_CUDA_LAUNCHER_H_
#define ZYFA_FFI_CUDA_LAUNCHER_H_

#include "csrc/cuda/launch_plan.h"
#include "csrc/gpu/launcher.h"

namespace zyfa {

gpu::Launch ToLaunch(const cuda::KernelLaunch& kernel, void** parameters);

// The process's one launcher of kernels for NVIDIA GPUs.
gpu::Launcher& CudaLauncher();

}  // namespace zyfa

#endif  // ZYFA_FFI_CUDA_LAUNCHER_H_
