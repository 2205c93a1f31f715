// The driver of AMD GPUs: libamdhip64, opened at run time.

#ifndef ZYFA_GPU_HIP_DRIVER_H_
#define ZYFA_GPU_HIP_DRIVER_H_

#include "csrc/gpu/driver.h"

namespace zyfa::gpu {

// The library that ZYFA_JAX_HIP_LIBRARY names, or the one that the process has
// loaded (JAX's plugin brings it), or the system's. Once found it stays; until
// then every call looks again.
MaybeError OpenHip(const Driver** driver);

}  // namespace zyfa::gpu

#endif  // ZYFA_GPU_HIP_DRIVER_H_
