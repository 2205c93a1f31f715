// How a quantisation becomes a launch on a Hopper GPU. Host and device alike.
//
// A block takes a tile of 128 tokens of one head in steps of 16, 32 or 64
// tokens, whose parts lie side by side in it: a thread's channels are the same
// in every step.

#ifndef ZYFA_CUDA_QUANTIZE_PLAN_H_
#define ZYFA_CUDA_QUANTIZE_PLAN_H_

#include <cstdint>

#include "csrc/gpu/quantize_args.h"

namespace zyfa::cuda {

constexpr int kMaxQuantizeThreads = 512;

// Tokens of a step of the kernel for head dims up to kernel_dim.
constexpr int QuantizeRows(int kernel_dim, int chunks) {
  return kMaxQuantizeThreads / (kernel_dim / (gpu::kChunk * chunks));
}

constexpr gpu::QuantizePlan PlanQuantize(int head_dim, int chunks) {
  const int kernel_dim = head_dim <= 128 ? 128 : gpu::kMaxQuantizeDim;
  const int threads =
      QuantizeRows(kernel_dim, chunks) * (head_dim / (gpu::kChunk * chunks));
  return {kernel_dim, (threads + 31) / 32 * 32};
}

}  // namespace zyfa::cuda

#endif  // ZYFA_CUDA_QUANTIZE_PLAN_H_
