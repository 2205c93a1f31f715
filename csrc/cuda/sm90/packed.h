// Codes of logits (see Fp8Softmax) from dot products in 16 bits, two in a
// register: half the registers of float32, and half the instructions.
//
// Register i of a thread has columns 8 (i / 2) + 2 (thread % 4) and the next,
// of row i % 2. Its codes end up in bytes 0 and 2.

#ifndef ZYFA_CUDA_SM90_PACKED_H_
#define ZYFA_CUDA_SM90_PACKED_H_

#include "csrc/cuda/sm90/intrinsics.h"
#include "csrc/cuda/sm90/rows.h"

namespace zyfa::sm90 {

constexpr int kPairs = kLogits / 2;
constexpr float kTopCode = 120.0f - 0.45f;

// For types whose logits stay in float32.
struct NoLogits {
  using Sums = float[kLogits];

  template <class Factors>
  ZYFA_DEVICE explicit NoLogits(const Factors&) {}
};

ZYFA_DEVICE uint32_t Twice(float x) { return PackHalves(x, x); }

// Over the threads that share the rows: of row 0 in the low half, of row 1 in
// the high one.
template <uint32_t (*kOf2)(uint32_t, uint32_t),
          uint32_t (*kOf3)(uint32_t, uint32_t, uint32_t)>
ZYFA_DEVICE uint32_t ReduceRows(const uint32_t (&pairs)[kPairs]) {
  uint32_t best[kThreadRows];
#pragma unroll
  for (int row = 0; row < kThreadRows; ++row) {
    best[row] = kOf2(pairs[row], pairs[row + 2]);
#pragma unroll
    for (int i = row + 4; i < kPairs; i += 4) {
      best[row] = kOf3(best[row], pairs[i], pairs[i + 2]);
    }
  }
  uint32_t both = kOf2(__byte_perm(best[0], best[1], 0x5410),
                       __byte_perm(best[0], best[1], 0x7632));
  both = kOf2(both, __shfl_xor_sync(~0u, both, 1));
  return kOf2(both, __shfl_xor_sync(~0u, both, 2));
}
ZYFA_DEVICE uint32_t Max2(uint32_t a, uint32_t b) { return __vmaxs2(a, b); }
ZYFA_DEVICE uint32_t Max3(uint32_t a, uint32_t b, uint32_t c) {
  return __vimax3_s16x2(a, b, c);
}
ZYFA_DEVICE uint32_t UnsignedMin2(uint32_t a, uint32_t b) {
  return __vminu2(a, b);
}
ZYFA_DEVICE uint32_t UnsignedMin3(uint32_t a, uint32_t b, uint32_t c) {
  return __vimin3_u16x2(a, b, c);
}

// Either kind of logits takes three steps, of which two are here:
//
//   x = max(0, product - largest product + reach)
//   code = round(x top code / x of the largest)
//
// where reach is that of the codes, in products: x is 0 for code 0. The second
// step makes the largest logit's code that of 2^8, whatever the first rounds.

// Dot products of e4m3 that the matrix unit adds up in half precision. Queries
// are scaled so that none overflows.
class HalfLogits {
 public:
  using Sums = uint32_t[kPairs];

  // Whether half precision is fine enough for a query, and the scale of x a
  // half. `logit` is the query's largest with keys of norm 1, `norms` are the
  // largest ones of tiles.
  static ZYFA_DEVICE bool Take(float factor, float logit,
                               const Extremes& norms) {
    // A bound by norms: several times what logits of real models come to.
    constexpr float kMostLogit = 512.0f;
    return logit * norms.most <= kMostLogit && 0x1p-12f <= factor &&
           factor <= 0x1p12f;
  }

  static ZYFA_DEVICE void Pack(const Sums& sums, uint32_t (&pairs)[kPairs]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = sums[i];
  }

  // The order of halves above zero is that of integers.
  static ZYFA_DEVICE uint32_t Largest(const uint32_t (&pairs)[kPairs]) {
    return ReduceRows<Max2, Max3>(pairs);
  }
  // Whether a row has none above zero. Among those, less is more.
  static ZYFA_DEVICE bool AnyNegative(uint32_t largest) {
    return (largest & 0x80008000) != 0;
  }
  static ZYFA_DEVICE uint32_t LargestOfNegative(const uint32_t (&pairs)[kPairs],
                                                uint32_t largest) {
    const uint32_t negative = __vcmplts2(largest, 0);
    const uint32_t least = ReduceRows<UnsignedMin2, UnsignedMin3>(pairs);
    return (largest & ~negative) | (least & negative);
  }

  // For queries with these factors.
  template <class Factors>
  ZYFA_DEVICE explicit HalfLogits(const Factors& factor) {
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      const float products = kTopCode / 8.0f * Reciprocal(factor[row]);
      // The power of two that brings reach between 512 and 1024.
      const uint32_t exponent = __float_as_uint(products) & 0x7f800000;
      scale_[row] = __uint_as_float(((127u + 127u + 9u) << 23) - exponent);
      reach_[row] = products * scale_[row];
    }
    PinRegisters(scale_);
    PinRegisters(reach_);
  }

