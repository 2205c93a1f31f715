// Machine code for GPUs that was built into the extension.

#ifndef ZYFA_GPU_CODE_OBJECT_H_
#define ZYFA_GPU_CODE_OBJECT_H_

#include <cstddef>

namespace zyfa {
namespace gpu {

struct CodeObject {
  const char* arch;  // as the device's driver names it, without features
  const unsigned char* data;
  size_t size;
};

}  // namespace gpu

namespace rocm {

using gpu::CodeObject;

// Every code object for AMD GPUs; none when built without.
extern const CodeObject kCodeObjects[];
extern const size_t kCodeObjectCount;

}  // namespace rocm

namespace cuda {

using gpu::CodeObject;

// The same for NVIDIA GPUs.
extern const CodeObject kCodeObjects[];
extern const size_t kCodeObjectCount;

}  // namespace cuda
}  // namespace zyfa

#endif  // ZYFA_GPU_CODE_OBJECT_H_
