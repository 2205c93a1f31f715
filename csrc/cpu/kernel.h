// The attention of one tile of rows, block of 128 keys by block: scores,
// probabilities, accumulation. Composed of an engine (both products and their
// layouts) and a kind of probability.

#ifndef ZYFA_CPU_KERNEL_H_
#define ZYFA_CPU_KERNEL_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "csrc/cpu/pack.h"
#include "csrc/cpu/simd.h"
#include "csrc/cpu/softmax.h"
#include "csrc/cpu/target.h"
#include "csrc/cpu/workspace.h"
#include "csrc/numerics/online_softmax.h"
#include "csrc/numerics/visibility.h"

namespace zyfa::cpu {
namespace {

// Calls f with the dtype as a compile-time constant, in a tag's `value`.
template <class F>
ZYFA_INLINE void WithDType(DType type, F f) {
  switch (type) {
    case DType::kF32:
      return f(std::integral_constant<DType, DType::kF32>());
    case DType::kF16:
      return f(std::integral_constant<DType, DType::kF16>());
    case DType::kBF16:
      return f(std::integral_constant<DType, DType::kBF16>());
    case DType::kE4m3:
      return f(std::integral_constant<DType, DType::kE4m3>());
    case DType::kI8:
      return f(std::integral_constant<DType, DType::kI8>());
  }
}

template <class Engine, class Probability>
class TileAttention {
 public:
  TileAttention(const AttentionParams& params, const WorkItem& item,
                void* memory)
      : params_(params),
        item_(item),
        group_(params.heads / params.kv_heads),
        kv_batch_(item.batch / (params.batch / params.kv_batch)),
        kv_row_(kv_batch_ * params.kv_heads + item.kv_head),
        row_count_(RoundUp(item.row_count, Engine::kRows)),
        work_(params, row_count_, memory) {}

  void Run() {
    Engine::BeginItem();
    const KeyRange keys = LoadRows();
    for (int64_t begin = keys.begin / Engine::kSpan * Engine::kSpan;
         begin < keys.end; begin += Engine::kPacked) {
      const int blocks = LoadBlocks(begin, keys.end);
      for (int64_t row = 0; row < row_count_; row += Engine::kGroupRows) {
        for (int block = 0; block < blocks;) {
          int attended = 0;
          if constexpr (kFused) attended = AttendWhole(row, block, blocks);
          if (attended == 0) {
            AttendGroup(row, block, blocks);
            attended = 1;
          }
          block += attended;
        }
      }
    }
    StoreRows();
    Engine::EndItem();
  }

 private:
  using Operand = typename Engine::Operand;
  using LogitOperand = typename Engine::LogitOperand;

  // The key panels that any row of one register tile sees.
  struct RowTile {
    int begin;  // multiples of kCols, relative to the block
    int end;
    bool whole;  // every row sees all keys of these panels

    bool IsEmpty() const { return begin >= end; }
    bool Has(int panel) const { return begin <= panel && panel < end; }
  };
  static constexpr int kTilesPerGroup = Engine::kGroupRows / Engine::kRows;

  int64_t QueryOf(int64_t row) const {
    return (item_.row_begin + row) / group_;
  }
  int64_t HeadOf(int64_t row) const {
    return item_.kv_head * group_ + (item_.row_begin + row) % group_;
  }

