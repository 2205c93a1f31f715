// Attention for Hopper: one block of threads per multiprocessor takes 128
// queries of one head at a time, until none are left.
//
// Three warpgroups. One thread of the first, the producer, starts the copies of
// tiles to shared memory; another, the scheduler, fetches work items. The other
// two, the consumers, compute 64 queries each, going through the tiles of keys
// from the last to the first:
//
//   first product   S(j) = Q K(j)^T; beside it, FP8's P(j + 2) V(j + 2) is
//   added second product  P(j + 1) V(j + 1); beside it, softmax makes P(j) of
//   S(j)
//
// Consumers take no turns: what one leaves of the matrix units' time the other
// finds by itself. Named turns were measured and cost 1 to 4 %.

#ifndef ZYFA_CUDA_SM90_ATTENTION_H_
#define ZYFA_CUDA_SM90_ATTENTION_H_

#include <type_traits>

#include "csrc/cuda/sm90/intrinsics.h"
#include "csrc/cuda/sm90/queries.h"
#include "csrc/cuda/sm90/softmax.h"
#include "csrc/cuda/sm90/store.h"
#include "csrc/cuda/sm90/tiles.h"

namespace zyfa::sm90 {

using cuda::OutType;
using cuda::TensorMap;

struct Maps {
  const TensorMap* q;
  const TensorMap* k;
  const TensorMap* v;
};

// ---- The scheduler

// One warp fetches work items ahead of those who use them.
template <class Type, class Shared>
ZYFA_DEVICE void FetchItems(const AttentionArgs& args, Shared shared) {
  const Schedule schedule(args);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPosition<Shared::kItemStages> at;
  bool more = true;
  while (more) {
    WorkItem item = schedule.Next(lane);
    if constexpr (Type::kPacks) {
      for (int tile = item.tiles.begin + lane; tile < item.tiles.end;
           tile += 32) {
        item.numbers.Add(TileNumber<Type>(args, item, tile));
      }
      item.numbers = item.numbers.OfWarp();
    }
    const int place = Shared::kItemsPlace + at.stage;
    Wait(shared.Empty(place), at.parity ^ 1);
    if (lane == 0) {
      shared.Item(at.stage) = item;
      Arrive(shared.Full(place));
    }
    at.Next();
    more = item.valid;
  }
}

// The items that were fetched, for a warp.
template <class Shared>
class ItemReader {
 public:
  ZYFA_DEVICE explicit ItemReader(Shared shared) : shared_(shared) {}

  // Waits for an item; false: there are no more.
  ZYFA_DEVICE bool Next() {
    Wait(shared_.Full(Shared::kItemsPlace + at_.stage), at_.parity);
    return Item().valid;
  }
  ZYFA_DEVICE const WorkItem& Item() const { return shared_.Item(at_.stage); }
  ZYFA_DEVICE void Release() {
    if (threadIdx.x % 32 == 0) {
      Arrive(shared_.Empty(Shared::kItemsPlace + at_.stage));
    }
    at_.Next();
  }

 private:
  const Shared shared_;
  RingPosition<Shared::kItemStages> at_;
};

// ---- The producer

template <class Type, int kHeadDim>
class Producer {
 public:
  using Shared = SharedLayout<Type, kHeadDim>;

  ZYFA_DEVICE Producer(const AttentionArgs& args, const Maps& maps,
                       Shared shared)
      : args_(args), maps_(maps), shared_(shared) {}

  ZYFA_DEVICE void Run() {
    ItemReader<Shared> items(shared_);
    while (items.Next()) {
      Load(items.Item());
      items.Release();
    }
  }

 private:
  // In the order in which consumers want them.
  ZYFA_DEVICE void Load(const WorkItem& item) {
    if (item.tiles.begin >= item.tiles.end) return;
    LoadKeys(item, item.tiles.end - 1);
    LoadQueries(item);
    for (int tile = item.tiles.end - 2; tile >= item.tiles.begin; --tile) {
      LoadKeys(item, tile);
      LoadValues(item, tile + 1);
    }
    LoadValues(item, item.tiles.begin);
  }

  ZYFA_DEVICE void LoadQueries(const WorkItem& item) {
    constexpr int kPlace = Shared::kQueriesPlace;
    Wait(shared_.Empty(kPlace), queries_parity_ ^ 1);
    queries_parity_ ^= 1;
    ArriveExpecting(shared_.Full(kPlace), kConsumers * Shared::kQueryBytes);
    for (int i = 0; i < kConsumers; ++i) {
      CopyBox(shared_.Queries(i), maps_.q,
              {0, item.first_query + i * kRows, 0, item.head, item.batch},
              shared_.Full(kPlace));
    }
  }

