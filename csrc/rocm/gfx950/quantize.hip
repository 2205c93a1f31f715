// The quantisation kernels: for each element type, by the largest head dim of
// rows that are not rotated or by Hadamard matrices of up to 64; and for the
// head dims 128 and 256 rotated whole.

#include "csrc/rocm/gfx950/quantize.h"

namespace zyfa::gfx950 {

#define ZYFA_QUANTIZE(name, Type, slots, chunks, rotates)                \
  extern "C" __attribute__((                                             \
      global, amdgpu_flat_work_group_size(rocm::kQuantizeThreads,        \
                                          rocm::kQuantizeThreads))) void \
  zyfa_quantize_##name(QuantizeArgs args) {                              \
    Quantize<Type, slots, chunks, rotates>(args);                        \
  }

#define ZYFA_QUANTIZE_TYPE(name, Type)                      \
  ZYFA_QUANTIZE(name##_64, Type, 2, 1, false)               \
  ZYFA_QUANTIZE(name##_128, Type, 4, 1, false)              \
  ZYFA_QUANTIZE(name##_192, Type, 6, 1, false)              \
  ZYFA_QUANTIZE(name##_256, Type, 8, 1, false)              \
  ZYFA_QUANTIZE(name##_64_rotated, Type, 2, 1, true)        \
  ZYFA_QUANTIZE(name##_128_rotated, Type, 4, 1, true)       \
  ZYFA_QUANTIZE(name##_192_rotated, Type, 6, 1, true)       \
  ZYFA_QUANTIZE(name##_256_rotated, Type, 8, 1, true)       \
  ZYFA_QUANTIZE(name##_128_rotated_whole, Type, 2, 2, true) \
  ZYFA_QUANTIZE(name##_256_rotated_whole, Type, 2, 4, true)

ZYFA_QUANTIZE_TYPE(bf16, FromBF16)
ZYFA_QUANTIZE_TYPE(f16, FromF16)
ZYFA_QUANTIZE_TYPE(f32, FromF32)

}  // namespace zyfa::gfx950
