// The queries of a thread, and what makes logits of their dot products. A
// warpgroup has 64 queries; the accumulator of 128 columns gives each thread
// two rows, 8 apart, of which it has columns 8 i + 2 (thread % 4) and the next:
// number 4 i + 2 row + column. Four neighbouring threads share a row. Logits
// are in log2 units.

#ifndef ZYFA_CUDA_SM90_ROWS_H_
#define ZYFA_CUDA_SM90_ROWS_H_

#include "csrc/cuda/sm90/intrinsics.h"
#include "csrc/cuda/sm90/tiles.h"
#include "csrc/numerics/online_softmax.h"

namespace zyfa::sm90 {

constexpr int kThreadRows = 2;
constexpr int kLogits = kKeyBlock * kThreadRows / 4;   // of a thread
constexpr int kOutputs = kValueDim * kThreadRows / 4;  // of a thread

// The row of a thread's accumulator number i.
constexpr int RowOf(int i) { return i / 2 % kThreadRows; }

ZYFA_DEVICE float SumOverRow(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// What turns the dot products of a thread's queries with a tile of keys into
// logits: above zero, and beside it whether the sign is to change. Zero becomes
// a number that still makes all logits alike.
template <class Type>
class LogitFactors {
 public:
  ZYFA_DEVICE LogitFactors(const AttentionArgs& args, const WorkItem& item,
                           const ThreadQueries& queries) {
    const float k_scale =
        Type::kKeyScales ? 1.0f : args.k_scale[item.KvHead(args)];
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      // A query beyond the last takes the last one's.
      const int known = min(queries[row], args.q_len - 1);
      const int scale = args.q_block > 0 ? known / args.q_block : 0;
      const float q_scale =
          args.q_scale[(int64_t{item.batch} * args.heads + item.head) *
                           args.q_scales +
                       scale];
      const float factor = numerics::LogitFactor(q_scale, k_scale);
      factor_[row] = of_query_[row] = AboveZero(fabsf(factor));
      negative_[row] = factor < 0.0f;
    }
    PinRegisters(factor_);  // not to be computed again for each tile
  }

  // For a tile of keys that have a scale of their own.
  ZYFA_DEVICE void OfTile(float k_scale) {
    if constexpr (Type::kKeyScales) {
#pragma unroll
      for (int row = 0; row < kThreadRows; ++row) {
        factor_[row] = AboveZero(of_query_[row] * k_scale);
      }
    }
  }
  // For queries that were divided by it.
  ZYFA_DEVICE void Multiply(int row, float x) { factor_[row] *= x; }

  ZYFA_DEVICE float operator[](int row) const { return factor_[row]; }
  // Without the scale of a tile.
  ZYFA_DEVICE float OfQuery(int row) const { return of_query_[row]; }
  ZYFA_DEVICE bool Negative(int row) const { return negative_[row]; }

 private:
  static ZYFA_DEVICE float AboveZero(float x) { return Maximum(x, 1e-30f); }

  float factor_[kThreadRows];
  float of_query_[kThreadRows];
  bool negative_[kThreadRows];
};

// What is known of a tile of keys before it is multiplied: its k_scale, where
// tiles have their own, or the largest norm of its keys.
template <class Type>
ZYFA_DEVICE float TileNumber(const AttentionArgs& args, const WorkItem& item,
                             int tile) {
  const int64_t kv_head = item.KvHead(args);
  if constexpr (Type::kKeyScales) {
    const int scale = args.kv_block > 0 ? tile * kKeyBlock / args.kv_block : 0;
    return args.k_scale[kv_head * args.k_scales + scale];
  } else {
    return KeyNorms(args)[kv_head * TileCount(args) + tile];
  }
}

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_ROWS_H_
