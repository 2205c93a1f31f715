// FP8 probabilities without an exponential.
//
// In its normal range the e4m3 code of 2^u is almost linear in u:
// code(u) = 8 (u + 7) - c. With the logit t = acc * factor in log2 units and
// the block's reference r (see online_softmax.h), the probability coded is 2^(t
// - r + 8), so code = 8 factor * acc + (-8 r + 120 - c): one fused
// multiply-add, a clamp and a rounding to an integer.
//
// `Ops` supplies the arithmetic for one vector or scalar type `Ops::F32`:
// Set(float), Fma(a, b, c) = a * b + c rounded once, Min and Max (an unordered
// first operand gives the second), Fraction(x) = x - floor(x) for x >= 0,
// RoundToInt (half to even).

#ifndef ZYFA_NUMERICS_PROBABILITY_H_
#define ZYFA_NUMERICS_PROBABILITY_H_

namespace zyfa::numerics {

constexpr float kLargestProbabilityCode = 126.0f;

// The chord of log2 between two codes lies under the curve, at most 0.69 of a
// code; 0.45 balances it and stays below 0.5, so the largest key keeps code
// 120.
struct LinearCode {
  static constexpr float kOffset = 119.55f;

  template <class Ops>
  static constexpr auto Apply(typename Ops::F32 acc, typename Ops::F32 factor8,
                              typename Ops::F32 offset) {
    const auto x = Ops::Fma(acc, factor8, offset);
    return Ops::RoundToInt(Ops::Min(Ops::Max(x, Ops::Set(0.0f)),
                                    Ops::Set(kLargestProbabilityCode)));
  }
};

// A parabola in the fraction of u, g = 8 * fraction, follows the curve to
// within 0.03 of a code.
struct QuadraticCode {
  static constexpr float kOffset = 120.0f;
  static constexpr float kCurvature = 0.3437f;

  template <class Ops>
  static constexpr auto Apply(typename Ops::F32 acc, typename Ops::F32 factor8,
                              typename Ops::F32 offset) {
    const auto y =
        Ops::Min(Ops::Max(Ops::Fma(acc, factor8, offset), Ops::Set(0.0f)),
                 Ops::Set(kLargestProbabilityCode));
    // With g = 8 * fraction, y + g (kCurvature / 8 * g - kCurvature); the
    // powers of two are placed so that none needs an operation, which is exact.
    const auto fraction = Ops::Fraction(y * Ops::Set(0.125f));
    const auto slope = Ops::Fma(fraction, Ops::Set(8.0f * kCurvature),
                                Ops::Set(-8.0f * kCurvature));
    return Ops::RoundToInt(Ops::Fma(fraction, slope, y));
  }
};

}  // namespace zyfa::numerics

#endif  // ZYFA_NUMERICS_PROBABILITY_H_