  ZYFA_DEVICE void LoadKeys(const WorkItem& item, int tile) {
    const int place = Shared::kKeysPlace + keys_.stage;
    float scale = 1.0f;
    if constexpr (Type::kKeyScales) scale = TileNumber<Type>(args_, item, tile);
    Wait(shared_.Empty(place), keys_.parity ^ 1);
    if (Type::kKeyScales) StoreShared(shared_.KeyScale(keys_.stage), scale);
    ArriveExpecting(shared_.Full(place), Shared::kKeyBytes);
    CopyBox(shared_.Keys(keys_.stage), maps_.k,
            {0, tile * kKeyBlock, 0, item.kv_head, item.kv_batch},
            shared_.Full(place));
    keys_.Next();
  }

  ZYFA_DEVICE void LoadValues(const WorkItem& item, int tile) {
    const int place = Shared::kValuesPlace + values_.stage;
    const int key = tile * kKeyBlock;
    Wait(shared_.Empty(place), values_.parity ^ 1);
    ArriveExpecting(shared_.Full(place), Shared::kValueCopyBytes);
    CopyBox(shared_.Values(values_.stage), maps_.v,
            {Type::kTransposedValues ? key : 0,
             Type::kTransposedValues ? 0 : key, 0, item.kv_head, item.kv_batch},
            shared_.Full(place));
    values_.Next();
  }

  const AttentionArgs& args_;
  const Maps maps_;
  const Shared shared_;
  uint32_t queries_parity_ = 0;
  RingPosition<Shared::kStages> keys_;
  RingPosition<Shared::kStages> values_;
};

// ---- The consumers

template <class Type, int kHeadDim>
class Consumer {
 public:
  using Shared = SharedLayout<Type, kHeadDim>;
  using Softmax = typename Type::Softmax;
  using Factors = LogitFactors<Type>;
  using Products = typename Type::Products;
  static constexpr int kSteps = kHeadDim / Products::kDepth;

  ZYFA_DEVICE Consumer(const AttentionArgs& args, Shared shared, int consumer)
      : args_(args), shared_(shared), consumer_(consumer) {}

  ZYFA_DEVICE void Run() {
    ItemReader<Shared> items(shared_);
    while (items.Next()) {
      const WorkItem& item = items.Item();
      const ThreadQueries queries(item, consumer_);
      Softmax softmax(LogitFactors<Type>(args_, item, queries));
      if (item.tiles.begin < item.tiles.end) Attend(item, softmax);
      StoreItem(args_, item, queries, softmax);
      __syncwarp();
      items.Release();
    }
  }

 private:
  // ---- The schedule

  ZYFA_DEVICE void Attend(const WorkItem& item, Softmax& softmax) {
    int tile = item.tiles.end - 1;
    const int first_tile = item.tiles.begin;
    // Signs that queries cannot take are changed where masks are.
    const bool masks_all = Type::kSignBits == 0 && item.negative;
    const TileRange whole = masks_all ? TileRange{} : item.whole[consumer_];

    Wait(shared_.Full(Shared::kQueriesPlace), queries_parity_);
    queries_parity_ ^= 1;
    const bool packs = PrepareQueries(item, softmax.factor);
    typename Type::Packed packed(softmax.factor);
    WaitForKeys();
    FirstStep(item, tile, whole, softmax);
    if (tile > first_tile) WaitForKeys();

    // Whole tiles have loops of their own: nearly all of the time.
    const int last_whole = max(whole.begin, first_tile);
    --tile;
    while (tile >= first_tile) {
      if (!whole.Holds(tile)) {
        Step<kMasked>(item, tile--, first_tile, softmax, packed);
      } else if (!packs) {
        do {
          Step<kPlain>(item, tile--, first_tile, softmax, packed);
        } while (tile >= last_whole);
      } else if constexpr (Type::kPacks) {
        do {
          Step<kPacked>(item, tile--, first_tile, softmax, packed);
        } while (tile >= last_whole);
      }
    }
    Release(Shared::kQueriesPlace);

    WaitForValues();
    softmax.Accumulate();
    FenceProducts();
    MultiplyValues(softmax);
    CommitProducts();
    WaitForProducts<0>();
    softmax.Pin();
    ReleaseValues();
    softmax.Accumulate();
  }

  ZYFA_DEVICE void FirstStep(const WorkItem& item, int tile,
                             const TileRange& whole, Softmax& softmax) {
    float logits[kLogits];
    typename Softmax::Ready ready;
    FenceProducts();
    MultiplyKeys(logits);
    CommitProducts();
    WaitForProducts<0>();
    PinRegisters(logits);
    ReleaseKeys();
    softmax.factor.OfTile(key_scale_);
    if (!whole.Holds(tile)) Mask(item, tile, softmax.factor, logits);
    softmax.template Prepare<true>(logits, ready);
    softmax.Take(ready);
    ClearValues(item.band.kv_length - tile * kKeyBlock);
  }

