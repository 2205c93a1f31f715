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
#include "csrc/numerics/online_softmax.h"
#include "csrc/numerics/visibility.h"

namespace zyfa::cpu {
namespace {

using numerics::KeyRange;
using numerics::kKeyBlock;

// A row of the tile: one query of one head.
struct QueryRow {
  KeyRange visible;
  float scale;  // made non-negative; the packed query carries the sign
  RowState state;
};

// The tile's arrays, in one block of memory. Strides in elements.
template <class Engine>
struct Workspace {
  using Operand = typename Engine::Operand;

  QueryRow* rows;
  Operand* queries;        // (rows, query_stride)
  Operand* keys;           // one block, in the engine's layout
  Operand* values;         // one block, in the engine's layout
  float* scores;           // (kGroupRows, 128)
  Operand* probabilities;  // (kGroupRows, 128); the scores' place if it can be
  float* out;              // (rows, out_stride), not yet divided by the sum
  int64_t query_stride;
  int64_t out_stride;
  size_t bytes;

  Workspace(const AttentionParams& params, int64_t row_count, void* memory)
      : query_stride(RoundUp(params.head_dim, Engine::kDepthStep)),
        out_stride(RoundUp(params.value_dim, Engine::kCols)) {
    auto* next = static_cast<unsigned char*>(memory);
    auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(next);
      next += RoundUp(count * sizeof(*array), 64);
    };
    take(rows, row_count);
    take(queries, row_count * query_stride);
    take(keys, kKeyBlock * query_stride);
    take(values, kKeyBlock * out_stride);
    take(scores, Engine::kGroupRows * kKeyBlock);
    if constexpr (Engine::kSeparateProbabilities) {
      take(probabilities, Engine::kGroupRows * kKeyBlock);
    } else {
      probabilities = scores;
    }
    take(out, row_count * out_stride);
    bytes = next - static_cast<unsigned char*>(memory);
  }
};

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
    for (int64_t block = keys.begin / kKeyBlock * kKeyBlock; block < keys.end;
         block += kKeyBlock) {
      LoadKeys(block);
      LoadValues(block);
      for (int64_t row = 0; row < row_count_; row += Engine::kGroupRows) {
        AttendGroup(row, block);
      }
    }
    StoreRows();
    Engine::EndItem();
  }

 private:
  using Operand = typename Engine::Operand;

  // Rows of one register tile, and the key panels that any of them sees.
  struct RowTile {
    int begin;  // multiples of kCols, relative to the block
    int end;
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
      Operand* packed = work_.queries + row * work_.query_stride;
      float* out = work_.out + row * work_.out_stride;
      std::memset(packed, 0, work_.query_stride * sizeof(Operand));
      std::memset(out, 0, work_.out_stride * sizeof(float));
      state.visible = {0, 0};
      state.scale = 0.0f;
      state.state = {numerics::kNegativeInfinity, 0.0f};
      if (row >= item_.row_count) continue;
      const int64_t query = QueryOf(row);
      const int64_t head = HeadOf(row);
      state.visible = numerics::VisibleKeys(window, extent, query);
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
          state.state.sum = std::numeric_limits<float>::quiet_NaN();
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

  int64_t KeyValueScale(int64_t block) const {
    return kv_row_ * params_.kv_scales +
           (params_.kv_block > 0 ? block / params_.kv_block : 0);
  }

  void LoadKeys(int64_t block) {
    const float scale = params_.k_scale[KeyValueScale(block)];
    key_scale_ = __builtin_fabsf(scale);
    WithDType(params_.in_dtype, [&](auto type) {
      const RowsView keys =
          KeyValueRows<type.value>(params_.k, block, params_.head_dim);
      Engine::template PackKeys<type.value>(keys, scale < 0.0f, work_.keys);
      // The code of a NaN is a number, so NaN keys are told apart here.
      nan_keys_ = {};
      if constexpr (type.value == DType::kE4m3) {
        for (int key = 0; key < keys.count; ++key) {
          if (HasE4m3NaN(keys.At<type.value>(key, 0), keys.width)) {
            nan_keys_.Add(key);
          }
        }
      }
    });
  }

  // A scale for all keys is applied at the end, one per block here.
  void LoadValues(int64_t block) {
    value_weight_ =
        params_.kv_block > 0 ? params_.v_scale[KeyValueScale(block)] : 1.0f;
    WithDType(params_.in_dtype, [&](auto type) {
      non_finite_ = Engine::template PackValues<type.value>(
          KeyValueRows<type.value>(params_.v, block, params_.value_dim),
          value_weight_, work_.values);
    });
  }

  void AttendGroup(int64_t first_row, int64_t block) {
    const int64_t left = (row_count_ - first_row) / Engine::kRows;
    const int tiles = left < kTilesPerGroup ? left : kTilesPerGroup;
    RowTile visible[kTilesPerGroup];
    RowTile any = {kKeyBlock, 0};
    for (int tile = 0; tile < tiles; ++tile) {
      visible[tile] = VisiblePanels(first_row + tile * Engine::kRows, block);
      if (visible[tile].begin >= visible[tile].end) continue;
      if (visible[tile].begin < any.begin) any.begin = visible[tile].begin;
      if (visible[tile].end > any.end) any.end = visible[tile].end;
    }
    if (any.begin >= any.end) return;

    for (int panel = any.begin; panel < any.end; panel += Engine::kCols) {
      for (int tile = 0; tile < tiles; ++tile) {
        if (panel < visible[tile].begin || panel >= visible[tile].end) continue;
        const int64_t row = tile * Engine::kRows;
        Engine::Scores(
            work_.queries + (first_row + row) * work_.query_stride,
            work_.query_stride, work_.keys + panel * work_.query_stride,
            params_.head_dim, work_.scores + row * kKeyBlock + panel);
      }
    }

    for (int tile = 0; tile < tiles; ++tile) {
      if (visible[tile].begin >= visible[tile].end) continue;
      for (int row = 0; row < Engine::kRows; ++row) {
        Normalise(first_row, tile * Engine::kRows + row, block, visible[tile]);
      }
    }

    for (int64_t column = 0; column < work_.out_stride;
         column += Engine::kCols) {
      for (int tile = 0; tile < tiles; ++tile) {
        if (visible[tile].begin >= visible[tile].end) continue;
        const int64_t row = tile * Engine::kRows;
        Engine::Accumulate(
            work_.probabilities + row * kKeyBlock,
            work_.values + column * kKeyBlock, visible[tile].begin,
            visible[tile].end, value_weight_,
            work_.out + (first_row + row) * work_.out_stride + column,
            work_.out_stride);
      }
    }

    if (non_finite_.Any()) {
      for (int row = 0; row < tiles * Engine::kRows; ++row) {
        AddNonFinite(first_row, row, block);
      }
    }
  }

  RowTile VisiblePanels(int64_t first_row, int64_t block) const {
    KeyRange all = {0, 0};
    for (int row = 0; row < Engine::kRows; ++row) {
      all = numerics::Union(
          all, numerics::Within(work_.rows[first_row + row].visible, block,
                                kKeyBlock));
    }
    return {static_cast<int>(all.begin / Engine::kCols * Engine::kCols),
            static_cast<int>(RoundUp(all.end, Engine::kCols))};
  }

  // Scores of one row to probabilities, over the panels its register tile sees.
  void Normalise(int64_t first_row, int row, int64_t block, RowTile panels) {
    QueryRow& state = work_.rows[first_row + row];
    const float* scores = work_.scores + row * kKeyBlock;
    Operand* probabilities = work_.probabilities + row * kKeyBlock;
    const KeyRange seen = numerics::Within(state.visible, block, kKeyBlock);
    if (numerics::IsEmpty(seen)) {
      std::memset(probabilities + panels.begin, 0,
                  (panels.end - panels.begin) * sizeof(Operand));
      return;
    }
    if (nan_keys_.Any()) {
      for (int key = seen.begin; key < seen.end; ++key) {
        if (nan_keys_.Has(key)) {
          state.state.sum = std::numeric_limits<float>::quiet_NaN();
        }
      }
    }
    const float factor = numerics::LogitFactor(state.scale, key_scale_);
    float rescale;
    if (seen.begin <= panels.begin && seen.end >= panels.end) {
      rescale = Probability::template Row<Engine>(
          scores, probabilities, panels.begin, panels.end, AllVisible(), factor,
          state.state);
    } else {
      rescale = Probability::template Row<Engine>(
          scores, probabilities, panels.begin, panels.end,
          RangeVisible{static_cast<int>(seen.begin),
                       static_cast<int>(seen.end)},
          factor, state.state);
    }
    if (rescale != 1.0f) {
      float* out = work_.out + (first_row + row) * work_.out_stride;
      for (int64_t c = 0; c < work_.out_stride; c += kLanes) {
        Store(out + c, Load(out + c) * rescale);
      }
    }
  }

  // What the packed values left out: infinities and NaN of the keys it sees.
  void AddNonFinite(int64_t first_row, int row, int64_t block) {
    const KeyRange seen =
        numerics::Within(work_.rows[first_row + row].visible, block, kKeyBlock);
    float* out = work_.out + (first_row + row) * work_.out_stride;
    WithDType(params_.in_dtype, [&](auto type) {
      const RowsView values =
          KeyValueRows<type.value>(params_.v, block, params_.value_dim);
      for (int key = seen.begin; key < seen.end; ++key) {
        if (!non_finite_.Has(key)) continue;
        const float p = Engine::LoadProbability(work_.probabilities +
                                                row * kKeyBlock + key) *
                        value_weight_;
        for (int64_t c = 0; c < params_.value_dim; c += kLanes) {
          const F32 x = LoadFirst<type.value>(values.At<type.value>(key, c),
                                              params_.value_dim - c);
          Store(out + c, Load(out + c) + Select(IsNonFinite(x), x * p, F32{}));
        }
      }
    });
  }

  void StoreRows() {
    const float value_scale =
        params_.kv_block > 0 ? 1.0f : params_.v_scale[KeyValueScale(0)];
    for (int64_t row = 0; row < item_.row_count; ++row) {
      const QueryRow& state = work_.rows[row];
      const int64_t query = QueryOf(row);
      const int64_t head = HeadOf(row);
      const bool empty = numerics::IsEmpty(state.visible);
      const float scale = empty ? 0.0f : value_scale / state.state.sum;
      StoreOutput(work_.out + row * work_.out_stride, scale,
                  (item_.batch * params_.q_len + query) * params_.heads + head);
      params_
          .lse[(item_.batch * params_.heads + head) * params_.q_len + query] =
          empty ? numerics::kNegativeInfinity
                : static_cast<float>(
                      numerics::kLn2 *
                      (state.state.max - Probability::kLog2Scale +
                       std::log2(static_cast<double>(state.state.sum))));
    }
  }

  void StoreOutput(const float* row, float scale, int64_t index) {
    const int64_t width = params_.value_dim;
    const int64_t size = SizeOf(params_.out_dtype);
    auto* target =
        static_cast<unsigned char*>(params_.out) + index * width * size;
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) {
      StoreElements(params_.out_dtype, target + c * size,
                    Load(row + c) * scale);
    }
    if (c < width) {
      unsigned char last[kLanes * 4];
      StoreElements(params_.out_dtype, last, Load(row + c) * scale);
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
  float key_scale_ = 1.0f;
  float value_weight_ = 1.0f;
  KeySet nan_keys_ = {};
  KeySet non_finite_ = {};
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
void Run(const AttentionParams& params, const WorkItem& item, void* workspace) {
  if (params.in_dtype != DType::kE4m3) {
    TileAttention<Engine, ExactProbability>(params, item, workspace).Run();
  } else if (params.quadratic) {
    TileAttention<Engine, Fp8Probability<numerics::QuadraticCode>>(params, item,
                                                                   workspace)
        .Run();
  } else {
    TileAttention<Engine, Fp8Probability<numerics::LinearCode>>(params, item,
                                                                workspace)
        .Run();
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
