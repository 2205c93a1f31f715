// What the handlers of every GPU platform share: which device a stream is of,
// loading ahead, and errors. kLauncher is the platform's launcher.

#ifndef ZYFA_FFI_GPU_LAUNCH_H_
#define ZYFA_FFI_GPU_LAUNCH_H_

#include <string>

#include "csrc/ffi/guarded_call.h"
#include "csrc/gpu/driver.h"
#include "csrc/gpu/launcher.h"
#include "xla/ffi/api/ffi.h"

namespace zyfa {

// Success where there is no error; `call` begins the message.
inline xla::ffi::Error ToFfiError(const char* call,
                                  const gpu::MaybeError& error) {
  namespace ffi = xla::ffi;
  if (!error) return ffi::Error::Success();
  auto code = ffi::ErrorCode::kInternal;
  if (error->kind == gpu::ErrorKind::kUnavailable) {
    code = ffi::ErrorCode::kFailedPrecondition;
  } else if (error->kind == gpu::ErrorKind::kOutOfMemory) {
    code = ffi::ErrorCode::kResourceExhausted;
  }
  return ffi::Error(code, std::string(call) + ": " + error->message);
}

// What run(device) returns for the device of a stream.
template <gpu::Launcher& (*kLauncher)(), class Run>
xla::ffi::Error OnDeviceOf(const char* call, void* stream, const Run& run) {
  int device;
  const auto error = kLauncher().StreamDevice(stream, &device);
  return error ? ToFfiError(call, error) : run(device);
}

// The initialize stage of a target: loads the kernels before a graph may be
// captured, when it would be too late.
template <gpu::Launcher& (*kLauncher)(), const char* kCall>
XLA_FFI_Error* LoadAhead(XLA_FFI_CallFrame* call_frame) {
  namespace ffi = xla::ffi;
  static auto* const handler =
      ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
          .Ctx<ffi::PlatformStream<void*>>()
          .To([](void* stream) {
            return GuardedCall(kCall, [stream] {
              return OnDeviceOf<kLauncher>(kCall, stream, [](int device) {
                return ToFfiError(kCall, kLauncher().Load(device));
              });
            });
          })
          .release();
  return handler->Call(call_frame);
}

}  // namespace zyfa

#endif  // ZYFA_FFI_GPU_LAUNCH_H_
