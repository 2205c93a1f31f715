// The part of a tile that a warp holds: loads, rotation, magnitudes, rounding.
// See quantize.h.

#ifndef ZYFA_CUDA_SM90_QUANTIZE_TILE_H_
#define ZYFA_CUDA_SM90_QUANTIZE_TILE_H_

#include <cstdint>
#include <type_traits>

#include "csrc/cuda/quantize_plan.h"
#include "csrc/cuda/sm90/intrinsics.h"
#include "csrc/cuda/sm90/warp_products.h"
#include "csrc/gpu/quantize_args.h"

namespace zyfa::sm90 {

using gpu::kChunk;
using gpu::kGuardAbove;
using gpu::kInfinityBits;
using gpu::kInt8Max;
using gpu::kInverseFp8Max;
using gpu::kInverseInt8Max;
using gpu::kSmallestNormal;
using gpu::QuantizeArgs;

constexpr uint32_t kAllLanes = 0xffffffffu;

using Chunk = float[kChunk];

// ---- Element types: eight elements from memory to float32.

struct FromBF16 {
  static constexpr int kBytes = 2;
  static constexpr bool kOverflows = true;
  // Of signs that are operands of a product.
  static constexpr float kUnit = 1.0f;
  // A power of two as this type.
  static ZYFA_DEVICE uint32_t Narrow(float power) {
    return __float_as_uint(power) >> 16;
  }
  static ZYFA_DEVICE void Multiply(float (&d)[4], const uint32_t (&a)[4],
                                   const uint32_t (&b)[2],
                                   const float (&c)[4]) {
    WarpProductBF16(d, a, b, c);
  }
  static ZYFA_DEVICE void Widen(const uint4 (&raw)[1], Chunk& y) {
    const uint32_t words[] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[2 * i] = __uint_as_float(words[i] << 16);
      y[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};

struct FromF16 {
  static constexpr int kBytes = 2;
  static constexpr bool kOverflows = false;
  // The largest weight is more than there is, its half is not.
  static constexpr float kUnit = 0.5f;
  static ZYFA_DEVICE uint32_t Narrow(float power) {
    const int exponent = static_cast<int>(__float_as_uint(power) >> 23) - 112;
    return exponent > 0 ? exponent << 10 : 1 << (exponent + 9);
  }
  static ZYFA_DEVICE void Multiply(float (&d)[4], const uint32_t (&a)[4],
                                   const uint32_t (&b)[2],
                                   const float (&c)[4]) {
    WarpProductF16(d, a, b, c);
  }
  static ZYFA_DEVICE void Widen(const uint4 (&raw)[1], Chunk& y) {
    const uint32_t words[] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) WidenHalves(words[i], y[2 * i], y[2 * i + 1]);
  }
};

struct FromF32 {
  static constexpr int kBytes = 4;
  static constexpr bool kOverflows = true;
  static ZYFA_DEVICE void Widen(const uint4 (&raw)[2], Chunk& y) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      y[4 * i] = __uint_as_float(raw[i].x);
      y[4 * i + 1] = __uint_as_float(raw[i].y);
      y[4 * i + 2] = __uint_as_float(raw[i].z);
      y[4 * i + 3] = __uint_as_float(raw[i].w);
    }
  }
};

// ---- Numbers

// The magnitude, 0 of what is not finite.
ZYFA_DEVICE float FiniteMagnitude(float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
  return __uint_as_float(bits < kInfinityBits ? bits : 0u);
}

ZYFA_DEVICE bool IsFinite(float x) {
  return (__float_as_uint(x) & kInfinityBits) != kInfinityBits;
}

// The largest of a warp's, none of which is negative; NaN if any is.
ZYFA_DEVICE float WarpMaximum(float x) {
  return __uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(x)));
}

// The descale of numbers up to `largest`. One below the normal range could be
// flushed to zero.
ZYFA_DEVICE float DescaleOf(float largest, float inverse_max) {
  return fmaxf(largest * inverse_max, kSmallestNormal);
}

// A small number plus this is rounded to an integer, and has it as its lowest
// bits.
constexpr float kByteFrame = 0x1.8p23f;

ZYFA_DEVICE void Butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// What to divide by, of numbers times `factor`, on the way to FP8.
struct Divisor {
  // Infinities become the largest FP8 number, to which this rounds; that number
  // times the largest descale would overflow.
  static constexpr float kAlmostMax = 447.0f;

