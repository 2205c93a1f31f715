// Attention for gfx950: one workgroup of eight waves takes 256 queries of one
// head, each wave 32 of them, and goes through the keys tile by tile.
//
// The waves form two groups, and each SIMD holds one wave of either. While one
// group is in its matrix phase, the other is in its softmax phase; a barrier
// ends both, and they swap:
//
//   leading    S(j)     M(j)     S(j+1)     M(j+1)
//   trailing   M(j-1)   S(j)     M(j)       S(j+1)
//
//   S(j): start the copies of keys j + 3 and values j + 2; logits of tile j to
//         probabilities; read the first operands of keys j + 1; wait for the
//         copies that S(j - 1) started.
//   M(j): logits of tile j + 1, output of tile j.
//
// Four tiles each of keys and of values lie in LDS. S(j) overwrites keys j - 1
// and values j - 2, which both groups last read in M(j - 2). What it copies,
// both groups have waited for when the leading one is past M(j + 1); it is
// first read in S(j + 2) and M(j + 2).
//
// Tiles that every query of the workgroup sees whole have a loop of their own;
// the tiles before it (the left edge of a window) and after it (the diagonal,
// the end of the keys) are masked.

#ifndef ZYFA_ROCM_GFX950_ATTENTION_H_
#define ZYFA_ROCM_GFX950_ATTENTION_H_

#include "csrc/numerics/visibility.h"
#include "csrc/rocm/attention_args.h"
#include "csrc/rocm/gfx950/lds_tile.h"
#include "csrc/rocm/gfx950/operand.h"
#include "csrc/rocm/gfx950/softmax.h"

namespace zyfa::gfx950 {

using numerics::KeyRange;
using rocm::AttentionArgs;

using Args = Constant<AttentionArgs>;

constexpr int kValueDim = 128;
constexpr int kValueBlocks = kValueDim / kBlock;
constexpr int kXcds = 8;

// Queries of one head, of which this workgroup computes a block at a time.
struct Head {
  int batch;
  int head;
  int kv_batch;
  int kv_head;
  numerics::Extent extent;
};

// Workgroups are dealt to the dies (XCDs) in turn. Renumbers them so that each
// die gets consecutive ones, whose heads share keys and values in its cache.
ZYFA_DEVICE int GroupOnDie(int group, int groups) {
  const int die = group % kXcds;
  const int more = groups % kXcds;
  return group / kXcds + die * (groups / kXcds) + (die < more ? die : more);
}

ZYFA_DEVICE Head HeadOf(Args& args, int index) {
  Head head;
  head.batch = index / args.heads;
  head.head = index % args.heads;
  head.kv_batch = head.batch / (args.batch / args.kv_batch);
  head.kv_head = head.head / (args.heads / args.kv_heads);
  head.extent = {Uniform(Global(args.q_offset)[head.batch]),
                 numerics::Clamp(Uniform(Global(args.q_lengths)[head.batch]), 0,
                                 args.q_len),
                 numerics::Clamp(Uniform(Global(args.kv_lengths)[head.batch]),
                                 0, args.kv_len)};
  return head;
}

// Tiles [begin, end); of these, every query sees [full_begin, full_end) whole.
struct TileRange {
  int begin;
  int end;
  int full_begin;
  int full_end;
};

// The tiles of queries [first, last].
template <int kKeys>
ZYFA_DEVICE TileRange TilesOf(numerics::Window window, numerics::Extent extent,
                              int first, int last) {
  const KeyRange of_first = numerics::VisibleKeys(window, extent, first);
  const KeyRange of_last = numerics::VisibleKeys(window, extent, last);
  // Not their union: between queries that see nothing may be some that do.
  const KeyRange any = numerics::VisibleKeys(window, extent, first, last);
  TileRange tiles;
  tiles.begin = static_cast<int>(any.begin) / kKeys;
  tiles.end = (static_cast<int>(any.end) + kKeys - 1) / kKeys;
  const int begin = (static_cast<int>(of_last.begin) + kKeys - 1) / kKeys;
  const int end = static_cast<int>(of_first.end) / kKeys;
  const bool some = begin < end && !numerics::IsEmpty(of_first) &&
                    !numerics::IsEmpty(of_last);
  tiles.full_begin = some ? begin : tiles.end;
  tiles.full_end = some ? end : tiles.end;
  return tiles;
}

// One wave's work on one block of queries.
template <class Type, int kHeadDim>
class Wave {
 public:
  using Operand = typename Type::Operand;
  using Softmax = typename SoftmaxOf<Type>::type;
  static constexpr int kKeys = Type::kKeys;
  static constexpr int kKeyRow = kHeadDim * Type::kBytes;
  static constexpr int kValueRow = kValueDim * Type::kBytes;
  using Keys = LdsTile<kKeys, kKeyRow, RowReads>;
  using Values = LdsTile<kKeys, kValueRow, TransposedReads>;
  static constexpr int kSlot = Keys::kBytes + Values::kBytes;
  static constexpr int kSlots = 4;
  static constexpr int kLdsBytes = kSlots * kSlot;
  static constexpr int kSteps = kHeadDim / Type::kDepth;
  static constexpr int kKeyBlocks = kKeys / kBlock;
  static constexpr int kOperandBytes = sizeof(Operand);
  // The softmax phase is the longer one where products are few.
  static constexpr bool kCopiesBesideProducts =
      Type::kBytes == 1 && kHeadDim == 128;
  // Operands that LDS reads are ahead of products, as registers allow.
  static constexpr int kAhead = kOperandBytes * kSteps > 64 ? 2 : 3;

