// Logits of one tile to probabilities, online.

#ifndef ZYFA_CUDA_SM90_SOFTMAX_H_
#define ZYFA_CUDA_SM90_SOFTMAX_H_

#include "csrc/cuda/sm90/intrinsics.h"
#include "csrc/cuda/sm90/packed.h"
#include "csrc/cuda/sm90/rows.h"
#include "csrc/numerics/online_softmax.h"

namespace zyfa::sm90 {

// Below every logit, and finite: differences with it are not NaN.
constexpr float kLowestMax = -0x1.fffffep127f;

// The largest number of each row, if any is above zero: the order of the
// integers that their bits are is right then, and three of those are compared
// at once. Otherwise something below zero.
ZYFA_DEVICE void LargestOfRows(const float (&logits)[kLogits],
                               float (&largest)[kThreadRows]) {
  int best[kThreadRows][2];
#pragma unroll
  for (int i = 0; i < kLogits; i += 8) {
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int a = __float_as_int(logits[i + 2 * row + column]);
        const int b = __float_as_int(logits[i + 4 + 2 * row + column]);
        int& x = best[row][column];
        x = i == 0 ? max(a, b) : __vimax3_s32(x, a, b);
      }
    }
  }
#pragma unroll
  for (int row = 0; row < kThreadRows; ++row) {
    int x = max(best[row][0], best[row][1]);
    x = max(x, __shfl_xor_sync(~0u, x, 1));
    x = max(x, __shfl_xor_sync(~0u, x, 2));
    largest[row] = __int_as_float(x);
  }
}

// The same for rows that have none above zero: among those, less is more.
ZYFA_DEVICE void LargestOfNegativeRows(const float (&logits)[kLogits],
                                       float (&largest)[kThreadRows]) {
#pragma unroll
  for (int row = 0; row < kThreadRows; ++row) {
    unsigned x = ~0u;
#pragma unroll
    for (int i = 2 * row; i < kLogits; i += 4) {
      x = __vimin3_u32(x, __float_as_uint(logits[i]),
                       __float_as_uint(logits[i + 1]));
    }
    x = min(x, __shfl_xor_sync(~0u, x, 1));
    x = min(x, __shfl_xor_sync(~0u, x, 2));
    if (__float_as_int(largest[row]) < 0) largest[row] = __uint_as_float(x);
  }
}

// Largest logits up to `limit` ask for nothing unusual. NaN and what is below
// zero lie beyond any limit, as integers without a sign.
ZYFA_DEVICE bool AnyBeyond(const float (&m)[kThreadRows],
                           const float (&limit)[kThreadRows]) {
  return __any_sync(~0u,
                    (__float_as_uint(m[0]) > __float_as_uint(limit[0])) |
                        (__float_as_uint(m[1]) > __float_as_uint(limit[1])));
}

// FP8 probabilities without an exponential. Each tile is coded against its own
// largest logit m, which codes as 2^8 exactly:
//
//   code = max(0, round(8 (t - m) + 120 - 0.45))
//
// made as a half-precision number so small that its bits are an integer. The
// tile's product has accumulators of its own, which keeps the matrix unit's
// short sums short, and is added up in float32 with the weight 2^(m - frame).
//
// Where a query may see few keys, errors do not cancel. There, in the first
// tile and in masked ones, keys 16 to 31 of every 32 are coded by the
// exponential.
template <class Type>
struct Fp8Softmax {
  using Factors = LogitFactors<Type>;
  static constexpr int kProducts = kOutputs + 4;  // the last four: row sums
  static constexpr int kSteps = kKeyBlock / Fp8Products::kDepth;
  static constexpr float kLog2Scale = numerics::kFp8ProbabilityLog2;
  // The bits of a half below 2^-14 are the number in units of 2^-24.
  static constexpr float kUnit = 0x1p-24f;
  static constexpr float kTop = kTopCode * kUnit;
  static constexpr int kExactPeriod = 16;  // logits of a thread: 32 keys
  // Of a tile's largest logit from zero. Beyond it, the fused multiply-add has
  // too few bits for a code.
  static constexpr float kLargestDistance = 0x1p14f;
  static constexpr float kBias = Type::Products::kBias;  // of dot products
  // Of a dot product's. Beyond it, the bias does the same.
  static constexpr float kLargestFactor = kLargestDistance / 0x1p24f;
  // A frame is kept until a logit lies this far above it.
  static constexpr float kFrameSlack = 60.0f;

  Factors factor;
  float frame[kThreadRows] = {kLowestMax, kLowestMax};
  float limit[kThreadRows] = {0.0f, 0.0f};  // of a tile's largest logit
  float sum[kThreadRows] = {0.0f, 0.0f};
  float out[kOutputs] = {};
  float product[kProducts] = {};
  // Of the latest tile whose product was started, and of the one after it.
  float weight[kThreadRows] = {0.0f, 0.0f};
  float next_weight[kThreadRows];
  uint32_t codes[kSteps][4];
  using Ready = uint32_t[kPairs];  // codes, in bytes 0 and 2

