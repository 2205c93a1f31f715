// Both products on float32 operands, for every dtype and any vector width.

#ifndef ZYFA_CPU_FLOAT_ENGINE_H_
#define ZYFA_CPU_FLOAT_ENGINE_H_

#include <cstdint>

#include "csrc/cpu/pack.h"
#include "csrc/cpu/simd.h"
#include "csrc/cpu/softmax.h"
#include "csrc/numerics/online_softmax.h"

namespace zyfa::cpu {
namespace {

// Layouts. Queries and probabilities: row-major. Keys: panels of kCols keys,
// each (depth, kCols). Values: panels of kCols columns, each (128 keys, kCols).
struct FloatEngine {
  using Operand = float;       // of the second product
  using LogitOperand = float;  // of the first
  // The accumulators of kRows x kCols, two vectors of the right operand and one
  // broadcast of the left fill the register file: 16 registers, or 32.
#if defined(__AVX512F__)
  static constexpr int kRows = 12;
#else
  static constexpr int kRows = 6;
#endif
  static constexpr int kVectors = 2;
  static constexpr int kCols = kVectors * kLanes;
  static constexpr int kGroupRows = 48;
  static constexpr int kDepthStep = kLanes;
  static constexpr int kBesideDepth = 0;
  static constexpr int64_t kTileBytes = 464 << 10;  // a 512 KiB L2 cache
  static constexpr int kExpDegree = 6;
  static constexpr bool kSeparateProbabilities = false;
  static constexpr bool kInterleaved = false;
  static constexpr float kSlack = 0.0f;
  static constexpr int kSpan = numerics::kKeyBlock;
  static constexpr int kPacked = numerics::kKeyBlock;

  static void BeginItem() {}
  static void EndItem() {}

  template <DType kType>
  static void PackQuery(const unsigned char* source, int64_t width, bool negate,
                        float* target) {
    for (int64_t d = 0; d < width; d += kLanes) {
      const F32 x = LoadFirst<kType>(source + d * SizeOf(kType), width - d);
      Store(target + d, FlipSign(x, negate));
    }
  }

  template <DType kType>
  static void PackKeys(const RowsView& keys, bool negate, float* target) {
    const int64_t depth = RoundUp(keys.width, kDepthStep);
    for (int64_t key = 0; key < numerics::kKeyBlock; key += kLanes) {
      float* panel = target + key / kCols * kCols * depth + key % kCols;
      for (int64_t d = 0; d < keys.width; d += kLanes) {
        F32 square[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          square[i] =
              key + i < keys.count
                  ? LoadFirst<kType>(keys.At<kType>(key + i, d), keys.width - d)
                  : F32{};
          square[i] = FlipSign(square[i], negate);
        }
        Transpose(square);
        for (int i = 0; i < kLanes; ++i) {
          Store(panel + (d + i) * kCols, square[i]);
        }
      }
    }
  }

  // Returns the keys with a value that is not finite. The products see zeros in
  // such a value's place, so that a query that gives the key no weight is not
  // touched (0 * NaN is NaN); the queries that see it get it one by one.
  template <DType kType>
  static KeySet PackValues(const RowsView& values, float weight,
                           float* target) {
    KeySet special = {};
    const int64_t columns = RoundUp(values.width, kCols);
    for (int key = 0; key < numerics::kKeyBlock; ++key) {
      I32 seen = {};
      for (int64_t c = 0; c < columns; c += kLanes) {
        F32 x = {};
        if (key < values.count && c < values.width) {
          x = LoadFirst<kType>(values.At<kType>(key, c), values.width - c);
        }
        const I32 bad = IsNonFinite(x);
        seen |= bad;
        float* panel = target + c / kCols * kCols * numerics::kKeyBlock;
        Store(panel + key * kCols + c % kCols, Select(bad, F32{}, x) * weight);
      }
      if (AnyLane(seen)) special.Add(key);
    }
    return special;
  }

  // Products, each run when it is asked for.
  class Products {
   public:
    // scores (kRows, kCols) = queries . panel.
    void Scores(const float* queries, int64_t query_stride, const float* panel,
                int64_t depth, float* scores, int64_t score_stride) {
      Multiply<false>(queries, query_stride, panel, depth, scores,
                      score_stride);
    }

    // out (kRows, kCols) += probabilities . panel; the weight is in the panel
    // already.
    void Accumulate(const float* probabilities, int64_t probability_stride,
                    const float* panel, int64_t depth, float /*weight*/,
                    float* out, int64_t out_stride) {
      Multiply<true>(probabilities, probability_stride, panel, depth, out,
                     out_stride);
    }

    void Spread(int) {}
    ZYFA_INLINE void Advance() {}
    void Finish() {}
  };

  static ZYFA_INLINE void StoreProbabilities(float* target, F32 p, F32 next) {
    Store(target, p);
    Store(target + kLanes, next);
  }

  // Writes a row's probabilities from their codes, weighted by 2^-shift.
  class Fp8Writer {
   public:
    ZYFA_INLINE Fp8Writer(float* target, int shift)
        : target_(target), weight_(BlockWeight(shift)) {}

    ZYFA_INLINE void Write(int key, I32 codes, I32 next_codes) {
      const F32 value = DecodeE4m3Codes(codes);
      const F32 next = DecodeE4m3Codes(next_codes);
      sum_ += value;
      next_sum_ += next;
      StoreProbabilities(target_ + key, value * weight_, next * weight_);
    }

    // Over the lanes. Exact: every partial sum is a multiple of 2^-9 up to
    // 2^15.
    ZYFA_INLINE F32 Sum() const { return (sum_ + next_sum_) * weight_; }

   private:
    float* target_;
    float weight_;
    F32 sum_ = {};
    F32 next_sum_ = {};
  };

  static float LoadProbability(const float* source) { return *source; }

 private:
  template <bool kAccumulate>
  static void Multiply(const float* a, int64_t a_stride, const float* b,
                       int64_t depth, float* c, int64_t c_stride) {
    F32 sum[kRows][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = kAccumulate ? Load(c + i * c_stride + j * kLanes) : F32{};
      }
    }
    for (int64_t k = 0; k < depth; ++k) {
      F32 right[kVectors];
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        right[j] = Load(b + k * kCols + j * kLanes);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const F32 left = Simd::Set(a[i * a_stride + k]);
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j) {
          sum[i][j] = Simd::MulAdd(left, right[j], sum[i][j]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kVectors; ++j) {
        Store(c + i * c_stride + j * kLanes, sum[i][j]);
      }
    }
  }
};

}  // namespace
}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_FLOAT_ENGINE_H_
