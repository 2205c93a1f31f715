// How a call becomes launches on a Hopper GPU: kernels, grids, shared memory
// and the tensor maps to encode. Pure C++; the host's only source for any of
// it.
//
// A kernel takes, in this order, AttentionArgs and the maps of q, k and v; the
// preparing kernel takes AttentionArgs alone, and runs before it on the same
// stream.

#ifndef ZYFA_CUDA_LAUNCH_PLAN_H_
#define ZYFA_CUDA_LAUNCH_PLAN_H_

#include <cstdint>

#include "csrc/cuda/attention_args.h"

namespace zyfa::cuda {

// Of queries and keys. Values are of their type, but e4m3 beside int8.
enum class InType { kE4m3, kBF16, kF16, kI8 };

struct CallSizes {
  InType type;
  int64_t batch;
  int64_t kv_batch;
  int64_t q_len;
  int64_t kv_len;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;  // 128 or 192; the value dim is 128
};

// Where a tensor map's base address comes from.
enum class Buffer { kQ, kK, kV, kWorkspace };
// CU_TENSOR_MAP_DATA_TYPE_UINT8, BFLOAT16, FLOAT16.
enum class MapType { kU8, kBF16, kF16 };
// CU_TENSOR_MAP_SWIZZLE_64B, 128B.
enum class MapSwizzle { k64B, k128B };

// Arguments of cuTensorMapEncodeTiled; element strides are 1, interleave NONE,
// L2 promotion 256B, out-of-bounds fill zero.
struct TensorMapPlan {
  static constexpr int kRank = 5;
  Buffer buffer;
  uint64_t offset;  // of the base address, in bytes from the buffer's
  MapType type;
  MapSwizzle swizzle;
  uint64_t sizes[kRank];        // innermost first, in elements
  uint64_t strides[kRank - 1];  // of dimensions 1.., in bytes
  uint32_t box[kRank];
};

struct KernelLaunch {
  const char* symbol;     // nullptr: no launch
  uint32_t grid;          // along x; 0: nothing to do
  uint32_t block;         // threads along x
  uint32_t shared_bytes;  // dynamic; raise the function's limit to it
};

struct LaunchPlan {
  bool supported;
  KernelLaunch prepare;
  KernelLaunch attention;
  TensorMapPlan q_map;
  TensorMapPlan k_map;
  TensorMapPlan v_map;
  uint64_t workspace_bytes;  // may be 0
  int32_t section_heads;     // for AttentionArgs
};

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t b) { return CeilDiv(a, b) * b; }

constexpr int ElementBytes(InType type) {
  return type == InType::kE4m3 || type == InType::kI8 ? 1 : 2;
}

// Bytes of a row that are adjacent in shared memory: rows are cut into chunks,
// which lie one after the other, each swizzled.
constexpr int ChunkBytes(int row_bytes) {
  return row_bytes % 128 == 0 ? 128 : 64;
}

// ---- Shared memory

constexpr int Stages(InType type, int head_dim) {
  if (ElementBytes(type) == 1) return 4;
  return head_dim == 128 ? 3 : 2;
}
// Values in FP8 lie transposed, and 8 rows of ones below them make the row sum.
constexpr int kOnesRows = 8;
constexpr int ValueTileBytes(InType type) {
  return ElementBytes(type) == 1 ? (kValueDim + kOnesRows) * kKeyBlock
                                 : kKeyBlock * kValueDim * 2;
}
constexpr int KeyTileBytes(InType type, int head_dim) {
  return kKeyBlock * head_dim * ElementBytes(type);
}
constexpr int QueryTileBytes(InType type, int head_dim) {
  return kQueryBlock * head_dim * ElementBytes(type);
}
constexpr int kBarrierBytes = 512;  // and work items
// Tiles want 1024-byte alignment; dynamic shared memory may not have it.
constexpr int kAlignmentSlack = 1024;
constexpr int SharedBytes(InType type, int head_dim) {
  return kAlignmentSlack + kBarrierBytes + QueryTileBytes(type, head_dim) +
         Stages(type, head_dim) *
             (KeyTileBytes(type, head_dim) + ValueTileBytes(type));
}
constexpr int kMaxSharedBytes = 227 * 1024;
static_assert(SharedBytes(InType::kE4m3, 128) <= kMaxSharedBytes);
static_assert(SharedBytes(InType::kE4m3, 192) <= kMaxSharedBytes);
static_assert(SharedBytes(InType::kBF16, 128) <= kMaxSharedBytes);
static_assert(SharedBytes(InType::kBF16, 192) <= kMaxSharedBytes);