  // Packs the tile's queries and says which keys any of them sees.
  KeyRange LoadRows() {
    const numerics::Window window = {params_.window_left, params_.window_right};
    const numerics::Extent extent = {
        params_.q_offset[item_.batch],
        numerics::Clamp(params_.q_lengths[item_.batch], 0, params_.q_len),
        numerics::Clamp(params_.kv_lengths[item_.batch], 0, params_.kv_len)};
    KeyRange all = {0, 0};
    for (int64_t row = 0; row < row_count_; ++row) {
      QueryRow& state = work_.rows[row];
      SeenKeys& seen = work_.seen[row / Engine::kRows];
      if (row % Engine::kRows == 0) seen = {{0, 0}, {0, params_.kv_len}};
      LogitOperand* packed = work_.queries + row * work_.query_stride;
      float* out = work_.out + row * work_.out_stride;
      std::memset(packed, 0, work_.query_stride * sizeof(*packed));
      std::memset(out, 0, work_.out_stride * sizeof(float));
      state.visible = {0, 0};
      state.scale = 0.0f;
      state.state = {F32{}, numerics::kNegativeInfinity};
      if (row >= item_.row_count) {
        seen.all = {0, 0};
        continue;
      }
      const int64_t query = QueryOf(row);
      const int64_t head = HeadOf(row);
      state.visible = numerics::VisibleKeys(window, extent, query);
      seen.any = numerics::Union(seen.any, state.visible);
      seen.all = numerics::Intersection(seen.all, state.visible);
      if (numerics::IsEmpty(state.visible)) continue;
      all = numerics::Union(all, state.visible);
      const int64_t scale_index =
          params_.q_block > 0 ? query / params_.q_block : 0;
      const float scale =
          params_
              .q_scale[(item_.batch * params_.heads + head) * params_.q_scales +
                       scale_index];
      state.scale = __builtin_fabsf(scale);
      const int64_t at =
          ((item_.batch * params_.q_len + query) * params_.heads + head) *
          params_.head_dim;
      WithDType(params_.in_dtype, [&](auto type) {
        Engine::template PackQuery<type.value>(
            static_cast<const unsigned char*>(params_.q) +
                at * SizeOf(type.value),
            params_.head_dim, scale < 0.0f, packed);
        if (type.value == DType::kE4m3 &&
            HasE4m3NaN(static_cast<const unsigned char*>(params_.q) + at,
                       params_.head_dim)) {
          state.state.sum = Simd::Set(std::numeric_limits<float>::quiet_NaN());
        }
      });
    }
    return all;
  }

  template <DType kType>
  RowsView KeyValueRows(const void* array, int64_t block, int64_t width) const {
    const int64_t left = params_.kv_len - block;
    const int64_t stride = params_.kv_heads * width;
    const int64_t first =
        (kv_batch_ * params_.kv_len + block) * stride + item_.kv_head * width;
    return {static_cast<const unsigned char*>(array) + first * SizeOf(kType),
            stride, left < kKeyBlock ? left : kKeyBlock, width};
  }

  bool HasBlockValueScales() const {
    return params_.kv_block > 0 && !params_.v_channels;
  }

  int64_t KeyValueScale(int64_t block) const {
    return kv_row_ * params_.kv_scales +
           (params_.kv_block > 0 ? block / params_.kv_block : 0);
  }

  // One block of the span, and what is particular to it.
  struct Block {
    int64_t begin;  // its first key
    LogitOperand* keys;
    Operand* values;
    float key_scale;     // made non-negative; the packed keys carry the sign
    float value_weight;  // a scale for all keys is applied at the end
    KeySet nan_keys;
    KeySet non_finite;  // keys of values that are
  };

  static constexpr int kSpanBlocks = Engine::kSpan / kKeyBlock;
  static constexpr bool kFused =
      Engine::kInterleaved && std::is_same_v<Probability, ExactProbability>;

  // Packs keys and values from `begin` up to `end`, if there is room; returns
  // the number of blocks.
  int LoadBlocks(int64_t begin, int64_t end) {
    int count = 0;
    for (int key = 0; key < Engine::kPacked && begin + key < end;
         key += kKeyBlock) {
      Block& block = blocks_[count++];
      block.begin = begin + key;
      block.keys = work_.keys + key * work_.query_stride;
      block.values = work_.values +
                     key / Engine::kSpan * Engine::kSpan * work_.out_stride +
                     key % Engine::kSpan * Engine::kCols;
      LoadKeys(block);
      LoadValues(block);
    }
    return count;
  }

  void LoadKeys(Block& block) {
    const float scale = params_.k_scale[KeyValueScale(block.begin)];
    block.key_scale = __builtin_fabsf(scale);
    WithDType(params_.in_dtype, [&](auto type) {
      const RowsView keys =
          KeyValueRows<type.value>(params_.k, block.begin, params_.head_dim);
      Engine::template PackKeys<type.value>(keys, scale < 0.0f, block.keys);
      // The code of a NaN is a number, so NaN keys are told apart here.
      block.nan_keys = {};
      if constexpr (type.value == DType::kE4m3) {
        for (int key = 0; key < keys.count; ++key) {
          if (HasE4m3NaN(keys.At<type.value>(key, 0), keys.width)) {
            block.nan_keys.Add(key);
          }
        }
      }
    });
  }

