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

// Products of one-byte numbers, 64 deep: a lane's operand is 32 bytes.
struct Fp8 {
  static constexpr int kBytes = 1;
  static constexpr int kKeys = 128;
  static constexpr int kDepth = 64;
  static constexpr uint32_t kSignBits = 0x80808080u;
  using Operand = I32x8;

  static __attribute__((device, always_inline)) F32x16 Multiply(Operand a,
                                                                Operand b,
                                                                F32x16 c) {
    return MultiplyFp8(a, b, c);
  }

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

// Products of two-byte numbers, 16 deep: a lane's operand is 16 bytes.
struct TwoBytes {
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