  // Below that, remainders of the division could be too small for float32.
  ZYFA_DEVICE explicit Divisor(float by)
      : factor(by < 0x1p-60f ? 0x1p64f : 1.0f),
        descale(by * factor),
        inverse(1.0f / descale) {}

  // The sign of zeros included. The first quotient is within two units of the
  // last place; its remainder is exact, and corrects it.
  ZYFA_DEVICE float Divide(float y) const {
    const float limit = kAlmostMax * descale;
    const float clamped = Maximum(Minimum(y, limit), -limit);
    const float quotient = clamped * inverse;
    const float excess = __fmaf_rn(quotient, descale, -clamped);
    return __fmaf_rn(-excess, inverse, quotient);
  }

  float factor;
  float descale;
  float inverse;
};

// ---- The warp's share of the tile

// How a tile lies in a block: every lane has kSlots rows, kRowStep apart, and
// of each kChunks chunks, kChunkStride channels apart.

// Lanes hold consecutive parts of rows.
template <int kSlots_, int kChunks_, bool kRotates_>
struct ByLanes {
  static constexpr int kSlots = kSlots_;
  static constexpr int kChunks = kChunks_;
  static constexpr int kRowStep = gpu::kQuantizeTokens / kSlots;
  static constexpr int kChunkStride = gpu::kRotatedLanes * kChunk;
  static constexpr bool kRotates = kRotates_;
  static constexpr bool kByMatrix = false;
  // Whether a row's lanes are all of one warp, and of which size then the
  // Hadamard matrix is.
  static constexpr bool kWhole = kChunks > 1;
  static constexpr int kHadamard = kChunks * kChunkStride;
};

// A warp holds 16 rows as its matrix products take and give them, four lanes a
// row: the products rotate.
template <int kDim>
struct ByMatrix {
  static constexpr int kSlots = 2;
  static constexpr int kChunks = kDim / 32;
  static constexpr int kRowStep = 8;
  static constexpr int kChunkStride = 32;
  static constexpr bool kRotates = true;
  static constexpr bool kByMatrix = true;
  static constexpr bool kWhole = true;
  static constexpr int kHadamard = kDim & -kDim;

  // What all warps need of a head.
  struct Shared {
    alignas(16) uint16_t weights[kDim];
    // The mean, as it is and small, times weights; and what comes of it behind
    // a product's part of the rotation.
    float means[2][kDim];
    alignas(16) float shifts[2][kDim];
  };
};

template <class Type, class Layout>
class WarpTile {
 public:
  static constexpr int kSlots = Layout::kSlots;
  static constexpr int kChunks = Layout::kChunks;
  static constexpr bool kRotates = Layout::kRotates;
  static constexpr bool kWhole = Layout::kWhole;

  ZYFA_DEVICE WarpTile(const QuantizeArgs& args, int64_t first_element,
                       int valid_tokens, int64_t head)
      : x_(static_cast<const char*>(args.x) + first_element * Type::kBytes),
        values_(static_cast<char*>(args.values) + first_element),
        hadamard_(kWhole ? Layout::kHadamard : args.hadamard) {
    if constexpr (Layout::kByMatrix) {
      row_ = static_cast<int>(threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4);
      channel_ = static_cast<int>(threadIdx.x % 4 * kChunk);
      valid_ = valid_tokens - row_;
    } else {
      const uint32_t parts = args.head_dim / (kChunk * kChunks);
      const uint32_t row =
          (threadIdx.x * args.row_inverse) >> gpu::kRowInverseShift;
      row_ = static_cast<int>(row);
      channel_ = static_cast<int>((threadIdx.x - row * parts) * kChunk);
      // The last warp may have threads beyond the step's last row.
      valid_ = row_ < Layout::kRowStep ? valid_tokens - row_ : 0;
    }
    const int token = args.heads * args.head_dim;
    element_ = row_ * token + channel_;
    step_ = Layout::kRowStep * token;
    const int64_t channels = head * args.head_dim;
    mean_ = args.mean == nullptr ? nullptr : args.mean + channels;
    weight_ = args.weight == nullptr ? nullptr : args.weight + channels;
  }

