// What an attention kernel for AMD GPUs is launched with: the one kernel
// argument, passed by value, and the launch's geometry. Host and device alike.

#ifndef ZYFA_ROCM_ATTENTION_ARGS_H_
#define ZYFA_ROCM_ATTENTION_ARGS_H_

#include <cstdint>

namespace zyfa::rocm {

constexpr int kThreads = 512;     // of a workgroup
constexpr int kQueryBlock = 256;  // queries of a workgroup
constexpr int kScaledKeys = 128;  // the least that share a k_scale

enum class OutType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// Division by a number that the host knows, of numbers in [0, 2^31): with the
// multiplier rounded up, the excess stays below one unit of the quotient.
struct Divisor {
  uint32_t multiplier;
  uint32_t shift;
};

constexpr Divisor DivisorOf(int32_t divisor) {
  uint32_t bits = 0;
  while ((int64_t{1} << bits) < divisor) ++bits;
  const uint64_t power = uint64_t{1} << (31 + bits);
  const auto by = static_cast<uint64_t>(divisor);
  return {static_cast<uint32_t>((power + by - 1) / by), 31 + bits};
}

constexpr int32_t Quotient(int32_t x, Divisor by) {
  return static_cast<int32_t>(
      uint64_t{static_cast<uint32_t>(x)} * by.multiplier >> by.shift);
}
static_assert(Quotient(INT32_MAX, DivisorOf(1)) == INT32_MAX);
static_assert(Quotient(20, DivisorOf(7)) == 2);
static_assert(Quotient(21, DivisorOf(7)) == 3);
static_assert(Quotient(INT32_MAX - 1, DivisorOf(INT32_MAX)) == 0);
static_assert(Quotient(INT32_MAX, DivisorOf(INT32_MAX)) == 1);

// The arrays and lengths of AttentionParams (csrc/ffi/attention_params.h).
// v_scale is (kv_batch, kv_heads), or (kv_batch, kv_heads, value dim) with
// v_channels. Kernels that take several k_scales for a head want them >= 0.
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
  int32_t groups_per_head;
  Divisor by_groups_per_head;
  Divisor by_heads;
  Divisor by_kv_group;     // query heads that share a key/value head
  Divisor by_batch_group;  // batch entries that share keys and values
  int32_t kv_block;  // keys that share a k_scale, a multiple of 128; 0: all
  int32_t k_scales;
  int32_t v_channels;  // 1: a v_scale for each channel; 0: one for all
  Divisor by_q_block;
  Divisor by_scaled_tiles;  // tiles of 128 keys that share a k_scale
};
static_assert(sizeof(AttentionArgs) == 11 * 8 + 28 * 4);

// Workgroups of a launch, along x: for each (batch, head) the groups of its
// query blocks.
constexpr int64_t GroupsPerHead(int32_t q_len, int32_t blocks_per_group) {
  const int64_t blocks = (int64_t{q_len} + kQueryBlock - 1) / kQueryBlock;
  return (blocks + blocks_per_group - 1) / blocks_per_group;
}

// Fills in what follows from the rest.
inline void SetGeometry(AttentionArgs& args, int32_t blocks_per_group) {
  args.blocks_per_group = blocks_per_group;
  args.groups_per_head =
      static_cast<int32_t>(GroupsPerHead(args.q_len, blocks_per_group));
  args.by_groups_per_head = DivisorOf(args.groups_per_head);
  args.by_heads = DivisorOf(args.heads);
  args.by_kv_group = DivisorOf(args.heads / args.kv_heads);
  args.by_batch_group = DivisorOf(args.batch / args.kv_batch);
  args.by_q_block = DivisorOf(args.q_block > 0 ? args.q_block : INT32_MAX);
  args.by_scaled_tiles =
      DivisorOf(args.kv_block > 0 ? args.kv_block / kScaledKeys : INT32_MAX);
}

}  // namespace zyfa::rocm

#endif  // ZYFA_ROCM_ATTENTION_ARGS_H_
