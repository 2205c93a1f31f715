#include "csrc/ffi/rocm_launcher.h"

#include <string>

#include "csrc/gpu/code_object.h"
#include "csrc/gpu/hip_driver.h"

namespace zyfa {

namespace ffi = xla::ffi;

// Never freed, as the modules that it holds.
gpu::Launcher& RocmLauncher() {
  static auto* const launcher = new gpu::Launcher(
      gpu::OpenHip, rocm::kCodeObjects, rocm::kCodeObjectCount,
      "Build zyfa_jax with the device's architecture in the CMake option "
      "ZYFA_ROCM_ARCHS, or call attention(implementation='reference')");
  return *launcher;
}

ffi::Error ToFfiError(const char* call, const gpu::MaybeError& error) {
  if (!error) return ffi::Error::Success();
  auto code = ffi::ErrorCode::kInternal;
  if (error->kind == gpu::ErrorKind::kUnavailable) {
    code = ffi::ErrorCode::kFailedPrecondition;
  } else if (error->kind == gpu::ErrorKind::kOutOfMemory) {
    code = ffi::ErrorCode::kResourceExhausted;
  }
  return ffi::Error(code, std::string(call) + ": " + error->message);
}

}  // namespace zyfa
