// Reading elements of any dtype into the layouts that the products take.

#ifndef ZYFA_CPU_PACK_H_
#define ZYFA_CPU_PACK_H_

#include <cstdint>
#include <cstring>
#include <utility>

#include "csrc/cpu/simd.h"

namespace zyfa::cpu {
namespace {

constexpr int64_t RoundUp(int64_t x, int64_t step) {
  return (x + step - 1) / step * step;
}

// Rows of one array: `count` rows of `width` elements, `stride` elements apart.
struct RowsView {
  const unsigned char* data;
  int64_t stride;
  int64_t count;
  int64_t width;

  template <DType kType>
  const unsigned char* At(int64_t row, int64_t column) const {
    return data + (row * stride + column) * SizeOf(kType);
  }
};

// The first `count` of kLanes elements, then zeros; reads nothing beyond them.
template <DType kType>
ZYFA_INLINE F32 LoadFirst(const void* source, int64_t count) {
  if (count >= kLanes) return LoadElements<kType>(source);
  unsigned char buffer[kLanes * SizeOf(kType)] = {};
  std::memcpy(buffer, source, count * SizeOf(kType));
  return LoadElements<kType>(buffer);
}

ZYFA_INLINE F32 FlipSign(F32 x, bool flip) {
  return BitCast<F32>(BitCast<U32>(x) ^ (flip ? 0x80000000u : 0u));
}

// All ones in lanes that hold an infinity or a NaN.
ZYFA_INLINE I32 IsNonFinite(F32 x) {
  return (I32)((BitCast<U32>(x) & 0x7f800000u) == 0x7f800000u);
}

template <int kStride, int... kLane>
ZYFA_INLINE void ExchangeBlocks(F32& a, F32& b,
                                std::integer_sequence<int, kLane...>) {
  const F32 low = __builtin_shufflevector(
      a, b, ((kLane & kStride) ? kLanes + kLane - kStride : kLane)...);
  const F32 high = __builtin_shufflevector(
      a, b, ((kLane & kStride) ? kLanes + kLane : kLane + kStride)...);
  a = low;
  b = high;
}

// Transposes a square of kLanes rows: first pairs of elements across the
// diagonal, then pairs of 2x2 blocks, and so on.
template <int kStride = 1>
ZYFA_INLINE void Transpose(F32 (&rows)[kLanes]) {
  if constexpr (kStride < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & kStride) == 0) {
        ExchangeBlocks<kStride>(rows[i], rows[i + kStride],
                                std::make_integer_sequence<int, kLanes>());
      }
    }
    Transpose<kStride * 2>(rows);
  }
}

// A set of keys of one block.
struct KeySet {
  uint64_t words[2];

  bool Any() const { return (words[0] | words[1]) != 0; }
  bool Has(int key) const { return (words[key / 64] >> (key % 64)) & 1; }
  void Add(int key) { words[key / 64] |= uint64_t{1} << (key % 64); }
};

// Whether any of `count` e4m3 numbers, a multiple of 8, is NaN.
ZYFA_INLINE bool HasE4m3NaN(const unsigned char* source, int64_t count) {
  constexpr uint64_t kOnes = 0x0101010101010101u;
  uint64_t found = 0;
  for (int64_t i = 0; i < count; i += 8) {
    // A byte of zero for a NaN; below, the top bit of such a byte is set.
    const uint64_t rest =
        (~LoadAs<uint64_t>(source + i) & (numerics::kE4m3NaN * kOnes));
    found |= (rest - kOnes) & ~rest & (0x80 * kOnes);
  }
  return found != 0;
}

}  // namespace
}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_PACK_H_
