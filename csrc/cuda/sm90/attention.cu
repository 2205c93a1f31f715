// The attention kernels for Hopper; launch_plan.h says how they are launched.

#include "csrc/cuda/sm90/attention.h"
#include "csrc/cuda/sm90/transpose.h"

namespace zyfa::sm90 {

// Of a type of queries and keys:
//   kSignBits: those of a register; 0 for numbers without them
//   kTransposedValues: whether values lie transposed in the workspace
//   kKeyScales: whether k_scale is for blocks of keys
//   kPacks: whether logits are packed, as Packed says, where they can be
struct OneByte {
  static constexpr int kBytes = 1;
  static constexpr bool kTransposedValues = true;
  static constexpr bool kPacks = true;
};

struct Fp8 : OneByte {
  using Products = Fp8Products;
  using Softmax = Fp8Softmax<Fp8>;
  using Packed = HalfLogits;
  static constexpr cuda::InType kInType = cuda::InType::kE4m3;
  static constexpr uint32_t kSignBits = 0x80808080;
  static constexpr bool kKeyScales = false;
};

struct Int8 : OneByte {
  using Products = Int8Products;
  using Softmax = Fp8Softmax<Int8>;
  using Packed = IntegerLogits;
  static constexpr cuda::InType kInType = cuda::InType::kI8;
  static constexpr uint32_t kSignBits = 0;
  static constexpr bool kKeyScales = true;
};

struct TwoBytes {
  static constexpr int kBytes = 2;
  static constexpr uint32_t kSignBits = 0x80008000;
  static constexpr bool kTransposedValues = false;
  static constexpr bool kKeyScales = false;
  static constexpr bool kPacks = false;
  using Packed = NoLogits;
};

struct BF16 : TwoBytes {
  using Products = BF16Products;
  using Softmax = ExactSoftmax<BF16>;
  static constexpr cuda::InType kInType = cuda::InType::kBF16;
  static ZYFA_DEVICE uint32_t Pack(float low, float high) {
    return PackBFloats(low, high);
  }
};

struct F16 : TwoBytes {
  using Products = F16Products;
  using Softmax = ExactSoftmax<F16>;
  static constexpr cuda::InType kInType = cuda::InType::kF16;
  static ZYFA_DEVICE uint32_t Pack(float low, float high) {
    return PackHalves(low, high);
  }
};

template <class Type, int kHeadDim>
ZYFA_DEVICE void Run(const AttentionArgs& args, const TensorMap& q,
                     const TensorMap& k, const TensorMap& v) {
  extern __shared__ uint8_t shared_memory[];
  Attention<Type, kHeadDim>(args, {&q, &k, &v}, shared_memory);
}

template <int kHeadDim>
ZYFA_DEVICE void PrepareFp8(const AttentionArgs& args) {
  const KeyNorm<kHeadDim> keys(args);
  TransposeValues(args);
  keys.Store(args);
}

}  // namespace zyfa::sm90

#define ZYFA_ATTENTION(name, Type, kHeadDim)                                  \
  extern "C" __global__ void __launch_bounds__(zyfa::cuda::kAttentionThreads, \
                                               1)                             \
      zyfa_attention_##name(                                                  \
          const __grid_constant__ zyfa::cuda::AttentionArgs args,             \
          const __grid_constant__ zyfa::cuda::TensorMap q,                    \
          const __grid_constant__ zyfa::cuda::TensorMap k,                    \
          const __grid_constant__ zyfa::cuda::TensorMap v) {                  \
    zyfa::sm90::Run<zyfa::sm90::Type, kHeadDim>(args, q, k, v);               \
  }

ZYFA_ATTENTION(fp8_128x128, Fp8, 128)
ZYFA_ATTENTION(fp8_192x128, Fp8, 192)
ZYFA_ATTENTION(int8_128x128, Int8, 128)
ZYFA_ATTENTION(int8_192x128, Int8, 192)
ZYFA_ATTENTION(bf16_128x128, BF16, 128)
ZYFA_ATTENTION(bf16_192x128, BF16, 192)
ZYFA_ATTENTION(f16_128x128, F16, 128)
ZYFA_ATTENTION(f16_192x128, F16, 192)

#define ZYFA_PREPARE(name, prepare)                                         \
  extern "C" __global__ void __launch_bounds__(zyfa::cuda::kPrepareThreads) \
      zyfa_prepare##name(                                                   \
          const __grid_constant__ zyfa::cuda::AttentionArgs args) {         \
    zyfa::sm90::ResetCounter(args);                                         \
    prepare(args);                                                          \
  }

ZYFA_PREPARE(, static_cast<void>)
ZYFA_PREPARE(_int8, zyfa::sm90::TransposeValues)
ZYFA_PREPARE(_fp8_128, zyfa::sm90::PrepareFp8<128>)
ZYFA_PREPARE(_fp8_192, zyfa::sm90::PrepareFp8<192>)
