// What the kernels of both GPU platforms take: they count in 32 bits.

#ifndef ZYFA_FFI_GPU_LIMITS_H_
#define ZYFA_FFI_GPU_LIMITS_H_

#include <cstdint>
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
