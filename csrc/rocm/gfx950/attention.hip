// The attention kernels: one for each element type and query/key head dim.

#include "csrc/rocm/gfx950/attention.h"

namespace zyfa::gfx950 {

// Two waves on each SIMD, which leaves each 256 vector registers.
#define ZYFA_ATTENTION(name, Type, head_dim)                               \
  extern "C" __attribute__((                                               \
      global, amdgpu_flat_work_group_size(rocm::kThreads, rocm::kThreads), \
      amdgpu_waves_per_eu(2, 2))) void                                     \
  zyfa_attention_##name(AttentionArgs) {                                   \
    Attention<Type, head_dim>();                                           \
  }

ZYFA_ATTENTION(fp8_128x128, Fp8, 128)
ZYFA_ATTENTION(fp8_192x128, Fp8, 192)
ZYFA_ATTENTION(int8_128x128, Int8, 128)
ZYFA_ATTENTION(int8_192x128, Int8, 192)
ZYFA_ATTENTION(bf16_128x128, BF16, 128)
ZYFA_ATTENTION(bf16_192x128, BF16, 192)
ZYFA_ATTENTION(f16_128x128, F16, 128)
ZYFA_ATTENTION(f16_192x128, F16, 192)

}  // namespace zyfa::gfx950