  void LoadValues(Block& block) {
    block.value_weight = HasBlockValueScales()
                             ? params_.v_scale[KeyValueScale(block.begin)]
                             : 1.0f;
    WithDType(params_.value_dtype, [&](auto type) {
      block.non_finite = Engine::template PackValues<type.value>(
          KeyValueRows<type.value>(params_.v, block.begin, params_.value_dim),
          block.value_weight, block.values);
    });
  }

  // How many blocks from `first` on, up to the end of its span, every row of a
  // register tile sees whole and can be attended at once.
  int WholeBlocks(int64_t first_row, int first, int count) const {
    if (params_.kv_block > 0) return 0;
    const KeyRange all = work_.seen[first_row / Engine::kRows].all;
    int end = first;
    do {
      const Block& block = blocks_[end];
      if (all.begin > block.begin || all.end < block.begin + kKeyBlock ||
          block.non_finite.Any()) {
        break;
      }
      ++end;
    } while (end < count && end % kSpanBlocks != 0);
    return end - first;
  }

  // Attends WholeBlocks at once: each panel of scores becomes probabilities
  // while the second next is computed. Without maxima: for rows that have one
  // already and turn out to need no larger one. Returns the number of blocks; 0
  // if nothing was done. Row for row the result is that of AttendGroup.
  int AttendWhole(int64_t first_row, int first, int count) {
    static_assert(Engine::kGroupRows == Engine::kRows);
    constexpr int kRows = Engine::kRows;
    constexpr int kCols = Engine::kCols;
    const int blocks = WholeBlocks(first_row, first, count);
    if (blocks == 0) return 0;
    const Block& begin = blocks_[first];
    const int keys = blocks * kKeyBlock;
    QueryRow* rows = work_.rows + first_row;
    F32 sums[kRows];
    float factors[kRows];
    for (int row = 0; row < kRows; ++row) {
      if (rows[row].state.max == numerics::kNegativeInfinity) return 0;
      sums[row] = rows[row].state.sum;
      factors[row] = numerics::LogitFactor(rows[row].scale, begin.key_scale);
    }

    const auto scores_of = [&](int key) {
      return work_.scores + key / kCols % 2 * kRows * kCols;
    };
    const auto add_scores = [&](int key) {
      products_.Scores(work_.queries + first_row * work_.query_stride,
                       work_.query_stride,
                       begin.keys + key * work_.query_stride, params_.head_dim,
                       scores_of(key), kCols);
    };
    add_scores(0);
    add_scores(kCols);
    products_.Spread(1);
    products_.Advance();  // The second panel's sums are still in the tiles.
    constexpr int kRowsAtATime = 2;
    for (int key = 0; key < keys; key += kCols) {
      if (key + 2 * kCols < keys) {
        add_scores(key + 2 * kCols);
      } else {
        products_.Finish();
      }
      products_.Spread(kRows / kRowsAtATime);
      const float* scores = scores_of(key);
      for (int row = 0; row < kRows; row += kRowsAtATime) {
        for (int i = row; i < row + kRowsAtATime; ++i) {
          sums[i] = Probability::template Exponentials<Engine>(
              scores + i * kCols, work_.probabilities + i * Engine::kSpan + key,
              0, kCols, AllVisible(), factors[i], rows[i].state.max, sums[i]);
        }
        products_.Advance();
      }
    }

    F32 largest = {};
    for (int row = 0; row < kRows; ++row) {
      largest = MaxOrNaN(largest, sums[row] - rows[row].state.sum);
    }
    if (!AllBelow(largest, std::exp2(Engine::kSlack))) return 0;
    for (int row = 0; row < kRows; ++row) rows[row].state.sum = sums[row];
    for (int64_t column = 0; column < work_.out_stride; column += kCols) {
      products_.Accumulate(work_.probabilities, Engine::kSpan,
                           begin.values + column * Engine::kSpan, keys, 1.0f,
                           work_.out + first_row * work_.out_stride + column,
                           work_.out_stride);
    }
    products_.Finish();
    return blocks;
  }

  // Neighbouring register tiles at one block.
  struct Group {
    const Block* block;
    int64_t row;  // the first
    int tiles;
    RowTile visible[kTilesPerGroup];
    float* scores;  // (kGroupRows, 128)

    bool SeesAny() const {
      for (int tile = 0; tile < tiles; ++tile) {
        if (!visible[tile].IsEmpty()) return true;
      }
      return false;
    }
  };