// ---- Maps

constexpr MapType MapTypeOf(InType type) {
  return ElementBytes(type) == 1 ? MapType::kU8
         : type == InType::kBF16 ? MapType::kBF16
                                 : MapType::kF16;
}

// An array (batch, tokens, heads, dim), as (chunk, token, chunks, head, batch):
// a box is `rows` tokens of one head, chunk after chunk.
constexpr TensorMapPlan RowsMap(Buffer buffer, InType type, int64_t batch,
                                int64_t tokens, int64_t heads, int64_t dim,
                                int rows) {
  const int64_t bytes = ElementBytes(type);
  const int64_t chunk = ChunkBytes(static_cast<int>(dim * bytes)) / bytes;
  TensorMapPlan map = {};
  map.buffer = buffer;
  map.type = MapTypeOf(type);
  map.swizzle = chunk * bytes == 128 ? MapSwizzle::k128B : MapSwizzle::k64B;
  const int64_t sizes[] = {chunk, tokens, dim / chunk, heads, batch};
  const int64_t strides[] = {heads * dim * bytes, chunk * bytes, dim * bytes,
                             tokens * heads * dim * bytes};
  const int64_t box[] = {chunk, rows, dim / chunk, 1, 1};
  for (int i = 0; i < TensorMapPlan::kRank; ++i) {
    map.sizes[i] = static_cast<uint64_t>(sizes[i] > 1 ? sizes[i] : 1);
    map.box[i] = static_cast<uint32_t>(box[i]);
  }
  for (int i = 0; i < TensorMapPlan::kRank - 1; ++i) {
    map.strides[i] = static_cast<uint64_t>(strides[i] > 16 ? strides[i] : 16);
  }
  return map;
}

// Transposed values (kv_batch, kv_heads, value_dim, padded keys) in the
// workspace, as (key, dim, 1, head, batch).
constexpr int kCounterBytes = 128;  // of work items, at the workspace's start
constexpr int64_t PaddedKeys(int64_t kv_len) {
  return RoundUp(kv_len > 0 ? kv_len : 1, kKeyBlock);
}
constexpr TensorMapPlan TransposedValuesMap(const CallSizes& call) {
  const uint64_t keys = static_cast<uint64_t>(PaddedKeys(call.kv_len));
  const uint64_t heads = static_cast<uint64_t>(call.kv_heads);
  TensorMapPlan map = {};
  map.buffer = Buffer::kWorkspace;
  map.offset = kCounterBytes;
  map.type = MapType::kU8;
  map.swizzle = MapSwizzle::k128B;
  const uint64_t sizes[] = {keys, kValueDim, 1, heads,
                            static_cast<uint64_t>(call.kv_batch)};
  const uint64_t strides[] = {keys, keys * kValueDim, keys * kValueDim,
                              keys * kValueDim * heads};
  const uint32_t box[] = {kKeyBlock, kValueDim, 1, 1, 1};
  for (int i = 0; i < TensorMapPlan::kRank; ++i) {
    map.sizes[i] = sizes[i];
    map.box[i] = box[i];
  }
  for (int i = 0; i < TensorMapPlan::kRank - 1; ++i)
    map.strides[i] = strides[i];
  return map;
}

// ---- The plan