  // For a tile: what does not need its products.
  ZYFA_DEVICE void Begin(float) {}

  // For the rows' largest products: first what is needed first.
  template <class Factors>
  ZYFA_DEVICE void Relate(const Factors& factor, uint32_t largest) {
    WidenHalves(largest, top_[0], top_[1]);
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      scales_[row] = Twice(scale_[row]);
      shift_[row] = Twice(fmaf(-top_[row], scale_[row], reach_[row]));
      logit_[row] = top_[row] * factor[row];
    }
  }
  ZYFA_DEVICE void SetSlopes() {
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      float shift, same, x;
      WidenHalves(shift_[row], shift, same);
      WidenHalves(Twice(fmaf(top_[row], scale_[row], shift)), x, same);
      slope_[row] = Twice(kTopCode * Reciprocal(x));
    }
  }

  ZYFA_DEVICE uint32_t Distance(uint32_t pair, int row) const {
    return MultiplyAddHalvesAboveZero(pair, scales_[row], shift_[row]);
  }
  ZYFA_DEVICE uint32_t Code(uint32_t distance, int row) const {
    // From here to twice as much, halves are integers, and the last bits
    // theirs.
    constexpr uint32_t kBase = 0x64006400;  // 1024
    return MultiplyAddHalves(distance, slope_[row], kBase);
  }
  // The largest logit.
  ZYFA_DEVICE float operator[](int row) const { return logit_[row]; }

 private:
  float scale_[kThreadRows];
  float reach_[kThreadRows];
  float top_[kThreadRows];
  float logit_[kThreadRows];
  uint32_t scales_[kThreadRows];
  uint32_t shift_[kThreadRows];
  uint32_t slope_[kThreadRows];
};

// Dot products of int8 without their last byte.
class IntegerLogits {
 public:
  using Sums = int32_t[kLogits];

  // Codes per step of the 16 bits: not so few that reach is beyond 2047, since
  // only to there the bits of halves are a number in units of the first; nor so
  // many that steps show. `factor` is a query's.
  static ZYFA_DEVICE bool Take(float factor, const Extremes& k_scales) {
    constexpr float kLeastSlope = kTopCode / 2047.0f;
    constexpr float kMostSlope = 0.75f;
    return factor * k_scales.least * kSlope >= kLeastSlope &&
           factor * k_scales.most * kSlope <= kMostSlope;
  }

  static ZYFA_DEVICE void Pack(const Sums& sums, uint32_t (&pairs)[kPairs]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      pairs[i] = __byte_perm(sums[2 * i], sums[2 * i + 1], 0x6521);
    }
  }

  static ZYFA_DEVICE uint32_t Largest(const uint32_t (&pairs)[kPairs]) {
    return ReduceRows<Max2, Max3>(pairs);
  }
  static ZYFA_DEVICE bool AnyNegative(uint32_t) { return false; }
  static ZYFA_DEVICE uint32_t LargestOfNegative(const uint32_t (&)[kPairs],
                                                uint32_t largest) {
    return largest;
  }

  template <class Factors>
  ZYFA_DEVICE explicit IntegerLogits(const Factors& factor) {
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      factor_[row] = factor.OfQuery(row) * kSlope;
    }
    PinRegisters(factor_);
  }

  ZYFA_DEVICE void Begin(float k_scale) {
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      const float slope = factor_[row] * k_scale;
      // Rounded to an integer, which is in the last bits.
      constexpr float kInteger = 0x1.8p23f;
      reach_[row] = fmaf(kTopCode, Reciprocal(slope), kInteger);
      slope_[row] = Twice(kTopCode * Reciprocal(reach_[row] - kInteger));
      step_[row] = slope / 8.0f;
    }
    PinRegisters(reach_);
    PinRegisters(slope_);
    PinRegisters(step_);
  }

  template <class Factors>
  ZYFA_DEVICE void Relate(const Factors&, uint32_t largest) {
    const int top[kThreadRows] = {static_cast<int16_t>(largest),
                                  static_cast<int32_t>(largest) >> 16};
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      shift_[row] =
          __byte_perm(__float_as_uint(reach_[row]) - top[row], 0, 0x1010);
      // Half a step: what the last byte is on average.
      logit_[row] = (static_cast<float>(top[row]) + 0.5f) * step_[row];
    }
  }
  ZYFA_DEVICE void SetSlopes() {}

  ZYFA_DEVICE uint32_t Distance(uint32_t pair, int row) const {
    return __viaddmax_s16x2_relu(pair, shift_[row], 0);
  }
  ZYFA_DEVICE uint32_t Code(uint32_t distance, int row) const {
    return MultiplyHalves(distance, slope_[row]);
  }
  ZYFA_DEVICE float operator[](int row) const { return logit_[row]; }

 private:
  static constexpr float kSlope = 8.0f * 256.0f;

  float factor_[kThreadRows];
  float reach_[kThreadRows];
  float step_[kThreadRows];  // of the 16 bits, in logits
  float logit_[kThreadRows];
  uint32_t slope_[kThreadRows];
  uint32_t shift_[kThreadRows];
};

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_PACKED_H_
