#include "csrc/ffi/rocm_launcher.h"

#include "csrc/gpu/code_object.h"
#include "csrc/gpu/hip_driver.h"

namespace zyfa {

// Never freed, as the modules that it holds.
gpu::Launcher& RocmLauncher() {
  static auto* const launcher = new gpu::Launcher(
      gpu::OpenHip, rocm::kCodeObjects, rocm::kCodeObjectCount,
      "Build zyfa_jax with the device's architecture in the CMake option "
      "ZYFA_ROCM_ARCHS, or call attention(implementation='reference')");
  return *launcher;
}

}  // namespace zyfa