  ZYFA_DEVICE explicit Fp8Softmax(const Factors& factors) : factor(factors) {}

  // Makes the new tile's codes while the last tile's product is under way.
  template <bool kFewKeys>
  ZYFA_DEVICE void Prepare(float (&logits)[kLogits], Ready& ready) {
    float largest[kThreadRows];
    LargestOfRows(logits, largest);
    float m[kThreadRows];
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      m[row] = (largest[row] - kBias) * factor[row];
    }
    if (AnyBeyond(m, limit) || (kBias != 0.0f && AnyFactorTooLarge())) {
      Reconsider(logits, largest, m);
    }
    SetWeights(m);
    Code<kFewKeys>(logits, largest, ready);
  }

  // The same from dot products in 16 bits.
  template <class Packed>
  ZYFA_DEVICE void PreparePacked(const typename Packed::Sums& sums,
                                 Packed& logits, Ready& ready) {
    uint32_t pairs[kPairs];
    Packed::Pack(sums, pairs);
    const uint32_t largest = Packed::Largest(pairs);
    logits.Relate(factor, largest);
    if (__any_sync(~0u, Packed::AnyNegative(largest) |
                            !(logits[0] <= frame[0] + kFrameSlack) |
                            !(logits[1] <= frame[1] + kFrameSlack))) {
      logits.Relate(factor, Packed::LargestOfNegative(pairs, largest));
      Reframe({logits[0], logits[1]});
    }
    SetWeights({logits[0], logits[1]});
    // One step for all pairs, then the next: slopes have time, and the compiler
    // keeps to it.
    logits.SetSlopes();
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      ready[i] = logits.Distance(pairs[i], i % kThreadRows);
    }
    PinRegisters(ready);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      ready[i] = logits.Code(ready[i], i % kThreadRows);
    }
  }

  ZYFA_DEVICE void SetWeights(const float (&m)[kThreadRows]) {
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      next_weight[row] = Exp2(m[row] - frame[row]);
    }
  }

  template <bool kHalfExact>
  ZYFA_DEVICE void Code(const float (&logits)[kLogits],
                        const float (&largest)[kThreadRows],
                        Ready& ready) const {
    float slope[kThreadRows];
    float offset[kThreadRows];
    float exact_offset[kThreadRows];
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      slope[row] = factor[row] * (8.0f * kUnit);
      offset[row] = fmaf(-largest[row], slope[row], kTop);
      exact_offset[row] = fmaf(-largest[row], factor[row], kLog2Scale);
    }
#pragma unroll
    for (int i = 0; i < kLogits; i += 2) {
      const int row = RowOf(i);
      uint32_t pair;
      if (kHalfExact && i % kExactPeriod >= kExactPeriod / 2) {
        pair = __byte_perm(
            PackE4m3(Exp2(fmaf(logits[i], factor[row], exact_offset[row])),
                     Exp2(fmaf(logits[i + 1], factor[row], exact_offset[row]))),
            0, 0x4140);
      } else {
        pair =
            PackHalvesAboveZero(fmaf(logits[i], slope[row], offset[row]),
                                fmaf(logits[i + 1], slope[row], offset[row]));
      }
      ready[i / 2] = pair;
    }
  }

  // Once that product is complete. The order of a tile's keys is that of the
  // transposed values.
  ZYFA_DEVICE void Take(const Ready& ready) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int pair = 8 * step + i / 2 * 4 + i % 2;
        codes[step][i] = __byte_perm(ready[pair], ready[pair + 2], 0x6420);
      }
    }
  }

  // Adds up the last tile's product.
  ZYFA_DEVICE void Accumulate() {
    PinRegisters(product);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      out[i] = fmaf(product[i], weight[RowOf(i)], out[i]);
    }
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      sum[row] = fmaf(product[kOutputs + 2 * row], weight[row], sum[row]);
      weight[row] = next_weight[row];
    }
  }

  ZYFA_DEVICE bool AnyFactorTooLarge() const {
    return __any_sync(
        ~0u, (factor[0] > kLargestFactor) | (factor[1] > kLargestFactor));
  }

  // Rows whose largest number is not above zero, or far above the frame, or so
  // far from zero that codes must be made from differences.
  ZYFA_DEVICE void Reconsider(float (&logits)[kLogits],
                              float (&largest)[kThreadRows],
                              float (&m)[kThreadRows]) {
    LargestOfNegativeRows(logits, largest);
    float shift[kThreadRows];
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      m[row] = (largest[row] - kBias) * factor[row];
      const bool empty = largest[row] == numerics::kNegativeInfinity;
      const bool far = fabsf(m[row]) > kLargestDistance ||
                       (kBias != 0.0f && factor[row] > kLargestFactor);
      shift[row] = !empty && far ? largest[row] : 0.0f;
      largest[row] = empty ? 0.0f : largest[row] - shift[row];
    }
    Reframe(m);