  // Loads; subtracts the mean, multiplies by the weight and rotates, all of it
  // times `guard`.
  ZYFA_DEVICE void Load(float guard, uint64_t policy) {
    guard_ = guard;
    uint4 raw[kSlots][kChunks][kVectors];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) LoadChunk(i, j, policy, raw[i][j]);
    }
    if constexpr (Layout::kByMatrix) {
      auto& shared = Shared();
      // All warps come here with this guard, once.
      if (guard == 1.0f) Share(shared);
      Multiply(raw, shared);
    } else if constexpr (kRotates) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
#pragma unroll
        for (int i = 0; i < kSlots; ++i) Type::Widen(raw[i][j], held_[i][j]);
        Prepare(j);
      }
#pragma unroll
      for (auto& part : held_) Rotate(part);
    } else {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) held_[i][0][k] = raw[i][0][k];
      }
    }
  }

  // The largest magnitude of the warp; NaN if any is.
  ZYFA_DEVICE float Largest() {
    float largest = 0.0f;
    ForEach([&](int, int, const Chunk& y) {
#pragma unroll
      for (const float value : y) largest = Maximum(largest, fabsf(value));
    });
    if constexpr (!kRotates) Pin();
    return WarpMaximum(largest) * Norm();
  }

  ZYFA_DEVICE float LargestFinite() const {
    float largest = 0.0f;
    ForEach([&](int, int, const Chunk& y) { IncludeFinite(y, largest); });
    return WarpMaximum(largest) * Norm();
  }

  // The largest magnitude of each row's part, NaN if any is.
  ZYFA_DEVICE void LargestOfRows(float (&of_row)[kSlots]) const {
#pragma unroll
    for (float& largest : of_row) largest = 0.0f;
    ForEach([&](int i, int, const Chunk& y) {
#pragma unroll
      for (const float value : y) of_row[i] = Maximum(of_row[i], fabsf(value));
    });
  }

  ZYFA_DEVICE void LargestFiniteOfRows(float (&of_row)[kSlots]) const {
#pragma unroll
    for (float& largest : of_row) largest = 0.0f;
    ForEach([&](int i, int, const Chunk& y) { IncludeFinite(y, of_row[i]); });
  }

  // From the largest of each row's part to that of the row, the rotation's
  // factor included. All threads of the block call this.
  ZYFA_DEVICE void OverRows(float (&of_row)[kSlots],
                            uint32_t (&shared)[gpu::kQuantizeTokens]) const {
#pragma unroll
    for (int bit = 0; bit < 3; ++bit) {
      if (!Crosses(bit)) continue;
#pragma unroll
      for (float& largest : of_row) {
        const float other = __shfl_xor_sync(kAllLanes, largest, 1 << bit);
        largest = fmaxf(largest, other);
      }
    }
    if constexpr (!kWhole) {
      // A row may be of several warps.
      for (int i = static_cast<int>(threadIdx.x); i < gpu::kQuantizeTokens;
           i += static_cast<int>(blockDim.x)) {
        shared[i] = 0;
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        if (!IsValid(i)) continue;
        atomicMax(&shared[TokenOf(i)], __float_as_uint(of_row[i]));
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (!kWhole && IsValid(i)) {
        of_row[i] = __uint_as_float(shared[TokenOf(i)]);
      }
      of_row[i] *= Norm();
    }
  }

  // use(slot, token of the tile) for each of the lane's rows.
  template <class Use>
  ZYFA_DEVICE void ForRows(const Use& use) const {
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      if (IsValid(i)) use(i, TokenOf(i));
    }
  }

  // use(token of the tile) for those of which the lane has a part with NaN.
  template <class Use>
  ZYFA_DEVICE void ForNaN(const Use& use) const {
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
      bool nan = false;
#pragma unroll 1
      for (int j = 0; j < kChunks; ++j) {
        uint4 raw[kVectors];
        Chunk x;
        LoadChunk(i, j, KeepPolicy(), raw);
        Type::Widen(raw, x);
#pragma unroll
        for (const float value : x) nan |= value != value;
      }
      if (nan) use(TokenOf(i));
    }
  }

  // Of the lane's rows, for each channel: the sum, times gpu::kSumScale, of the
  // distances from `origin`, and that of their squares, which is not finite if
  // a number is not.
  ZYFA_DEVICE void Sums(const Chunk& origin, Chunk& sum, Chunk& squares) {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) sum[k] = squares[k] = 0.0f;
    ForEach([&](int, int, const Chunk& y) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        const float distance = y[k] - origin[k];
        sum[k] += distance;
        squares[k] = __fmaf_rn(distance, distance, squares[k]);
      }
    });