  // Tiles that some query does not see whole, or whose logits packed.h takes.
  enum Kind { kPlain, kMasked, kPacked };

  // One tile of keys, and the values of the one before. Both waits for copies
  // also keep the compiler from moving work over them: the sums behind the
  // first product, the codes behind the second.
  template <Kind kKind>
  ZYFA_DEVICE void Step(const WorkItem& item, int tile, int first_tile,
                        Softmax& softmax, typename Type::Packed& packed) {
    std::conditional_t<kKind == kPacked, typename Type::Packed::Sums,
                       float[kLogits]>
        logits;
    typename Softmax::Ready ready;
    FenceProducts();
    MultiplyKeys(logits);
    CommitProducts();
    WaitForValues();
    softmax.Accumulate();
    FenceProducts();
    MultiplyValues(softmax);
    CommitProducts();
    if constexpr (kKind == kPacked) packed.Begin(key_scale_);
    WaitForProducts<1>();
    PinRegisters(logits);
    ReleaseKeys();
    if constexpr (kKind == kPacked) {
      softmax.PreparePacked(logits, packed, ready);
    } else {
      softmax.factor.OfTile(key_scale_);
      if (kKind == kMasked) Mask(item, tile, softmax.factor, logits);
      softmax.template Prepare<kKind == kMasked>(logits, ready);
    }
    PinRegisters(ready);
    if (tile > first_tile) WaitForKeys();
    WaitForProducts<0>();
    softmax.Pin();
    ReleaseValues();
    softmax.Take(ready);
  }

  ZYFA_DEVICE void WaitForKeys() {
    Wait(shared_.Full(Shared::kKeysPlace + keys_.stage), keys_.parity);
    if (Type::kKeyScales)
      key_scale_ = LoadShared(shared_.KeyScale(keys_.stage));
  }
  ZYFA_DEVICE void WaitForValues() {
    Wait(shared_.Full(Shared::kValuesPlace + values_.stage), values_.parity);
  }
  ZYFA_DEVICE void ReleaseKeys() {
    Release(Shared::kKeysPlace + keys_.stage);
    keys_.Next();
  }
  ZYFA_DEVICE void ReleaseValues() {
    Release(Shared::kValuesPlace + values_.stage);
    values_.Next();
  }
  // Once for each warp.
  ZYFA_DEVICE void Release(int place) {
    if (threadIdx.x % 32 == 0) Arrive(shared_.Empty(place));
  }

  // ---- The pieces

  // Signs, and what keeps dot products within 16 bits. Returns whether the
  // warpgroup's logits may be packed.
  ZYFA_DEVICE bool PrepareQueries(const WorkItem& item, Factors& factor) {
    const uint32_t queries = shared_.Queries(consumer_);
    bool packs = Type::kPacks;
    if constexpr (Type::kKeyScales) {
      packs = Type::Packed::Take(factor.OfQuery(0), item.numbers) &&
              Type::Packed::Take(factor.OfQuery(1), item.numbers);
    } else if constexpr (Type::kPacks) {
      packs = ScaleQueries<Shared>(queries, item.numbers, factor);
    } else {
      FlipQueries<Shared>(queries, Type::kSignBits, factor);
    }
    FenceProxyAsync();
    return SyncNamedAll(3 + consumer_, kWarpgroup, packs);
  }

  // Logits of the tile of keys that was waited for.
  template <class Sums>
  ZYFA_DEVICE void MultiplyKeys(Sums& sums) {
    constexpr int kStepBytes = Products::kDepth * Type::kBytes;
    constexpr int kStepsPerChunk = Shared::kChunk / kStepBytes;
    const uint64_t queries =
        OperandAt<Shared::kChunk>(shared_.Queries(consumer_));
    const uint64_t keys = OperandAt<Shared::kChunk>(shared_.Keys(keys_.stage));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int chunk = step / kStepsPerChunk * Shared::kChunk;
      const int byte = step % kStepsPerChunk * kStepBytes;
      const uint64_t key_step = Advance(keys, chunk * kKeyBlock + byte);
      const uint64_t query_step = Advance(queries, chunk * kRows + byte);
      if (step == 0) {
        Products::template Multiply<false>(sums, query_step, key_step);
      } else {
        Products::template Multiply<true>(sums, query_step, key_step);
      }
    }
  }

  // Output of the latest probabilities and the values that were waited for.
  ZYFA_DEVICE void MultiplyValues(Softmax& softmax) {
    constexpr int kStepBytes =
        Type::kTransposedValues ? Products::kDepth : Products::kDepth * 128;
    const uint64_t values =
        OperandAt<128>(shared_.Values(values_.stage), kKeyBlock * 128);
#pragma unroll
    for (int step = 0; step < Softmax::kSteps; ++step) {
      softmax.Multiply(step, Advance(values, step * kStepBytes));
    }
  }

