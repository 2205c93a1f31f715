#include "csrc/ffi/decode.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "csrc/numerics/online_softmax.h"

namespace zyfa {
namespace {

namespace ffi = xla::ffi;

template <class Dims>
std::string ShapeText(const Dims& dims) {
  std::string text = "(";
  for (int64_t dim : dims) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(dim);
  }
  return text + ")";
}

// Collects the first thing that is wrong.
class Checker {
 public:
  void Require(bool condition, const std::string& message) {
    if (!condition && message_.empty()) message_ = "zyfa_attention: " + message;
  }

  void Rank4(const char* name, const ffi::AnyBuffer& buffer) {
    Require(buffer.dimensions().size() == 4,
            std::string(name) + " takes 4 dimensions, got shape " +
                ShapeText(buffer.dimensions()));
  }

  void Array(const char* name, const ffi::AnyBuffer& buffer,
             std::initializer_list<int64_t> shape, ffi::DataType dtype) {
    const auto dims = buffer.dimensions();
    Require(std::equal(dims.begin(), dims.end(), shape.begin(), shape.end()),
            std::string(name) + " takes shape " + ShapeText(shape) + ", got " +
                ShapeText(dims));
    Require(buffer.element_type() == dtype,
            std::string(name) + " takes dtype code " +
                std::to_string(static_cast<int>(dtype)) + ", got " +
                std::to_string(static_cast<int>(buffer.element_type())));
  }

  bool failed() const { return !message_.empty(); }
  ffi::Unexpected<ffi::Error> error() const {
    return ffi::Unexpected<ffi::Error>(ffi::Error::InvalidArgument(message_));
  }

 private:
  std::string message_;
};

bool DecodeDType(ffi::DataType from, bool is_input, DType& to) {
  switch (from) {
    case ffi::DataType::F32:
      to = DType::kF32;
      return true;
    case ffi::DataType::F16:
      to = DType::kF16;
      return true;
    case ffi::DataType::BF16:
      to = DType::kBF16;
      return true;
    case ffi::DataType::F8E4M3FN:
      to = DType::kE4m3;
      return is_input;
    case ffi::DataType::S8:
      to = DType::kI8;
      return is_input;
    default:
      return false;
  }
}

bool IsHeadDim(int64_t dim) { return dim % 8 == 0 && dim >= 8 && dim <= 256; }

int64_t ScaleCount(int64_t length, int64_t block) {
  return block > 0 ? length / block + (length % block != 0) : 1;
}

}  // namespace