  Group GroupAt(int64_t row, int block) const {
    const int64_t left = (row_count_ - row) / Engine::kRows;
    Group group;
    group.block = &blocks_[block];
    group.row = row;
    group.tiles = left < kTilesPerGroup ? left : kTilesPerGroup;
    for (int tile = 0; tile < group.tiles; ++tile) {
      group.visible[tile] =
          VisiblePanels(row / Engine::kRows + tile, blocks_[block]);
    }
    group.scores = work_.scores + block % Workspace<Engine>::kScores *
                                      Engine::kGroupRows * kKeyBlock;
    return group;
  }

  // One block of `count`. Where products can run among other work, the scores
  // of the next block are computed while this one's become probabilities.
  void AttendGroup(int64_t row, int index, int count) {
    const Group group = GroupAt(row, index);
    const bool scores_are_there = index > 0 && scores_are_there_;
    scores_are_there_ = false;
    if (!group.SeesAny()) return;
    if (!scores_are_there) AddScores(group);
    products_.Finish();

    if (Workspace<Engine>::kScores > 1 && !kFused && index + 1 < count) {
      AddScores(GroupAt(row, index + 1));
      scores_are_there_ = true;
    }
    products_.Spread(2 * Engine::kRows * group.tiles);
    for (int tile = 0; tile < group.tiles; ++tile) {
      if (!group.visible[tile].IsEmpty()) Normalise(group, tile);
    }
    products_.Finish();

    AddOutput(group);
    products_.Finish();
    if (group.block->non_finite.Any()) {
      for (int i = 0; i < group.tiles * Engine::kRows; ++i) {
        AddNonFinite(group, i);
      }
    }
  }

  void AddScores(const Group& group) {
    for (int panel = 0; panel < kKeyBlock; panel += Engine::kCols) {
      for (int tile = 0; tile < group.tiles; ++tile) {
        if (!group.visible[tile].Has(panel)) continue;
        const int64_t row = tile * Engine::kRows;
        products_.Scores(work_.queries + (group.row + row) * work_.query_stride,
                         work_.query_stride,
                         group.block->keys + panel * work_.query_stride,
                         params_.head_dim,
                         group.scores + row * kKeyBlock + panel, kKeyBlock);
      }
    }
  }

  void AddOutput(const Group& group) {
    for (int64_t column = 0; column < work_.out_stride;
         column += Engine::kCols) {
      for (int tile = 0; tile < group.tiles; ++tile) {
        if (group.visible[tile].IsEmpty()) continue;
        const int64_t row = tile * Engine::kRows;
        const int begin = group.visible[tile].begin;
        products_.Accumulate(
            work_.probabilities + row * kKeyBlock + begin, kKeyBlock,
            group.block->values + column * Engine::kSpan +
                begin * Engine::kCols,
            group.visible[tile].end - begin, group.block->value_weight,
            work_.out + (group.row + row) * work_.out_stride + column,
            work_.out_stride);
      }
    }
  }

  RowTile VisiblePanels(int64_t tile, const Block& block) const {
    const KeyRange any =
        numerics::Within(work_.seen[tile].any, block.begin, kKeyBlock);
    const KeyRange all =
        numerics::Within(work_.seen[tile].all, block.begin, kKeyBlock);
    const int begin = any.begin / Engine::kCols * Engine::kCols;
    const int end = RoundUp(any.end, Engine::kCols);
    return {begin, end, all.begin <= begin && all.end >= end};
  }

  // Scores of a register tile's rows to probabilities, over the panels it sees.
  void Normalise(const Group& group, int tile) {
    const Block& block = *group.block;
    const RowTile panels = group.visible[tile];
    QueryRow* rows = work_.rows + group.row + tile * Engine::kRows;
    const float* scores = group.scores + tile * Engine::kRows * kKeyBlock;
    Operand* probabilities =
        work_.probabilities + tile * Engine::kRows * kKeyBlock;
    typename Probability::Plan plans[Engine::kRows];
    for (int i = 0; i < Engine::kRows; ++i) {
      if (block.nan_keys.Any()) MarkNaN(rows[i], block);
      plans[i].rescale = 1.0f;
      WithVisible(rows[i], block, panels, [&](auto visible) {
        plans[i] = Probability::template Prepare<Engine>(
            scores + i * kKeyBlock, panels.begin, panels.end, visible,
            numerics::LogitFactor(rows[i].scale, block.key_scale),
            rows[i].state);
      });
      if (plans[i].rescale != 1.0f) {
        float* out = work_.out +
                     (group.row + tile * Engine::kRows + i) * work_.out_stride;
        for (int64_t c = 0; c < work_.out_stride; c += kLanes) {
          Store(out + c, Load(out + c) * plans[i].rescale);
        }
      }
      products_.Advance();
    }
    for (int i = 0; i < Engine::kRows; ++i) {
      const bool any = WithVisible(rows[i], block, panels, [&](auto visible) {
        Probability::template Write<Engine>(
            scores + i * kKeyBlock, probabilities + i * kKeyBlock, panels.begin,
            panels.end, visible, plans[i], rows[i].state);
      });
      if (!any) {
        std::memset(probabilities + i * kKeyBlock + panels.begin, 0,
                    (panels.end - panels.begin) * sizeof(Operand));
      }
      products_.Advance();
    }
  }

