#include "csrc/ffi/rocm_handler.h"

#include <cstdint>
#include <string>

#include "csrc/ffi/attention_params.h"
#include "csrc/ffi/decode.h"
#include "csrc/ffi/gpu_launch.h"
#include "csrc/ffi/gpu_limits.h"
#include "csrc/ffi/rocm_launcher.h"
#include "csrc/rocm/attention_args.h"
#include "xla/ffi/api/ffi.h"

namespace zyfa {
namespace {

namespace ffi = xla::ffi;
using rocm::AttentionArgs;

struct Kernel {
  DType dtype;
  int64_t head_dim;
  int64_t value_dim;
  const char* name;
};
constexpr Kernel kKernels[] = {
    {DType::kE4m3, 128, 128, "zyfa_attention_fp8_128x128"},
    {DType::kE4m3, 192, 128, "zyfa_attention_fp8_192x128"},
    {DType::kI8, 128, 128, "zyfa_attention_int8_128x128"},
    {DType::kI8, 192, 128, "zyfa_attention_int8_192x128"},
    {DType::kBF16, 128, 128, "zyfa_attention_bf16_128x128"},
    {DType::kBF16, 192, 128, "zyfa_attention_bf16_192x128"},
    {DType::kF16, 128, 128, "zyfa_attention_f16_128x128"},
    {DType::kF16, 192, 128, "zyfa_attention_f16_192x128"},
};

constexpr char kName[] = "zyfa_attention";

rocm::OutType ToOutType(DType dtype) {
  return dtype == DType::kF32   ? rocm::OutType::kF32
         : dtype == DType::kF16 ? rocm::OutType::kF16
                                : rocm::OutType::kBF16;
}

const Kernel* FindKernel(const AttentionParams& p) {
  for (const Kernel& kernel : kKernels) {
    if (kernel.dtype == p.in_dtype && kernel.head_dim == p.head_dim &&
        kernel.value_dim == p.value_dim) {
      return &kernel;
    }
  }
  return nullptr;
}

std::string Refusal(const AttentionParams& p) {
  return GpuRefusal(p, FindKernel(p) != nullptr);
}

AttentionArgs ToArgs(const AttentionParams& p) {
  AttentionArgs args;
  FillArgs(p, &args);
  args.out_type = ToOutType(p.out_dtype);
  return args;
}

// Blocks of queries are paired, long with short, where later queries see more
// keys than earlier ones and the pairs still fill the device twice over.
int32_t BlocksPerGroup(const AttentionArgs& args, int compute_units) {
  const bool grows = args.window_right >= 0 && args.window_left < 0;
  const int64_t heads = int64_t{args.batch} * args.heads;
  const bool pairs =
      args.q_len > rocm::kQueryBlock &&
      heads * rocm::GroupsPerHead(args.q_len, 2) >= int64_t{2} * compute_units;
  return grows && pairs ? 2 : 1;
}

// `quadratic` is not looked at: the kernels' FP8 probabilities are linear.
ffi::Error Run(int32_t device, void* stream, const AttentionParams& params) {
  AttentionArgs args = ToArgs(params);
  gpu::Device description;
  if (auto error = RocmLauncher().Load(device, &description))
    return ToFfiError(kName, error);
  rocm::SetGeometry(args, BlocksPerGroup(args, description.compute_units));
  const int64_t groups =
      int64_t{args.batch} * args.heads * args.groups_per_head;
  return ToFfiError(
      kName, RocmLauncher().Run(
                 device,
                 {FindKernel(params)->name, static_cast<uint32_t>(groups),
                  rocm::kThreads, &args, sizeof(args)},
                 stream));
}

}  // namespace

XLA_FFI_Error* RocmInitialize(XLA_FFI_CallFrame* call_frame) {
  return LoadAhead<RocmLauncher, kName>(call_frame);
}

XLA_FFI_Error* RocmAttention(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler =
      AttentionHandler<ffi::PlatformStream<void*>>(
          [](void* stream, const AttentionCall& call) {
            return RunIfTaken(
                "ROCm", call, Refusal, [stream](const AttentionParams& params) {
                  return OnDeviceOf<RocmLauncher>(
                      kName, stream,
                      [&](int device) { return Run(device, stream, params); });
                });
          },
          {ffi::Traits::kCmdBufferCompatible})
          .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* RocmAttentionOnHost(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler =
      AttentionHandler<ffi::DeviceOrdinal>([](int32_t device,
                                              const AttentionCall& call) {
        return RunIfTaken("ROCm", call, Refusal,
                          [device](const AttentionParams& params) {
                            return Run(device, nullptr, params);
                          });
      }).release();
  return handler->Call(call_frame);
}

}  // namespace zyfa
