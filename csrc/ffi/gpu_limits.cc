#include "csrc/ffi/gpu_limits.h"

#include <algorithm>
#include <limits>

#include "csrc/numerics/visibility.h"

namespace zyfa {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kQueryBlock = 256;
// The last block of queries may run past the last token.
constexpr int64_t kMaxTokens = numerics::kBandLimit - kQueryBlock - 1;
constexpr int64_t kMaxRowBytes = (1 << 24) - 1;
// HIP takes fewer than 2^32 threads along a dimension.
constexpr int64_t kMaxBlocks = (int64_t{1} << 32) / 512 - 1;

int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 4;
    case DType::kE4m3:
    case DType::kI8:
      return 1;
    default:
      return 2;
  }
}

std::string Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kE4m3:
      return "float8_e4m3fn";
    case DType::kI8:
      return "int8";
  }
  return "";
}

}  // namespace

std::optional<int32_t> ToWindow(int64_t side) {
  if (side < 0 || side >= int64_t{1} << 32) return -1;
  if (side > kInt32Max) return std::nullopt;
  return static_cast<int32_t>(side);
}

std::string GpuRefusal(const AttentionParams& p, bool has_kernel) {
  const auto two = [](int64_t x, int64_t y) {
    return std::to_string(x) + " and " + std::to_string(y);
  };
  if (!has_kernel) {
    return "bfloat16, float16, float8_e4m3fn and int8 with head dims 128 and "
           "128 or 192 and 128, got " +
           Name(p.in_dtype) + " with " + two(p.head_dim, p.value_dim);
  }
  const bool is_int8 = p.in_dtype == DType::kI8;
  if (p.kv_block != 0 && !(is_int8 && p.v_channels)) {
    return "one descale for all keys, but int8 keys, got kv_block " +
           std::to_string(p.kv_block);
  }
  if (p.v_channels && !is_int8) {
    return "one descale for all channels of v, got one for each";
  }
  if (std::max(p.q_len, p.kv_len) > kMaxTokens) {
    return "up to " + std::to_string(kMaxTokens) + " tokens, got " +
           two(p.q_len, p.kv_len);
  }
  const int64_t head_bytes = std::max(p.head_dim * SizeOf(p.in_dtype),
                                      p.value_dim * SizeOf(p.out_dtype));
  if (p.heads > kMaxRowBytes / head_bytes) {
    return "up to " + std::to_string(kMaxRowBytes) +
           " bytes of a token over all heads, got " + std::to_string(p.heads) +
           " heads of " + std::to_string(head_bytes) + " bytes";
  }
  if (!ToWindow(p.window_left) || !ToWindow(p.window_right)) {
    return "windows of up to " + std::to_string(kInt32Max) +
           " tokens or of 2**32 and more, got " +
           two(p.window_left, p.window_right);
  }
  if (p.batch > kInt32Max) {
    return "a batch that int32 holds, got " + std::to_string(p.batch);
  }
  const int64_t per_head = (p.q_len + kQueryBlock - 1) / kQueryBlock;
  if (per_head > 0 && p.heads > 0 &&
      p.batch > kMaxBlocks / (p.heads * per_head)) {
    return "up to " + std::to_string(kMaxBlocks) + " blocks of " +
           std::to_string(kQueryBlock) +
           " queries over all batch rows and heads, got " +
           std::to_string(p.batch) + " rows of " + std::to_string(p.heads) +
           " heads of " + std::to_string(per_head);
  }
  return "";
}

}  // namespace zyfa
