// The quantisation kernels for Hopper: for each element type, by the largest
// head dim of rows that are not rotated or by Hadamard matrices of up to 64;
// and for the head dims 128 and 256 rotated whole. And those that measure.

#include "csrc/cuda/sm90/quantize.h"

namespace zyfa::sm90 {

// Blocks of a multiprocessor, by the registers that a thread holds its numbers
// in: enough of 512 threads to keep the memory busy.
constexpr int QuantizeBlocks(int held) {
  return held <= 16 ? 3 : held <= 32 ? 2 : 1;
}

}  // namespace zyfa::sm90

#define ZYFA_QUANTIZE(name, Type, dim, chunks, rotates)                     \
  extern "C" __global__ void __launch_bounds__(                             \
      zyfa::cuda::kMaxQuantizeThreads,                                      \
      zyfa::sm90::QuantizeBlocks(                                           \
          (dim) / 4 * ((rotates) ? 4 : zyfa::sm90::Type::kBytes) / 4))      \
      zyfa_quantize_##name(                                                 \
          const __grid_constant__ zyfa::gpu::QuantizeArgs args) {           \
    constexpr int kSlots =                                                  \
        zyfa::gpu::kQuantizeTokens / zyfa::cuda::QuantizeRows(dim, chunks); \
    zyfa::sm90::Quantize<zyfa::sm90::Type, kSlots, chunks, rotates>(args);  \
  }

#define ZYFA_QUANTIZE_TYPE(name, Type)                        \
  ZYFA_QUANTIZE(name##_128, Type, 128, 1, false)              \
  ZYFA_QUANTIZE(name##_256, Type, 256, 1, false)              \
  ZYFA_QUANTIZE(name##_128_rotated, Type, 128, 1, true)       \
  ZYFA_QUANTIZE(name##_256_rotated, Type, 256, 1, true)       \
  ZYFA_QUANTIZE(name##_128_rotated_whole, Type, 128, 2, true) \
  ZYFA_QUANTIZE(name##_256_rotated_whole, Type, 256, 4, true)

#define ZYFA_MEASURE(name, Type, dim)                                       \
  extern "C" __global__ void __launch_bounds__(                             \
      zyfa::cuda::kMaxQuantizeThreads,                                      \
      zyfa::sm90::QuantizeBlocks(16 +                                       \
                                 (dim) / 4 * zyfa::sm90::Type::kBytes / 4)) \
      zyfa_quantize_##name##_measure(                                       \
          const __grid_constant__ zyfa::gpu::QuantizeArgs args) {           \
    constexpr int kSlots =                                                  \
        zyfa::gpu::kQuantizeTokens / zyfa::cuda::QuantizeRows(dim, 1);      \
    zyfa::sm90::Measure<zyfa::sm90::Type, kSlots>(args);                    \
  }

#define ZYFA_MEASURE_TYPE(name, Type) \
  ZYFA_MEASURE(name##_128, Type, 128) \
  ZYFA_MEASURE(name##_256, Type, 256)

ZYFA_MEASURE_TYPE(bf16, FromBF16)
ZYFA_MEASURE_TYPE(f16, FromF16)
ZYFA_MEASURE_TYPE(f32, FromF32)

ZYFA_QUANTIZE_TYPE(bf16, FromBF16)
ZYFA_QUANTIZE_TYPE(f16, FromF16)
ZYFA_QUANTIZE_TYPE(f32, FromF32)
