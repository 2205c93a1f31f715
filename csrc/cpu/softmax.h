// One row of one key block: raw dot products to probabilities, online.

#ifndef ZYFA_CPU_SOFTMAX_H_
#define ZYFA_CPU_SOFTMAX_H_

#include <cstdint>
#include <limits>

#include "csrc/cpu/simd.h"
#include "csrc/numerics/online_softmax.h"
#include "csrc/numerics/probability.h"

namespace zyfa::cpu {
namespace {

using numerics::RowState;

// Which keys of the block a row sees, as lane masks.
struct AllVisible {
  ZYFA_INLINE I32 operator()(int) const { return ~I32{}; }
};

struct RangeVisible {
  int begin;
  int end;
  ZYFA_INLINE I32 operator()(int key) const {
    const I32 lane = LaneNumbers() + key;
    return (lane >= begin) & (lane < end);
  }
};

struct ArrayVisible {
  const int32_t* masks;
  ZYFA_INLINE I32 operator()(int key) const { return LoadAs<I32>(masks + key); }
};

// The largest visible number, -inf if there is none; NaN is passed over.
// `begin` and `end` are multiples of 2 * kLanes.
template <class Visible>
ZYFA_INLINE float MaximumOf(const float* acc, int begin, int end,
                            Visible visible) {
  const F32 lowest = Simd::Set(numerics::kNegativeInfinity);
  F32 best[2] = {lowest, lowest};
  for (int key = begin; key < end; key += 2 * kLanes) {
    for (int half = 0; half < 2; ++half) {
      const int at = key + half * kLanes;
      best[half] =
          Simd::Max(Select(visible(at), Load(acc + at), lowest), best[half]);
    }
  }
  return ReduceMax(Simd::Max(best[0], best[1]));
}

// 2^(old_max - new_max): what brings a row's state to its new maximum.
ZYFA_INLINE float RescaleFactor(float old_max, float new_max) {
  return Simd::Exp2<6>(Simd::Set(old_max - new_max))[0];
}

// How one block of one row is coded, once its maximum is known.
struct Fp8Block {
  float new_max;  // NaN if has_nan
  int shift;
  float offset;  // of the code, see csrc/numerics/probability.h
  bool has_nan;
};

template <class Code>
ZYFA_INLINE Fp8Block PlanFp8Block(float largest_acc, float factor,
                                  float running_max) {
  const float block_max = largest_acc * factor;
  // An infinite logit has no code; as in exact arithmetic it makes a NaN.
  if (!(__builtin_fabsf(block_max) <= std::numeric_limits<float>::max())) {
    return {std::numeric_limits<float>::quiet_NaN(), 0, 0.0f, true};
  }
  const float new_max = block_max > running_max ? block_max : running_max;
  const int shift = numerics::BlockShift(new_max, block_max);
  const float reference = new_max - static_cast<float>(shift);
  return {new_max, shift, Code::Offset(reference), false};
}

// Calls emit(key, codes, next_codes) for each two vectors of keys: e4m3 codes,
// zero where not visible.
template <class Code, class Visible, class Emit>
ZYFA_INLINE void EmitFp8Codes(const float* acc, int begin, int end,
                              Visible visible, float factor,
                              const Fp8Block& block, Emit emit) {
  const F32 slope = Simd::Set(Code::Slope(factor));
  const F32 offset = Simd::Set(block.offset);
  for (int key = begin; key < end; key += 2 * kLanes) {
    I32 codes[2];
    for (int half = 0; half < 2; ++half) {
      const int at = key + half * kLanes;
      codes[half] = Code::template Apply<Simd>(Load(acc + at), slope, offset) &
                    visible(at);
    }
    emit(key, codes[0], codes[1]);
  }
}

// 2^-shift, for shifts of 0..126.
ZYFA_INLINE float BlockWeight(int shift) {
  return BitCast<float>((127 - shift) << 23);
}

// How a row's probabilities are made. Each has
//   kLog2Scale: the power of two that probabilities carry,
//   Row(...): writes the probabilities of keys [begin, end) (zero where not
//   visible), brings `state` up to date and returns the factor by which the
//   row's output so far is to be multiplied.

struct ExactProbability {
  static constexpr float kLog2Scale = 0.0f;

  template <class Engine, class Visible>
  static ZYFA_INLINE float Row(const float* acc,
                               typename Engine::Operand* probabilities,
                               int begin, int end, Visible visible,
                               float factor, RowState& state) {
    const float block_max = MaximumOf(acc, begin, end, visible) * factor;
    float rescale = 1.0f;
    if (block_max > state.max) {
      rescale = RescaleFactor(state.max, block_max);
      state.max = block_max;
    }
    const F32 scale = Simd::Set(factor);
    const F32 max = Simd::Set(state.max);
    F32 sum[2] = {};
    for (int key = begin; key < end; key += 2 * kLanes) {
      F32 p[2];
      for (int half = 0; half < 2; ++half) {
        const int at = key + half * kLanes;
        // Not fused, so that the largest logit leaves exactly 0 however large.
        const F32 t = Load(acc + at) * scale - max;
        p[half] = Select(visible(at), Simd::Exp2<Engine::kExpDegree>(t), F32{});
        sum[half] += p[half];
      }
      Engine::StoreProbabilities(probabilities + key, p[0], p[1]);
    }
    state.sum = state.sum * rescale + ReduceAdd(sum[0] + sum[1]);
    return rescale;
  }
};

template <class Code>
struct Fp8Probability {
  static constexpr float kLog2Scale = numerics::kFp8ProbabilityLog2;

  template <class Engine, class Visible>
  static ZYFA_INLINE float Row(const float* acc,
                               typename Engine::Operand* probabilities,
                               int begin, int end, Visible visible,
                               float factor, RowState& state) {
    const Fp8Block block = PlanFp8Block<Code>(
        MaximumOf(acc, begin, end, visible), factor, state.max);
    float rescale = 1.0f;
    if (block.new_max > state.max) {
      rescale = RescaleFactor(state.max, block.new_max);
      state.max = block.new_max;
    }
    typename Engine::Fp8Writer writer(probabilities, block.shift);
    EmitFp8Codes<Code>(acc, begin, end, visible, factor, block,
                       [&](int key, I32 codes, I32 next_codes) {
                         writer.Write(key, codes, next_codes);
                       });
    state.sum = block.has_nan ? std::numeric_limits<float>::quiet_NaN()
                              : state.sum * rescale + writer.Sum();
    return rescale;
  }
};

}  // namespace
}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_SOFTMAX_H_
