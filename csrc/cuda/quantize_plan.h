// How a quantisation becomes a launch on a Hopper GPU. Host and device alike.
//
// A block takes a tile of 128 tokens of one head: by lanes, in steps of 16, 32
// or 64 tokens, whose parts lie side by side in it, so that a thread's channels
// are the same in every step; by matrix, 16 tokens a warp.

#ifndef ZYFA_CUDA_QUANTIZE_PLAN_H_
#define ZYFA_CUDA_QUANTIZE_PLAN_H_

#include <cstdint>

#include "csrc/gpu/quantize_args.h"

namespace zyfa::cuda {

constexpr int kMaxQuantizeThreads = 512;
constexpr int kMatrixQuantizeThreads = 256;  // of kernels by matrix

// Tokens of a step of the kernel for head dims up to kernel_dim.
constexpr int QuantizeRows(int kernel_dim, int chunks) {
  return kMaxQuantizeThreads / (kernel_dim / (gpu::kChunk * chunks));
}

constexpr gpu::QuantizePlan PlanQuantize(int head_dim, bool rotates,
                                         int bytes) {
  if (rotates && bytes == 2 && head_dim % 64 == 0) {
    return {head_dim, kMatrixQuantizeThreads, 1, "_matrix"};
  }
  const int chunks = gpu::PartChunks(head_dim, rotates);
  const int kernel_dim = head_dim <= 128 ? 128 : gpu::kMaxQuantizeDim;
  const int parts = head_dim / (gpu::kChunk * chunks);
  const int threads = QuantizeRows(kernel_dim, chunks) * parts;
  return {kernel_dim, (threads + 31) / 32 * 32, parts,
          chunks > 1 ? "_whole" : ""};
}

}  // namespace zyfa::cuda

#endif  // ZYFA_CUDA_QUANTIZE_PLAN_H_
