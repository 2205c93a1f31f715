#include "csrc/ffi/cuda_launcher.h"

#include <set>
#include <string>
#include <vector>

#include "csrc/cuda/quantize_plan.h"
#include "csrc/ffi/quantize_call.h"
#include "csrc/gpu/code_object.h"
#include "csrc/gpu/cuda_driver.h"

namespace zyfa {
namespace {

// Every kernel: CUDA may load a kernel's code when it is first asked for, which
// a stream that is being captured may not allow.
std::vector<gpu::Launch> Kernels() {
  std::vector<gpu::Launch> kernels;
  for (const auto type : {cuda::InType::kE4m3, cuda::InType::kBF16,
                          cuda::InType::kF16, cuda::InType::kI8}) {
    for (const int64_t head_dim : {128, 192}) {
      const cuda::LaunchPlan plan =
          cuda::PlanAttention({type, 1, 1, 1, 1, 1, 1, head_dim}, 1);
      kernels.push_back(ToLaunch(plan.attention, nullptr));
      if (plan.prepare.symbol != nullptr) {
        kernels.push_back(ToLaunch(plan.prepare, nullptr));
      }
    }
  }
  static const auto* const quantize =
      new std::set<std::string>(QuantizeKernels({"CUDA", cuda::PlanQuantize}));
  for (const std::string& name : *quantize) {
    kernels.push_back({name.c_str(), 1, cuda::kMaxQuantizeThreads, nullptr, 0});
  }
  return kernels;
}

}  // namespace

gpu::Launch ToLaunch(const cuda::KernelLaunch& kernel, void** parameters) {
  return {kernel.symbol,       kernel.grid, kernel.block, nullptr, 0,
          kernel.shared_bytes, parameters};
}

// Never freed, as the modules that it holds.
gpu::Launcher& CudaLauncher() {
  static auto* const launcher = new gpu::Launcher(
      gpu::OpenCuda, cuda::kCodeObjects, cuda::kCodeObjectCount,
      "The kernels are for Hopper GPUs (sm_90): call "
      "attention(implementation='reference')",
      Kernels());
  return *launcher;
}

}  // namespace zyfa
