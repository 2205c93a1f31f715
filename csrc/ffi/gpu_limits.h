// What the kernels of both GPU platforms take: they count in 32 bits.

#ifndef ZYFA_FFI_GPU_LIMITS_H_
#define ZYFA_FFI_GPU_LIMITS_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "csrc/ffi/attention_params.h"
#include "csrc/ffi/decode.h"
#include "xla/ffi/api/ffi.h"

namespace zyfa {

// A window's side as the kernels take it, -1 for one that reaches every key
// from every int32 position; nothing where neither is exact.
std::optional<int32_t> ToWindow(int64_t side);

// What they do not take of a call, or nothing; `has_kernel` says whether there
// is a kernel for its dtype and head dims.
std::string GpuRefusal(const AttentionParams& p, bool has_kernel);

// The fields of a platform's AttentionArgs that are those of the call. `p` is
// one that GpuRefusal has nothing against.
template <class Args>
void FillArgs(const AttentionParams& p, Args* args) {
  const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
  args->q = p.q;
  args->k = p.k;
  args->v = p.v;
  args->q_scale = p.q_scale;
  args->k_scale = p.k_scale;
  args->v_scale = p.v_scale;
  args->q_offset = p.q_offset;
  args->q_lengths = p.q_lengths;
  args->kv_lengths = p.kv_lengths;
  args->out = p.out;
  args->lse = p.lse;
  args->batch = narrow(p.batch);
  args->kv_batch = narrow(p.kv_batch);
  args->q_len = narrow(p.q_len);
  args->kv_len = narrow(p.kv_len);
  args->heads = narrow(p.heads);
  args->kv_heads = narrow(p.kv_heads);
  args->window_left = *ToWindow(p.window_left);
  args->window_right = *ToWindow(p.window_right);
  // A block of more queries than there are is all of them.
  args->q_block =
      narrow(std::min<int64_t>(p.q_block, std::numeric_limits<int32_t>::max()));
  args->q_scales = narrow(p.q_scales);
  args->kv_block = narrow(
      std::min<int64_t>(p.kv_block, std::numeric_limits<int32_t>::max()));
  args->k_scales = narrow(p.kv_scales);
  args->v_channels = p.v_channels ? 1 : 0;
}

// Calls run(params) unless `refusal(params)` says what the kernels of
// `platform` take that the call is not, or there is nothing to compute.
template <class Refusal, class Run>
xla::ffi::Error RunIfTaken(const char* platform, const AttentionCall& call,
                           const Refusal& refusal, const Run& run) {
  const auto params = DecodeAttention(call);
  if (params.has_error()) return params.error();
  const std::string refused = refusal(*params);
  if (!refused.empty()) {
    return xla::ffi::Error::InvalidArgument(
        std::string("zyfa_attention: the ") + platform + " kernels take " +
        refused);
  }
  if (params->batch == 0 || params->heads == 0 || params->q_len == 0) {
    return xla::ffi::Error::Success();
  }
  return run(*params);
}

}  // namespace zyfa

#endif  // ZYFA_FFI_GPU_LIMITS_H_
