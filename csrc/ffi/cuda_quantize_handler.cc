#include "csrc/cuda/quantize_plan.h"
#include "csrc/ffi/cuda_launcher.h"
#include "csrc/ffi/quantize_call.h"
#include "csrc/ffi/quantize_handlers.h"

namespace zyfa {
namespace {

constexpr QuantizePlatform kPlatform = {"CUDA", cuda::PlanQuantize};

xla::ffi::Error Run(int device, void* stream, const QuantizeLaunch& launch) {
  gpu::QuantizeArgs args = launch.args;
  void* parameters[] = {&args};
  return ToFfiError(
      kQuantizeName,
      CudaLauncher().Run(device,
                         {launch.kernel.c_str(), launch.groups, launch.threads,
                          nullptr, 0, 0, parameters},
                         stream));
}

using Stages = QuantizeStages<CudaLauncher, Run>;

}  // namespace

XLA_FFI_Error* CudaQuantizeInitialize(XLA_FFI_CallFrame* call_frame) {
  return Stages::Initialize(call_frame);
}

XLA_FFI_Error* CudaQuantize(XLA_FFI_CallFrame* call_frame) {
  return Stages::Execute(kPlatform, call_frame);
}

XLA_FFI_Error* CudaQuantizeOnHost(XLA_FFI_CallFrame* call_frame) {
  return Stages::ExecuteOnHost(kPlatform, call_frame);
}

}  // namespace zyfa