  // Calls f with what tells which keys of the panels the row sees; returns
  // whether it sees any.
  template <class F>
  ZYFA_INLINE bool WithVisible(const QueryRow& row, const Block& block,
                               RowTile panels, F f) const {
    if (panels.whole) {
      f(AllVisible());
      return true;
    }
    const KeyRange seen = numerics::Within(row.visible, block.begin, kKeyBlock);
    if (numerics::IsEmpty(seen)) return false;
    if (seen.begin <= panels.begin && seen.end >= panels.end) {
      f(AllVisible());
    } else {
      f(RangeVisible{static_cast<int>(seen.begin), static_cast<int>(seen.end)});
    }
    return true;
  }

  void MarkNaN(QueryRow& row, const Block& block) const {
    const KeyRange seen = numerics::Within(row.visible, block.begin, kKeyBlock);
    for (int key = seen.begin; key < seen.end; ++key) {
      if (block.nan_keys.Has(key)) {
        row.state.sum = Simd::Set(std::numeric_limits<float>::quiet_NaN());
      }
    }
  }

  // What the packed values left out: infinities and NaN of the keys it sees.
  void AddNonFinite(const Group& group, int row) {
    const Block& block = *group.block;
    const KeyRange seen = numerics::Within(work_.rows[group.row + row].visible,
                                           block.begin, kKeyBlock);
    float* out = work_.out + (group.row + row) * work_.out_stride;
    WithDType(params_.value_dtype, [&](auto type) {
      const RowsView values =
          KeyValueRows<type.value>(params_.v, block.begin, params_.value_dim);
      for (int key = seen.begin; key < seen.end; ++key) {
        if (!block.non_finite.Has(key)) continue;
        const float p = Engine::LoadProbability(work_.probabilities +
                                                row * kKeyBlock + key) *
                        block.value_weight;
        for (int64_t c = 0; c < params_.value_dim; c += kLanes) {
          const F32 x = LoadFirst<type.value>(values.At<type.value>(key, c),
                                              params_.value_dim - c);
          Store(out + c, Load(out + c) + Select(IsNonFinite(x), x * p, F32{}));
        }
      }
    });
  }

  void StoreRows() {
    const float value_scale = HasBlockValueScales() || params_.v_channels
                                  ? 1.0f
                                  : params_.v_scale[KeyValueScale(0)];
    for (int64_t row = 0; row < item_.row_count; ++row) {
      const QueryRow& state = work_.rows[row];
      const int64_t query = QueryOf(row);
      const int64_t head = HeadOf(row);
      const bool empty = numerics::IsEmpty(state.visible);
      const float sum = ReduceAdd(state.state.sum);
      const float scale = empty ? 0.0f : value_scale / sum;
      StoreOutput(work_.out + row * work_.out_stride, scale,
                  (item_.batch * params_.q_len + query) * params_.heads + head);
      params_
          .lse[(item_.batch * params_.heads + head) * params_.q_len + query] =
          empty
              ? numerics::kNegativeInfinity
              : static_cast<float>(numerics::kLn2 *
                                   (state.state.max - Probability::kLog2Scale +
                                    std::log2(static_cast<double>(sum))));
    }
  }

  void StoreOutput(const float* row, float scale, int64_t index) {
    const int64_t width = params_.value_dim;
    const auto scaled = [&](int64_t c) {
      const F32 x = Load(row + c) * scale;
      if (!params_.v_channels) return x;
      const float* channels = params_.v_scale + kv_row_ * width;
      return x * LoadFirst<DType::kF32>(channels + c, width - c);
    };
    const int64_t size = SizeOf(params_.out_dtype);
    auto* target =
        static_cast<unsigned char*>(params_.out) + index * width * size;
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) {
      StoreElements(params_.out_dtype, target + c * size, scaled(c));
    }
    if (c < width) {
      unsigned char last[kLanes * 4];
      StoreElements(params_.out_dtype, last, scaled(c));
      std::memcpy(target + c * size, last, (width - c) * size);
    }
  }

