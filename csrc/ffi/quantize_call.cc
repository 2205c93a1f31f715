#include "csrc/ffi/quantize_call.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "csrc/gpu/quantize_args.h"
#include "xla/ffi/api/ffi.h"

namespace zyfa {
namespace {

namespace ffi = xla::ffi;
using gpu::kChunk;
using gpu::QuantizeArgs;

constexpr int64_t kMaxTokens =
    std::numeric_limits<int32_t>::max() - int64_t{1 << 16};
// The kernels multiply and count within a tile in 24 and 32 bits.
constexpr int64_t kMaxRowBytes = (1 << 24) - 1;
// HIP takes fewer than 2^32 threads along a dimension.
constexpr int64_t kMaxGroups = (int64_t{1} << 32) / 512 - 1;

ffi::Unexpected<ffi::Error> Invalid(const std::string& what) {
  return ffi::Unexpected(
      ffi::Error::InvalidArgument(std::string(kQuantizeName) + ": " + what));
}

const char* TypeName(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16:
      return "bf16";
    case ffi::DataType::F16:
      return "f16";
    case ffi::DataType::F32:
      return "f32";
    default:
      return nullptr;
  }
}

using Dims = std::vector<int64_t>;

std::string Text(const Dims& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(dims[i]);
  }
  return text + ")";
}

// The array's address, where it is of that type and shape.
template <class T>
ffi::ErrorOr<T*> Take(const char* name, ffi::AnyBuffer buffer,
                      ffi::DataType type, const Dims& dims) {
  const auto found = buffer.dimensions();
  const Dims got(found.begin(), found.end());
  if (buffer.element_type() != type || got != dims) {
    return Invalid(std::string(name) + " must have shape " + Text(dims) +
                   " and its type, got " + Text(got));
  }
  return static_cast<T*>(buffer.untyped_data());
}

int64_t PowerOfTwoIn(int64_t x) { return x & -x; }

}  // namespace

std::string QuantizeKernel(const std::string& type, int kernel_dim,
                           bool rotates, int chunks) {
  return std::string(kQuantizeName) + "_" + type + "_" +
         std::to_string(kernel_dim) + (rotates ? "_rotated" : "") +
         (chunks > 1 ? "_whole" : "");
}

std::string MeasureKernel(const std::string& type, int kernel_dim) {
  return std::string("zyfa_quantize_") + type + "_" +
         std::to_string(kernel_dim) + "_measure";
}

ffi::ErrorOr<QuantizeLaunch> DecodeQuantize(const QuantizeCall& call,
                                            const QuantizePlatform& platform) {
  const std::string kernels =
      std::string("the ") + platform.name + " kernels take ";
  const bool rounds_only = call.step == "round";
  const bool measures = platform.measures && call.step == "measure";
  const bool finds_only = measures || call.step == "find";
  if (!rounds_only && !finds_only && call.step != "both") {
    const char* steps = platform.measures ? "find, round, both or measure"
                                          : "find, round or both";
    return Invalid(std::string("step must be ") + steps + ", got " +
                   std::string(call.step));
  }
  const size_t fewest = rounds_only ? 1 : 0;
  const size_t most = measures ? 0 : fewest + 1;
  const size_t results = rounds_only || finds_only ? 1 : 2;
  if (call.operands.size() < fewest || call.operands.size() > most ||
      call.results.size() != results) {
    return Invalid("wrong number of operands or results");
  }
  const auto x_dims = call.x.dimensions();
  const Dims dims(x_dims.begin(), x_dims.end());
  const char* type = TypeName(call.x.element_type());
  if (type == nullptr || dims.size() != 4) {
    return Invalid(
        "x must be bfloat16, float16 or float32 of four dimensions, got " +
        Text(dims));
  }
  const int64_t batch = dims[0], tokens = dims[1], heads = dims[2];
  const int64_t dim = dims[3];
  if (dim <= 0 || dim > gpu::kMaxQuantizeDim || dim % kChunk != 0) {
    return Invalid(kernels +
                   "head dims that are multiples of 8 up to 256, got " +
                   std::to_string(dim));
  }
  const int64_t max_heads = kMaxRowBytes / (dim * 4);
  if (tokens > kMaxTokens || heads > max_heads) {
    return Invalid(kernels + "up to " + std::to_string(kMaxTokens) +
                   " tokens of up to " + std::to_string(max_heads) +
                   " heads, got " + Text(dims));
  }
  const int64_t tiles = gpu::QuantizeTiles(tokens);
  if (heads > 0 && tiles > 0 && batch > kMaxGroups / (heads * tiles)) {
    return Invalid(kernels + "up to " + std::to_string(kMaxGroups) +
                   " tiles of 128 tokens of a head, got " + Text(dims));
  }

  QuantizeLaunch launch = {};
  QuantizeArgs& args = launch.args;
  args.x = call.x.untyped_data();
  size_t operand = 0;
  const auto next = [&](const char* name,
                        const Dims& dims) -> ffi::ErrorOr<const float*> {
    auto buffer = call.operands.get<ffi::AnyBuffer>(operand++);
    if (buffer.has_error()) return ffi::Unexpected(buffer.error());
    auto data = Take<float>(name, *buffer, ffi::DataType::F32, dims);
    if (data.has_error()) return ffi::Unexpected(data.error());
    return static_cast<const float*>(*data);
  };
  if (rounds_only) {
    const auto given = next("given", {batch, heads, tiles});
    if (given.has_error()) return ffi::Unexpected(given.error());
    args.given = *given;
  }
  if (call.operands.size() > operand) {
    const auto mean = next("mean", {batch, heads, dim});
    if (mean.has_error()) return ffi::Unexpected(mean.error());
    args.mean = *mean;
  }
  if (!finds_only) {
    auto buffer = call.results.get<ffi::AnyBuffer>(0);
    if (buffer.has_error()) return ffi::Unexpected(buffer.error());
    const auto values =
        Take<void>("values", **buffer, ffi::DataType::F8E4M3FN, dims);
    if (values.has_error()) return ffi::Unexpected(values.error());
    args.values = *values;
  }
  if (!rounds_only) {
    auto buffer = call.results.get<ffi::AnyBuffer>(results - 1);
    if (buffer.has_error()) return ffi::Unexpected(buffer.error());
    Dims found_dims = {batch, heads, tiles};
    if (measures) found_dims.insert(found_dims.end(), {gpu::kStatistics, dim});
    const auto found =
        Take<float>("found", **buffer, ffi::DataType::F32, found_dims);
    if (found.has_error()) return ffi::Unexpected(found.error());
    args.found = *found;
  }

  const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
  args.tokens = narrow(tokens);
  args.heads = narrow(heads);
  args.head_dim = narrow(dim);
  args.hadamard = narrow(PowerOfTwoIn(dim));
  args.zero_descale = finds_only ? 0.0f : 1.0f;
  const int chunks = gpu::PartChunks(args.hadamard, call.rotate && !measures);
  args.row_inverse =
      gpu::RowInverse(static_cast<uint32_t>(args.head_dim / (kChunk * chunks)));
  const gpu::QuantizePlan plan = platform.plan(args.head_dim, chunks);
  launch.kernel =
      measures ? MeasureKernel(type, plan.kernel_dim)
               : QuantizeKernel(type, plan.kernel_dim, call.rotate, chunks);
  launch.groups = static_cast<uint32_t>(batch * heads * tiles);
  launch.threads = static_cast<uint32_t>(plan.threads);
  return launch;
}

}  // namespace zyfa
