// float8_e4m3fn codes: one sign bit, four exponent bits (bias 7), three
// mantissa bits. No infinity; magnitude 0x7f is NaN; the largest finite value
// is 448.

#ifndef ZYFA_NUMERICS_E4M3_H_
#define ZYFA_NUMERICS_E4M3_H_

#include <cstdint>

namespace zyfa::numerics {

// Everything in this folder has internal linkage, because the same header is
// compiled for several instruction sets that meet in one binary.

constexpr float kE4m3Smallest = 0.001953125f;  // 2^-9, the value of code 1
constexpr float kE4m3Largest = 448.0f;
constexpr int kE4m3NaN = 0x7f;
constexpr int kE4m3LargestCode = 126;
constexpr int kE4m3FirstNormalCode = 8;
// A normal code shifted left by 20 has its mantissa and exponent where float32
// has them; this is the difference of the two exponent biases, in place.
constexpr int kE4m3MantissaShift = 20;
constexpr int kE4m3ToF32Bias = (127 - 7) << 23;

static constexpr float PowerOfTwo(int exponent) {
  float result = 1.0f;
  for (; exponent > 0; --exponent) result *= 2.0f;
  for (; exponent < 0; ++exponent) result *= 0.5f;
  return result;
}

// The value of a code without its sign bit, 0..126.
static constexpr float DecodeE4m3Magnitude(int code) {
  return code < kE4m3FirstNormalCode ? static_cast<float>(code) * kE4m3Smallest
                                     : static_cast<float>(8 + (code & 7)) *
                                           PowerOfTwo((code >> 3) - 10);
}

// The magnitude code nearest to x >= 0, ties to even, saturating at 448.
static constexpr int EncodeE4m3Magnitude(float x) {
  if (!(x < kE4m3Largest)) return kE4m3LargestCode;
  // Codes are ordered as their values are, so the largest code not above x is
  // found by bisection and the rounding decided between it and the next.
  int low = 0;
  int high = kE4m3LargestCode;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (DecodeE4m3Magnitude(middle) <= x) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  if (low == kE4m3LargestCode) return low;
  const float below = x - DecodeE4m3Magnitude(low);
  const float above = DecodeE4m3Magnitude(low + 1) - x;
  return below < above || (below == above && (low & 1) == 0) ? low : low + 1;
}

static_assert(DecodeE4m3Magnitude(120) == 256.0f);
static_assert(DecodeE4m3Magnitude(kE4m3LargestCode) == kE4m3Largest);
static_assert(EncodeE4m3Magnitude(256.0f) == 120);
static_assert(EncodeE4m3Magnitude(1.0625f) == EncodeE4m3Magnitude(1.0f));

}  // namespace zyfa::numerics

#endif  // ZYFA_NUMERICS_E4M3_H_
