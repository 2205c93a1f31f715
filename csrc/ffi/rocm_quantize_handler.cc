#include "csrc/ffi/rocm_quantize_handler.h"

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/ffi/gpu_launch.h"
#include "csrc/ffi/rocm_launcher.h"
#include "csrc/rocm/quantize_args.h"
#include "xla/ffi/api/ffi.h"

namespace zyfa {
namespace {

namespace ffi = xla::ffi;
using rocm::kChunk;
using rocm::QuantizeArgs;

constexpr char kName[] = "zyfa_quantize";
constexpr int64_t kMaxTokens =
    std::numeric_limits<int32_t>::max() - int64_t{1 << 16};
// The kernels multiply and count within a tile in 24 and 32 bits.
constexpr int64_t kMaxRowBytes = (1 << 24) - 1;
constexpr int64_t kMaxGroups = MaxGroups(rocm::kQuantizeThreads);

struct Call {
  ffi::AnyBuffer x;
  ffi::RemainingArgs operands;
  ffi::RemainingRets results;
  std::string_view step;
  bool rotate;
};

// One launch, decoded. Where there is nothing to do, `groups` is 0.
struct Launch {
  std::string kernel;
  QuantizeArgs args;
  int64_t groups;
};

ffi::Unexpected<ffi::Error> Invalid(const std::string& what) {
  return ffi::Unexpected(
      ffi::Error::InvalidArgument(std::string(kName) + ": " + what));
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

ffi::ErrorOr<Launch> Decode(const Call& call) {
  const bool rounds_only = call.step == "round";
  const bool finds_only = call.step == "find";
  if (!rounds_only && !finds_only && call.step != "both") {
    return Invalid("step must be find, round or both, got " +
                   std::string(call.step));
  }
  const size_t fewest = rounds_only ? 1 : 0;
  const size_t results = rounds_only || finds_only ? 1 : 2;
  if (call.operands.size() < fewest || call.operands.size() > fewest + 1 ||
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
  if (dim <= 0 || dim > rocm::kMaxQuantizeDim || dim % kChunk != 0) {
    return Invalid(
        "the ROCm kernels take head dims that are multiples of 8 "
        "up to 256, got " +
        std::to_string(dim));
  }
  const int64_t max_heads = kMaxRowBytes / (dim * 4);
  if (tokens > kMaxTokens || heads > max_heads) {
    return Invalid("the ROCm kernels take up to " + std::to_string(kMaxTokens) +
                   " tokens of up to " + std::to_string(max_heads) +
                   " heads, got " + Text(dims));
  }
  const int64_t tiles = rocm::QuantizeTiles(tokens);
  if (heads > 0 && tiles > 0 && batch > kMaxGroups / (heads * tiles)) {
    return Invalid("the ROCm kernels take up to " + std::to_string(kMaxGroups) +
                   " tiles of 128 tokens of a head, got " + Text(dims));
  }

  Launch launch = {};
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
    const auto found = Take<float>("found", **buffer, ffi::DataType::F32,
                                   {batch, heads, tiles});
    if (found.has_error()) return ffi::Unexpected(found.error());
    args.found = *found;
  }

  const int64_t hadamard = PowerOfTwoIn(dim);
  // The rows of a large matrix are longer than eight lanes' chunks.
  const int64_t chunks =
      call.rotate && hadamard > 8 * kChunk ? hadamard / (8 * kChunk) : 1;
  launch.kernel = std::string(kName) + "_" + type + "_" +
                  std::to_string((dim + 63) / 64 * 64);
  if (call.rotate) launch.kernel += chunks > 1 ? "_rotated_whole" : "_rotated";
  launch.groups = batch * heads * tiles;
  args.tokens = static_cast<int32_t>(tokens);
  args.heads = static_cast<int32_t>(heads);
  args.head_dim = static_cast<int32_t>(dim);
  args.hadamard = static_cast<int32_t>(hadamard);
  args.zero_descale = finds_only ? 0.0f : 1.0f;
  args.row_inverse =
      rocm::RowInverse(static_cast<uint32_t>(dim / (kChunk * chunks)));
  return launch;
}

ffi::Error Run(int32_t device, void* stream, const Launch& launch) {
  return ToFfiError(
      kName, RocmLauncher().Run(
                 device,
                 {launch.kernel.c_str(), static_cast<uint32_t>(launch.groups),
                  rocm::kQuantizeThreads, &launch.args, sizeof(launch.args)},
                 stream));
}

// The handler that calls run(context, Launch) unless there is nothing to do.
template <class Context, class RunLaunch>
auto Handler(RunLaunch run, std::initializer_list<ffi::Traits> traits = {}) {
  return ffi::Ffi::Bind()
      .template Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("step")
      .template Attr<bool>("rotate")
      .To(
          [run](typename ffi::CtxDecoding<Context>::Type context,
                ffi::AnyBuffer x, ffi::RemainingArgs operands,
                ffi::RemainingRets results, std::string_view step,
                bool rotate) {
            return GuardedCall(kName, [&] {
              const auto launch = Decode({x, operands, results, step, rotate});
              if (launch.has_error()) return launch.error();
              if (launch->groups == 0) return ffi::Error::Success();
              return run(context, *launch);
            });
          },
          traits);
}

}  // namespace

XLA_FFI_Error* RocmQuantizeInitialize(XLA_FFI_CallFrame* call_frame) {
  return LoadAhead<RocmLauncher, kName>(call_frame);
}

XLA_FFI_Error* RocmQuantize(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler =
      Handler<ffi::PlatformStream<void*>>(
          [](void* stream, const Launch& launch) {
            return OnDeviceOf<RocmLauncher>(kName, stream, [&](int device) {
              return Run(device, stream, launch);
            });
          },
          {ffi::Traits::kCmdBufferCompatible})
          .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* RocmQuantizeOnHost(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler =
      Handler<ffi::DeviceOrdinal>([](int32_t device, const Launch& launch) {
        return Run(device, nullptr, launch);
      }).release();
  return handler->Call(call_frame);
}

}  // namespace zyfa
