// What the quantisation kernels of every GPU are launched with: the one kernel
// argument, passed by value, and what their names say. Host and device alike.

#ifndef ZYFA_GPU_QUANTIZE_ARGS_H_
#define ZYFA_GPU_QUANTIZE_ARGS_H_

#include <cstdint>

namespace zyfa::gpu {

constexpr int kQuantizeTokens = 128;  // of a workgroup: a tile of one head
constexpr int kMaxQuantizeDim = 256;
constexpr int kChunk = 8;         // elements that a lane has in a row, at least
constexpr int kRotatedLanes = 8;  // that hold a row of a matrix, at most

// What is measured of the finite numbers of a channel in a tile: their sum
// times kSumScale, which keeps it finite; how many there are; the largest (-inf
// if there is none) and the smallest (inf); the sum of the squares of their
// distances from their mean.
constexpr int kStatistics = 5;
constexpr float kSumScale = 1.0f / 256;

// What the kernels of every platform compute with, as the definition in jnp.
constexpr float kInverseFp8Max = 1.0f / 448.0f;
constexpr float kInt8Max = 127.0f;
constexpr float kInverseInt8Max = 1.0f / kInt8Max;
constexpr float kSmallestNormal = 0x1p-126f;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr float kGuardAbove = 0x1p64f;

// A kernel rounds x, less the mean, times the weight and rotated, by given
// descales; or finds the descale of each tile or token; or both. Or it measures
// each tile.
struct QuantizeArgs {
  const void* x;         // (batch, tokens, heads, head_dim)
  const float* mean;     // (batch, heads, head_dim); null: zeros
  const float* weight;   // (batch, heads, head_dim), powers of two; null: ones
  const float* given;    // descales, (batch, heads, tiles), or of channels
                         // (batch, heads, head_dim); null: the found
  uint8_t* nan;          // (batch, heads, tokens), 1 where a token has NaN:
                         // given with channels' descales, else found; or null
  void* values;          // (batch, tokens, heads, head_dim); null: none
  float* found;          // descales, (batch, heads, tiles) or of tokens
                         // (batch, heads, tokens); null: none; or statistics
                         // (batch, heads, tiles, kStatistics, head_dim)
  int32_t tokens;        // of a head
  int32_t heads;         //
  int32_t head_dim;      //
  int32_t hadamard;      // size of the rotated blocks of a row
  float zero_descale;    // what is found for a tile without magnitude
  uint32_t row_inverse;  // RowInverse of a row's parts
};
static_assert(sizeof(QuantizeArgs) == 7 * 8 + 6 * 4);

constexpr int64_t QuantizeTiles(int64_t tokens) {
  return (tokens + kQuantizeTokens - 1) / kQuantizeTokens;
}

// A row is cut into parts, each of one lane: of so many chunks, since few lanes
// hold a row of a large Hadamard matrix.
constexpr int PartChunks(int head_dim, bool rotates) {
  const int hadamard = head_dim & -head_dim;
  return rotates && hadamard > kRotatedLanes * kChunk
             ? hadamard / (kRotatedLanes * kChunk)
             : 1;
}

// The kernel for a head dim is named by the largest that it takes, and ends as
// `tail` says.
struct QuantizePlan {
  int kernel_dim;
  int threads;
  int parts;  // of a row
  const char* tail;
};

// i / parts is i * RowInverse(parts) >> kRowInverseShift for i up to
// kQuantizeTokens * kMaxQuantizeDim / kChunk, and parts up to
// kMaxQuantizeDim / kChunk.
constexpr int kRowInverseShift = 19;
constexpr uint32_t RowInverse(uint32_t parts) {
  return ((1u << kRowInverseShift) + parts - 1) / parts;
}

}  // namespace zyfa::gpu

#endif  // ZYFA_GPU_QUANTIZE_ARGS_H_
