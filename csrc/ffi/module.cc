// The extension module zyfa_jax._ext.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "csrc/cpu/dispatch.h"
#include "csrc/ffi/cpu_handler.h"
#include "csrc/ffi/cuda_handler.h"
#include "csrc/ffi/quantize_handlers.h"
#include "csrc/ffi/rocm_handler.h"
#include "csrc/gpu/code_object.h"
#include "csrc/numerics/online_softmax.h"

namespace nb = nanobind;

namespace zyfa {
namespace {

std::vector<std::string> Names(const std::vector<const cpu::Target*>& targets) {
  std::vector<std::string> names;
  for (const cpu::Target* target : targets) names.push_back(target->name);
  return names;
}

const cpu::Target& UsableTarget(const std::string& name) {
  if (const cpu::Target* target = cpu::FindTarget(name)) return *target;
  std::string message = "CPU targets usable here are";
  for (const std::string& usable : Names(cpu::UsableTargets())) {
    message += " '" + usable + "'";
  }
  throw nb::value_error((message + ", got '" + name + "'").c_str());
}

void ForceCpuTarget(const std::optional<std::string>& name) {
  cpu::ForceTarget(name ? &UsableTarget(*name) : nullptr);
}

nb::capsule Handler(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

nb::dict Registrations() {
  nb::dict rocm;
  rocm["initialize"] = Handler(RocmInitialize);
  rocm["execute"] = Handler(RocmAttention);
  nb::dict handlers;
  handlers["cpu"] = Handler(CpuAttention);
  nb::dict cuda;
  cuda["initialize"] = Handler(CudaInitialize);
  cuda["execute"] = Handler(CudaAttention);
  handlers["ROCM"] = rocm;
  handlers["CUDA"] = cuda;
  return handlers;
}

nb::dict QuantizeRegistrations() {
  nb::dict rocm;
  rocm["initialize"] = Handler(RocmQuantizeInitialize);
  rocm["execute"] = Handler(RocmQuantize);
  nb::dict cuda;
  cuda["initialize"] = Handler(CudaQuantizeInitialize);
  cuda["execute"] = Handler(CudaQuantize);
  nb::dict handlers;
  handlers["ROCM"] = rocm;
  handlers["CUDA"] = cuda;
  return handlers;
}

nb::dict HandlersOnHost() {
  nb::dict rocm;
  rocm["zyfa_attention"] = Handler(RocmAttentionOnHost);
  rocm["zyfa_quantize"] = Handler(RocmQuantizeOnHost);
  nb::dict cuda;
  cuda["zyfa_attention"] = Handler(CudaAttentionOnHost);
  cuda["zyfa_quantize"] = Handler(CudaQuantizeOnHost);
  nb::dict handlers;
  handlers["rocm"] = rocm;
  handlers["cuda"] = cuda;
  return handlers;
}

std::vector<std::string> Archs(const gpu::CodeObject* codes, size_t count) {
  std::vector<std::string> archs;
  for (size_t i = 0; i < count; ++i) archs.push_back(codes[i].arch);
  return archs;
}

nb::bytes CodeOf(const std::string& arch, const gpu::CodeObject* codes,
                 size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (arch == codes[i].arch) return nb::bytes(codes[i].data, codes[i].size);
  }
  throw nb::value_error(("no code object for '" + arch + "'").c_str());
}

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using NewArray = nb::ndarray<nb::numpy, T>;

template <class T>
NewArray<T> MakeArray(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (size_t dim : shape) count *= dim;
  T* data = new T[count > 0 ? count : 1]();
  const nb::capsule owner(
      data, [](void* array) noexcept { delete[] static_cast<T*>(array); });
  return NewArray<T>(data, shape, owner);
}

auto Fp8SoftmaxBlock(const std::string& target, const Matrix<float>& acc,
                     const Matrix<bool>& visible, const Vector<float>& factor,
                     const Vector<float>& running_max, bool quadratic) {
  const size_t rows = acc.shape(0);
  const size_t keys = acc.shape(1);
  if (keys > numerics::kKeyBlock || visible.shape(0) != rows ||
      visible.shape(1) != keys || factor.shape(0) != rows ||
      running_max.shape(0) != rows) {
    throw nb::value_error(
        "fp8_softmax_block takes acc and visible (rows, keys <= 128), factor "
        "and running_max (rows,)");
  }
  auto codes = MakeArray<uint8_t>({rows, keys});
  auto shift = MakeArray<int32_t>({rows});
  auto new_max = MakeArray<float>({rows});
  auto row_sum = MakeArray<float>({rows});
  cpu::RunFp8SoftmaxBlock(
      UsableTarget(target),
      {acc.data(), visible.data(), factor.data(), running_max.data(), quadratic,
       static_cast<int64_t>(rows), static_cast<int64_t>(keys), codes.data(),
       shift.data(), new_max.data(), row_sum.data()});
  return nb::make_tuple(codes, shift, new_max, row_sum);
}

}  // namespace
}  // namespace zyfa

NB_MODULE(_ext, module) {
  using namespace zyfa;  // NOLINT(build/namespaces)

  module.def("registrations", &Registrations);
  module.def("quantize_registrations", &QuantizeRegistrations);
  module.def("handlers_on_host", &HandlersOnHost);
  module.def("rocm_archs",
             [] { return Archs(rocm::kCodeObjects, rocm::kCodeObjectCount); });
  module.def("cuda_archs",
             [] { return Archs(cuda::kCodeObjects, cuda::kCodeObjectCount); });
  module.def(
      "rocm_code_object",
      [](const std::string& arch) {
        return CodeOf(arch, rocm::kCodeObjects, rocm::kCodeObjectCount);
      },
      nb::arg("arch"));
  module.def(
      "cuda_code_object",
      [](const std::string& arch) {
        return CodeOf(arch, cuda::kCodeObjects, cuda::kCodeObjectCount);
      },
      nb::arg("arch"));
  module.def("cpu_targets", [] { return Names(cpu::UsableTargets()); });
  module.def("compiled_cpu_targets",
             [] { return Names(cpu::CompiledTargets()); });
  module.def("force_cpu_target", &ForceCpuTarget, nb::arg("name").none());
  module.def("fp8_softmax_block", &Fp8SoftmaxBlock, nb::arg("target"),
             nb::arg("acc"), nb::arg("visible"), nb::arg("factor"),
             nb::arg("running_max"), nb::arg("quadratic"));

  if (const char* name = std::getenv("ZYFA_JAX_CPU_TARGET")) {
    if (*name != '\0') ForceCpuTarget(name);
  }
}
