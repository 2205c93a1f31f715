// How a quantisation becomes a launch on an AMD GPU. Host and device alike.

#ifndef ZYFA_ROCM_QUANTIZE_PLAN_H_
#define ZYFA_ROCM_QUANTIZE_PLAN_H_

#include <cstdint>

#include "csrc/gpu/quantize_args.h"

namespace zyfa::rocm {

constexpr int kQuantizeThreads = 512;  // of a workgroup

constexpr gpu::QuantizePlan PlanQuantize(int head_dim, int /*chunks*/) {
  return {(head_dim + 63) / 64 * 64, kQuantizeThreads};
}

}  // namespace zyfa::rocm

#endif  // ZYFA_ROCM_QUANTIZE_PLAN_H_