  __attribute__((device, always_inline)) Wave(Args& args, const Head& head,
                                              int first_query, int lds)
      : args_(args),
        head_(head),
        slots_{lds, lds + kSlot, lds + 2 * kSlot, lds + 3 * kSlot},
        wave_(Uniform(Thread() / kLanes)),
        lane_(Thread() % kLanes),
        half_(lane_ / kBlock),
        query_(first_query + wave_ * kBlock + lane_ % kBlock),
        tiles_(TilesOf<kKeys>({args.window_left, args.window_right},
                              head.extent, first_query,
                              LastQuery(first_query, rocm::kQueryBlock))),
        full_(TilesOf<kKeys>({args.window_left, args.window_right}, head.extent,
                             first_query + wave_ * kBlock,
                             LastQuery(first_query + wave_ * kBlock, kBlock))),
        keys_(FirstRow(args.k, kKeyRow), args.kv_heads * kKeyRow, RowsLeft(),
              wave_, lane_),
        values_(FirstRow(args.v, kValueRow), args.kv_heads * kValueRow,
                RowsLeft(), wave_, lane_),
        softmax_(LogitFactor()),
        ones_(Softmax::SumOperand(lane_)) {}

  __attribute__((device, always_inline)) void Run() {
    if (tiles_.begin < tiles_.end) Attend();
    Store();
  }

 private:
  // ---- The schedule

  __attribute__((device, always_inline)) void Attend() {
    const bool trails = wave_ >= kWaves / 2;
    int tile = tiles_.begin;
    const int last = tiles_.end - 1;
    for (int i = 0; i < 3; ++i) keys_.StartNext(slots_[i]);
    for (int i = 0; i < 2; ++i) values_.StartNext(ValuesAt(i));
    LoadQueries();
    WaitForCopies<0>();
    Barrier();
    if (trails) Barrier();

    ReadFirstKeys(slots_[0]);
    MultiplyKeys(slots_[0]);
    Barrier();
    for (; tile < last && tile < tiles_.full_begin; ++tile) Step<true>(tile);
    for (; tile < last && tile < tiles_.full_end; ++tile) Step<false>(tile);
    for (; tile < last; ++tile) Step<true>(tile);
    SoftmaxPhase<true>(tile);
    Barrier();
    MultiplyValues(ValuesAt(0));
    WaitForCopies<0>();
    Barrier();

    if (!trails) Barrier();
  }