#pragma unroll
    for (float& x : sum) x *= gpu::kSumScale;
    Pin();
  }

  // The same of finite numbers alone, which may be so large that a sum needs
  // its scale from the first.
  ZYFA_DEVICE void FiniteSums(const Chunk& origin, Chunk& sum,
                              Chunk& squares) const {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) sum[k] = squares[k] = 0.0f;
    ForEach([&](int, int, const Chunk& y) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        if (!IsFinite(y[k])) continue;
        const float distance = y[k] - origin[k];
        sum[k] += __fmaf_rn(y[k], gpu::kSumScale, -gpu::kSumScale * origin[k]);
        squares[k] = __fmaf_rn(distance, distance, squares[k]);
      }
    });
  }

  // How many are finite.
  ZYFA_DEVICE void Count(Chunk& count) const {
#pragma unroll
    for (float& x : count) x = 0.0f;
    ForEach([&](int, int, const Chunk& y) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) count[k] += IsFinite(y[k]) ? 1.0f : 0.0f;
    });
  }

  // The largest and the smallest, of finite numbers alone if not all are.
  ZYFA_DEVICE void Extremes(bool finite, Chunk& high, Chunk& low) const {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      high[k] = __uint_as_float(kInfinityBits | 0x80000000u);
      low[k] = __uint_as_float(kInfinityBits);
    }
    ForEach([&](int, int, const Chunk& y) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        if (!finite && !IsFinite(y[k])) continue;
        high[k] = fmaxf(high[k], y[k]);
        low[k] = fminf(low[k], y[k]);
      }
    });
  }

  // A number of each channel that is not far from the tile's, and finite.
  ZYFA_DEVICE void Origin(Chunk& origin) const {
    uint4 raw[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const char* from = x_ + channel_ * Type::kBytes + k * 16;
      raw[k] = LoadIf(true, from, KeepPolicy());
    }
    Type::Widen(raw, origin);
#pragma unroll
    for (float& x : origin) x = IsFinite(x) ? x : 0.0f;
  }

  ZYFA_DEVICE int row() const { return row_; }
  ZYFA_DEVICE int channel() const { return channel_; }

  // What to multiply input and mean with so that no sum overflows.
  ZYFA_DEVICE float Guard() const {
    float largest = 0.0f;
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll 1
      for (int j = 0; j < kChunks; ++j) {
        uint4 raw[kVectors];
        Chunk x;
        LoadChunk(i, j, KeepPolicy(), raw);
        Type::Widen(raw, x);
        IncludeFinite(x, largest);
        if (mean_ != nullptr) {
          LoadMean(j, x);
          IncludeFinite(x, largest);
        }
      }
    }
    return WarpMaximum(largest) > kGuardAbove ? 1.0f / kGuardAbove : 1.0f;
  }

  // Divides by the descale, rounds and stores.
  ZYFA_DEVICE void Store(float descale) const {
    const Divisor by(descale);
    const float scale = Norm() * by.factor;
    ForEach([&](int i, int j, const Chunk& y) {
      Chunk quotients;
#pragma unroll
      for (int k = 0; k < kChunk; ++k) quotients[k] = by.Divide(y[k] * scale);
      StoreE4m3(i, j, quotients);
    });
  }

  // The same with a descale for each channel; tokens of which `nan` is not 0
  // become NaN.
  ZYFA_DEVICE void StoreByChannel(const float* descales,
                                  const uint8_t* nan) const {
    Chunk descale;
    LoadFloats(descales + channel_, descale);
    bool marked[kSlots] = {};
    ForRows([&](int i, int token) { marked[i] = __ldg(nan + token) != 0; });
    ForEach([&](int i, int j, const Chunk& y) {
      Chunk quotients;
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        const Divisor by(descale[k]);
        const float quotient = by.Divide(y[k] * by.factor);
        quotients[k] = marked[i] ? __uint_as_float(0x7fffffffu) : quotient;
      }
      StoreE4m3(i, j, quotients);
    });
  }

  // Multiplies each row by its number, rounds to int8 and stores.
  template <bool kFinite>
  ZYFA_DEVICE void StoreInt8(const float (&inverse)[kSlots]) const {
    ForEach([&](int i, int j, const Chunk& y) {
      uint32_t codes[kChunk];
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        if constexpr (kFinite) {
          // Rounded once, to the frame's integers.
          const float framed = __fmaf_rn(y[k], inverse[i], kByteFrame);
          codes[k] = __float_as_uint(framed);
        } else {
          const float number = y[k] == y[k] ? y[k] * inverse[i] : 0.0f;
          const float clamped = fmaxf(fminf(number, kInt8Max), -kInt8Max);
          codes[k] = __float_as_uint(clamped + kByteFrame);
        }
      }
      const uint2 bytes = {LowBytes(codes[0], codes[1], codes[2], codes[3]),
                           LowBytes(codes[4], codes[5], codes[6], codes[7])};
      *reinterpret_cast<uint2*>(values_ + ElementOf(i, j)) = bytes;
    });
  }

  // What makes the rotation orthonormal: what is held lacks it.
  ZYFA_DEVICE float Norm() const {
    if constexpr (!kRotates) return 1.0f;
    float unit = 1.0f;
    if constexpr (Layout::kByMatrix) unit = Type::kUnit;
    return 1.0f / (unit * sqrtf(static_cast<float>(hadamard_)));
  }

 private:
  static constexpr int kVectors = kChunk * Type::kBytes / 16;
  static constexpr int kChunkStride = Layout::kChunkStride;

  // Numbers as they came; or rotated ones, which take longer to make again.
  using Held = std::conditional_t<kRotates, Chunk, uint4[kVectors]>;

  // Has the compiler keep what is held, and not what was made of it.
  ZYFA_DEVICE void Pin() {
#pragma unroll
    for (auto& part : held_) {
#pragma unroll
      for (auto& chunk : part) {
#pragma unroll
        for (uint4& x : chunk) {
          asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w));
        }
      }
    }
  }

  static ZYFA_DEVICE void IncludeFinite(const Chunk& y, float& largest) {
#pragma unroll
    for (const float value : y)
      largest = fmaxf(largest, FiniteMagnitude(value));
  }

  ZYFA_DEVICE bool IsValid(int i) const {
    return i * Layout::kRowStep < valid_;
  }

  ZYFA_DEVICE int TokenOf(int i) const { return row_ + i * Layout::kRowStep; }

  ZYFA_DEVICE int64_t ElementOf(int i, int j) const {
    return element_ + i * step_ + j * kChunkStride;
  }

  ZYFA_DEVICE void LoadChunk(int i, int j, uint64_t policy,
                             uint4 (&raw)[kVectors]) const {
    const char* from = x_ + ElementOf(i, j) * Type::kBytes;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      raw[k] = LoadIf(IsValid(i), from + k * 16, policy);
    }
  }

  // From the first-level cache each time, for want of registers.
  static ZYFA_DEVICE float4 LoadFour(const float* from) {
    const uint4 raw = LoadIf(true, from, KeepPolicy());
    return {__uint_as_float(raw.x), __uint_as_float(raw.y),
            __uint_as_float(raw.z), __uint_as_float(raw.w)};
  }
  static ZYFA_DEVICE void LoadFloats(const float* from, Chunk& x) {
    const uint4 raw[] = {LoadIf(true, from, KeepPolicy()),
                         LoadIf(true, from + 4, KeepPolicy())};
    FromF32::Widen(raw, x);
  }
  ZYFA_DEVICE void LoadMean(int j, Chunk& mean) const {
    LoadFloats(mean_ + channel_ + j * kChunkStride, mean);
  }

  // Subtracts the mean, and multiplies by weight and guard. These are powers of
  // two, so that one rounding remains. Four channels at a time, for want of
  // registers.
  ZYFA_DEVICE void Prepare(int j) {
#pragma unroll
    for (int half = 0; half < kChunk; half += 4) {
      const int channel = channel_ + j * kChunkStride + half;
      float4 scale = {guard_, guard_, guard_, guard_};
      float4 shift = {-0.0f, -0.0f, -0.0f, -0.0f};
      if (weight_ != nullptr) {
        const float4 x = LoadFour(weight_ + channel);
        scale = {guard_ * x.x, guard_ * x.y, guard_ * x.z, guard_ * x.w};
      }
      if (mean_ != nullptr) {
        const float4 x = LoadFour(mean_ + channel);
        shift = {-scale.x * x.x, -scale.y * x.y, -scale.z * x.z,
                 -scale.w * x.w};
      }
#pragma unroll
      for (auto& part : held_) {
        float* y = &part[j][half];
        y[0] = __fmaf_rn(y[0], scale.x, shift.x);
        y[1] = __fmaf_rn(y[1], scale.y, shift.y);
        y[2] = __fmaf_rn(y[2], scale.z, shift.z);
        y[3] = __fmaf_rn(y[3], scale.w, shift.w);
      }
    }
  }

  ZYFA_DEVICE void Widen(const uint4 (&raw)[kVectors], const Chunk& mean,
                         Chunk& y) const {
    Type::Widen(raw, y);
    if (mean_ != nullptr) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        y[k] = __fmaf_rn(-mean[k], guard_, y[k] * guard_);
      }
    }
  }

  ZYFA_DEVICE void StoreE4m3(int i, int j, const Chunk& y) const {
    const uint2 codes = {PackE4m3(y[0], y[1]) | PackE4m3(y[2], y[3]) << 16,
                         PackE4m3(y[4], y[5]) | PackE4m3(y[6], y[7]) << 16};
    *reinterpret_cast<uint2*>(values_ + ElementOf(i, j)) = codes;
  }

  static ZYFA_DEVICE uint32_t LowBytes(uint32_t a, uint32_t b, uint32_t c,
                                       uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040),
                       0x5410);
  }

  // use(slot, chunk, y) for each chunk of the tokens that are there.
  template <class Use>
  ZYFA_DEVICE void ForEach(const Use& use) const {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        if (!IsValid(i)) continue;
        if constexpr (kRotates) {
          use(i, j, held_[i][j]);
        } else {
          Chunk y, mean;
          if (mean_ != nullptr) LoadMean(j, mean);
          Widen(held_[i][j], mean, y);
          use(i, j, y);
        }
      }
    }
  }

  // Whether the matrix is so large that it joins lanes by that bit.
  ZYFA_DEVICE bool Crosses(int bit) const {
    if constexpr (Layout::kByMatrix) return bit < 2;
    return kWhole || hadamard_ > kChunk << bit;
  }

  // ---- By matrix products
  //
  // A channel's number is 32 j + 8 t + 4 h + i: chunk j of lane t of a row's
  // four, half h of it, element i. The matrix is a product over these bits. Of
  // t and i, which are 16 channels, a warp's product takes care: they come in
  // as the rows of its second operand, whose columns are the 16 of the result,
  // and so arranged that a lane gets those where it has given. Butterflies
  // follow over j and h.

  static ZYFA_DEVICE auto& Shared() {
    __shared__ typename Layout::Shared shared;
    return shared;
  }

  // Computes what is shared, from the head's mean and weights.
  template <class Shared>
  ZYFA_DEVICE void Share(Shared& shared) const {
    constexpr int kDim = kChunks * kChunkStride;
    if (mean_ == nullptr && weight_ == nullptr) return;
    for (int i = static_cast<int>(threadIdx.x); i < kDim;
         i += static_cast<int>(blockDim.x)) {
      const float weight =
          Type::kUnit * (weight_ != nullptr ? __ldg(weight_ + i) : 1.0f);
      shared.weights[i] = static_cast<uint16_t>(Type::Narrow(weight));
      if (mean_ != nullptr) {
        const float mean = __ldg(mean_ + i);
        shared.means[0][i] = mean * weight;
        shared.means[1][i] = mean * (1.0f / kGuardAbove) * weight;
      }
    }
    __syncthreads();
    if (mean_ == nullptr) return;
    for (int i = static_cast<int>(threadIdx.x); i < kDim;
         i += static_cast<int>(blockDim.x)) {
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int from = 0; from < 16; ++from) {
        const int channel = (i & ~0x1b) | (from & 12) << 1 | (from & 3);
        const bool odd = __popc(channel & i & 0x1b) % 2 != 0;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float mean = shared.means[k][channel];
          sums[k] += odd ? mean : -mean;
        }
      }
      shared.shifts[0][i] = sums[0];
      shared.shifts[1][i] = sums[1];
    }
    __syncthreads();
  }

  template <class Shared>
  ZYFA_DEVICE void Multiply(const uint4 (&raw)[kSlots][kChunks][kVectors],
                            const Shared& shared) {
    const uint32_t g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    // Signs of two rows of the second operand, whose elements differ in the
    // lowest bit, in this lane's column of it.
    const uint32_t of_lane = __popc(t & g >> 1) % 2;
    const uint32_t signs = of_lane << 15 | (of_lane ^ (g & 1)) << 31;
    // The guard, which there is for bfloat16 alone, in exponents.
    const bool guarded = guard_ != 1.0f;
    const uint32_t lower = guarded ? 0x20002000u : 0u;
    const uint32_t unit = Type::Narrow(Type::kUnit) * 0x10001u;
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const int channel = channel_ + j * kChunkStride;
      uint4 weights = {unit, unit, unit, unit};
      if (mean_ != nullptr || weight_ != nullptr) {
        weights = *reinterpret_cast<const uint4*>(shared.weights + channel);
      }
      const uint32_t w[] = {weights.x, weights.y, weights.z, weights.w};
      const uint4 a = raw[0][j][0], b = raw[1][j][0];
      const uint32_t upper[] = {a.x, a.y, a.z, a.w};
      const uint32_t under[] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t rows[] = {upper[2 * h], under[2 * h], upper[2 * h + 1],
                                 under[2 * h + 1]};
        float4 shift = {0.0f, 0.0f, 0.0f, 0.0f};
        if (mean_ != nullptr) {
          shift = *reinterpret_cast<const float4*>(
              &shared.shifts[guarded][channel + 4 * h]);
        }
        const uint32_t first = (w[2 * h] - lower) ^ signs;
        const uint32_t second = (w[2 * h + 1] - lower) ^ signs;
        float even[4], odd[4];
        Type::Multiply(even, rows, {first, second},
                       {shift.x, shift.y, shift.x, shift.y});
        Type::Multiply(odd, rows, {first, second ^ 0x80008000u},
                       {shift.z, shift.w, shift.z, shift.w});
#pragma unroll
        for (int i = 0; i < kSlots; ++i) {
          float* const y = &held_[i][j][4 * h];
          y[0] = even[2 * i];
          y[1] = even[2 * i + 1];
          y[2] = odd[2 * i];
          y[3] = odd[2 * i + 1];
        }
      }
    }
