// Logits of one tile to probabilities, online. A lane has half of the keys of
// one query; the other half's lane has the rest. Logits are in log2 units.
//
// No packed float32 arithmetic: it runs on the matrix unit's multipliers, and
// would wait for the other group's products.

#ifndef ZYFA_ROCM_GFX950_SOFTMAX_H_
#define ZYFA_ROCM_GFX950_SOFTMAX_H_

#include "csrc/numerics/online_softmax.h"
#include "csrc/numerics/probability.h"
#include "csrc/rocm/gfx950/operand.h"

#ifndef ZYFA_GFX950_CHORD_BLOCKS
#define ZYFA_GFX950_CHORD_BLOCKS 1  // a CMake option
#endif

namespace zyfa::gfx950 {

// Below every logit, and finite: differences with it are not NaN.
constexpr float kLowestMax = -0x1.fffffep127f;

// The raw dot products of a tile, plus Type::kZero, one accumulator vector for
// each 32 keys.
template <class Type>
struct Logits {
  static constexpr int kBlocks = Type::kKeys / kBlock;
  F32x16 blocks[kBlocks];
};

// The largest of the tile's dot products for a lane's query; NaN if one is.
template <class Type>
ZYFA_DEVICE float LargestOf(const Logits<Type>& logits) {
  constexpr int kBlocks = Logits<Type>::kBlocks;
  float best[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const F32x16& x = logits.blocks[b];
    best[b] = Maximum(x[0], x[1]);
#pragma unroll
    for (int r = 2; r < 16; r += 2) {
      best[b] = Maximum(Maximum(best[b], x[r]), x[r + 1]);
    }
  }
#pragma unroll
  for (int b = 1; b < kBlocks; ++b) best[0] = Maximum(best[0], best[b]);
  const F32x2 both = BothHalves(best[0]);
  return Maximum(both[0], both[1]);
}

// FP8 probabilities by numerics::LinearCode and ChordCode, with a power of two
// as the weight of each tile. The row sum is made by the matrix unit, from the
// codes.
template <class Type>
struct Fp8Softmax {
  static constexpr float kLog2Scale = numerics::kFp8ProbabilityLog2;
  static constexpr int kSteps = Type::kKeys / Type::kDepth;
  // Of a tile's four blocks of 32 keys, those whose probabilities are made by
  // two chords. The more, the smaller the error; all of them fill the vector
  // unit.
  static constexpr int kChordBlocks = ZYFA_GFX950_CHORD_BLOCKS;
  static_assert(0 <= kChordBlocks && kChordBlocks <= Type::kKeys / kBlock);
  static constexpr int kSumProducts = kSteps;

  I32x8 codes[kSteps];  // of the latest tile, in the order of the keys
  F32x4 tile_sum = {};  // of its codes' values; [0] counts
  int exponent = 127;   // of its weight, in E8M0
  float factor;         // logit per unit of the dot product
  float zero;           // what a logit is less than its accumulator times that
  float max = kLowestMax;
  float sum = 0.0f;

  // Makes `codes` and `exponent` of a tile's dot products, and calls
  // rescale(f) if what was summed up so far must be multiplied by f.
  template <class Rescale>
  __attribute__((device, always_inline)) void Step(const Logits<Type>& logits,
                                                   Rescale rescale) {
    sum += tile_sum[0] * BitCast<float>(exponent << 23);
    const float limit = max + Slack(sum);
    const float largest = LargestOf(logits);
    const float tile_max =
        kShifted ? Fma(largest, factor, -zero) : largest * factor;
    const float new_max = tile_max <= limit ? max : tile_max;
    const float shift =
        __builtin_fminf(__builtin_floorf(new_max - tile_max),
                        static_cast<float>(numerics::kLargestBlockShift));
    exponent = 127 - static_cast<int>(shift);

#pragma unroll
    for (int block = 0; block < Type::kKeys / kBlock; ++block) {
      const float reference =
          kShifted ? new_max + zero - shift : new_max - shift;
      const I32x4 part =
          block < kChordBlocks
              ? Codes<numerics::ChordCode>(logits.blocks[block], reference)
              : Codes<numerics::LinearCode>(logits.blocks[block], reference);
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[block / 2][block % 2 * 4 + i] = part[i];
    }

    // Last, so that the codes need not wait for the branch.
    if (__builtin_expect(AnyLane(new_max != max), false)) {
      const float f = Exp2(max - new_max);
      sum *= f;
      rescale(f);
      max = new_max;
    }
  }

  // The second product of the latest tile, and its row sum.
  __attribute__((device, always_inline)) F32x16 Multiply(int step, I32x8 values,
                                                         F32x16 out) const {
    return MultiplyScaledFp8(values, codes[step], out, 127, exponent);
  }
  __attribute__((device, always_inline)) void SumTile(I32x8 ones) {
    tile_sum = F32x4{};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      tile_sum = MultiplyFp8Narrow(ones, codes[step], tile_sum);
    }
  }
  __attribute__((device)) float TotalSum() const {
    return sum + tile_sum[0] * BitCast<float>(exponent << 23);
  }

 private:
  static constexpr bool kShifted = Type::kZero != 0.0f;