  template <bool kMasked>
  __attribute__((device, always_inline)) void Step(int tile) {
    if (!kCopiesBesideProducts) StartCopies();
    SoftmaxPhase<kMasked>(tile);
    ReadFirstKeys(slots_[1]);
    WaitForCopies<kCopiesBesideProducts ? 0
                                        : Keys::kCopies + Values::kCopies>();
    Barrier();

    SetPriority<1>();
    MultiplyKeys(slots_[1]);
    if (kCopiesBesideProducts) StartCopies();
    MultiplyValues(ValuesAt(0));
    ScheduleMatrixPhase();
    SetPriority<0>();
    Barrier();

    const int free_slot = slots_[0];
    for (int i = 1; i < kSlots; ++i) slots_[i - 1] = slots_[i];
    slots_[kSlots - 1] = free_slot;
  }

  __attribute__((device, always_inline)) void StartCopies() {
    keys_.StartNext(slots_[3]);
    values_.StartNext(ValuesAt(2));
  }

  // LDS reads run a few operands ahead of the products that need them.
  __attribute__((device, always_inline)) static void ScheduleMatrixPhase() {
    constexpr int kKeyReads = kOperandBytes / kSlotBytes;
    constexpr int kValueReads = Type::kParts;
    constexpr int kKeyProducts = kKeyBlocks * kSteps;
    constexpr int kValueProducts = kValueBlocks * Softmax::kSteps;
#pragma unroll
    for (int i = 0; i < kKeyProducts - kAhead; ++i) {
      ScheduleProduct();
      ScheduleLdsReads<kKeyReads>();
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      ScheduleProduct();
      ScheduleLdsReads<kValueReads>();
    }
#pragma unroll
    for (int i = 0; i < Softmax::kSumProducts; ++i) ScheduleProduct();
#pragma unroll
    for (int i = 0; i < kValueProducts - kAhead; ++i) {
      ScheduleProduct();
      ScheduleLdsReads<kValueReads>();
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ScheduleProduct();
  }

  // ---- The pieces

  // One operand of the keys at `lds`: 32 keys of one step of the first product.
  __attribute__((device, always_inline)) Operand ReadKeys(int lds, int block,
                                                          int step) const {
    Operand keys;
#pragma unroll
    for (int i = 0; i < kOperandBytes / kSlotBytes; ++i) {
      // Rows 32 apart are swizzled alike.
      const int byte = step * 2 * kOperandBytes + i * kSlotBytes;
      const I32x4 part = ReadLds<I32x4>(
          lds + Keys::Address(lane_ % kBlock, byte, half_ * kOperandBytes),
          block * kBlock * Keys::Pitch(byte));
      SetPart(keys, i, part);
    }
    return keys;
  }

  __attribute__((device, always_inline)) void ReadFirstKeys(int lds) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      first_keys_[i] = ReadKeys(lds, i / kSteps, i % kSteps);
    }
  }

