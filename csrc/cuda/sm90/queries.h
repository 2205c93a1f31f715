// What is done to a warpgroup's queries in shared memory before the first
// product. Four neighbouring threads share the two rows of each.

#ifndef ZYFA_CUDA_SM90_QUERIES_H_
#define ZYFA_CUDA_SM90_QUERIES_H_

#include "csrc/cuda/sm90/intrinsics.h"
#include "csrc/cuda/sm90/packed.h"
#include "csrc/cuda/sm90/rows.h"

namespace zyfa::sm90 {

// The addresses of a thread's pieces of 16 bytes of its rows.
template <class Shared>
struct QueryPieces {
  static constexpr int kCount = Shared::kRowBytes / 16 / 4;  // of a row

  uint32_t first;

  ZYFA_DEVICE explicit QueryPieces(uint32_t queries)
      : first(queries + (static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 +
                         static_cast<int>(threadIdx.x) % 32 / 4) *
                            Shared::kChunk) {}
  ZYFA_DEVICE uint32_t At(int row, int i) const {
    const int byte = (static_cast<int>(threadIdx.x) % 4 + 4 * i) * 16;
    return first + (byte / Shared::kChunk * kRows + 8 * row) * Shared::kChunk +
           byte % Shared::kChunk;
  }
};

// Changes the signs of rows whose logits' factor is below zero.
template <class Shared, class Factors>
ZYFA_DEVICE void FlipQueries(uint32_t queries, uint32_t sign_bits,
                             const Factors& factor) {
  const QueryPieces<Shared> pieces(queries);
#pragma unroll
  for (int row = 0; row < kThreadRows; ++row) {
    if (!factor.Negative(row)) continue;
#pragma unroll
    for (int i = 0; i < pieces.kCount; ++i) {
      uint4 x = LoadShared4(pieces.At(row, i));
      x.x ^= sign_bits;
      x.y ^= sign_bits;
      x.z ^= sign_bits;
      x.w ^= sign_bits;
      StoreShared(pieces.At(row, i), x);
    }
  }
}

// Divides rows of e4m3 by powers of two, so that no sum with any keys
// overflows in half precision, and changes signs as above. Of a row's numbers,
// only those below a five-hundredth of what it may have at most are rounded.
// Returns whether packed logits take the rows.
template <class Shared, class Factors>
ZYFA_DEVICE bool ScaleQueries(uint32_t queries, const Extremes& key_norms,
                              Factors& factor) {
  constexpr float kLargestKey = 448.0f;
  constexpr float kLargestSum = 60000.0f;  // 65504, less what sums may round
  // Brings squares of e4m3, and sums of 48 of them, into half precision.
  constexpr float kSmall = 0x1p-4f;
  // Of what half precision leaves out of a row's norm.
  constexpr float kNormSlack = 0.25f;
  const QueryPieces<Shared> pieces(queries);
  constexpr int kPieces = QueryPieces<Shared>::kCount;
  bool taken = true;
#pragma unroll
  for (int row = 0; row < kThreadRows; ++row) {
    uint32_t small[kPieces][8];  // two halves each
    uint32_t squares = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint4 piece = LoadShared4(pieces.At(row, i));
      const uint32_t words[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        small[i][j] = MultiplyHalves(HalvesOfE4m3(words[j / 2] >> 16 * (j % 2)),
                                     Twice(kSmall));
        squares = MultiplyAddHalves(small[i][j], small[i][j], squares);
      }
    }
    float low, high;
    WidenHalves(squares, low, high);
    const float norm = sqrtf(SumOverRow(low + high)) / kSmall + kNormSlack;
    const float logit = norm * factor[row];
    const float excess =
        norm * (kLargestKey / kLargestSum * sqrtf(Shared::kRowBytes));
    // NaN stays what it is.
    const int halvings =
        excess >= 1.0f ? (__float_as_int(excess) >> 23) - 126 : 0;
    if (halvings > 0 || factor.Negative(row)) {
      const float scale = __int_as_float((127 - halvings) << 23) / kSmall;
      const uint32_t scales = Twice(factor.Negative(row) ? -scale : scale);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[j] = __byte_perm(
              E4m3OfHalves(MultiplyHalves(small[i][2 * j], scales)),
              E4m3OfHalves(MultiplyHalves(small[i][2 * j + 1], scales)),
              0x5410);
        }
        StoreShared(pieces.At(row, i),
                    make_uint4(words[0], words[1], words[2], words[3]));
      }
      factor.Multiply(row, __int_as_float((127 + halvings) << 23));
    }
    taken = taken && HalfLogits::Take(factor[row], logit, key_norms);
  }
  return taken;
}

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_QUERIES_H_
