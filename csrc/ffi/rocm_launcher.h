// What the handlers of the platform "ROCM" share.

#ifndef ZYFA_FFI_ROCM_LAUNCHER_H_
#define ZYFA_FFI_ROCM_LAUNCHER_H_

#include <cstdint>

#include "csrc/ffi/guarded_call.h"
#include "csrc/gpu/driver.h"
#include "csrc/gpu/launcher.h"
#include "xla/ffi/api/ffi.h"

namespace zyfa {

// The process's one launcher of kernels for AMD GPUs.
gpu::Launcher& RocmLauncher();

// Success where there is no error; `call` begins the message.
xla::ffi::Error ToFfiError(const char* call, const gpu::MaybeError& error);

// What run(device) returns for the device of a stream.
template <class Run>
xla::ffi::Error OnDeviceOf(const char* call, void* stream, const Run& run) {
  int device;
  const auto error = RocmLauncher().StreamDevice(stream, &device);
  return error ? ToFfiError(call, error) : run(device);
}

// The initialize stage of a target: loads the kernels before a graph may be
// captured, when it would be too late.
template <const char* kCall>
XLA_FFI_Error* LoadAhead(XLA_FFI_CallFrame* call_frame) {
  namespace ffi = xla::ffi;
  static auto* const handler =
      ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
          .Ctx<ffi::PlatformStream<void*>>()
          .To([](void* stream) {
            return GuardedCall(kCall, [stream] {
              return OnDeviceOf(kCall, stream, [](int device) {
                return ToFfiError(kCall, RocmLauncher().Load(device));
              });
            });
          })
          .release();
  return handler->Call(call_frame);
}

// HIP takes fewer than 2^32 threads along a dimension.
constexpr int64_t MaxGroups(int threads) {
  return (int64_t{1} << 32) / threads - 1;
}

}  // namespace zyfa

#endif  // ZYFA_FFI_ROCM_LAUNCHER_H_
