// Vectors of the widest kind that the including file is compiled for: compiler
// vectors for arithmetic, intrinsics only where the compiler has no operator.
//
// Everything here has internal linkage: the same header is compiled with
// different instruction sets, and the linker must not mix the results.

#ifndef ZYFA_CPU_SIMD_H_
#define ZYFA_CPU_SIMD_H_

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "csrc/ffi/attention_params.h"
#include "csrc/numerics/e4m3.h"

#define ZYFA_INLINE inline __attribute__((always_inline))

namespace zyfa::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));
typedef uint8_t U8 __attribute__((vector_size(kLanes)));

template <class To, class From>
ZYFA_INLINE To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V>
ZYFA_INLINE V LoadAs(const void* source) {
  V v;
  std::memcpy(&v, source, sizeof(v));
  return v;
}

ZYFA_INLINE F32 Load(const float* source) { return LoadAs<F32>(source); }

ZYFA_INLINE void Store(float* target, F32 x) {
  std::memcpy(target, &x, sizeof(x));
}

// Lanes of `mask` are all ones or all zeros.
ZYFA_INLINE F32 Select(I32 mask, F32 yes, F32 no) { return mask ? yes : no; }

// 0, 1, 2, ...
ZYFA_INLINE I32 LaneNumbers() {
  I32 lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// The arithmetic that csrc/numerics asks for, on a vector.
struct Simd {
  using F32 = cpu::F32;

  static ZYFA_INLINE F32 Set(float x) { return x - F32{}; }

  // Unordered operands give the second, so a NaN in `a` is dropped and a NaN in
  // `b` stays.
  static ZYFA_INLINE F32 Min(F32 a, F32 b) { return a < b ? a : b; }
  static ZYFA_INLINE F32 Max(F32 a, F32 b) { return a > b ? a : b; }

  // a * b + c, fused where that is one instruction.
  static ZYFA_INLINE F32 MulAdd(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
    return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
  }

  // a * b + c rounded once, on every target.
  static ZYFA_INLINE F32 Fma(F32 a, F32 b, F32 c) {
#if defined(__FMA__) || defined(__aarch64__)
    return MulAdd(a, b, c);
#else
    // The product is exact in double; the sum is rounded to odd, so that the
    // second rounding, to float, acts as if it were the only one.
    typedef double F64 __attribute__((vector_size(8 * kLanes)));
    typedef int64_t I64 __attribute__((vector_size(8 * kLanes)));
    const F64 product =
        __builtin_convertvector(a, F64) * __builtin_convertvector(b, F64);
    const F64 addend = __builtin_convertvector(c, F64);
    const F64 sum = product + addend;
    const F64 virtual_addend = sum - product;
    const F64 error =
        (product - (sum - virtual_addend)) + (addend - virtual_addend);
    const I64 bits = (I64)sum;
    // Not `error != 0`: infinities and NaN have no error to correct.
    const I64 inexact = (I64)(error > 0.0) | (I64)(error < 0.0);
    const I64 inexact_even = inexact & ((bits & 1) == 0);
    // Toward the exact value: away from zero if the error has the sum's sign.
    const I64 outward = (I64)(error > 0.0) ^ (I64)(sum < 0.0);
    const I64 step = (outward & 2) - 1;
    return __builtin_convertvector((F64)(bits + (inexact_even & step)), F32);
#endif
  }

  // Half to even; |x| < 2^22.
  static ZYFA_INLINE F32 Round(F32 x) {
#if defined(__AVX512F__)
    return (F32)_mm512_roundscale_ps((__m512)x, 8);
#elif defined(__AVX2__)
    return (F32)_mm256_round_ps((__m256)x, 8);
#else
    const float magic = 12582912.0f;  // 1.5 * 2^23: no fraction bits are left
    return (x + magic) - magic;
#endif
  }

  // x - floor(x) for x >= 0, exact.
  static ZYFA_INLINE F32 Fraction(F32 x) {
#if defined(__AVX512DQ__)
    return (F32)_mm512_reduce_ps((__m512)x, 9);
#elif defined(__AVX2__)
    return x - (F32)_mm256_round_ps((__m256)x, 9);
#else
    return x - __builtin_convertvector(__builtin_convertvector(x, I32), F32);
#endif
  }

  // The nearest integer, half to even; any result for NaN.
  static ZYFA_INLINE I32 RoundToInt(F32 x) {
#if defined(__AVX512F__)
    return (I32)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (I32)_mm256_cvtps_epi32((__m256)x);
#elif defined(__SSE2__)
    return (I32)_mm_cvtps_epi32((__m128)x);
#elif defined(__aarch64__)
    return (I32)vcvtnq_s32_f32((float32x4_t)x);
#else
    return __builtin_convertvector(Round(x), I32);
#endif
  }

  // 2^x for x at most about 1; below 2^-126.5 zero; NaN stays NaN. With
  // kDegree 6 within 1.5 units in the last place, with 4 within 3e-6.
  template <int kDegree>
  static ZYFA_INLINE F32 Exp2(F32 x) {
    static_assert(kDegree == 4 || kDegree == 6);
#if defined(__AVX512DQ__)
    // Two instructions find the fraction and put the whole part back, for any
    // x up to infinity.
    if constexpr (kDegree == 4) {
      const F32 r = Fraction(x);
      // Minimax in relative error on [0, 1) with p(0) = 1.
      F32 p = Set(0.0134266848f);
      p = MulAdd(p, r, Set(0.0522424728f));
      p = MulAdd(p, r, Set(0.241280213f));
      p = MulAdd(p, r, Set(0.693044841f));
      p = MulAdd(p, r, Set(1.0f));
      return (F32)_mm512_scalef_ps((__m512)p, (__m512)x);
    }
#endif
    x = Max(Set(-127.0f), x);
    const F32 whole = Round(x);
    const F32 r = x - whole;
    F32 p;
    // Minimax in relative error on [-0.5, 0.5] with p(0) = 1.
    if constexpr (kDegree == 4) {
      p = Set(0.00958285294f);
      p = MulAdd(p, r, Set(0.0559064262f));
      p = MulAdd(p, r, Set(0.240240991f));
      p = MulAdd(p, r, Set(0.693124175f));
    } else {
      p = Set(0.00015353362f);
      p = MulAdd(p, r, Set(0.0013398875f));
      p = MulAdd(p, r, Set(0.00961843692f));
      p = MulAdd(p, r, Set(0.0555033237f));
      p = MulAdd(p, r, Set(0.240226477f));
      p = MulAdd(p, r, Set(0.693147182f));
    }
    p = MulAdd(p, r, Set(1.0f));
#if defined(__AVX512F__)
    return (F32)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
    // A product and not an addition to the exponent, which would turn some NaNs
    // into numbers.
    return p * BitCast<F32>((RoundToInt(whole) + 127) << 23);
#endif
  }
};

// The lanes in another order: lane i is taken from lane i ^ kDistance.
template <int kDistance, int... kLane>
ZYFA_INLINE F32 SwapLanes(F32 x, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(x, x, (kLane ^ kDistance)...);
}

template <int kDistance = kLanes / 2>
ZYFA_INLINE float ReduceMax(F32 x) {
  if constexpr (kDistance == 0) {
    return x[0];
  } else {
    const auto lanes = std::make_integer_sequence<int, kLanes>();
    return ReduceMax<kDistance / 2>(
        Simd::Max(x, SwapLanes<kDistance>(x, lanes)));
  }
}

template <int kDistance = kLanes / 2>
ZYFA_INLINE float ReduceAdd(F32 x) {
  if constexpr (kDistance == 0) {
    return x[0];
  } else {
    const auto lanes = std::make_integer_sequence<int, kLanes>();
    return ReduceAdd<kDistance / 2>(x + SwapLanes<kDistance>(x, lanes));
  }
}

ZYFA_INLINE bool AnyLane(I32 mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_ps((__m128)mask) != 0;
#else
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= mask[i];
  return any != 0;
#endif
}

// The larger, of numbers that are not negative, or NaN.
ZYFA_INLINE F32 MaxOrNaN(F32 a, F32 b) {
  const U32 x = BitCast<U32>(a);
  const U32 y = BitCast<U32>(b);
  return BitCast<F32>(x > y ? x : y);
}

// Whether every lane is below `limit`; a NaN is not.
ZYFA_INLINE bool AllBelow(F32 x, float limit) {
  return !AnyLane(~(I32)(x < limit));
}

// Values of e4m3 codes 0..126.
ZYFA_INLINE F32 DecodeE4m3Codes(I32 codes) {
  const F32 normal = BitCast<F32>((codes << numerics::kE4m3MantissaShift) +
                                  numerics::kE4m3ToF32Bias);
  const F32 subnormal =
      __builtin_convertvector(codes, F32) * Simd::Set(numerics::kE4m3Smallest);
  return codes < numerics::kE4m3FirstNormalCode ? subnormal : normal;
}

// Unsigned elements of 8 or 16 bits, widened.
ZYFA_INLINE U32 LoadWidened(const uint8_t* source) {
#if defined(__AVX512F__)
  return (U32)_mm512_cvtepu8_epi32((__m128i)LoadAs<U8>(source));
#elif defined(__AVX2__)
  return (U32)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)source));
