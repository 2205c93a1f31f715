// One attention call, decoded: what every backend's kernel takes.

#ifndef ZYFA_FFI_ATTENTION_PARAMS_H_
#define ZYFA_FFI_ATTENTION_PARAMS_H_

#include <cstdint>

namespace zyfa {

enum class DType { kF32, kF16, kBF16, kE4m3, kI8 };

// All arrays are dense and row-major; lengths are in elements, scales in
// natural units. Query head h reads key/value head h / (heads / kv_heads), and
// query batch b reads key/value batch b / (batch / kv_batch).
struct AttentionParams {
  const void* q;         // (batch, q_len, heads, head_dim), in_dtype
  const void* k;         // (kv_batch, kv_len, kv_heads, head_dim), in_dtype
  const void* v;         // (kv_batch, kv_len, kv_heads, value_dim), value_dtype
  const float* q_scale;  // (batch, heads, q_scales): softmax scale * descale
  const float* k_scale;  // (kv_batch, kv_heads, kv_scales)
  const float* v_scale;  // likewise, or (kv_batch, kv_heads, value_dim)
  const int32_t* q_offset;    // (batch,): position of query 0 on the keys' axis
  const int32_t* q_lengths;   // (batch,), clamped to [0, q_len]
  const int32_t* kv_lengths;  // (batch,), clamped to [0, kv_len]
  void* out;                  // (batch, q_len, heads, value_dim), out_dtype
  float* lse;                 // (batch, heads, q_len), natural log

  DType in_dtype;
  DType value_dtype;  // that of q and k, but e4m3 where they are int8
  DType out_dtype;
  int64_t batch;
  int64_t kv_batch;
  int64_t q_len;
  int64_t kv_len;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t value_dim;
  int64_t window_left;   // below zero: unbounded
  int64_t window_right;  // below zero: unbounded; 0: causal
  int64_t q_block;       // queries that share a q_scale; 0: all of them
  int64_t kv_block;      // keys that share a scale, a multiple of 128; 0: all
  int64_t q_scales;
  int64_t kv_scales;
  bool v_channels;  // whether v has a scale for each channel, for all keys
  bool quadratic;   // the quadratic term of the FP8 probabilities
};

}  // namespace zyfa

#endif  // ZYFA_FFI_ATTENTION_PARAMS_H_
