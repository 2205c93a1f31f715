// How a quantisation becomes a launch on an AMD GPU. Host and device alike.

#ifndef ZYFA_ROCM_QUANTIZE_PLAN_H_
#define ZYFA_ROCM_QUANTIZE_PLAN_H_

#include <cstdint>

#include "csrc/gpu/quantize_args.h"

namespace zyfa::rocm {

constexpr int kQuantizeThreads = 512;  // of a workgroup

constexpr gpu::QuantizePlan PlanQuantize(int head_dim, bool rotates,
                                         int /*bytes*/) {
  const int chunks = gpu::PartChunks(head_dim, rotates);
  return {(head_dim + 63) / 64 * 64, kQuantizeThreads,
          head_dim / (gpu::kChunk * chunks), chunks > 1 ? "_whole" : ""};
}

}  // namespace zyfa::rocm

#endif  // ZYFA_ROCM_QUANTIZE_PLAN_H_
