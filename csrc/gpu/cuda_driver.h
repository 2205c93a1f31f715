// The driver of NVIDIA GPUs: libcuda, opened at run time.

#ifndef ZYFA_GPU_CUDA_DRIVER_H_
#define ZYFA_GPU_CUDA_DRIVER_H_

#include "csrc/cuda/attention_args.h"
#include "csrc/cuda/launch_plan.h"
#include "csrc/gpu/driver.h"

namespace zyfa::gpu {

// The library that ZYFA_JAX_CUDA_LIBRARY names, or the system's. Once found it
// stays; until then every call looks again.
MaybeError OpenCuda(const Driver** driver);

// The tensor map of an array at `base`.
MaybeError EncodeTensorMap(const cuda::TensorMapPlan& plan, const void* base,
                           cuda::TensorMap* map);

}  // namespace zyfa::gpu

#endif  // ZYFA_GPU_CUDA_DRIVER_H_