  // How far a logit may exceed `max` before that moves: as long as its
  // probability is at most 1/64 of the row's sum, to within 6 %. The bits of a
  // float32 are nearly linear in its logarithm.
  static __attribute__((device, always_inline)) float Slack(float sum) {
    constexpr float kLog2Share = 6.0f;
    const auto bits = static_cast<float>(BitCast<int32_t>(sum));
    return __builtin_fmaxf(
        Fma(bits, 0x1p-23f, -(127.0f + kLog2Scale + kLog2Share)), 0.0f);
  }

  // An instruction right after the one it waits for stalls, so steps are done
  // for all numbers before the next; where the compiler sees to it by itself,
  // nothing is said, as what is said costs wait states.

  template <class Code>
  __attribute__((device, always_inline)) I32x4 Codes(const F32x16& acc,
                                                     float reference) const {
    const float slope = Code::Slope(factor);
    const float offset = Code::Offset(reference);
    F32x2 x[8];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i / 2][i % 2] = Fma(acc[i], slope, offset);
    }
    ScheduleAll(x);
    uint32_t bits[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) bits[i] = ToUnorm16(x[i]);
    return Pack(Code{}, bits);
  }

  static __attribute__((device, always_inline)) I32x4
  Pack(numerics::LinearCode, const uint32_t (&bits)[8]) {
    return {HighBytes(bits[0], bits[1]), HighBytes(bits[2], bits[3]),
            HighBytes(bits[4], bits[5]), HighBytes(bits[6], bits[7])};
  }

  static __attribute__((device, always_inline)) I32x4
  Pack(numerics::ChordCode, const uint32_t (&bits)[8]) {
    constexpr _Float16 kSecond = numerics::ChordCode::kSecond;
    constexpr uint16_t kHalf = numerics::ChordCode::kHalfOctave;
    F16x2 second[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      second[i] = BitCast<F16x2>(BitCast<U16x2>(bits[i]) + U16x2{kHalf, kHalf});
    }
    F16x2 sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sums[i] =
          Fma(second[i], F16x2{kSecond, kSecond}, BitCast<F16x2>(bits[i]));
    }
    ScheduleAll(sums);
    I32x4 result;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // All of it is overwritten.
      const int32_t some = static_cast<int32_t>(bits[2 * i]);
      result[i] = InsertFp8<false>(some, sums[2 * i]);
    }
    ScheduleFence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      result[i] = InsertFp8<true>(result[i], sums[2 * i + 1]);
    }
    return result;
  }

 public:
  // The operand whose product with codes gives each lane its own query's sum:
  // rows 4 g .. 4 g + 3 of the narrow product go to the lanes of group g, lane
  // / 16, and these have the query lane % 16 of the groups with the parity of
  // g.
  static __attribute__((device)) I32x8 SumOperand(int lane) {
    constexpr int kOnes = 0x38383838;
    const int ones = lane / 4 % 2 == lane / 16 % 2 ? kOnes : 0;
    return {ones, ones, ones, ones, ones, ones, ones, ones};
  }
};

// Exact probabilities in 16 bits, relative to a maximum that is brought up to
// date only when a logit exceeds it by 2^8.
template <class Type>
struct ExactSoftmax {
  static constexpr float kLog2Scale = 0.0f;
  static constexpr float kSlack = 8.0f;
  static constexpr int kSteps = Type::kKeys / Type::kDepth;
  static constexpr int kSumProducts = 0;

  I32x4 probabilities[kSteps];
  float sums[2] = {};  // of this lane's keys
  float factor;
  float max = kLowestMax;

  template <class Rescale>
  __attribute__((device, always_inline)) void Step(const Logits<Type>& logits,
                                                   Rescale rescale) {
    const float tile_max = Maximum(LargestOf(logits) * factor, kLowestMax);
    if (AnyLane(!(tile_max <= max + kSlack))) {
      const float new_max = Maximum(max, tile_max);
      const float f = Exp2(max - new_max);
      sums[0] *= f;
      sums[1] *= f;
      rescale(f);
      max = new_max;
    }
#pragma unroll
    for (int i = 0; i < Type::kKeys / 4; ++i) {
      const F32x16& x = logits.blocks[i / 8];
      F32x2 p;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        p[j] = Exp2(Fma(x[i % 8 * 2 + j], factor, -max));
        sums[j] += p[j];
      }
      probabilities[i / 4][i % 4] = Type::Pack(p);
    }
  }

  __attribute__((device, always_inline)) F32x16 Multiply(int step, I32x4 values,
                                                         F32x16 out) const {
    return Type::Multiply(values, probabilities[step], out);
  }
  __attribute__((device, always_inline)) void SumTile(I32x8) {}
  __attribute__((device)) float TotalSum() const {
    const F32x2 both = BothHalves(sums[0] + sums[1]);
    return both[0] + both[1];
  }
  static __attribute__((device)) I32x8 SumOperand(int) { return {}; }
};

template <class Type>
struct SoftmaxOf {
  using type = ExactSoftmax<Type>;
};
template <>
struct SoftmaxOf<Fp8> {
  using type = Fp8Softmax<Fp8>;
};
template <>
struct SoftmaxOf<Int8> {
  using type = Fp8Softmax<Int8>;
};

}  // namespace zyfa::gfx950

#endif  // ZYFA_ROCM_GFX950_SOFTMAX_H_
