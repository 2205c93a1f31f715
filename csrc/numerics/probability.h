// FP8 probabilities without an exponential.
//
// In its normal range the e4m3 code of 2^u is almost linear in u:
// code(u) = 8 (u + 7) - c. With the logit t = acc * factor in log2 units and
// the block's reference r (see online_softmax.h), the probability coded is 2^(t
// - r + 8), so code = 8 factor * acc + (-8 r + 120 - c): one fused
// multiply-add, a clamp and a rounding to an integer. Slope and Offset are the
// two coefficients.
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
// 120. The number is made in 1/256 of a code, clamped as a fraction of 65535,
// for which GPUs have an instruction; its high byte is the code.
struct LinearCode {
  static constexpr float kCodesPerOctave = 2048.0f / 65535.0f;
  static constexpr float kTop = (120.0f - 0.45f + 0.5f) * (256.0f / 65535.0f);
  // Code 126 and the fraction below 127; reached only where logits are so large
  // that a code is less than their last bit.
  static constexpr float kLargest = (127.0f * 256.0f - 1.0f) / 65535.0f;

  static constexpr float Slope(float factor) {
    return factor * kCodesPerOctave;
  }
  // `reference`: the logit that codes as 2^8.
  static constexpr float Offset(float reference) {
    return kTop - kCodesPerOctave * reference;
  }

  template <class Ops>
  static constexpr auto Apply(typename Ops::F32 acc, typename Ops::F32 slope,
                              typename Ops::F32 offset) {
    const auto x =
        Ops::Min(Ops::Max(Ops::Fma(acc, slope, offset), Ops::Set(0.0f)),
                 Ops::Set(kLargest));
    return Ops::RoundToInt(x * Ops::Set(65535.0f)) >> 8;
  }
};

// Two chords: the bits of a float16 are linear in the logarithm of what they
// stand for, too. A number read from bits linear in u lies up to 6 % above 2^u,
// in an arch over each octave; the number read from bits half an octave further
// on has its arches half an octave off. Their weighted sum follows 2^u to
// within 0.8 %, and is rounded to e4m3:
//
//   bits = 1024 (u + 15 - kLog2Sum), clamped at 0
//   p = F16(bits) + kSecond F16(bits + 512), fused
//
// On gfx950 this takes six instructions for two probabilities where LinearCode
// takes three and a half, and none of them is an exponential.
struct ChordCode {
  static constexpr float kBitsPerOctave = 1024.0f / 65535.0f;
  static constexpr float kSecond = 0.70710678f;
  static constexpr int kHalfOctave = 512;
  // log2 of the sum's mean excess, 2.0814: both numbers, and their arches.
  static constexpr float kLog2Sum = 1.05756f;
  static constexpr float kTop =
      (15.0f + 8.0f - kLog2Sum) * (1024.0f / 65535.0f);

  static constexpr float Slope(float factor) { return factor * kBitsPerOctave; }
  static constexpr float Offset(float reference) {
    return kTop - kBitsPerOctave * reference;
  }
};

// A parabola in the fraction of u, g = 8 * fraction, follows the curve to
// within 0.03 of a code.
struct QuadraticCode {
  static constexpr float kTop = 120.0f;
  static constexpr float kCurvature = 0.3437f;

  static constexpr float Slope(float factor) { return 8.0f * factor; }
  static constexpr float Offset(float reference) {
    return kTop - 8.0f * reference;
  }

  template <class Ops>
  static constexpr auto Apply(typename Ops::F32 acc, typename Ops::F32 slope,
                              typename Ops::F32 offset) {
    const auto y =
        Ops::Min(Ops::Max(Ops::Fma(acc, slope, offset), Ops::Set(0.0f)),
                 Ops::Set(kLargestProbabilityCode));
    // With g = 8 * fraction, y + g (kCurvature / 8 * g - kCurvature); the
    // powers of two are placed so that none needs an operation, which is exact.
    const auto fraction = Ops::Fraction(y * Ops::Set(0.125f));
    const auto bend = Ops::Fma(fraction, Ops::Set(8.0f * kCurvature),
                               Ops::Set(-8.0f * kCurvature));
    return Ops::RoundToInt(Ops::Fma(fraction, bend, y));
  }
};

}  // namespace zyfa::numerics

#endif  // ZYFA_NUMERICS_PROBABILITY_H_
