// What code_object.h declares, for a build without code objects.

#include "csrc/gpu/code_object.h"

#ifndef ZYFA_WITH_ROCM
namespace zyfa::rocm {

const CodeObject kCodeObjects[1] = {};
const size_t kCodeObjectCount = 0;

}  // namespace zyfa::rocm
#endif

#ifndef ZYFA_WITH_CUDA
namespace zyfa::cuda {

const CodeObject kCodeObjects[1] = {};
const size_t kCodeObjectCount = 0;

}  // namespace zyfa::cuda
#endif
