// What the attention kernels for NVIDIA GPUs are launched with, by value: this
// struct and three tensor maps (see launch_plan.h). Host and device alike.

#ifndef ZYFA_CUDA_ATTENTION_ARGS_H_
#define ZYFA_CUDA_ATTENTION_ARGS_H_

#include <cstdint>

namespace zyfa::cuda {

constexpr int kQueryBlock = 128;  // queries of a work item
constexpr int kKeyBlock = 128;    // keys of a tile
constexpr int kValueDim = 128;

enum class OutType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// The arrays and lengths of AttentionParams (csrc/ffi/attention_params.h). For
// each (kv_batch, kv_head) there are `k_scales` of k, one but for int8, and of
// v one or, with `v_channels`, kValueDim.
struct AttentionArgs {
  const void* q;
  const void* k;
  const void* v;
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  const int32_t* q_offset;
  const int32_t* q_lengths;
  const int32_t* kv_lengths;
  void* out;
  float* lse;
  void* workspace;  // LaunchPlan::workspace_bytes, 128-byte aligned
  int32_t batch;
  int32_t kv_batch;
  int32_t q_len;
  int32_t kv_len;
  int32_t heads;
  int32_t kv_heads;
  int32_t window_left;   // below zero: unbounded
  int32_t window_right;  // below zero: unbounded; 0: causal
  int32_t q_block;       // queries that share a q_scale; 0: all of them
  int32_t q_scales;
  int32_t kv_block;  // keys that share a k_scale; 0: all of them
  int32_t k_scales;
  int32_t v_channels;  // 0 or 1
  OutType out_type;
  int32_t section_heads;  // LaunchPlan::section_heads
  int32_t padding;
};
static_assert(sizeof(AttentionArgs) == 12 * 8 + 16 * 4);

// The driver's CUtensorMap.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

}  // namespace zyfa::cuda

#endif  // ZYFA_CUDA_ATTENTION_ARGS_H_
