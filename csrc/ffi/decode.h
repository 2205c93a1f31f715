// From FFI buffers and attributes to AttentionParams, with every dimension,
// dtype and attribute checked.

#ifndef ZYFA_FFI_DECODE_H_
#define ZYFA_FFI_DECODE_H_

#include <cstdint>

#include "csrc/ffi/attention_params.h"
#include "xla/ffi/api/ffi.h"

namespace zyfa {

// The operands, results and attributes of "zyfa_attention", as they come.
struct AttentionCall {
  xla::ffi::AnyBuffer q, k, v;
  xla::ffi::AnyBuffer q_scale, k_scale, v_scale;
  xla::ffi::AnyBuffer q_offset, q_lengths, kv_lengths;
  xla::ffi::AnyBuffer out, lse;
  int64_t window_left, window_right;
  int64_t q_block, kv_block;
  bool quadratic;
};

xla::ffi::ErrorOr<AttentionParams> DecodeAttention(const AttentionCall& call);

}  // namespace zyfa

#endif  // ZYFA_FFI_DECODE_H_
