// One instruction set's build of the kernel, as the dispatcher sees it.

#ifndef ZYFA_CPU_TARGET_H_
#define ZYFA_CPU_TARGET_H_

#include <cstddef>
#include <cstdint>

#include "csrc/ffi/attention_params.h"

namespace zyfa::cpu {

// A tile of the rows that share one key/value head. A row is one query of one
// head of the group; rows are ordered by position, then by head.
struct WorkItem {
  int64_t batch;
  int64_t kv_head;
  int64_t row_begin;
  int64_t row_count;
};

// One block of FP8 probabilities for `rows` rows of `keys` <= 128 keys.
struct Fp8SoftmaxBlock {
  const float* acc;          // (rows, keys): raw dot products
  const bool* visible;       // (rows, keys)
  const float* factor;       // (rows,): logit in log2 units per unit of acc
  const float* running_max;  // (rows,)
  bool quadratic;
  int64_t rows;
  int64_t keys;
  uint8_t* codes;  // (rows, keys)
  int32_t* shift;  // (rows,)
  float* new_max;  // (rows,)
  float* row_sum;  // (rows,): sum of the codes' values, without 2^-shift
};

struct Target {
  const char* name;
  bool (*takes)(DType in_dtype);
  // Rows in a tile: a multiple of `row_step`, at most `max_rows(params)`.
  int64_t row_step;
  int64_t (*max_rows)(const AttentionParams& params);
  // Bytes of 64-byte aligned scratch that `run` needs for tiles of `rows` rows.
  size_t (*workspace_bytes)(const AttentionParams& params, int64_t rows);
  void (*run)(const AttentionParams& params, const WorkItem& item,
              void* workspace);
  void (*fp8_softmax_block)(const Fp8SoftmaxBlock& block);
};

}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_TARGET_H_