#else
  return __builtin_convertvector(LoadAs<U8>(source), U32);
#endif
}

ZYFA_INLINE U32 LoadWidened(const uint16_t* source) {
  return __builtin_convertvector(LoadAs<U16>(source), U32);
}

// kLanes elements as float32, exactly. Subnormal codes are built from integers,
// so that a thread that flushes subnormal floats reads them right.
template <DType kType>
ZYFA_INLINE F32 LoadElements(const void* source) {
  if constexpr (kType == DType::kF32) {
    return LoadAs<F32>(source);
  } else if constexpr (kType == DType::kBF16) {
    return BitCast<F32>(LoadWidened(static_cast<const uint16_t*>(source))
                        << 16);
  } else if constexpr (kType == DType::kF16) {
#if defined(__AVX512F__)
    return (F32)_mm512_cvtph_ps((__m256i)LoadAs<U16>(source));
#elif defined(__F16C__)
    return (F32)_mm256_cvtph_ps((__m128i)LoadAs<U16>(source));
#else
    const I32 bits = (I32)LoadWidened(static_cast<const uint16_t*>(source));
    const I32 magnitude = bits & 0x7fff;
    const I32 bias = (I32){} + ((127 - 15) << 23);
    const F32 normal =
        BitCast<F32>((magnitude << 13) + bias + (bias & (magnitude >= 0x7c00)));
    const F32 subnormal =
        __builtin_convertvector(magnitude, F32) * 5.9604644775390625e-8f;
    return BitCast<F32>(BitCast<I32>(magnitude < 0x400 ? subnormal : normal) |
                        ((bits & 0x8000) << 16));
#endif
  } else if constexpr (kType == DType::kI8) {
    const I32 bits = (I32)LoadWidened(static_cast<const uint8_t*>(source));
    return __builtin_convertvector((bits << 24) >> 24, F32);
  } else {
    const I32 bits = (I32)LoadWidened(static_cast<const uint8_t*>(source));
    const I32 magnitude = bits & 0x7f;
    return BitCast<F32>(BitCast<I32>(DecodeE4m3Codes(magnitude)) |
                        ((bits & 0x80) << 24) |
                        ((magnitude == numerics::kE4m3NaN) & 0x7fc00000));
  }
}

