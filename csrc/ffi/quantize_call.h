// What the handlers of "zyfa_quantize" share: from FFI buffers and attributes
// to a launch, with every dimension, dtype and attribute checked.

#ifndef ZYFA_FFI_QUANTIZE_CALL_H_
#define ZYFA_FFI_QUANTIZE_CALL_H_

#include <cstdint>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>

#include "csrc/ffi/gpu_launch.h"
#include "csrc/ffi/guarded_call.h"
#include "csrc/gpu/quantize_args.h"
#include "xla/ffi/api/ffi.h"

namespace zyfa {

inline constexpr char kQuantizeName[] = "zyfa_quantize";

// The operands, results and attributes as they come.
struct QuantizeCall {
  xla::ffi::AnyBuffer x;
  xla::ffi::RemainingArgs operands;
  xla::ffi::RemainingRets results;
  std::string_view step;
  bool center;
  bool weigh;
  bool rotate;
};

// What differs between the platforms.
struct QuantizePlatform {
  const char* name;
  gpu::QuantizePlan (*plan)(int head_dim, bool rotates, int bytes);
};

// The names of all of a platform's kernels.
std::set<std::string> QuantizeKernels(const QuantizePlatform& platform);

// Where there is nothing to do, `groups` is 0.
struct QuantizeLaunch {
  std::string kernel;
  gpu::QuantizeArgs args;
  uint32_t groups;
  uint32_t threads;
};

xla::ffi::ErrorOr<QuantizeLaunch> DecodeQuantize(
    const QuantizeCall& call, const QuantizePlatform& platform);

// The handler that calls run(context, QuantizeLaunch) unless there is nothing
// to do.
template <class Context, class Run>
auto QuantizeHandler(const QuantizePlatform& platform, Run run,
                     std::initializer_list<xla::ffi::Traits> traits = {}) {
  namespace ffi = xla::ffi;
  return ffi::Ffi::Bind()
      .template Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("step")
      .template Attr<bool>("center")
      .template Attr<bool>("weigh")
      .template Attr<bool>("rotate")
      .To(
          [platform, run](typename ffi::CtxDecoding<Context>::Type context,
                          ffi::AnyBuffer x, ffi::RemainingArgs operands,
                          ffi::RemainingRets results, std::string_view step,
                          bool center, bool weigh, bool rotate) {
            return GuardedCall(kQuantizeName, [&] {
              const auto launch = DecodeQuantize(
                  {x, operands, results, step, center, weigh, rotate},
                  platform);
              if (launch.has_error()) return launch.error();
              if (launch->groups == 0) return ffi::Error::Success();
              return run(context, *launch);
            });
          },
          traits);
}

// The stages of a platform: kRun enqueues on a device's stream.
template <gpu::Launcher& (*kLauncher)(),
          xla::ffi::Error (*kRun)(int device, void* stream,
                                  const QuantizeLaunch& launch)>
struct QuantizeStages {
  static XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* call_frame) {
    return LoadAhead<kLauncher, kQuantizeName>(call_frame);
  }

  static XLA_FFI_Error* Execute(const QuantizePlatform& platform,
                                XLA_FFI_CallFrame* call_frame) {
    static auto* const handler =
        QuantizeHandler<xla::ffi::PlatformStream<void*>>(
            platform,
            [](void* stream, const QuantizeLaunch& launch) {
              return OnDeviceOf<kLauncher>(
                  kQuantizeName, stream,
                  [&](int device) { return kRun(device, stream, launch); });
            },
            {xla::ffi::Traits::kCmdBufferCompatible})
            .release();
    return handler->Call(call_frame);
  }

  static XLA_FFI_Error* ExecuteOnHost(const QuantizePlatform& platform,
                                      XLA_FFI_CallFrame* call_frame) {
    static auto* const handler =
        QuantizeHandler<xla::ffi::DeviceOrdinal>(
            platform,
            [](int32_t device, const QuantizeLaunch& launch) {
              return kRun(device, nullptr, launch);
            })
            .release();
    return handler->Call(call_frame);
  }
};

}  // namespace zyfa

#endif  // ZYFA_FFI_QUANTIZE_CALL_H_