  const AttentionParams& params_;
  const WorkItem& item_;
  const int64_t group_;
  const int64_t kv_batch_;
  const int64_t kv_row_;
  const int64_t row_count_;
  Workspace<Engine> work_;
  Block blocks_[Engine::kPacked / kKeyBlock];
  typename Engine::Products products_;
  bool scores_are_there_ = false;  // of the block to come
};

// The functions of a target (target.h) for one engine.

template <class Engine>
size_t WorkspaceBytes(const AttentionParams& params, int64_t rows) {
  return Workspace<Engine>(params, RoundUp(rows, Engine::kRows), nullptr).bytes;
}

// As many rows as keep the tile and one block of keys and values in the cache.
template <class Engine>
int64_t MaxRows(const AttentionParams& params) {
  int64_t rows = Engine::kGroupRows;
  while (WorkspaceBytes<Engine>(params, rows + Engine::kGroupRows) <=
         Engine::kTileBytes) {
    rows += Engine::kGroupRows;
  }
  return rows;
}

template <class Engine>
void RunFp8(const AttentionParams& params, const WorkItem& item,
            void* workspace) {
  if (params.quadratic) {
    TileAttention<Engine, Fp8Probability<numerics::QuadraticCode>>(params, item,
                                                                   workspace)
        .Run();
  } else {
    TileAttention<Engine, Fp8Probability<numerics::LinearCode>>(params, item,
                                                                workspace)
        .Run();
  }
}

template <class Engine>
void Run(const AttentionParams& params, const WorkItem& item, void* workspace) {
  if (params.value_dtype == DType::kE4m3) {
    RunFp8<Engine>(params, item, workspace);
  } else {
    TileAttention<Engine, ExactProbability>(params, item, workspace).Run();
  }
}

template <class Code>
void RunFp8SoftmaxBlock(const Fp8SoftmaxBlock& block) {
  constexpr int kPadded = kKeyBlock;
  for (int64_t row = 0; row < block.rows; ++row) {
    float acc[kPadded] = {};
    int32_t masks[kPadded] = {};
    bool any = false;
    bool has_nan = false;
    for (int64_t key = 0; key < block.keys; ++key) {
      acc[key] = block.acc[row * block.keys + key];
      masks[key] = block.visible[row * block.keys + key] ? -1 : 0;
      any |= masks[key] != 0;
      has_nan |= masks[key] != 0 && acc[key] != acc[key];
    }
    const ArrayVisible visible = {masks};
    const float factor = block.factor[row];
    int32_t codes[kPadded] = {};
    float sum = 0.0f;
    Fp8Block plan = {block.running_max[row], 0, 0.0f, false};
    if (any) {
      plan = PlanFp8Block<Code>(MaximumOf(acc, 0, kPadded, visible), factor,
                                plan.new_max);
      if (has_nan || plan.has_nan) {
        plan = {std::numeric_limits<float>::quiet_NaN(), 0, 0.0f, true};
        sum = plan.new_max;
      } else {
        EmitFp8Codes<Code>(
            acc, 0, kPadded, visible, factor, plan,
            [&](int key, I32 here, I32 next) {
              std::memcpy(codes + key, &here, sizeof(here));
              std::memcpy(codes + key + kLanes, &next, sizeof(next));
              sum += ReduceAdd(DecodeE4m3Codes(here) + DecodeE4m3Codes(next));
            });
      }
    }
    for (int64_t key = 0; key < block.keys; ++key) {
      block.codes[row * block.keys + key] = static_cast<uint8_t>(codes[key]);
    }
    block.shift[row] = plan.shift;
    block.new_max[row] = plan.new_max;
    block.row_sum[row] = sum;
  }
}

void Fp8SoftmaxBlockOf(const Fp8SoftmaxBlock& block) {
  if (block.quadratic) {
    RunFp8SoftmaxBlock<numerics::QuadraticCode>(block);
  } else {
    RunFp8SoftmaxBlock<numerics::LinearCode>(block);
  }
}

}  // namespace
}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_KERNEL_H_
