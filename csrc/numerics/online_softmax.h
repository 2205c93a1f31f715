// The state of one query row while key blocks pass by, and the power-of-two
// scale of a block. Logits are in log2 units.

#ifndef ZYFA_NUMERICS_ONLINE_SOFTMAX_H_
#define ZYFA_NUMERICS_ONLINE_SOFTMAX_H_

#include <limits>

namespace zyfa::numerics {

constexpr float kLog2E = 1.4426950408889634f;
constexpr double kLn2 = 0.6931471805599453;
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Keys in a block: the unit of the block scale, of the work schedule and of the
// per-block descales.
constexpr int kKeyBlock = 128;

// Probabilities of the FP8 path carry 2^8, so the largest key codes as 256.
constexpr float kFp8ProbabilityLog2 = 8.0f;

// Beyond this a block's weight 2^-shift no longer matters, and the weight times
// the smallest code is still a float.
constexpr int kLargestBlockShift = 120;

struct RowState {
  float max = kNegativeInfinity;  // largest logit seen
  float sum = 0.0f;               // sum of probabilities relative to `max`
};

// Logit in log2 units per unit of the raw dot product.
static constexpr float LogitFactor(float q_scale, float k_scale) {
  return (q_scale * k_scale) * kLog2E;
}

// How far, in whole octaves, the block's maximum lies below the row's running
// maximum (which is at least the block's). The block is coded against
// running_max - shift and weighted by 2^-shift, which is exact.
static constexpr int BlockShift(float running_max, float block_max) {
  const float distance = running_max - block_max;
  return distance < static_cast<float>(kLargestBlockShift)
             ? static_cast<int>(distance)
             : kLargestBlockShift;
}

static_assert(BlockShift(3.5f, 3.5f) == 0);
static_assert(BlockShift(3.5f, 1.0f) == 2);
static_assert(BlockShift(0.0f, -1e30f) == kLargestBlockShift);

}  // namespace zyfa::numerics

#endif  // ZYFA_NUMERICS_ONLINE_SOFTMAX_H_