ffi::ErrorOr<AttentionParams> DecodeAttention(const AttentionCall& call) {
  Checker check;
  check.Rank4("q", call.q);
  check.Rank4("k", call.k);
  check.Rank4("v", call.v);
  if (check.failed()) return check.error();

  AttentionParams p = {};
  const auto q = call.q.dimensions();
  const auto k = call.k.dimensions();
  const auto v = call.v.dimensions();
  p.batch = q[0];
  p.q_len = q[1];
  p.heads = q[2];
  p.head_dim = q[3];
  p.kv_batch = k[0];
  p.kv_len = k[1];
  p.kv_heads = k[2];
  p.value_dim = v[3];

  const ffi::DataType in = call.q.element_type();
  check.Require(
      DecodeDType(in, true, p.in_dtype),
      "q takes dtype bfloat16, float16, float32, float8_e4m3fn or int8, got "
      "code " +
          std::to_string(static_cast<int>(in)));
  const bool is_int8 = in == ffi::DataType::S8;
  const ffi::DataType of_values = is_int8 ? ffi::DataType::F8E4M3FN : in;
  p.value_dtype = is_int8 ? DType::kE4m3 : p.in_dtype;
  check.Require(DecodeDType(call.out.element_type(), false, p.out_dtype),
                "out takes dtype bfloat16, float16 or float32, got code " +
                    std::to_string(static_cast<int>(call.out.element_type())));
  check.Require(IsHeadDim(p.head_dim) && IsHeadDim(p.value_dim),
                "head dims are multiples of 8 in 8..256, got " +
                    std::to_string(p.head_dim) + " and " +
                    std::to_string(p.value_dim));
  check.Require(p.kv_heads > 0 ? p.heads % p.kv_heads == 0 : p.heads == 0,
                "query heads are a multiple of key/value heads, got " +
                    std::to_string(p.heads) + " and " +
                    std::to_string(p.kv_heads));
  check.Require(p.kv_batch > 0 ? p.batch % p.kv_batch == 0 : p.batch == 0,
                "q's batch is a multiple of k's, got " +
                    std::to_string(p.batch) + " and " +
                    std::to_string(p.kv_batch));
  check.Require(call.window_left >= -1 && call.window_right >= -1,
                "window bounds are -1 or more, got " +
                    std::to_string(call.window_left) + " and " +
                    std::to_string(call.window_right));
  check.Require(call.q_block >= 0,
                "q_block is 0 or more, got " + std::to_string(call.q_block));
  check.Require(
      call.kv_block >= 0 && call.kv_block % numerics::kKeyBlock == 0,
      "kv_block is a multiple of 128, got " + std::to_string(call.kv_block));
  if (check.failed()) return check.error();

  // Far beyond any position, and still safe to add to one.
  constexpr int64_t kWidest = int64_t{1} << 60;
  p.window_left = std::min(call.window_left, kWidest);
  p.window_right = std::min(call.window_right, kWidest);
  p.q_block = call.q_block;
  p.kv_block = call.kv_block;
  p.q_scales = ScaleCount(p.q_len, p.q_block);
  p.kv_scales = ScaleCount(p.kv_len, p.kv_block);
  p.quadratic = call.quadratic;

  using ffi::DataType;
  check.Array("k", call.k, {p.kv_batch, p.kv_len, p.kv_heads, p.head_dim}, in);
  check.Array("v", call.v, {p.kv_batch, p.kv_len, p.kv_heads, p.value_dim},
              of_values);
  check.Array("q_scale", call.q_scale, {p.batch, p.heads, p.q_scales},
              DataType::F32);
  check.Array("k_scale", call.k_scale, {p.kv_batch, p.kv_heads, p.kv_scales},
              DataType::F32);
  p.v_channels = call.v_scale.dimensions().size() == 4;
  if (p.v_channels) {
    check.Array("v_scale", call.v_scale,
                {p.kv_batch, p.kv_heads, 1, p.value_dim}, DataType::F32);
  } else {
    check.Array("v_scale", call.v_scale, {p.kv_batch, p.kv_heads, p.kv_scales},
                DataType::F32);
  }
  check.Array("q_offset", call.q_offset, {p.batch}, DataType::S32);
  check.Array("q_lengths", call.q_lengths, {p.batch}, DataType::S32);
  check.Array("kv_lengths", call.kv_lengths, {p.batch}, DataType::S32);
  check.Array("out", call.out, {p.batch, p.q_len, p.heads, p.value_dim},
              call.out.element_type());
  check.Array("lse", call.lse, {p.batch, p.heads, p.q_len}, DataType::F32);
  if (check.failed()) return check.error();

  p.q = call.q.untyped_data();
  p.k = call.k.untyped_data();
  p.v = call.v.untyped_data();
  p.q_scale = static_cast<const float*>(call.q_scale.untyped_data());
  p.k_scale = static_cast<const float*>(call.k_scale.untyped_data());
  p.v_scale = static_cast<const float*>(call.v_scale.untyped_data());
  p.q_offset = static_cast<const int32_t*>(call.q_offset.untyped_data());
  p.q_lengths = static_cast<const int32_t*>(call.q_lengths.untyped_data());
  p.kv_lengths = static_cast<const int32_t*>(call.kv_lengths.untyped_data());
  p.out = call.out.untyped_data();
  p.lse = static_cast<float*>(call.lse.untyped_data());
  return p;
}

}  // namespace zyfa
