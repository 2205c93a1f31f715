// The arrays of one tile of rows, in one block of memory.

#ifndef ZYFA_CPU_WORKSPACE_H_
#define ZYFA_CPU_WORKSPACE_H_

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "csrc/cpu/pack.h"
#include "csrc/cpu/softmax.h"
#include "csrc/ffi/attention_params.h"
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

// The keys that rows of one register tile see.
struct SeenKeys {
  KeyRange any;  // from the first to the last that any row sees
  KeyRange all;  // those that all rows see
};

// The tile's arrays, in one block of memory. Strides in elements.
template <class Engine>
struct Workspace {
  using Operand = typename Engine::Operand;
  using LogitOperand = typename Engine::LogitOperand;

  // Blocks whose scores are there at a time.
  static constexpr int kScores = Engine::kInterleaved ? 2 : 1;

  QueryRow* rows;
  SeenKeys* seen;         // (rows / kRows,)
  LogitOperand* queries;  // (rows, query_stride)
  LogitOperand* keys;     // kPacked, in the engine's layout
  Operand* values;        // kPacked, in the engine's layout
  float* scores;          // (kScores, kGroupRows, 128)
  Operand*
      probabilities;  // (kGroupRows, kSpan); the scores' place if it can be
  float* out;         // (rows, out_stride), not yet divided by the sum
  int64_t query_stride;
  int64_t out_stride;
  size_t bytes;

  Workspace(const AttentionParams& params, int64_t row_count, void* memory)
      : query_stride(RoundUp(params.head_dim, Engine::kDepthStep) +
                     Engine::kBesideDepth),
        out_stride(RoundUp(params.value_dim, Engine::kCols)) {
    auto* next = static_cast<unsigned char*>(memory);
    auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(next);
      next += RoundUp(count * sizeof(*array), 64);
    };
    take(rows, row_count);
    take(seen, row_count / Engine::kRows);
    take(queries, row_count * query_stride);
    take(keys, Engine::kPacked * query_stride);
    take(values, Engine::kPacked * out_stride);
    take(scores, kScores * Engine::kGroupRows * kKeyBlock);
    if constexpr (Engine::kSeparateProbabilities) {
      take(probabilities, Engine::kGroupRows * Engine::kSpan);
    } else {
      probabilities = scores;
    }
    take(out, row_count * out_stride);
    bytes = next - static_cast<unsigned char*>(memory);
  }
};

}  // namespace
}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_WORKSPACE_H_
