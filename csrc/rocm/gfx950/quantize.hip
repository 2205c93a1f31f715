// The quantisation kernels: for each element type, by the largest head dim of
// rows that are not rotated or by Hadamard matrices of up to 64; and for the
// head dims 128 and 256 rotated whole. To FP8, by descales of tiles or of
// channels; to int8, by descales of tokens or of tiles. And those that measure.

#include "csrc/rocm/gfx950/quantize.h"

namespace zyfa::gfx950 {

#define ZYFA_KERNEL(name, ...)                                           \
  extern "C" __attribute__((                                             \
      global, amdgpu_flat_work_group_size(rocm::kQuantizeThreads,        \
                                          rocm::kQuantizeThreads))) void \
  zyfa_quantize_##name(QuantizeArgs args) {                              \
    __VA_ARGS__(args);                                                   \
  }

#define ZYFA_QUANTIZE_PLAIN(name, Type, slots, steps)         \
  ZYFA_KERNEL(name, Quantize<Type, slots, 1, false>)          \
  ZYFA_KERNEL(name##_channels, QuantizeChannels<Type, slots>) \
  ZYFA_KERNEL(name##_measure, Measure<Type, steps>)           \
  ZYFA_QUANTIZE_ROTATED(name, , Type, slots, 1)

#define ZYFA_QUANTIZE_ROTATED(name, tail, Type, slots, chunks)              \
  ZYFA_KERNEL(name##_rotated##tail, Quantize<Type, slots, chunks, true>)    \
  ZYFA_KERNEL(name##_tokens##tail, QuantizeInt8<Type, slots, chunks, true>) \
  ZYFA_KERNEL(name##_blocks##tail, QuantizeInt8<Type, slots, chunks, false>)

#define ZYFA_QUANTIZE_TYPE(name, Type)                  \
  ZYFA_QUANTIZE_PLAIN(name##_64, Type, 2, 2)            \
  ZYFA_QUANTIZE_PLAIN(name##_128, Type, 4, 4)           \
  ZYFA_QUANTIZE_PLAIN(name##_192, Type, 6, 7)           \
  ZYFA_QUANTIZE_PLAIN(name##_256, Type, 8, 8)           \
  ZYFA_QUANTIZE_ROTATED(name##_128, _whole, Type, 2, 2) \
  ZYFA_QUANTIZE_ROTATED(name##_256, _whole, Type, 2, 4)

ZYFA_QUANTIZE_TYPE(bf16, FromBF16)
ZYFA_QUANTIZE_TYPE(f16, FromF16)
ZYFA_QUANTIZE_TYPE(f32, FromF32)

}  // namespace zyfa::gfx950
