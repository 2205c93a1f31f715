// From FFI buffers and attributes to AttentionParams, with every dimension,
// dtype and attribute checked; and the handlers that begin so.

#ifndef ZYFA_FFI_DECODE_H_
#define ZYFA_FFI_DECODE_H_

#include <cstdint>
#include <initializer_list>
#include <utility>

#include "csrc/ffi/attention_params.h"
#include "csrc/ffi/guarded_call.h"
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

// The handler of "zyfa_attention" that calls run(context, AttentionCall), or
// run(context, AttentionCall, More) where it has a third result.
template <class Context, class... More, class Run>
auto AttentionHandler(Run run,
                      std::initializer_list<xla::ffi::Traits> traits = {}) {
  using xla::ffi::AnyBuffer;
  using xla::ffi::Result;
  auto binding = xla::ffi::Ffi::Bind()
                     .template Ctx<Context>()
                     .template Arg<AnyBuffer>()  // q
                     .template Arg<AnyBuffer>()  // k
                     .template Arg<AnyBuffer>()  // v
                     .template Arg<AnyBuffer>()  // q_scale
                     .template Arg<AnyBuffer>()  // k_scale
                     .template Arg<AnyBuffer>()  // v_scale
                     .template Arg<AnyBuffer>()  // q_offset
                     .template Arg<AnyBuffer>()  // q_lengths
                     .template Arg<AnyBuffer>()  // kv_lengths
                     .template Attr<int64_t>("window_left")
                     .template Attr<int64_t>("window_right")
                     .template Attr<int64_t>("q_block")
                     .template Attr<int64_t>("kv_block")
                     .template Attr<bool>("quadratic")
                     .template Ret<AnyBuffer>()   // out
                     .template Ret<AnyBuffer>();  // lse
  const auto handler =
      [run](typename xla::ffi::CtxDecoding<Context>::Type context, AnyBuffer q,
            AnyBuffer k, AnyBuffer v, AnyBuffer q_scale, AnyBuffer k_scale,
            AnyBuffer v_scale, AnyBuffer q_offset, AnyBuffer q_lengths,
            AnyBuffer kv_lengths, int64_t window_left, int64_t window_right,
            int64_t q_block, int64_t kv_block, bool quadratic,
            Result<AnyBuffer> out, Result<AnyBuffer> lse,
            Result<More>... more) {
        const AttentionCall call = {q,
                                    k,
                                    v,
                                    q_scale,
                                    k_scale,
                                    v_scale,
                                    q_offset,
                                    q_lengths,
                                    kv_lengths,
                                    *out,
                                    *lse,
                                    window_left,
                                    window_right,
                                    q_block,
                                    kv_block,
                                    quadratic};
        return GuardedCall("zyfa_attention",
                           [&] { return run(context, call, *more...); });
      };
  if constexpr (sizeof...(More) == 0) {
    return std::move(binding).To(handler, traits);
  } else {
    return std::move(binding).template Ret<More...>().To(handler, traits);
  }
}

}  // namespace zyfa

#endif  // ZYFA_FFI_DECODE_H_
