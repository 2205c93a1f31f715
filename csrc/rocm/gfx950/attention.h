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

using rocm::AttentionArgs;

using Args = Constant<AttentionArgs>;

constexpr int kValueDim = 128;
constexpr int kValueBlocks = kValueDim / kBlock;
constexpr int kXcds = 8;

// What a block needs of the arguments. All of it is read at once: a scalar load
// takes as long as fifty instructions.
struct Arrays {
  const void* q;
  const void* k;
  const void* v;
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  void* out;
  float* lse;
  int q_len;
  int kv_len;
  int heads;
  int kv_heads;
  int q_block;
  int q_scales;
  rocm::OutType out_type;
  // Read at once by kernels whose keys have several descales.
  int k_scales;
  int v_channels;
  rocm::Divisor by_q_block;
  rocm::Divisor by_scaled_tiles;
};

template <class Type>
ZYFA_DEVICE Arrays ArraysOf(Args& args) {
  Arrays x = {args.q,
              args.k,
              args.v,
              args.q_scale,
              args.k_scale,
              args.v_scale,
              args.out,
              args.lse,
              args.q_len,
              args.kv_len,
              args.heads,
              args.kv_heads,
              args.q_block,
              args.q_scales,
              args.out_type,
              args.k_scales,
              args.v_channels,
              {args.by_q_block.multiplier, args.by_q_block.shift},
              {args.by_scaled_tiles.multiplier, args.by_scaled_tiles.shift}};
  Pin(x.q), Pin(x.k), Pin(x.v), Pin(x.q_scale), Pin(x.k_scale), Pin(x.v_scale);
  Pin(x.out), Pin(x.lse), Pin(x.q_len), Pin(x.kv_len), Pin(x.heads);
  Pin(x.kv_heads), Pin(x.q_block), Pin(x.q_scales), Pin(x.out_type);
  if constexpr (Type::kScalesKeys) {
    Pin(x.k_scales), Pin(x.v_channels);
    Pin(x.by_q_block.multiplier), Pin(x.by_q_block.shift);
    Pin(x.by_scaled_tiles.multiplier), Pin(x.by_scaled_tiles.shift);
  }
  return x;
}

// Queries of one head, of which this workgroup computes a block at a time.
struct Head {
  int batch;
  int head;
  int kv_batch;
  int kv_head;
  int q_length;  // queries that count
  numerics::Band band;
};

// Workgroups are dealt to the dies (XCDs) in turn. Renumbers them so that each
// die gets consecutive ones, whose heads share keys and values in its cache.
ZYFA_DEVICE int GroupOnDie(unsigned group, unsigned groups) {
  const unsigned die = group % kXcds;
  const unsigned more = groups % kXcds;
  return static_cast<int>(group / kXcds + die * (groups / kXcds) +
                          (die < more ? die : more));
}

ZYFA_DEVICE int Between(int x, int low, int high) {
  return x < low ? low : x > high ? high : x;
}

