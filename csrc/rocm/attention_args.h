// What an attention kernel for AMD GPUs is launched with: the one kernel
// argument, passed by value, and the launch's geometry. Host and device alike.

#ifndef ZYFA_ROCM_ATTENTION_ARGS_H_
#define ZYFA_ROCM_ATTENTION_ARGS_H_

#include <cstdint>

namespace zyfa::rocm {

constexpr int kThreads = 512;     // of a workgroup
constexpr int kQueryBlock = 256;  // queries of a workgroup

enum class OutType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// The arrays and lengths of AttentionParams (csrc/ffi/attention_params.h), with
// one k_scale and v_scale for each (kv_batch, kv_head).
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
  OutType out_type;
  // 1: a workgroup takes one block of queries; 2: the i-th and the i-th from
  // the end, whose causal work adds up to the same for every i.
  int32_t blocks_per_group;
};
static_assert(sizeof(AttentionArgs) == 11 * 8 + 12 * 4);

// Workgroups of a launch, along x: for each (batch, head) the groups of its
// query blocks.
constexpr int64_t GroupsPerHead(int32_t q_len, int32_t blocks_per_group) {
  const int64_t blocks = (int64_t{q_len} + kQueryBlock - 1) / kQueryBlock;
  return (blocks + blocks_per_group - 1) / blocks_per_group;
}

}  // namespace zyfa::rocm

#endif  // ZYFA_ROCM_ATTENTION_ARGS_H_
