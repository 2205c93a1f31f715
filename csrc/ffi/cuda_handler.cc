#include "csrc/ffi/cuda_handler.h"

#include <cstdint>
#include <optional>
#include <string>

#include "csrc/cuda/attention_args.h"
#include "csrc/cuda/launch_plan.h"
#include "csrc/ffi/attention_params.h"
#include "csrc/ffi/cuda_launcher.h"
#include "csrc/ffi/decode.h"
#include "csrc/ffi/gpu_launch.h"
#include "csrc/ffi/gpu_limits.h"
#include "csrc/gpu/cuda_driver.h"
#include "xla/ffi/api/ffi.h"

namespace zyfa {
namespace {

namespace ffi = xla::ffi;
using cuda::AttentionArgs;
using cuda::LaunchPlan;
using cuda::TensorMap;

constexpr char kName[] = "zyfa_attention";

std::optional<cuda::InType> ToInType(DType dtype) {
  switch (dtype) {
    case DType::kE4m3:
      return cuda::InType::kE4m3;
    case DType::kBF16:
      return cuda::InType::kBF16;
    case DType::kF16:
      return cuda::InType::kF16;
    case DType::kI8:
      return cuda::InType::kI8;
    case DType::kF32:
      break;
  }
  return std::nullopt;
}

cuda::OutType ToOutType(DType dtype) {
  return dtype == DType::kF32   ? cuda::OutType::kF32
         : dtype == DType::kF16 ? cuda::OutType::kF16
                                : cuda::OutType::kBF16;
}

LaunchPlan PlanOf(const AttentionParams& p, int multiprocessors) {
  const auto type = ToInType(p.in_dtype);
  if (!type || p.value_dim != cuda::kValueDim) return {};
  return cuda::PlanAttention({*type, p.batch, p.kv_batch, p.q_len, p.kv_len,
                              p.heads, p.kv_heads, p.head_dim},
                             multiprocessors);
}

std::string Refusal(const AttentionParams& p) {
  return GpuRefusal(p, PlanOf(p, 1).supported);
}

AttentionArgs ToArgs(const AttentionParams& p, const LaunchPlan& plan,
                     void* workspace) {
  AttentionArgs args = {};
  FillArgs(p, &args);
  args.workspace = workspace;
  args.out_type = ToOutType(p.out_dtype);
  args.section_heads = plan.section_heads;
  return args;
}

// Where a map's array begins. One without keys may have no address, which the
// driver does not take; since nothing reads it, the queries' does as well.
const void* BaseOf(const cuda::TensorMapPlan& map, const AttentionArgs& args) {
  const void* base = args.workspace;
  switch (map.buffer) {
    case cuda::Buffer::kQ:
      base = args.q;
      break;
    case cuda::Buffer::kK:
      base = args.kv_len > 0 ? args.k : args.q;
      break;
    case cuda::Buffer::kV:
      base = args.kv_len > 0 ? args.v : args.q;
      break;
    case cuda::Buffer::kWorkspace:
      break;
  }
  return static_cast<const char*>(base) + map.offset;
}

ffi::Error Start(int device, const cuda::KernelLaunch& kernel,
                 void** parameters, void* stream) {
  return ToFfiError(
      kName, CudaLauncher().Run(device, ToLaunch(kernel, parameters), stream));
}

ffi::Error Run(int device, void* stream, const AttentionParams& params,
               ffi::AnyBuffer workspace) {
  gpu::Device description;
  if (auto error = CudaLauncher().Load(device, &description)) {
    return ToFfiError(kName, error);
  }
  const LaunchPlan plan = PlanOf(params, description.compute_units);
  if (workspace.size_bytes() < plan.workspace_bytes) {
    return ffi::Error::InvalidArgument("zyfa_attention: the workspace takes " +
                                       std::to_string(plan.workspace_bytes) +
                                       " bytes, got " +
                                       std::to_string(workspace.size_bytes()));
  }
  AttentionArgs args = ToArgs(params, plan, workspace.untyped_data());
  TensorMap q, k, v;
  const struct {
    const cuda::TensorMapPlan& plan;
    TensorMap* map;
  } maps[] = {{plan.q_map, &q}, {plan.k_map, &k}, {plan.v_map, &v}};
  for (const auto& [map_plan, map] : maps) {
    if (auto error =
            gpu::EncodeTensorMap(map_plan, BaseOf(map_plan, args), map)) {
      return ToFfiError(kName, error);
    }
  }
  void* parameters[] = {&args, &q, &k, &v};
  if (plan.prepare.symbol != nullptr && plan.prepare.grid > 0) {
    ffi::Error error = Start(device, plan.prepare, parameters, stream);
    if (error.failure()) return error;
  }
  return Start(device, plan.attention, parameters, stream);
}

}  // namespace

XLA_FFI_Error* CudaInitialize(XLA_FFI_CallFrame* call_frame) {
  return LoadAhead<CudaLauncher, kName>(call_frame);
}

XLA_FFI_Error* CudaAttention(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler =
      AttentionHandler<ffi::PlatformStream<void*>, ffi::AnyBuffer>(
          [](void* stream, const AttentionCall& call,
             ffi::AnyBuffer workspace) {
            return RunIfTaken(
                "CUDA", call, Refusal, [&](const AttentionParams& params) {
                  return OnDeviceOf<CudaLauncher>(
                      kName, stream, [&](int device) {
                        return Run(device, stream, params, workspace);
                      });
                });
          },
          {ffi::Traits::kCmdBufferCompatible})
          .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* CudaAttentionOnHost(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler =
      AttentionHandler<ffi::DeviceOrdinal, ffi::AnyBuffer>(
          [](int32_t device, const AttentionCall& call,
             ffi::AnyBuffer workspace) {
            return RunIfTaken("CUDA", call, Refusal,
                              [&](const AttentionParams& params) {
                                return Run(device, nullptr, params, workspace);
                              });
          })
          .release();
  return handler->Call(call_frame);
}

}  // namespace zyfa
