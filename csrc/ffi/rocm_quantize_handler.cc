#include "csrc/ffi/quantize_call.h"
#include "csrc/ffi/quantize_handlers.h"
#include "csrc/ffi/rocm_launcher.h"
#include "csrc/rocm/quantize_plan.h"

namespace zyfa {
namespace {

constexpr QuantizePlatform kPlatform = {"ROCm", rocm::PlanQuantize};

xla::ffi::Error Run(int device, void* stream, const QuantizeLaunch& launch) {
  return ToFfiError(
      kQuantizeName,
      RocmLauncher().Run(device,
                         {launch.kernel.c_str(), launch.groups, launch.threads,
                          &launch.args, sizeof(launch.args)},
                         stream));
}

using Stages = QuantizeStages<RocmLauncher, Run>;

}  // namespace

XLA_FFI_Error* RocmQuantizeInitialize(XLA_FFI_CallFrame* call_frame) {
  return Stages::Initialize(call_frame);
}

XLA_FFI_Error* RocmQuantize(XLA_FFI_CallFrame* call_frame) {
  return Stages::Execute(kPlatform, call_frame);
}

XLA_FFI_Error* RocmQuantizeOnHost(XLA_FFI_CallFrame* call_frame) {
  return Stages::ExecuteOnHost(kPlatform, call_frame);
}

}  // namespace zyfa
