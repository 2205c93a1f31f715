// The quantisation kernels for Hopper: for each element type, by the largest
// head dim of rows that are not rotated or by Hadamard matrices of up to 64;
// and for the head dims 128 and 256 rotated whole. To FP8, by descales of tiles
// or of channels; to int8, by descales of tokens or of tiles. And those that
// measure.

#include "csrc/cuda/sm90/quantize.h"

namespace zyfa::sm90 {

// Blocks of a multiprocessor, by the registers that a thread holds its numbers
// in: enough of 512 threads to keep the memory busy.
constexpr int QuantizeBlocks(int held) {
  return held <= 16 ? 3 : held <= 32 ? 2 : 1;
}

// Registers that a thread holds its part of a tile in. Where it is of float32
// and rotated, there is the part as loaded beside the first that is rotated.
template <class Type>
constexpr int HeldRegisters(int dim, bool rotates) {
  if (rotates) return dim / 4 + (Type::kBytes == 4 ? kChunk : 0);
  return dim / 4 * Type::kBytes / 4;
}

constexpr int QuantizeSlots(int dim, int chunks) {
  return gpu::kQuantizeTokens / cuda::QuantizeRows(dim, chunks);
}

}  // namespace zyfa::sm90

#define ZYFA_KERNEL(name, held)                                          \
  extern "C" __global__ void __launch_bounds__(                          \
      zyfa::cuda::kMaxQuantizeThreads, zyfa::sm90::QuantizeBlocks(held)) \
      zyfa_quantize_##name(                                              \
          const __grid_constant__ zyfa::gpu::QuantizeArgs args)

// What is not rotated. Some hold more than their numbers.
#define ZYFA_QUANTIZE_PLAIN(name, Type, dim)                       \
  ZYFA_KERNEL(name, zyfa::sm90::HeldRegisters<Type>(dim, false)) { \
    constexpr int kSlots = zyfa::sm90::QuantizeSlots(dim, 1);      \
    zyfa::sm90::Quantize<Type, kSlots, 1, false>(args);            \
  }                                                                \
  ZYFA_KERNEL(name##_channels,                                     \
              16 + zyfa::sm90::HeldRegisters<Type>(dim, false)) {  \
    constexpr int kSlots = zyfa::sm90::QuantizeSlots(dim, 1);      \
    zyfa::sm90::QuantizeChannels<Type, kSlots>(args);              \
  }                                                                \
  ZYFA_KERNEL(name##_measure,                                      \
              16 + zyfa::sm90::HeldRegisters<Type>(dim, false)) {  \
    constexpr int kSlots = zyfa::sm90::QuantizeSlots(dim, 1);      \
    zyfa::sm90::Measure<Type, kSlots>(args);                       \
  }

#define ZYFA_QUANTIZE_ROTATED(name, tail, Type, dim, chunks)       \
  ZYFA_KERNEL(name##_rotated##tail,                                \
              zyfa::sm90::HeldRegisters<Type>(dim, true)) {        \
    constexpr int kSlots = zyfa::sm90::QuantizeSlots(dim, chunks); \
    zyfa::sm90::Quantize<Type, kSlots, chunks, true>(args);        \
  }                                                                \
  ZYFA_KERNEL(name##_tokens##tail,                                 \
              zyfa::sm90::HeldRegisters<Type>(dim, true)) {        \
    constexpr int kSlots = zyfa::sm90::QuantizeSlots(dim, chunks); \
    zyfa::sm90::QuantizeInt8<Type, kSlots, chunks, true>(args);    \
  }                                                                \
  ZYFA_KERNEL(name##_blocks##tail,                                 \
              zyfa::sm90::HeldRegisters<Type>(dim, true)) {        \
    constexpr int kSlots = zyfa::sm90::QuantizeSlots(dim, chunks); \
    zyfa::sm90::QuantizeInt8<Type, kSlots, chunks, false>(args);   \
  }

#define ZYFA_QUANTIZE_TYPE(name, Type)                    \
  ZYFA_QUANTIZE_PLAIN(name##_128, Type, 128)              \
  ZYFA_QUANTIZE_PLAIN(name##_256, Type, 256)              \
  ZYFA_QUANTIZE_ROTATED(name##_128, , Type, 128, 1)       \
  ZYFA_QUANTIZE_ROTATED(name##_256, , Type, 256, 1)       \
  ZYFA_QUANTIZE_ROTATED(name##_128, _whole, Type, 128, 2) \
  ZYFA_QUANTIZE_ROTATED(name##_256, _whole, Type, 256, 4)

ZYFA_QUANTIZE_TYPE(bf16, zyfa::sm90::FromBF16)
ZYFA_QUANTIZE_TYPE(f16, zyfa::sm90::FromF16)
ZYFA_QUANTIZE_TYPE(f32, zyfa::sm90::FromF32)