  // Values of keys from `end` on, of the last tile: whatever they are, even
  // NaN, they count for nothing. Where all keys count, the copy has put zeros
  // there.
  ZYFA_DEVICE void ClearValues(int end) {
    const bool clear =
        Type::kTransposedValues ? args_.batch > args_.kv_batch : true;
    if (end >= kKeyBlock || !clear) return;
    WaitForValues();
    const uint32_t values = shared_.Values(values_.stage);
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
    if constexpr (Type::kTransposedValues) {
      for (int place = 0; place < kKeyBlock; ++place) {
        if (place / 16 * 16 + KeyAt(place % 16) < end) continue;
        const int swizzled = place ^ thread % 8 << 4;
        StoreShared(values + thread * kKeyBlock + swizzled, uint8_t{0});
      }
    } else {
      constexpr int kPieces = 128 / 16;  // of a row of a chunk
      for (int i = thread; i < (kKeyBlock - end) * kPieces; i += kWarpgroup) {
        const uint32_t at = values + end * 128 + i * 16;
        StoreShared(at, make_uint4(0, 0, 0, 0));
        StoreShared(at + kKeyBlock * 128, make_uint4(0, 0, 0, 0));
      }
    }
    FenceProxyAsync();
    SyncNamed(3 + consumer_, kWarpgroup);
  }

  // Gives logits that do not count the value -inf.
  ZYFA_DEVICE void Mask(const WorkItem& item, int tile, const Factors& factor,
                        float (&logits)[kLogits]) {
    const ThreadQueries queries(item, consumer_);
    const int first =
        tile * kKeyBlock + 2 * (static_cast<int>(threadIdx.x) % 4);
    int begin[kThreadRows];
    int end[kThreadRows];
#pragma unroll
    for (int row = 0; row < kThreadRows; ++row) {
      begin[row] = item.band.Begin(queries[row]) - first;
      end[row] = item.band.End(queries[row]) - first;
    }
#pragma unroll
    for (int i = 0; i < kLogits; ++i) {
      const int key = i / 4 * 8 + i % 2;
      const bool visible = begin[RowOf(i)] <= key && key < end[RowOf(i)];
      if (Type::kSignBits == 0 && factor.Negative(RowOf(i))) {
        logits[i] = 2.0f * Products::kBias - logits[i];
      }
      logits[i] = visible ? logits[i] : numerics::kNegativeInfinity;
    }
  }

  const AttentionArgs& args_;
  const Shared shared_;
  const int consumer_;
  uint32_t queries_parity_ = 0;
  RingPosition<Shared::kStages> keys_;
  RingPosition<Shared::kStages> values_;
  float key_scale_ = 1.0f;  // of the tile of keys that was waited for
};

// ---- The kernel

// Barriers, and the rows of ones below transposed values.
template <class Shared>
ZYFA_DEVICE void Prepare(const Shared& shared, const Maps& maps) {
  if (threadIdx.x == 0) {
    PrefetchMap(maps.q);
    PrefetchMap(maps.k);
    PrefetchMap(maps.v);
    constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
    for (int place = 0; place < Shared::kPlaces; ++place) {
      InitBarrier(shared.Full(place), 1);
      // The producer reads items, too.
      InitBarrier(shared.Empty(place), place < Shared::kItemsPlace
                                           ? kConsumerWarps
                                           : kConsumerWarps + 1);
    }
    FenceBarrierInit();
  }
  constexpr int kOnesBytes = Shared::kValueBytes - Shared::kValueCopyBytes;
  constexpr uint32_t kOnes = 0x38383838;  // in e4m3
#pragma unroll
  for (int stage = 0; stage < Shared::kStages; ++stage) {
    for (int byte = 4 * static_cast<int>(threadIdx.x); byte < kOnesBytes;
         byte += 4 * static_cast<int>(blockDim.x)) {
      StoreShared(shared.Values(stage) + Shared::kValueCopyBytes + byte, kOnes);
    }
  }
  FenceProxyAsync();
  __syncthreads();
}

template <class Type, int kHeadDim>
ZYFA_DEVICE void Attention(const AttentionArgs& args, const Maps& maps,
                           const void* shared_memory) {
  using Shared = SharedLayout<Type, kHeadDim>;
  const Shared shared(shared_memory);
  Prepare(shared, maps);

  // Of the 168 registers a thread that the block starts with, the first
  // warpgroup gives back what the consumers take.
  const int warpgroup =
      __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    ShrinkRegisters<24>();
    if (threadIdx.x == 0) Producer<Type, kHeadDim>(args, maps, shared).Run();
    if (threadIdx.x / 32 == 1) FetchItems<Type>(args, shared);
  } else {
    GrowRegisters<240>();
    Consumer<Type, kHeadDim>(args, shared, warpgroup - 1).Run();
  }
}

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_ATTENTION_H_