ZYFA_DEVICE Head HeadOf(Args& args, int index) {
  Head head;
  head.batch = rocm::Quotient(index, args.by_heads);
  head.head = index - head.batch * args.heads;
  head.kv_batch = rocm::Quotient(head.batch, args.by_batch_group);
  head.kv_head = rocm::Quotient(head.head, args.by_kv_group);
  const int q_length = Unwritten(args.q_lengths)[head.batch];
  const int kv_length = Unwritten(args.kv_lengths)[head.batch];
  head.q_length = Between(q_length, 0, args.q_len);
  head.band = numerics::BandOf(args.window_left, args.window_right,
                               Unwritten(args.q_offset)[head.batch],
                               Between(kv_length, 0, args.kv_len));
  return head;
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
  // Where the copies of the next tiles start: in the softmax phase, but where
  // products are few, that is the longer one. Beside products of int8, which
  // are short, they start one at a time.
  enum class Copies { kInSoftmax, kBetweenProducts, kAmongValues };
  static constexpr Copies kCopies = Type::kProducts > 1 ? Copies::kAmongValues
                                    : Type::kBytes == 1 && kHeadDim == 128
                                        ? Copies::kBetweenProducts
                                        : Copies::kInSoftmax;
  // Where the descale of a coming tile is read: in the shorter phase.
  static constexpr bool kReadsScaleInSoftmax = kHeadDim > 128;
  // Operands that LDS reads are ahead of products, as registers allow.
  static constexpr int kAhead = kOperandBytes * kSteps > 64 ? 2 : 3;
  // Where sums start from a constant, which takes registers, the first operands
  // of keys are read when the logits have become codes.
  static constexpr bool kLateKeys = Type::kZero != 0.0f;

  __attribute__((device, always_inline)) Wave(const Arrays& arrays,
                                              const Head& head, int first_query,
                                              int lds)
      : arrays_(arrays),
        head_(head),
        slots_{lds, lds + kSlot, lds + 2 * kSlot, lds + 3 * kSlot},
        wave_(Uniform(Thread() / kLanes)),
        lane_(Thread() % kLanes),
        half_(lane_ / kBlock),
        trails_(wave_ >= kWaves / 2),
        first_query_(first_query + wave_ * kBlock),
        query_(first_query_ + lane_ % kBlock),
        tiles_(TilesOf(first_query)),
        keys_(FirstRow(arrays.k, kKeyRow), arrays.kv_heads * kKeyRow,
              RowsLeft(), wave_, lane_),
        values_(FirstRow(arrays.v, kValueRow), arrays.kv_heads * kValueRow,
                RowsLeft(), wave_, lane_),
        v_scale_(ChannelScales() ? 1.0f : Unwritten(arrays.v_scale)[KvHead()]),
        ones_(Softmax::SumOperand(lane_)) {
    if constexpr (Type::kZero != 0.0f) {
#pragma unroll
      for (int r = 0; r < 16; ++r) zero_[r] = Type::kZero;
      Keep(zero_);
    }
  }

  __attribute__((device, always_inline)) void Run() {
    if (tiles_.begin < tiles_.end) {
      Attend();
    } else {
      Store();
    }
  }

 private:
  // ---- The schedule

  __attribute__((device, always_inline)) void Attend() {
    for (int i = 0; i < 3; ++i) keys_.StartNext(slots_[i]);
    for (int i = 0; i < 2; ++i) values_.StartNext(ValuesAt(i));
    LoadQueries();
    WaitForCopies<0>();
    Barrier();
    if (trails_) Barrier();

    int tile = tiles_.begin;
    const int last = tiles_.group_end - 1;
    if constexpr (Type::kScalesKeys) {
      k_scale_ = *KeyScale(tile);
      next_k_scale_ = *KeyScale(tile + 1);
    }
    ReadFirstKeys(slots_[0]);
    MultiplyKeys(slots_[0]);
    Barrier();
    for (; tile < last && tile < tiles_.full_begin; ++tile) Step<true>(tile);
    for (; tile < last && tile < tiles_.full_end; ++tile) Step<false>(tile);
    for (; tile < last; ++tile) Step<true>(tile);
    // The trailing group may still need all of them.
    if (kCopies == Copies::kInSoftmax) StartCopies();
    SoftmaxPhase<true>(tile);
    F32x4 channels;
    if (ChannelScales()) channels = ReadChannelScales();
    Barrier();
    MultiplyValues(ValuesAt(0), [](int) {});
    ScheduleAll(out_);
    WaitForCopies<0>();
    Barrier();
    if (ChannelScales()) ScaleChannels(channels);

    Store();
    if (!trails_) {
      Barrier();
      for (int i = tiles_.group_end; i < tiles_.end; ++i) {
        Barrier();
        Barrier();
      }
    }
  }

  template <bool kMasked>
  __attribute__((device, always_inline)) void Step(int tile) {
    if constexpr (Type::kScalesKeys && kReadsScaleInSoftmax) {
      next_k_scale_ = ReadHere(KeyScale(tile + 1));
    }
    if (kCopies == Copies::kInSoftmax) StartCopies();
    if (!kLateKeys) ReadFirstKeys(slots_[1]);
    SoftmaxPhase<kMasked>(tile);
    if (kLateKeys) {
      ReadFirstKeys(slots_[1]);
      ScheduleLdsReads<kAhead * kOperandBytes / kSlotBytes>();
      ScheduleVector<4>();
    }
    WaitForCopies<
        kCopies == Copies::kInSoftmax ? Keys::kCopies + Values::kCopies : 0>();
    Barrier();

    SetPriority<1>();
    MultiplyKeys(slots_[1]);
    if (kCopies == Copies::kBetweenProducts) StartCopies();
    MultiplyValues(ValuesAt(0), [this](int block) {
      if (kCopies == Copies::kAmongValues) StartCopies(block);
    });
    ScheduleMatrixPhase();
    SetPriority<0>();
    // Here rather than in the longer softmax phase.
    const int free_slot = slots_[0];
    for (int i = 1; i < kSlots; ++i) slots_[i - 1] = slots_[i];
    slots_[kSlots - 1] = free_slot;
    for (int& slot : slots_) Pin(slot);
    if constexpr (Type::kScalesKeys) {
      k_scale_ = next_k_scale_;
      Pin(k_scale_);
      if constexpr (!kReadsScaleInSoftmax) {
        int next_tile = tile + 2;
        Pin(next_tile);
        next_k_scale_ = ReadHere(KeyScale(next_tile));
      }
    }
    Barrier();
  }

  __attribute__((device, always_inline)) void StartCopies() {
    keys_.StartNext(slots_[3]);
    values_.StartNext(ValuesAt(2));
  }

  // Those of them that start before the products of a block of values.
  __attribute__((device, always_inline)) void StartCopies(int block) {
    constexpr int kCount = Values::kCopies + Keys::kCopies;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((i * kValueBlocks + 1) / kCount != block) continue;
      if (i < Values::kCopies) {
        values_.StartNext(ValuesAt(2), i);
      } else {
        keys_.StartNext(slots_[3], i - Values::kCopies);
      }
    }
  }

  // LDS reads run a few operands ahead of the products that need them.
  __attribute__((device, always_inline)) static void ScheduleMatrixPhase() {
    constexpr int kProducts = Type::kProducts;
    constexpr int kKeyReads = kOperandBytes / kSlotBytes / kProducts;
    constexpr int kValueReads = Type::kParts;
    constexpr int kKeyProducts = kKeyBlocks * kSteps * kProducts;
    constexpr int kValueProducts = kValueBlocks * Softmax::kSteps;
#pragma unroll
    for (int i = 0; i < kKeyProducts - kAhead * kProducts; ++i) {
      ScheduleProduct();
      ScheduleLdsReads<kKeyReads>();
    }
#pragma unroll
    for (int i = 0; i < kAhead * kProducts; ++i) {
      ScheduleProduct();
      ScheduleLdsReads<kValueReads / kProducts>();
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
      F32x16 sum = zero_;
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

  // Output of the tile at `lds`, and the sum of its probabilities. Calls
  // before(block) for each block of values.
  template <class Before>
  __attribute__((device, always_inline)) void MultiplyValues(int lds,
                                                             Before before) {
    const int row = Type::TransposedRow(lane_);
    softmax_.SumTile(ones_);
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) {
      before(block);
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
    if constexpr (Type::kScalesKeys) ScaleTile<kMasked>();
    if (kMasked) Mask(tile * kKeys);
    softmax_.Step(logits_, [this](float f) {
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
        for (int r = 0; r < 16; ++r) out_[block][r] *= f;
      }
    });
  }

  // The descale of a tile's keys; beyond the last tile, of some.
  __attribute__((device, always_inline)) Constant<float>* KeyScale(
      int tile) const {
    const int block = rocm::Quotient(tile, arrays_.by_scaled_tiles);
    const int last = arrays_.k_scales - 1;
    return Unwritten(arrays_.k_scale) +
           Offset(KvHead(), arrays_.k_scales, block < last ? block : last);
  }

  // Takes the descale of this tile's keys to the softmax. A factor's sign goes
  // to the logits, as -128 has no opposite in int8; where some lane's is
  // negative all tiles are masked ones.
  template <bool kMasked>
  __attribute__((device, always_inline)) void ScaleTile() {
    const float factor = q_factor_ * k_scale_;
    softmax_.factor = PositiveFactor(factor);
    softmax_.zero = Type::kZero * factor;
    if (!kMasked || !some_negative_) return;
    const uint32_t sign = BitCast<uint32_t>(factor) & 0x80000000u;
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      F32x16& logits = logits_.blocks[block];
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        const float x = logits[r];
        logits[r] = BitCast<float>(BitCast<uint32_t>(x) ^ sign);
      }
    }
  }

  // Leaves only what each query sees of the tile from key `first_key` on. Most
  // blocks are seen by all of the wave's queries or by none.
  __attribute__((device, always_inline)) void Mask(int first_key) {
    // Keys are counted from `first_key`.
    const numerics::Band& band = head_.band;
    const int last_query = first_query_ + kBlock - 1;
    const int any_begin = band.Begin(first_query_) - first_key;
    const int all_begin = band.Begin(last_query) - first_key;
    const int all_end = band.End(first_query_) - first_key;
    const int any_end = band.End(last_query) - first_key;
    const int begin = band.Begin(query_) - first_key;
    const int end = band.End(query_) - first_key;
#pragma unroll
    for (int block = 0; block < kKeyBlocks; ++block) {
      const int first = block * kBlock;
      const int last = first + kBlock - 1;
      if (all_begin <= first && last < all_end) continue;
      F32x16& logits = logits_.blocks[block];
      if (last < any_begin || any_end <= first) {
#pragma unroll
        for (int r = 0; r < 16; ++r) logits[r] = numerics::kNegativeInfinity;
        continue;
      }
      const uint32_t visible =
          (LowBits(end - first) & ~LowBits(begin - first)) >>
          FirstKey(0, half_);
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        logits[r] = Select(visible, FirstKey(r / 4, 0) + r % 4, logits[r],
                           numerics::kNegativeInfinity);
      }
    }
  }

  // ---- Queries in, results out

  __attribute__((device, always_inline)) void LoadQueries() {
    const auto* source = Global(static_cast<const unsigned char*>(arrays_.q)) +
                         Row(QueryRow()) * kKeyRow + half_ * kOperandBytes;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      queries_[step] =
          *reinterpret_cast<const Operand*>(source + step * 2 * kOperandBytes);
    }
    uint32_t flip = 0;
    if constexpr (Type::kScalesKeys) {
      q_factor_ = numerics::LogitFactor(QueryScale(), 1.0f);
      some_negative_ = AnyLane(q_factor_ < 0.0f);
      if (some_negative_) tiles_.full_begin = tiles_.end;
    } else {
      const float factor = numerics::LogitFactor(
          QueryScale(), Unwritten(arrays_.k_scale)[KvHead()]);
      softmax_.factor = PositiveFactor(factor);
      flip = factor < 0.0f ? Type::kSignBits : 0;
    }
    const bool counts = query_ < head_.q_length;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      queries_[step] =
          counts ? queries_[step] ^ static_cast<int32_t>(flip) : Operand{};
    }
  }

  // Kernels want a factor above zero: its sign goes elsewhere, and zero becomes
  // a number that still makes all logits alike.
  static __attribute__((device, always_inline)) float PositiveFactor(
      float factor) {
    constexpr float kSmallest = 1e-37f;
    return Maximum(__builtin_fabsf(factor), kSmallest);
  }

  __attribute__((device, always_inline)) float QueryScale() const {
    const auto* scales =
        arrays_.q_scale +
        Offset(head_.batch, arrays_.heads, head_.head) * arrays_.q_scales;
    const auto block = [this] {
      return Type::kScalesKeys ? rocm::Quotient(QueryRow(), arrays_.by_q_block)
                               : QueryRow() / arrays_.q_block;
    };
    return arrays_.q_block > 0 ? Global(scales)[block()] : Unwritten(scales)[0];
  }

  // Whether each channel of the values has a descale.
  __attribute__((device, always_inline)) bool ChannelScales() const {
    return Type::kScalesKeys && arrays_.v_channels != 0;
  }

  // Those descales, spread over the lanes of a row of 16: lane i has those of
  // the i-th four of this half's channels.
  __attribute__((device, always_inline)) F32x4 ReadChannelScales() const {
    const auto* scales =
        Global(arrays_.v_scale) + Offset(KvHead(), kValueDim, 0);
    return *reinterpret_cast<GlobalPointer<const F32x4>>(
        scales + FirstKey(lane_ % 16, half_));
  }

  __attribute__((device, always_inline)) void ScaleChannels(F32x4 scales) {
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
      for (int r = 0; r < 16; ++r) {
        out_[block][r] *= OfRow(scales[r % 4], block * 4 + r / 4);
      }
    }
  }

  __attribute__((device, always_inline)) void Store() {
    const float total = softmax_.TotalSum();
    // Logits that have no code may leave nothing of a query that sees keys.
    const float sum = total == 0.0f ? __builtin_nanf("") : total;
    const float weight = v_scale_ * Reciprocal(sum);
    const bool empty = query_ >= head_.q_length || softmax_.max == kLowestMax;
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) out_[block] *= weight;
    if (AnyLane(empty)) {
#pragma unroll
      for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
        for (int r = 0; r < 16; ++r) {
          out_[block][r] = empty ? 0.0f : out_[block][r];
        }
      }
    }
    if (query_ >= arrays_.q_len) return;
    if (half_ == 0) {
      const float lse = (softmax_.max + Log2(sum) - Softmax::kLog2Scale) *
                        static_cast<float>(numerics::kLn2);
      Global(arrays_.lse)[Offset(head_.batch, arrays_.heads, head_.head) *
                              arrays_.q_len +
                          query_] = empty ? numerics::kNegativeInfinity : lse;
    }
    const uint64_t row = Row(query_) * kValueDim;
    switch (arrays_.out_type) {
      case rocm::OutType::kF32:
        StoreRow(static_cast<float*>(arrays_.out) + row);
        break;
      case rocm::OutType::kBF16:
        StoreRow<BF16>(static_cast<uint16_t*>(arrays_.out) + row);
        break;
      case rocm::OutType::kF16:
        StoreRow<F16>(static_cast<uint16_t*>(arrays_.out) + row);
        break;
    }
  }

  // A lane has four consecutive numbers in every eight.
  __attribute__((device, always_inline)) void StoreRow(float* row) const {
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const F32x16& x = out_[block];
        *reinterpret_cast<GlobalPointer<F32x4>>(Global(row) + block * kBlock +
                                                FirstKey(i, half_)) = {
            x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]};
      }
    }
  }

  // The halves of a query trade fours, so that each stores eight at a time.
  template <class OutType>
  __attribute__((device, always_inline)) void StoreRow(uint16_t* row) const {
#pragma unroll
    for (int block = 0; block < kValueBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        I32x4 eight;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const F32x16& x = out_[block];
          const int r = 4 * i + 2 * j;
          const I32x2 traded = SwapHalves(OutType::Pack({x[r], x[r + 1]}),
                                          OutType::Pack({x[r + 4], x[r + 5]}));
          eight[j] = traded[0];
          eight[j + 2] = traded[1];
        }
        *reinterpret_cast<GlobalPointer<I32x4>>(Global(row) + block * kBlock +
                                                (i + half_) * 8) = eight;
      }
    }
  }

  // ---- Addresses

  static __attribute__((device, always_inline)) uint64_t Offset(int outer,
                                                                int size,
                                                                int inner) {
    return uint64_t{static_cast<uint32_t>(outer)} *
               static_cast<uint32_t>(size) +
           static_cast<uint32_t>(inner);
  }

  // Where a query's row of this head lies among those of `q` and `out`.
  __attribute__((device, always_inline)) uint64_t Row(int query) const {
    return Offset(head_.batch, arrays_.q_len, query) *
               static_cast<uint32_t>(arrays_.heads) +
           static_cast<uint32_t>(head_.head);
  }

  // The query whose memory this lane reads: its own, or the last.
  __attribute__((device, always_inline)) int QueryRow() const {
    return query_ < arrays_.q_len ? query_ : arrays_.q_len - 1;
  }

  __attribute__((device, always_inline)) int KvHead() const {
    return head_.kv_batch * arrays_.kv_heads + head_.kv_head;
  }

  // Tiles [begin, end) of the workgroup; this wave's group needs those before
  // group_end, of which it sees [full_begin, full_end) whole.
  struct TileRange {
    int begin;
    int end;
    int group_end;
    int full_begin;
    int full_end;
  };

  __attribute__((device, always_inline)) TileRange
  TilesOf(int first_query) const {
    constexpr int kGroup = rocm::kQueryBlock / 2;
    const numerics::Band& band = head_.band;
    const int first_of_group = first_query + (trails_ ? kGroup : 0);
    const int last = Last(first_query, rocm::kQueryBlock);
    const int last_of_group = Last(first_of_group, kGroup);
    const int end = band.End(last);
    const bool some =
        (first_query < head_.q_length) & (band.Begin(first_query) < end);
    TileRange tiles;
    tiles.begin = FloorTiles(band.Begin(first_query));
    tiles.end = some ? CeilTiles(end) : tiles.begin;
    // No group has less than one tile: both start the copies that both need.
    const int group_end = CeilTiles(band.End(last_of_group));
    tiles.group_end =
        Between(trails_ ? tiles.end : group_end, tiles.begin + 1, tiles.end);
    tiles.full_begin = CeilTiles(band.Begin(last_of_group));
    tiles.full_end = FloorTiles(band.End(first_of_group));
    return tiles;
  }

  static __attribute__((device, always_inline)) int FloorTiles(int keys) {
    return static_cast<int>(static_cast<unsigned>(keys) / kKeys);
  }
  static __attribute__((device, always_inline)) int CeilTiles(int keys) {
    return FloorTiles(keys + kKeys - 1);
  }

  // The last of `count` queries from `first` that counts.
  __attribute__((device, always_inline)) int Last(int first, int count) const {
    const int last = first + count - 1;
    return last < head_.q_length ? last : head_.q_length - 1;
  }

  // Row and count of the keys, or values, from the first tile on.
  __attribute__((device, always_inline)) const unsigned char* FirstRow(
      const void* array, int row_bytes) const {
    return static_cast<const unsigned char*>(array) +
           (Offset(head_.kv_batch, arrays_.kv_len, tiles_.begin * kKeys) *
                static_cast<uint32_t>(arrays_.kv_heads) +
            static_cast<uint32_t>(head_.kv_head)) *
               row_bytes;
  }
  __attribute__((device, always_inline)) int RowsLeft() const {
    return head_.band.kv_length - tiles_.begin * kKeys;
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

  const Arrays arrays_;
  const Head& head_;
  int slots_[kSlots];  // where keys and values of this tile and the next are
  int wave_;
  int lane_;
  int half_;
  bool trails_;      // is of the group that is a phase behind
  int first_query_;  // of the wave
  int query_;        // of the lane
  TileRange tiles_;
  TileCopies<Keys> keys_;
  TileCopies<Values> values_;
  Operand queries_[kSteps];
  Operand first_keys_[kAhead];
  Logits<Type> logits_;
  Softmax softmax_;
  float v_scale_;
  I32x8 ones_;
  F32x16 zero_ = {};  // what sums of the first product start from
  float q_factor_;    // what a logit is per unit of a dot product and k_scale_
  bool some_negative_;  // whether a lane's is
  float k_scale_;       // descale of this tile's keys
  float next_k_scale_;  // and of the next
  F32x16 out_[kValueBlocks] = {};
};