constexpr int kAttentionThreads = 384;
constexpr int kPrepareThreads = 256;

constexpr const char* AttentionSymbol(InType type, int64_t head_dim) {
  const bool narrow = head_dim == 128;
  switch (type) {
    case InType::kE4m3:
      return narrow ? "zyfa_attention_fp8_128x128"
                    : "zyfa_attention_fp8_192x128";
    case InType::kI8:
      return narrow ? "zyfa_attention_int8_128x128"
                    : "zyfa_attention_int8_192x128";
    case InType::kBF16:
      return narrow ? "zyfa_attention_bf16_128x128"
                    : "zyfa_attention_bf16_192x128";
    case InType::kF16:
      return narrow ? "zyfa_attention_f16_128x128"
                    : "zyfa_attention_f16_192x128";
  }
  return nullptr;
}

// Query heads of a section, whose work is done before the next section's: their
// keys and values should stay in the L2 cache.
constexpr int64_t kSectionBytes = 24 << 20;
constexpr int64_t SectionHeads(const CallSizes& call) {
  const int64_t group = call.heads / call.kv_heads;
  const int64_t bytes_per_kv_head = (call.kv_len > 0 ? call.kv_len : 1) *
                                    (call.head_dim + kValueDim) *
                                    ElementBytes(call.type);
  int64_t kv_heads = kSectionBytes / bytes_per_kv_head;
  if (kv_heads < 1) kv_heads = 1;
  const int64_t all = call.batch * call.heads;
  return kv_heads * group < all ? kv_heads * group : all;
}

constexpr LaunchPlan PlanAttention(const CallSizes& call, int multiprocessors) {
  LaunchPlan plan = {};
  plan.supported = call.head_dim == 128 || call.head_dim == 192;
  if (!plan.supported) return plan;
  const int head_dim = static_cast<int>(call.head_dim);
  const int64_t items =
      call.batch * call.heads * CeilDiv(call.q_len, kQueryBlock);
  plan.attention.symbol = AttentionSymbol(call.type, call.head_dim);
  plan.attention.grid =
      static_cast<uint32_t>(items < multiprocessors ? items : multiprocessors);
  plan.attention.block = kAttentionThreads;
  plan.attention.shared_bytes =
      static_cast<uint32_t>(SharedBytes(call.type, head_dim));
  if (items == 0) return plan;
  plan.section_heads = static_cast<int32_t>(SectionHeads(call));

  plan.q_map = RowsMap(Buffer::kQ, call.type, call.batch, call.q_len,
                       call.heads, call.head_dim, kQueryBlock / 2);
  plan.k_map = RowsMap(Buffer::kK, call.type, call.kv_batch, call.kv_len,
                       call.kv_heads, call.head_dim, kKeyBlock);
  plan.prepare.block = kPrepareThreads;
  if (ElementBytes(call.type) == 1) {
    const int64_t tiles =
        call.kv_batch * call.kv_heads * (PaddedKeys(call.kv_len) / kKeyBlock);
    plan.v_map = TransposedValuesMap(call);
    plan.workspace_bytes =
        kCounterBytes +
        static_cast<uint64_t>(tiles) * (kKeyBlock * kValueDim + sizeof(float));
    plan.prepare.symbol = call.type == InType::kI8 ? "zyfa_prepare_int8"
                          : head_dim == 128        ? "zyfa_prepare_fp8_128"
                                                   : "zyfa_prepare_fp8_192";
    plan.prepare.grid = static_cast<uint32_t>(tiles);
  } else {
    plan.v_map = RowsMap(Buffer::kV, call.type, call.kv_batch, call.kv_len,
                         call.kv_heads, kValueDim, kKeyBlock);
    plan.workspace_bytes = kCounterBytes;
    plan.prepare.symbol = "zyfa_prepare";
    plan.prepare.grid = 1;
  }
  return plan;
}

}  // namespace zyfa::cuda

#endif  // ZYFA_CUDA_LAUNCH_PLAN_H_
