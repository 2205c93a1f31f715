// Work items, the tiles of keys each visits, and what lies in shared memory.

#ifndef ZYFA_CUDA_SM90_TILES_H_
#define ZYFA_CUDA_SM90_TILES_H_

#include "csrc/cuda/attention_args.h"
#include "csrc/cuda/launch_plan.h"
#include "csrc/cuda/sm90/intrinsics.h"
#include "csrc/numerics/online_softmax.h"
#include "csrc/numerics/visibility.h"

namespace zyfa::sm90 {

using cuda::AttentionArgs;
using cuda::kKeyBlock;
using cuda::kQueryBlock;
using cuda::kValueDim;
using numerics::KeyRange;

constexpr int kWarpgroup = 128;                  // threads
constexpr int kConsumers = 2;                    // warpgroups that compute
constexpr int kRows = kQueryBlock / kConsumers;  // queries of a warpgroup

struct TileRange {
  int begin;
  int end;

  ZYFA_DEVICE bool Holds(int tile) const { return begin <= tile && tile < end; }
};

// The tiles that hold some of the keys.
ZYFA_DEVICE TileRange TilesOf(const KeyRange& keys) {
  return {static_cast<int>(keys.begin) / kKeyBlock,
          static_cast<int>((keys.end + kKeyBlock - 1) / kKeyBlock)};
}

// The tiles that all queries from `first` to `last` see whole.
ZYFA_DEVICE TileRange WholeTilesOf(const numerics::Band& band, int first,
                                   int last) {
  return {(band.Begin(last) + kKeyBlock - 1) / kKeyBlock,
          band.End(first) / kKeyBlock};
}

// Of numbers from zero on; NaN is the most.
struct Extremes {
  float least = -numerics::kNegativeInfinity;
  float most = 0.0f;

  ZYFA_DEVICE void Add(float x) {
    least = __uint_as_float(min(__float_as_uint(least), __float_as_uint(x)));
    most = __uint_as_float(max(__float_as_uint(most), __float_as_uint(x)));
  }
  ZYFA_DEVICE Extremes OfWarp() const {
    Extremes x;
    x.least = __uint_as_float(__reduce_min_sync(~0u, __float_as_uint(least)));
    x.most = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(most)));
    return x;
  }
};

// kQueryBlock queries of one head, and the tiles [tiles_begin, tiles_end) that
// they visit.
struct WorkItem {
  int batch;
  int head;
  int kv_batch;
  int kv_head;
  int first_query;
  int q_length;
  numerics::Band band;
  TileRange tiles;
  TileRange whole[kConsumers];  // for which a consumer needs no mask
  Extremes numbers;             // of the tiles: see TileNumber
  bool negative;                // whether logits' factors are below zero
  bool valid;                   // false: no items are left

  // Among the heads of keys and values of all batches.
  ZYFA_DEVICE int64_t KvHead(const AttentionArgs& args) const {
    return int64_t{kv_batch} * args.kv_heads + kv_head;
  }
};

// The queries of one thread: `first` and the one 8 further on.
struct ThreadQueries {
  int first;

  ZYFA_DEVICE ThreadQueries(const WorkItem& item, int consumer)
      : first(item.first_query + consumer * kRows +
              static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 +
              static_cast<int>(threadIdx.x) % 32 / 4) {}
  ZYFA_DEVICE int operator[](int row) const { return first + 8 * row; }
};

// The items of a launch, in an order that ends with the shortest ones and works
// on few heads at a time, whose keys and values stay in the L2 cache. Blocks of
// threads take the next one when they have time for it; a counter in the
// workspace says which that is.
class Schedule {
 public:
  ZYFA_DEVICE explicit Schedule(const AttentionArgs& args)
      : args_(args),
        blocks_((args.q_len + kQueryBlock - 1) / kQueryBlock),
        count_(static_cast<unsigned>(args.batch) * args.heads * blocks_) {}

  // For a warp.
  ZYFA_DEVICE WorkItem Next(int lane) const {
    unsigned index = 0;
    if (lane == 0) {
      index = atomicAdd(static_cast<unsigned*>(args_.workspace), 1);
    }
    index = __shfl_sync(~0u, index, 0);
    if (index < count_) return At(index);
    WorkItem none = {};
    none.valid = false;
    return none;
  }

