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

// The state of one query row while key blocks pass by.
struct RowState {
  F32 sum;    // of the probabilities so far, relative to `max`, over the lanes
  float max;  // what the logits are relative to: the largest one seen, or near
};

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

// How a row's probabilities are made, in two steps, so that the steps of
// several rows can be taken in turn. Each has
//   kLog2Scale: the power of two that probabilities carry,
//   Prepare(...): brings `state` to the maximum over keys [begin, end); the
//   result's `rescale` is the factor for the row's output so far,
//   Write(...): writes the probabilities, zero where not visible, and adds them
//   to `state`.

struct ExactProbability {
  static constexpr float kLog2Scale = 0.0f;

  struct Plan {
    float factor;
    float rescale;
  };

  // The reference stays while no logit exceeds it by more than kSlack, in log2
  // units. So a block whose sums are below 2^kSlack needs no maximum.
  template <class Engine, class Visible>
  static ZYFA_INLINE Plan Prepare(const float* acc, int begin, int end,
                                  Visible visible, float factor,
                                  RowState& state) {
    const float block_max = MaximumOf(acc, begin, end, visible) * factor;
    if (!(block_max - state.max > Engine::kSlack)) return {factor, 1.0f};
    const float rescale = RescaleFactor(state.max, block_max);
    state.max = block_max;
    state.sum *= rescale;
    return {factor, rescale};
  }

  template <class Engine, class Visible>
  static ZYFA_INLINE void Write(const float* acc,
                                typename Engine::Operand* probabilities,
                                int begin, int end, Visible visible,
                                const Plan& plan, RowState& state) {
    state.sum = Exponentials<Engine>(acc, probabilities, begin, end, visible,
                                     plan.factor, state.max, state.sum);
  }

  // Writes the probabilities relative to `max` and returns `sum` with theirs.
  template <class Engine, class Visible>
  static ZYFA_INLINE F32 Exponentials(const float* acc,
                                      typename Engine::Operand* probabilities,
                                      int begin, int end, Visible visible,
                                      float factor, float max, F32 sum) {
    const F32 scale = Simd::Set(factor);
    const F32 reference = Simd::Set(max);
    for (int key = begin; key < end; key += 2 * kLanes) {
      F32 p[2];
      for (int half = 0; half < 2; ++half) {
        const int at = key + half * kLanes;
        // Not fused, so that the largest logit leaves exactly 0 however large.
        const F32 t = Load(acc + at) * scale - reference;
        p[half] = Select(visible(at), Simd::Exp2<Engine::kExpDegree>(t), F32{});
      }
      sum += p[0] + p[1];
      Engine::StoreProbabilities(probabilities + key, p[0], p[1]);
    }
    return sum;
  }
};

template <class Code>
struct Fp8Probability {
  static constexpr float kLog2Scale = numerics::kFp8ProbabilityLog2;

  struct Plan {
    Fp8Block block;
    float factor;
    float rescale;
  };

  template <class Engine, class Visible>
  static ZYFA_INLINE Plan Prepare(const float* acc, int begin, int end,
                                  Visible visible, float factor,
                                  RowState& state) {
    const Fp8Block block = PlanFp8Block<Code>(
        MaximumOf(acc, begin, end, visible), factor, state.max);
    float rescale = 1.0f;
    if (block.new_max > state.max) {
      rescale = RescaleFactor(state.max, block.new_max);
      state.max = block.new_max;
      state.sum *= rescale;
    }
    return {block, factor, rescale};
  }

  template <class Engine, class Visible>
  static ZYFA_INLINE void Write(const float* acc,
                                typename Engine::Operand* probabilities,
                                int begin, int end, Visible visible,
                                const Plan& plan, RowState& state) {
    typename Engine::Fp8Writer writer(probabilities, plan.block.shift);
    EmitFp8Codes<Code>(acc, begin, end, visible, plan.factor, plan.block,
                       [&](int key, I32 codes, I32 next_codes) {
                         writer.Write(key, codes, next_codes);
                       });
    state.sum = plan.block.has_nan
                    ? Simd::Set(std::numeric_limits<float>::quiet_NaN())
                    : state.sum + writer.Sum();
  }
};

}  // namespace
}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_SOFTMAX_H_