template <class Type, int kHeadDim>
ZYFA_DEVICE void Attention() {
  Args& args = KernelArgument<AttentionArgs>();
  const Arrays arrays = ArraysOf<Type>(args);
  __attribute__((
      shared)) static unsigned char lds[Wave<Type, kHeadDim>::kLdsBytes];
  const int blocks = (args.q_len + rocm::kQueryBlock - 1) / rocm::kQueryBlock;
  const int per_head = args.groups_per_head;
  const int group = GroupOnDie(Group(), args.batch * args.heads * per_head);
  const int head_index = rocm::Quotient(group, args.by_groups_per_head);
  const Head head = HeadOf(args, head_index);

  // The longest first; with two, the shortest after it.
  const int early = group - head_index * per_head;
  const int late = blocks - 1 - early;
  const int lds_start = LdsAddress(lds);
  Wave<Type, kHeadDim>(arrays, head, late * rocm::kQueryBlock, lds_start).Run();
  if (args.blocks_per_group == 2 && early != late) {
    Wave<Type, kHeadDim>(ArraysOf<Type>(Reread(args)), head,
                         early * rocm::kQueryBlock, lds_start)
        .Run();
  }
}

}  // namespace zyfa::gfx950

#endif  // ZYFA_ROCM_GFX950_ATTENTION_H_