#pragma unroll
    for (int i = 0; i < kLogits; ++i) logits[i] -= shift[RowOf(i)];
  }

  // Rows whose largest logit is far above the frame.
  ZYFA_DEVICE void Reframe(const float (&m)[kThreadRows]) {
    float rescale[kThreadRows];
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      // NaN replaces it, too.
      const float next =
          m[row] <= frame[row] + kFrameSlack ? frame[row] : m[row];
      rescale[row] = Exp2(frame[row] - next);
      frame[row] = next;
      sum[row] *= rescale[row];
      weight[row] *= rescale[row];
      limit[row] = fmaxf(fminf(next + kFrameSlack, kLargestDistance), 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] *= rescale[RowOf(i)];
  }

  ZYFA_DEVICE void Pin() {
    PinRegisters(product);
    PinRegisters(codes);
  }
  ZYFA_DEVICE void Multiply(int step, uint64_t values) {
    if (step == 0) {
      Fp8Products::Multiply<false>(product, codes[step], values);
    } else {
      Fp8Products::Multiply<true>(product, codes[step], values);
    }
  }
  ZYFA_DEVICE float Frame(int row) const { return frame[row]; }
  ZYFA_DEVICE float TotalSum(int row) const { return sum[row]; }
};

// Exact probabilities in 16 bits, relative to a maximum that is brought up to
// date only when a logit exceeds it by 2^8.
template <class Type>
struct ExactSoftmax {
  using Factors = LogitFactors<Type>;
  static constexpr int kSteps = kKeyBlock / Type::Products::kDepth;
  static constexpr float kLog2Scale = 0.0f;
  static constexpr float kSlack = 8.0f;
  // Of a tile's largest logit from zero. Beyond it, the fused multiply-add has
  // too few bits for the difference of a logit from the maximum.
  static constexpr float kLargestDistance = 0x1p14f;

  Factors factor;
  float max[kThreadRows] = {kLowestMax, kLowestMax};
  float limit[kThreadRows] = {0.0f, 0.0f};  // of a tile's largest logit
  float sum[kThreadRows] = {0.0f, 0.0f};    // of this thread's keys
  float out[kOutputs] = {};
  float rescale[kThreadRows];
  bool rescales = false;
  uint32_t codes[kSteps][4];
  using Ready = float[kLogits];  // probabilities

  ZYFA_DEVICE explicit ExactSoftmax(const Factors& factors) : factor(factors) {}

  template <bool kFewKeys>
  ZYFA_DEVICE void Prepare(float (&logits)[kLogits], Ready& ready) {
    float largest[kThreadRows];
    LargestOfRows(logits, largest);
    float offset[kThreadRows] = {-max[0], -max[1]};
    const float m[kThreadRows] = {largest[0] * factor[0],
                                  largest[1] * factor[1]};
    rescales = AnyBeyond(m, limit);
    if (rescales) Reconsider(logits, largest, offset);
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      const int row = RowOf(i);
      ready[i] = Exp2(fmaf(logits[i], factor[row], offset[row]));
      sum[row] += ready[i];
    }
  }

  // Rows whose largest number is not above zero, or far above the maximum, or
  // so far from zero that probabilities must be made from differences.
  ZYFA_DEVICE void Reconsider(float (&logits)[kLogits],
                              float (&largest)[kThreadRows],
                              float (&offset)[kThreadRows]) {
    float shift[kThreadRows];
    LargestOfNegativeRows(logits, largest);
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      const float m = largest[row] * factor[row];
      const float next = m <= max[row] + kSlack ? max[row] : m;  // or NaN
      rescale[row] = Exp2(max[row] - next);
      sum[row] *= rescale[row];
      max[row] = next;
      limit[row] = fmaxf(fminf(next + kSlack, kLargestDistance), 0.0f);
      const bool far = largest[row] != numerics::kNegativeInfinity &&
                       fabsf(m) > kLargestDistance;
      shift[row] = far ? largest[row] : 0.0f;
      offset[row] = far ? m - next : -next;
    }
#pragma unroll
    for (int i = 0; i < kLogits; ++i) logits[i] -= shift[RowOf(i)];
  }
  ZYFA_DEVICE void Accumulate() {}
  ZYFA_DEVICE void Pin() {
    PinRegisters(out);
    PinRegisters(codes);
  }
  ZYFA_DEVICE void Take(const Ready& ready) {
    if (__builtin_expect(rescales, 0)) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) out[i] *= rescale[RowOf(i)];
    }
#pragma unroll
    for (int i = 0; i < kLogits / 2; ++i) {
      codes[i / 4][i % 4] = Type::Pack(ready[2 * i], ready[2 * i + 1]);
    }
  }
  ZYFA_DEVICE void Multiply(int step, uint64_t values) {
    Type::Products::template Multiply<true>(out, codes[step], values);
  }
  ZYFA_DEVICE float Frame(int row) const { return max[row]; }
  ZYFA_DEVICE float TotalSum(int row) const { return SumOverRow(sum[row]); }
};

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_SOFTMAX_H_