#pragma unroll
    for (auto& part : held_) {
#pragma unroll
      for (auto& y : part) {
#pragma unroll
        for (int k = 0; k < 4; ++k) Butterfly(y[k], y[k + 4]);
      }
      RotateChunks(part, Layout::kHadamard / kChunkStride);
    }
  }

  // ---- By lanes

  // Butterflies between as many chunks.
  static ZYFA_DEVICE void RotateChunks(Chunk (&part)[kChunks], int count) {
#pragma unroll
    for (int stride = 1; stride < count; stride *= 2) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        if (j & stride) continue;
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
          Butterfly(part[j][k], part[j + stride][k]);
        }
      }
    }
  }

  ZYFA_DEVICE void Rotate(Chunk (&part)[kChunks]) const {
#pragma unroll
    for (auto& y : part) {
#pragma unroll
      for (int stride = 1; stride < kChunk; stride *= 2) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
          if ((k & stride) == 0) Butterfly(y[k], y[k + stride]);
        }
      }
    }
    RotateChunks(part, kChunks);
#pragma unroll
    for (int bit = 0; bit < 3; ++bit) {
      if (!Crosses(bit)) continue;
      const float sign = (threadIdx.x >> bit & 1) != 0 ? -1.0f : 1.0f;
#pragma unroll
      for (auto& y : part) {
#pragma unroll
        for (float& value : y) {
          const float other = __shfl_xor_sync(kAllLanes, value, 1 << bit);
          value = __fmaf_rn(sign, value, other);
        }
      }
    }
  }

  const char* const x_;  // of the tile
  char* const values_;   // of the tile
  const int hadamard_;
  const float* mean_;    // of the head; null: zeros
  const float* weight_;  // of the head; null: ones
  int row_;              // the lane's, of a step
  int channel_;          // the lane's first
  int element_;          // of the tile, the lane's first
  int step_;             // elements from slot to slot
  int valid_;            // tokens from the lane's first row to the last
  float guard_;
  Held held_[kSlots][kChunks];
};

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_QUANTIZE_TILE_H_