  // Logits of the tile whose keys are at `lds`, the first of which are read.
  __attribute__((device, always_inline)) void MultiplyKeys(int lds) {
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      F32x16 sum = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int i = block * kSteps + step;
        const Operand keys =
            i < kAhead ? first_keys_[i] : ReadKeys(lds, block, step);
        sum = Type::Multiply(keys, queries_[step], sum);
      }
      logits_.blocks[block] = sum;
    }
  }

  // Output of the tile at `lds`, and the sum of its probabilities.
  __attribute__((device, always_inline)) void MultiplyValues(int lds) {
    const int row = Type::TransposedRow(lane_);
    softmax_.SumTile(ones_);
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) {
      const int address =
          lds + Values::Address(row, block * kBlock * Type::kBytes,
                                Type::TransposedByte(lane_));
#pragma unroll
      for (int step = 0; step < Softmax::kSteps; ++step) {
        Operand values;
#pragma unroll
        for (int part = 0; part < Type::kParts; ++part) {
          const I32x2 read = Type::ReadTransposed(
              address, Type::PartKey(step, part) * kValueRow);
          values[2 * part] = read[0];
          values[2 * part + 1] = read[1];
        }
        out_[block] = softmax_.Multiply(step, values, out_[block]);
      }
    }
  }

  template <bool kMasked>
  __attribute__((device, always_inline)) void SoftmaxPhase(int tile) {
    if (kMasked && !(full_.full_begin <= tile && tile < full_.full_end)) {
      Mask(tile);
    }
    softmax_.Step(logits_, [this](float f) {
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
        for (int r = 0; r < 16; ++r) out_[block][r] *= f;
      }
    });
  }

  __attribute__((device, always_inline)) void Mask(int tile) {
    const KeyRange range = numerics::Within(
        numerics::VisibleKeys({args_.window_left, args_.window_right},
                              head_.extent, query_),
        int64_t{tile} * kKeys, kKeys);
    const int begin = static_cast<int>(range.begin) - FirstKey(0, half_);
    const unsigned count = static_cast<unsigned>(range.end - range.begin);
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        const int key = block * kBlock + FirstKey(r / 4, 0) + r % 4;
        const bool visible = static_cast<unsigned>(key - begin) < count;
        logits_.blocks[block][r] =
            visible ? logits_.blocks[block][r] : numerics::kNegativeInfinity;
      }
    }
  }

  // ---- Queries in, results out

  __attribute__((device, always_inline)) float LogitFactor() {
    const int scale = args_.q_block > 0 ? QueryRow() / args_.q_block : 0;
    const float q_scale =
        Global(args_.q_scale)[Row(head_.batch, args_.heads, head_.head) *
                                  args_.q_scales +
                              scale];
    const float k_scale = Global(
        args_.k_scale)[Row(head_.kv_batch, args_.kv_heads, head_.kv_head)];
    const float factor = numerics::LogitFactor(q_scale, k_scale);
    // Kernels want a factor above zero: its sign goes to the query, and zero
    // becomes a number that still makes all logits alike.
    flips_queries_ = factor < 0.0f;
    return Maximum(__builtin_fabsf(factor), kSmallestFactor);
  }

  __attribute__((device, always_inline)) void LoadQueries() {
    const auto* source =
        Global(static_cast<const unsigned char*>(args_.q)) +
        (Row(head_.batch, args_.q_len, QueryRow()) * args_.heads + head_.head) *
            kKeyRow +
        half_ * kOperandBytes;
    const auto flip =
        static_cast<int32_t>(flips_queries_ ? Type::kSignBits : 0u);
    const bool counts = query_ < head_.extent.q_length;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      queries_[step] =
          *reinterpret_cast<const Operand*>(source + step * 2 * kOperandBytes);
      queries_[step] = counts ? queries_[step] ^ flip : Operand{};
    }
  }

  __attribute__((device, always_inline)) void Store() {
    // Read once more, so that it takes no registers until now.
    Args& args = Reread(args_);
    const float total = softmax_.TotalSum();
    if (query_ >= args.q_len) return;
    const bool empty =
        query_ >= head_.extent.q_length || softmax_.max == kLowestMax;
    // Logits that have no code may leave nothing of a query that sees keys.
    const float sum = total == 0.0f ? __builtin_nanf("") : total;
    const float v_scale =
        Global(args.v_scale)[Row(head_.kv_batch, args.kv_heads, head_.kv_head)];
    const float weight = v_scale / sum;
    const int64_t row =
        Row(head_.batch, args.q_len, query_) * args.heads + head_.head;
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        F32x4 out;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          out[r] = empty ? 0.0f : out_[block][4 * i + r] * weight;
        }
        StoreFour(args, row * kValueDim + block * kBlock + FirstKey(i, half_),
                  out);
      }
    }
    if (half_ == 0) {
      const float lse = (softmax_.max + Log2(sum) - Softmax::kLog2Scale) *
                        static_cast<float>(numerics::kLn2);
      Global(args.lse)[Row(head_.batch, args.heads, head_.head) * args.q_len +
                       query_] = empty ? numerics::kNegativeInfinity : lse;
    }
  }

  __attribute__((device, always_inline)) static void StoreFour(Args& args,
                                                               int64_t at,
                                                               F32x4 out) {
    const F32x2 low = {out[0], out[1]};
    const F32x2 high = {out[2], out[3]};
    switch (args.out_type) {
      case rocm::OutType::kF32:
        *reinterpret_cast<GlobalPointer<F32x4>>(
            Global(static_cast<float*>(args.out)) + at) = out;
        break;
      case rocm::OutType::kBF16:
        *reinterpret_cast<GlobalPointer<I32x2>>(
            Global(static_cast<__bf16*>(args.out)) + at) = {BF16::Pack(low),
                                                            BF16::Pack(high)};
        break;
      case rocm::OutType::kF16:
        *reinterpret_cast<GlobalPointer<I32x2>>(
            Global(static_cast<_Float16*>(args.out)) + at) = {F16::Pack(low),
                                                              F16::Pack(high)};
        break;
    }
  }

  // ---- Addresses

  static constexpr float kSmallestFactor = 1e-37f;

  __attribute__((device, always_inline)) static int64_t Row(int outer, int size,
                                                            int inner) {
    return int64_t{outer} * size + inner;
  }

  // The query whose memory this lane reads: its own, or the last.
  __attribute__((device, always_inline)) int QueryRow() const {
    return query_ < args_.q_len ? query_ : args_.q_len - 1;
  }

  // The last of `count` queries from `first` that counts.
  __attribute__((device, always_inline)) int LastQuery(int first,
                                                       int count) const {
    const int end = static_cast<int>(head_.extent.q_length);
    const int last = first + count < end ? first + count - 1 : end - 1;
    return last > first ? last : first;
  }

  // Row and count of the keys, or values, from the first tile on.
  __attribute__((device, always_inline)) const unsigned char* FirstRow(
      const void* array, int row_bytes) const {
    return static_cast<const unsigned char*>(array) +
           (Row(head_.kv_batch, args_.kv_len, tiles_.begin * kKeys) *
                args_.kv_heads +
            head_.kv_head) *
               row_bytes;
  }
  __attribute__((device, always_inline)) int RowsLeft() const {
    return static_cast<int>(head_.extent.kv_length) - tiles_.begin * kKeys;
  }

  __attribute__((device, always_inline)) int ValuesAt(int i) const {
    return slots_[i] + Keys::kBytes;
  }

  __attribute__((device, always_inline)) static void SetPart(I32x4& to, int,
                                                             I32x4 part) {
    to = part;
  }
  __attribute__((device, always_inline)) static void SetPart(I32x8& to, int i,
                                                             I32x4 part) {
#pragma unroll
    for (int j = 0; j < 4; ++j) to[4 * i + j] = part[j];
  }

  Args& args_;
  const Head& head_;
  int slots_[kSlots];  // where keys and values of this tile and the next are
  int wave_;
  int lane_;
  int half_;
  int query_;
  TileRange tiles_;  // of the workgroup
  TileRange full_;   // of the wave
  TileCopies<Keys> keys_;
  TileCopies<Values> values_;
  bool flips_queries_;
  Operand queries_[kSteps];
  Operand first_keys_[kAhead];
  Logits<Type> logits_;
  Softmax softmax_;
  I32x8 ones_;
  F32x16 out_[kValueBlocks] = {};
};

template <class Type, int kHeadDim>
ZYFA_DEVICE void Attention() {
  Args& args = KernelArgument<AttentionArgs>();
  __attribute__((
      shared)) static unsigned char lds[Wave<Type, kHeadDim>::kLdsBytes];
  const int blocks = (args.q_len + rocm::kQueryBlock - 1) / rocm::kQueryBlock;
  const int per_head =
      (blocks + args.blocks_per_group - 1) / args.blocks_per_group;
  const int group = GroupOnDie(Group(), args.batch * args.heads * per_head);
  const Head head = HeadOf(args, group / per_head);

  // The longest first; with two, the shortest after it.
  const int early = group % per_head;
  const int late = blocks - 1 - early;
  const int lds_start = LdsAddress(lds);
  Wave<Type, kHeadDim>(args, head, late * rocm::kQueryBlock, lds_start).Run();
  if (args.blocks_per_group == 2 && early != late) {
    Wave<Type, kHeadDim>(Reread(args), head, early * rocm::kQueryBlock,
                         lds_start)
        .Run();
  }
}

}  // namespace zyfa::gfx950

#endif  // ZYFA_ROCM_GFX950_ATTENTION_H_