 private:
  ZYFA_DEVICE WorkItem At(unsigned index) const {
    const unsigned all_heads = args_.batch * args_.heads;
    const unsigned section_heads = args_.section_heads;
    const unsigned per_section = section_heads * blocks_;
    const unsigned section = index / per_section;
    const unsigned first = section * section_heads;
    const unsigned heads = min(section_heads, all_heads - first);
    const unsigned within = index % per_section;
    const int number = static_cast<int>(first + within % heads);
    const int block = static_cast<int>(blocks_ - 1 - within / heads);

    WorkItem item;
    item.batch = number / args_.heads;
    item.head = number % args_.heads;
    item.kv_batch = item.batch / (args_.batch / args_.kv_batch);
    item.kv_head = item.head / (args_.heads / args_.kv_heads);
    item.first_query = block * kQueryBlock;
    item.q_length = min(max(args_.q_lengths[item.batch], 0), args_.q_len);
    const int offset = args_.q_offset[item.batch];
    const int kv_length =
        min(max(args_.kv_lengths[item.batch], 0), args_.kv_len);
    item.band = numerics::BandOf(args_.window_left, args_.window_right, offset,
                                 kv_length);
    item.tiles = TilesOf(numerics::VisibleKeys(
        {args_.window_left, args_.window_right},
        {offset, item.q_length, kv_length}, item.first_query,
        item.first_query + kQueryBlock - 1));
#pragma unroll
    for (int i = 0; i < kConsumers; ++i) {
      const int first = item.first_query + i * kRows;
      item.whole[i] = WholeTilesOf(item.band, first, first + kRows - 1);
    }
    item.negative =
        args_.q_scale[(int64_t{item.batch} * args_.heads + item.head) *
                      args_.q_scales] < 0.0f;
    item.valid = true;
    return item;
  }

  const AttentionArgs& args_;
  unsigned blocks_;
  unsigned count_;
};

// Tiles of all of a head's keys.
ZYFA_DEVICE int TileCount(const AttentionArgs& args) {
  return static_cast<int>(cuda::PaddedKeys(args.kv_len) / kKeyBlock);
}

// The largest Euclidean norm of each tile's keys (kv_batch, kv_heads, tiles),
// behind the transposed values.
ZYFA_DEVICE float* KeyNorms(const AttentionArgs& args) {
  return reinterpret_cast<float*>(
      static_cast<uint8_t*>(args.workspace) + cuda::kCounterBytes +
      int64_t{args.kv_batch} * args.kv_heads * TileCount(args) *
          (kKeyBlock * kValueDim));
}

ZYFA_DEVICE void ResetCounter(const AttentionArgs& args) {
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *static_cast<unsigned*>(args.workspace) = 0;
  }
}

// Addresses in shared memory. Queries: one tile for each consumer.
template <class Type, int kHeadDim>
struct SharedLayout {
  static constexpr int kStages = cuda::Stages(Type::kInType, kHeadDim);
  static constexpr int kRowBytes = kHeadDim * Type::kBytes;
  static constexpr int kChunk = cuda::ChunkBytes(kRowBytes);
  static constexpr int kQueryBytes = kRows * kRowBytes;
  static constexpr int kKeyBytes = kKeyBlock * kRowBytes;
  static constexpr int kValueCopyBytes = kKeyBlock * kValueDim * Type::kBytes;
  static constexpr int kValueBytes = cuda::ValueTileBytes(Type::kInType);
  static constexpr int kItemStages = 2;
  static constexpr int kBarrier = 8;

  uint32_t base;

  ZYFA_DEVICE explicit SharedLayout(const void* memory)
      : base((SharedAddress(memory) + 1023) & ~1023u) {}

  ZYFA_DEVICE uint32_t Queries(int consumer) const {
    return base + consumer * kQueryBytes;
  }
  ZYFA_DEVICE uint32_t Keys(int stage) const {
    return base + kConsumers * kQueryBytes + stage * kKeyBytes;
  }
  ZYFA_DEVICE uint32_t Values(int stage) const {
    return Keys(kStages) + stage * kValueBytes;
  }

  // Each of these is full and empty in turn: two barriers.
  enum Place {
    kQueriesPlace,
    kKeysPlace,
    kValuesPlace = kKeysPlace + kStages,
    kItemsPlace = kValuesPlace + kStages,
    kPlaces = kItemsPlace + kItemStages
  };
  ZYFA_DEVICE uint32_t Full(int place) const {
    return Values(kStages) + place * 2 * kBarrier;
  }
  ZYFA_DEVICE uint32_t Empty(int place) const { return Full(place) + kBarrier; }

  ZYFA_DEVICE WorkItem& Item(int stage) const {
    return reinterpret_cast<WorkItem*>(
        __cvta_shared_to_generic(Full(kPlaces)))[stage];
  }
  // The k_scale of that stage's keys.
  ZYFA_DEVICE uint32_t KeyScale(int stage) const {
    return Full(kPlaces) + kItemStages * sizeof(WorkItem) +
           stage * sizeof(float);
  }
  static_assert(kPlaces * 2 * kBarrier + kItemStages * sizeof(WorkItem) +
                    kStages * sizeof(float) <=
                cuda::kBarrierBytes);
};

// The key at position `place` of 16 of transposed values. A thread's four bytes
// of the probabilities' operand are two neighbouring columns of two blocks of
// eight.
ZYFA_DEVICE int KeyAt(int place) {
  return place / 4 * 2 + place % 2 + place / 2 % 2 * 8;
}

// A position in a ring of stages, and how often it has come round.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t parity = 0;

  ZYFA_DEVICE void Next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_TILES_H_