constexpr int SizeOf(DType type) {
  return type == DType::kF32                          ? 4
         : type == DType::kE4m3 || type == DType::kI8 ? 1
                                                      : 2;
}

// bfloat16 bits of x, half to even, in the low half of each lane; NaN stays
// NaN.
ZYFA_INLINE U32 RoundToBF16(F32 x) {
  const U32 bits = BitCast<U32>(x);
  const U32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? rounded : (bits >> 16) | 0x40;
}

// float16 bits of x, half to even, overflow to infinity, NaN stays NaN.
ZYFA_INLINE U32 RoundToF16(F32 x) {
  const I32 sign = (BitCast<I32>(x) >> 16) & 0x8000;
  const I32 magnitude = BitCast<I32>(x) & 0x7fffffff;
  // Rebias, round at bit 13; a carry out of the mantissa is the right exponent.
  const I32 normal =
      (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Below 2^-14 the unit is 2^-24: adding 0.5 leaves that unit as the last bit.
  const F32 shifted = BitCast<F32>(magnitude) + 0.5f;
  const I32 subnormal = BitCast<I32>(shifted) - BitCast<I32>(Simd::Set(0.5f));
  I32 result = magnitude < ((127 - 14) << 23) ? subnormal : normal;
  result = magnitude >= ((127 + 16) << 23) ? (I32){} + 0x7c00 : result;
  result = magnitude > 0x7f800000 ? (I32){} + 0x7e00 : result;
  return (U32)(result | sign);
}

// `x` as kLanes elements of `type`, which is of 16 or 32 bits.
ZYFA_INLINE void StoreElements(DType type, void* target, F32 x) {
  if (type == DType::kF32) {
    std::memcpy(target, &x, sizeof(x));
  } else {
    const U16 half = __builtin_convertvector(
        type == DType::kBF16 ? RoundToBF16(x) : RoundToF16(x), U16);
    std::memcpy(target, &half, sizeof(half));
  }
}

}  // namespace
}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_SIMD_H_
