// The quantisation kernels for Hopper, for each element type: to FP8, by
// descales of tiles or of channels; to int8, by descales of tokens or of tiles;
// and those that measure. What rotates is, of two-byte types, by matrix for the
// usual head dims; else by lanes, by the largest head dim, for Hadamard
// matrices of up to 64 or for a head dim of 128 or 256 whole.

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

template <int kDim, int kChunks, bool kRotates>
using Lanes = ByLanes<QuantizeSlots(kDim, kChunks), kChunks, kRotates>;

// The same of a kernel by matrix, of half as many threads, that needs `more`.
constexpr int MatrixBlocks(int dim, int more = 0) {
  const int held = dim / 2 + more;
  return held <= 32 ? 4 : held <= 96 ? 2 : 1;
}

}  // namespace zyfa::sm90

#define ZYFA_KERNEL(name, threads, blocks)                      \
  extern "C" __global__ void __launch_bounds__(threads, blocks) \
      zyfa_quantize_##name(                                     \
          const __grid_constant__ zyfa::gpu::QuantizeArgs args)

#define ZYFA_LANES_KERNEL(name, held)                \
  ZYFA_KERNEL(name, zyfa::cuda::kMaxQuantizeThreads, \
              zyfa::sm90::QuantizeBlocks(held))

// What is not rotated. Some hold more than their numbers.
#define ZYFA_QUANTIZE_PLAIN(name, Type, dim)                               \
  ZYFA_LANES_KERNEL(name, zyfa::sm90::HeldRegisters<Type>(dim, false)) {   \
    zyfa::sm90::Quantize<Type, zyfa::sm90::Lanes<dim, 1, false>>(args);    \
  }                                                                        \
  ZYFA_LANES_KERNEL(name##_channels,                                       \
                    16 + zyfa::sm90::HeldRegisters<Type>(dim, false)) {    \
    zyfa::sm90::QuantizeChannels<Type, zyfa::sm90::QuantizeSlots(dim, 1)>( \
        args);                                                             \
  }                                                                        \
  ZYFA_LANES_KERNEL(name##_measure,                                        \
                    16 + zyfa::sm90::HeldRegisters<Type>(dim, false)) {    \
    zyfa::sm90::Measure<Type, zyfa::sm90::QuantizeSlots(dim, 1)>(args);    \
  }

#define ZYFA_QUANTIZE_ROTATED(name, tail, Type, dim, chunks)                \
  ZYFA_LANES_KERNEL(name##_rotated##tail,                                   \
                    zyfa::sm90::HeldRegisters<Type>(dim, true)) {           \
    zyfa::sm90::Quantize<Type, zyfa::sm90::Lanes<dim, chunks, true>>(args); \
  }                                                                         \
  ZYFA_LANES_KERNEL(name##_tokens##tail,                                    \
                    zyfa::sm90::HeldRegisters<Type>(dim, true)) {           \
    using Layout = zyfa::sm90::Lanes<dim, chunks, true>;                    \
    zyfa::sm90::QuantizeInt8<Type, Layout, true>(args);                     \
  }                                                                         \
  ZYFA_LANES_KERNEL(name##_blocks##tail,                                    \
                    zyfa::sm90::HeldRegisters<Type>(dim, true)) {           \
    using Layout = zyfa::sm90::Lanes<dim, chunks, true>;                    \
    zyfa::sm90::QuantizeInt8<Type, Layout, false>(args);                    \
  }

#define ZYFA_MATRIX_KERNEL(name, ...)                   \
  ZYFA_KERNEL(name, zyfa::cuda::kMatrixQuantizeThreads, \
              zyfa::sm90::MatrixBlocks(__VA_ARGS__))

#define ZYFA_QUANTIZE_BY_MATRIX(name, Type, dim)                            \
  ZYFA_MATRIX_KERNEL(name##_rotated_matrix, dim) {                          \
    zyfa::sm90::Quantize<Type, zyfa::sm90::ByMatrix<dim>>(args);            \
  }                                                                         \
  ZYFA_MATRIX_KERNEL(name##_tokens_matrix, dim) {                           \
    zyfa::sm90::QuantizeInt8<Type, zyfa::sm90::ByMatrix<dim>, true>(args);  \
  }                                                                         \
  ZYFA_MATRIX_KERNEL(name##_blocks_matrix, dim, (dim) > 64 ? 16 : 0) {      \
    zyfa::sm90::QuantizeInt8<Type, zyfa::sm90::ByMatrix<dim>, false>(args); \
  }

#define ZYFA_QUANTIZE_BY_LANES(name, Type)          \
  ZYFA_QUANTIZE_PLAIN(name##_128, Type, 128)        \
  ZYFA_QUANTIZE_PLAIN(name##_256, Type, 256)        \
  ZYFA_QUANTIZE_ROTATED(name##_128, , Type, 128, 1) \
  ZYFA_QUANTIZE_ROTATED(name##_256, , Type, 256, 1)

#define ZYFA_QUANTIZE_TWO_BYTES(name, Type)      \
  ZYFA_QUANTIZE_BY_LANES(name, Type)             \
  ZYFA_QUANTIZE_BY_MATRIX(name##_64, Type, 64)   \
  ZYFA_QUANTIZE_BY_MATRIX(name##_128, Type, 128) \
  ZYFA_QUANTIZE_BY_MATRIX(name##_192, Type, 192) \
  ZYFA_QUANTIZE_BY_MATRIX(name##_256, Type, 256)

ZYFA_QUANTIZE_TWO_BYTES(bf16, zyfa::sm90::FromBF16)
ZYFA_QUANTIZE_TWO_BYTES(f16, zyfa::sm90::FromF16)
ZYFA_QUANTIZE_BY_LANES(f32, zyfa::sm90::FromF32)
ZYFA_QUANTIZE_ROTATED(f32_128, _whole, zyfa::sm90::FromF32, 128, 2)
ZYFA_QUANTIZE_ROTATED(f32_256, _whole, zyfa::sm90::FromF32, 256, 4)
