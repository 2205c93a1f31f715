#include "csrc/ffi/quantize_call.h"

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
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

struct Type {
  ffi::DataType type;
  const char* name;
  int bytes;
};
constexpr Type kTypes[] = {{ffi::DataType::BF16, "bf16", 2},
                           {ffi::DataType::F16, "f16", 2},
                           {ffi::DataType::F32, "f32", 4}};

const Type* FindType(ffi::DataType type) {
  for (const Type& x : kTypes) {
    if (x.type == type) return &x;
  }
  return nullptr;
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

// What a step takes and gives beside x, mean and weight.
enum class Given { kNone, kOfTiles, kOfChannels };
enum class Found { kNone, kOfTiles, kOfTokens, kStatistics };
struct Step {
  std::string_view name;
  Given given;
  ffi::DataType values;  // INVALID: none
  Found found;
  const char* suffix;  // of the kernels' names; null: by whether it rotates
};
constexpr auto kNoValues = ffi::DataType::INVALID;
constexpr auto kFp8 = ffi::DataType::F8E4M3FN;
constexpr auto kInt8 = ffi::DataType::S8;
constexpr Step kSteps[] = {
    {"find", Given::kNone, kNoValues, Found::kOfTiles, nullptr},
    {"round", Given::kOfTiles, kFp8, Found::kNone, nullptr},
    {"both", Given::kNone, kFp8, Found::kOfTiles, nullptr},
    {"tokens", Given::kNone, kInt8, Found::kOfTokens, "_tokens"},
    {"blocks", Given::kNone, kInt8, Found::kOfTiles, "_blocks"},
    {"channels", Given::kOfChannels, kFp8, Found::kNone, "_channels"},
    {"measure", Given::kNone, kNoValues, Found::kStatistics, "_measure"},
};

const Step* FindStep(std::string_view name) {
  for (const Step& step : kSteps) {
    if (step.name == name) return &step;
  }
  return nullptr;
}

// Whether it takes a mean, a weight and the rotation.
bool Prepares(const Step& step) {
  return step.given != Given::kOfChannels && step.found != Found::kStatistics;
}

std::string KernelName(const Step& step, const char* type, bool rotates,
                       const gpu::QuantizePlan& plan) {
  const char* plain = rotates ? "_rotated" : "";
  return std::string(kQuantizeName) + "_" + type + "_" +
         std::to_string(plan.kernel_dim) +
         (step.suffix != nullptr ? step.suffix : plain) + plan.tail;
}

std::string StepNames() {
  std::string names;
  for (const Step& step : kSteps) {
    names += (names.empty() ? "" : ", ") + std::string(step.name);
  }
  return names;
}

}  // namespace

std::set<std::string> QuantizeKernels(const QuantizePlatform& platform) {
  std::set<std::string> names;
  for (const Step& step : kSteps) {
    for (const bool rotate : {false, true}) {
      if (rotate ? !Prepares(step) : step.values == kInt8) continue;
      for (const Type& type : kTypes) {
        for (int dim = kChunk; dim <= gpu::kMaxQuantizeDim; dim += kChunk) {
          const auto plan = platform.plan(dim, rotate, type.bytes);
          names.insert(KernelName(step, type.name, rotate, plan));
        }
      }
    }
  }
  return names;
}

ffi::ErrorOr<QuantizeLaunch> DecodeQuantize(const QuantizeCall& call,
                                            const QuantizePlatform& platform) {
  const std::string kernels =
      std::string("the ") + platform.name + " kernels take ";
  const Step* step = FindStep(call.step);
  if (step == nullptr) {
    return Invalid("step must be one of " + StepNames() + ", got " +
                   std::string(call.step));
  }
  const bool to_int8 = step->values == kInt8;
  if (!Prepares(*step) && (call.center || call.weigh || call.rotate)) {
    return Invalid(std::string(step->name) +
                   " takes neither center, weigh nor rotate");
  }
  if ((to_int8 || call.weigh) && !call.rotate) {
    return Invalid("int8 and weigh are for rotate alone");
  }
  const bool gives_nan = to_int8 && step->found == Found::kOfTiles;
  const size_t operands = (step->given != Given::kNone) +
                          (step->given == Given::kOfChannels) + call.center +
                          call.weigh;
  const size_t results =
      (step->values != kNoValues) + (step->found != Found::kNone) + gives_nan;
  if (call.operands.size() != operands || call.results.size() != results) {
    return Invalid("wrong number of operands or results");
  }
  const auto x_dims = call.x.dimensions();
  const Dims dims(x_dims.begin(), x_dims.end());
  const Type* type = FindType(call.x.element_type());
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
  const Dims of_tiles = {batch, heads, tiles};
  const Dims of_tokens = {batch, heads, tokens};
  const Dims of_channels = {batch, heads, dim};
  std::optional<ffi::Error> trouble;
  size_t operand = 0, result = 0;
  // The address of an operand or result; or notes the first trouble.
  const auto take = [&](auto& to, const char* name, auto buffer,
                        ffi::DataType type, const Dims& dims) {
    if (trouble) return;
    using T = std::remove_pointer_t<std::remove_reference_t<decltype(to)>>;
    const auto data = Take<T>(name, buffer, type, dims);
    if (data.has_error()) {
      trouble = data.error();
    } else {
      to = *data;
    }
  };
  const auto next_operand = [&] {
    return *call.operands.get<ffi::AnyBuffer>(operand++);
  };
  const auto next_result = [&] {
    return **call.results.get<ffi::AnyBuffer>(result++);
  };
  if (step->given != Given::kNone) {
    take(args.given, "given", next_operand(), ffi::DataType::F32,
         step->given == Given::kOfTiles ? of_tiles : of_channels);
  }
  if (step->given == Given::kOfChannels) {
    take(args.nan, "nan", next_operand(), ffi::DataType::PRED, of_tokens);
  }
  if (call.center) {
    take(args.mean, "mean", next_operand(), ffi::DataType::F32, of_channels);
  }
  if (call.weigh) {
    take(args.weight, "weight", next_operand(), ffi::DataType::F32,
         of_channels);
  }
  if (step->values != kNoValues) {
    take(args.values, "values", next_result(), step->values, dims);
  }
  if (step->found != Found::kNone) {
    Dims found = step->found == Found::kOfTokens ? of_tokens : of_tiles;
    if (step->found == Found::kStatistics) {
      found.insert(found.end(), {gpu::kStatistics, dim});
    }
    take(args.found, "found", next_result(), ffi::DataType::F32, found);
  }
  if (gives_nan) {
    take(args.nan, "nan", next_result(), ffi::DataType::PRED, of_tokens);
  }
  if (trouble) return ffi::Unexpected(*trouble);

  const auto narrow = [](int64_t x) { return static_cast<int32_t>(x); };
  args.tokens = narrow(tokens);
  args.heads = narrow(heads);
  args.head_dim = narrow(dim);
  args.hadamard = narrow(PowerOfTwoIn(dim));
  args.zero_descale = step->values == kNoValues ? 0.0f : 1.0f;
  const gpu::QuantizePlan plan =
      platform.plan(args.head_dim, call.rotate, type->bytes);
  args.row_inverse = gpu::RowInverse(static_cast<uint32_t>(plan.parts));
  launch.kernel = KernelName(*step, type->name, call.rotate, plan);
  launch.groups = static_cast<uint32_t>(batch * heads * tiles);
  launch.threads = static_cast<uint32_t>(plan.threads);
  return launch;
}

}  // namespace zyfa
