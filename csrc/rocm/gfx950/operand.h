// The element types of the kernels: how many keys a tile has, and how the lanes
// of a wave hold the operands of its matrix products.
//
// A wave computes S^T = K Q^T and O^T = V^T P^T, 32 queries at a time, so that
// a lane's accumulators belong to one query, lane % 32, and the probabilities
// of a block of 32 keys are where the second product wants them. It may order
// keys as it likes if values are read in the same order.

#ifndef ZYFA_ROCM_GFX950_OPERAND_H_
#define ZYFA_ROCM_GFX950_OPERAND_H_

#include "csrc/rocm/gfx950/intrinsics.h"

namespace zyfa::gfx950 {

constexpr int kBlock = 32;  // queries of a wave; rows of a matrix instruction

// The key, within its block of 32, of the first of the four consecutive keys
// that accumulators 4 i .. 4 i + 3 stand for.
constexpr int FirstKey(int i, int half) { return 8 * i + 4 * half; }

// Each type says, of the first product: `kProducts`, the matrix instructions of
// a step; `kZero`, what its sums start from; `kScalesKeys`, whether each tile
// of keys has a descale of its own, and each channel of values may have one.

// Products of one-byte numbers, 64 deep: a lane's operand is 32 bytes.
struct OneByte {
  static constexpr int kBytes = 1;
  static constexpr int kKeys = 128;
  static constexpr int kDepth = 64;
  using Operand = I32x8;

  // The key block and the four-key group that a lane's values stand for, in
  // step `step` of the second product, at `part` of its operand (8 bytes).
  static constexpr int kParts = 4;
  static constexpr int PartKey(int step, int part) {
    return step * kDepth + part / 2 * kBlock + part % 2 * 16;
  }

  // The row and column of a tile that this lane names in a transposing read of
  // eight keys' values for 32 columns.
  static __attribute__((device)) int TransposedRow(int lane) {
    const int row = lane % 16 / 2;
    return row % 4 + FirstKey(row / 4, lane / kBlock);
  }
  static __attribute__((device)) int TransposedByte(int lane) {
    return lane / 16 % 2 * 16 + lane % 2 * 8;
  }
  static __attribute__((device, always_inline)) I32x2
  ReadTransposed(int address, int offset) {
    return ReadTransposed8(address, offset);
  }
};

struct Fp8 : OneByte {
  static constexpr int kProducts = 1;
  static constexpr float kZero = 0.0f;
  static constexpr bool kScalesKeys = false;
  static constexpr uint32_t kSignBits = 0x80808080u;

  static __attribute__((device, always_inline)) F32x16 Multiply(Operand a,
                                                                Operand b,
                                                                F32x16 c) {
    return MultiplyFp8(a, b, c);
  }
};

// Queries and keys in int8, values in e4m3. Sums are exact in int32, and at
// most 2^22 in magnitude. They start from the bits of 1.5 * 2^23, around which
// one more in the bits is one more in the number: no sum needs a conversion.
struct Int8 : OneByte {
  static constexpr int kProducts = 2;
  static constexpr float kZero = 0x1.8p23f;
  static constexpr bool kScalesKeys = true;

  static __attribute__((device, always_inline)) F32x16 Multiply(Operand a,
                                                                Operand b,
                                                                F32x16 c) {
    const auto half = [](const Operand& x, int i) {
      return I32x4{x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
    };
    I32x16 sum = BitCast<I32x16>(c);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      sum = MultiplyInt8(half(a, i), half(b, i), sum);
    }
    return BitCast<F32x16>(sum);
  }
};

// Products of two-byte numbers, 16 deep: a lane's operand is 16 bytes.
struct TwoBytes {
  static constexpr int kProducts = 1;
  static constexpr float kZero = 0.0f;
  static constexpr bool kScalesKeys = false;
  static constexpr int kBytes = 2;
  static constexpr int kKeys = 64;
  static constexpr int kDepth = 16;
  static constexpr uint32_t kSignBits = 0x80008000u;
  using Operand = I32x4;

  static constexpr int kParts = 2;
  static constexpr int PartKey(int step, int part) {
    return step * kDepth + part * 8;
  }
  static __attribute__((device)) int TransposedRow(int lane) {
    return lane % 16 / 4 + FirstKey(0, lane / kBlock);
  }
  static __attribute__((device)) int TransposedByte(int lane) {
    return lane / 16 % 2 * 32 + lane % 4 * 8;
  }
  static __attribute__((device, always_inline)) I32x2
  ReadTransposed(int address, int offset) {
    return ReadTransposed16(address, offset);
  }
};

struct BF16 : TwoBytes {
  static __attribute__((device, always_inline)) F32x16 Multiply(Operand a,
                                                                Operand b,
                                                                F32x16 c) {
    return MultiplyBF16(a, b, c);
  }
  static __attribute__((device, always_inline)) int32_t Pack(F32x2 x) {
    return BitCast<int32_t>(__builtin_convertvector(x, BF16x2));
  }
};

struct F16 : TwoBytes {
  static __attribute__((device, always_inline)) F32x16 Multiply(Operand a,
                                                                Operand b,
                                                                F32x16 c) {
    return MultiplyF16(a, b, c);
  }
  static __attribute__((device, always_inline)) int32_t Pack(F32x2 x) {
    return BitCast<int32_t>(__builtin_convertvector(x, F16x2));
  }
};

}  // namespace zyfa::gfx950

#endif  // ZYFA_ROCM_GFX950_OPERAND_H_
