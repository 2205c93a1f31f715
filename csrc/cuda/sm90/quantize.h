// FP8 quantisation for Hopper: a block takes 128 tokens of one head, and holds
// them in registers from the one load of them to the one store.
//
// A row (a token of the head) is cut into parts of eight elements, 16 bytes of
// the two-byte types: consecutive threads hold consecutive parts of consecutive
// rows, so that a warp's load or store is of whole lines. Where rows are
// rotated by a Hadamard matrix, eight lanes (or fewer, of a smaller matrix)
// hold the row of it: a part is then one, two or four chunks of eight elements,
// eight chunks apart. Butterflies within a lane come first, then those between
// lanes.
//
// All loads of a thread start before the first is used. Blocks that round after
// others have found descales come in the reverse order: what those read last
// may still be in the L2 cache.
//
// NaN, infinities, and numbers so large that a sum of them overflows, all leave
// a maximum that is not finite. What they need beyond the common path is apart
// from it, and a warp decides for itself.

#ifndef ZYFA_CUDA_SM90_QUANTIZE_H_
#define ZYFA_CUDA_SM90_QUANTIZE_H_

#include <cstdint>
#include <type_traits>

#include "csrc/cuda/quantize_plan.h"
#include "csrc/cuda/sm90/intrinsics.h"
#include "csrc/gpu/quantize_args.h"

namespace zyfa::sm90 {

using gpu::kChunk;
using gpu::QuantizeArgs;

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr float kInverseFp8Max = 1.0f / 448.0f;
constexpr float kSmallestNormal = 0x1p-126f;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr float kGuardAbove = 0x1p64f;

using Chunk = float[kChunk];

// ---- Element types: eight elements from memory to float32.

struct FromBF16 {
  static constexpr int kBytes = 2;
  static constexpr bool kOverflows = true;
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

ZYFA_DEVICE void Butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// y / descale, the sign of zeros included. The first quotient is within two
// units of the last place; its remainder is exact, and corrects it.
ZYFA_DEVICE float Quotient(float y, float descale, float inverse) {
  const float quotient = y * inverse;
  const float excess = __fmaf_rn(quotient, descale, -y);
  return __fmaf_rn(-excess, inverse, quotient);
}

// ---- The warp's share of the tile

// kSlots parts of kChunks chunks each for every lane.
template <class Type, int kSlots, int kChunks, bool kRotates>
class WarpTile {
 public:
  ZYFA_DEVICE WarpTile(const QuantizeArgs& args, int64_t first_element,
                       int valid_tokens, int64_t head)
      : x_(static_cast<const char*>(args.x) + first_element * Type::kBytes),
        values_(static_cast<char*>(args.values) + first_element),
        hadamard_(args.hadamard) {
    constexpr int kRows = gpu::kQuantizeTokens / kSlots;
    const uint32_t parts = args.head_dim / (kChunk * kChunks);
    const uint32_t row =
        (threadIdx.x * args.row_inverse) >> gpu::kRowInverseShift;
    row_ = static_cast<int>(row);
    channel_ = static_cast<int>((threadIdx.x - row * parts) * kChunk);
    const int token = args.heads * args.head_dim;
    element_ = row_ * token + channel_;
    step_ = kRows * token;
    // The last warp may have threads beyond the step's last row.
    valid_ = row_ < kRows ? valid_tokens - row_ : 0;
    mean_ = args.mean == nullptr ? nullptr : args.mean + head * args.head_dim;
  }

  // Loads, subtracts the mean and rotates, all of it times `guard`.
  ZYFA_DEVICE void Load(float guard, uint64_t policy) {
    guard_ = guard;
    uint4 raw[kSlots][kChunks][kVectors];
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) LoadChunk(i, j, policy, raw[i][j]);
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      Chunk mean;
      if (kRotates && mean_ != nullptr) LoadMean(j, mean);
#pragma unroll
      for (int i = 0; i < kSlots; ++i) {
        if constexpr (kRotates) {
          Widen(raw[i][j], mean, held_[i][j]);
        } else {
#pragma unroll
          for (int k = 0; k < kVectors; ++k) held_[i][j][k] = raw[i][j][k];
        }
      }
    }
    if constexpr (kRotates) {
#pragma unroll
      for (auto& part : held_) Rotate(part);
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

  // Of the lane's rows: see gpu::kStatistics.
  ZYFA_DEVICE void Measure(
      float (&statistics)[gpu::kStatistics][kChunk]) const {
    Chunk& sum = statistics[0];
    Chunk& count = statistics[1];
    Chunk& high = statistics[2];
    Chunk& low = statistics[3];
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      sum[k] = count[k] = 0.0f;
      high[k] = __uint_as_float(kInfinityBits | 0x80000000u);
      low[k] = __uint_as_float(kInfinityBits);
    }
    ForEach([&](int, int, const Chunk& y) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        if (!IsFinite(y[k])) continue;
        sum[k] = __fmaf_rn(y[k], gpu::kSumScale, sum[k]);
        count[k] += 1.0f;
        high[k] = fmaxf(high[k], y[k]);
        low[k] = fminf(low[k], y[k]);
      }
    });
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
    // Infinities become the largest FP8 number, to which this rounds; that
    // number times the largest descale would overflow.
    constexpr float kAlmostMax = 447.0f;
    // Below this, remainders of the division could be too small for float32.
    const float factor = descale < 0x1p-60f ? 0x1p64f : 1.0f;
    descale *= factor;
    const float limit = kAlmostMax * descale;
    const float scale = Norm() * factor;
    const float inverse = 1.0f / descale;
    ForEach([&](int i, int j, const Chunk& y) {
      float quotients[kChunk];
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        const float clamped = Maximum(Minimum(y[k] * scale, limit), -limit);
        quotients[k] = Quotient(clamped, descale, inverse);
      }
      const uint2 codes = {PackE4m3(quotients[0], quotients[1]) |
                               PackE4m3(quotients[2], quotients[3]) << 16,
                           PackE4m3(quotients[4], quotients[5]) |
                               PackE4m3(quotients[6], quotients[7]) << 16};
      *reinterpret_cast<uint2*>(values_ + ElementOf(i, j)) = codes;
    });
  }

 private:
  static constexpr int kVectors = kChunk * Type::kBytes / 16;
  static constexpr int kChunkStride = gpu::kRotatedLanes * kChunk;

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
    return i * (gpu::kQuantizeTokens / kSlots) < valid_;
  }

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
  ZYFA_DEVICE void LoadMean(int j, Chunk& mean) const {
    const float* from = mean_ + channel_ + j * kChunkStride;
    const uint4 raw[] = {LoadIf(true, from, KeepPolicy()),
                         LoadIf(true, from + 4, KeepPolicy())};
    FromF32::Widen(raw, mean);
  }

  ZYFA_DEVICE void Widen(const uint4 (&raw)[kVectors], const Chunk& mean,
                         Chunk& y) const {
    Type::Widen(raw, y);
    if (mean_ != nullptr) {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        y[k] = __fmaf_rn(-mean[k], guard_, y[k] * guard_);
      }
    } else if (kRotates && guard_ != 1.0f) {
#pragma unroll
      for (float& value : y) value *= guard_;
    }
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

  // What makes the rotation orthonormal: what is held lacks it.
  ZYFA_DEVICE float Norm() const {
    return kRotates ? 1.0f / sqrtf(static_cast<float>(hadamard_)) : 1.0f;
  }

  // Whether the matrix is so large that it joins lanes by that bit.
  ZYFA_DEVICE bool Crosses(int bit) const {
    return kChunks > 1 || hadamard_ > kChunk << bit;
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
#pragma unroll
    for (int stride = 1; stride < kChunks; stride *= 2) {
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        if (j & stride) continue;
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
          Butterfly(part[j][k], part[j + stride][k]);
        }
      }
    }
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
  const float* mean_;  // of the head; null: zeros
  int row_;            // the lane's, of a step
  int channel_;        // the lane's first
  int element_;        // of the tile, the lane's first
  int step_;           // elements from slot to slot
  int valid_;          // tokens from the lane's first row to the last
  float guard_;
  Held held_[kSlots][kChunks];
};

// ---- The kernel

// The largest of the block's; every thread of a warp has the warp's.
ZYFA_DEVICE float BlockMaximum(float of_warp) {
  __shared__ float of_warps[cuda::kMaxQuantizeThreads / 32];
  const uint32_t lane = threadIdx.x % 32;
  if (lane == 0) of_warps[threadIdx.x / 32] = of_warp;
  __syncthreads();
  return WarpMaximum(lane < blockDim.x / 32 ? of_warps[lane] : 0.0f);
}

// The block's tile. Heads come first: what is loaded at one time lies together.
struct Tile {
  ZYFA_DEVICE explicit Tile(const QuantizeArgs& args) {
    const auto tiles = static_cast<uint32_t>(gpu::QuantizeTiles(args.tokens));
    const auto heads = static_cast<uint32_t>(args.heads);
    const uint32_t block =
        args.given == nullptr ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    const uint32_t head_of_batch = block % heads;
    const uint32_t tile = block / heads % tiles;
    const uint32_t batch = block / heads / tiles;
    const int first_token = static_cast<int>(tile) * gpu::kQuantizeTokens;
    const int64_t token = int64_t{batch} * args.tokens + first_token;
    head = int64_t{batch} * heads + head_of_batch;
    index = head * tiles + tile;
    first_element = (token * heads + head_of_batch) * args.head_dim;
    valid_tokens = min(args.tokens - first_token, gpu::kQuantizeTokens);
  }

  int64_t head;   // of all batches
  int64_t index;  // of all heads' tiles
  int64_t first_element;
  int valid_tokens;
};

template <class Type, int kSlots, int kChunks, bool kRotates>
ZYFA_DEVICE void Quantize(const QuantizeArgs& args) {
  const Tile tile(args);
  WarpTile<Type, kSlots, kChunks, kRotates> warp(args, tile.first_element,
                                                 tile.valid_tokens, tile.head);

  const bool finds = args.given == nullptr;
  const bool overflows = Type::kOverflows && (kRotates || args.mean != nullptr);
  const uint64_t policy =
      args.values == nullptr ? KeepPolicy() : LastUsePolicy();
  float guard = 1.0f;
  float largest = 0.0f;
#pragma unroll 1
  for (;;) {
    warp.Load(guard, policy);
    if (!finds && !overflows) break;
    largest = warp.Largest();
    if (IsFinite(largest) || !overflows || guard != 1.0f) break;
    guard = warp.Guard();
    if (guard == 1.0f) break;
  }

  float descale;
  if (!finds) {
    descale = __ldg(args.given + tile.index);
  } else {
    if (!IsFinite(largest)) largest = warp.LargestFinite();
    // Rounding keeps the order: the largest of the descales is the descale of
    // the largest. A descale below the normal range could be flushed to zero.
    const float of_warp =
        largest == 0.0f
            ? 0.0f
            : fmaxf(largest * kInverseFp8Max, kSmallestNormal) / guard;
    const float of_tile = BlockMaximum(of_warp);
    descale = of_tile == 0.0f ? args.zero_descale : of_tile;
    if (threadIdx.x == 0) args.found[tile.index] = descale;
  }
  if (args.values == nullptr) return;
  warp.Store(descale * guard);
}

// The channels' statistics of a tile. Sums are of a thread's rows, from the
// first to the last, and then of the threads', likewise.
template <class Type, int kSlots>
ZYFA_DEVICE void Measure(const QuantizeArgs& args) {
  constexpr int kRows = gpu::kQuantizeTokens / kSlots;
  alignas(16) __shared__ float of_rows[cuda::kMaxQuantizeThreads * kChunk];
  const Tile tile(args);
  WarpTile<Type, kSlots, 1, false> warp(args, tile.first_element,
                                        tile.valid_tokens, tile.head);
  warp.Load(1.0f, KeepPolicy());
  float statistics[gpu::kStatistics][kChunk];
  warp.Measure(statistics);

  float* const mine = of_rows + warp.row() * args.head_dim + warp.channel();
  float* const to = args.found + tile.index * gpu::kStatistics * args.head_dim;
#pragma unroll
  for (int i = 0; i < gpu::kStatistics; ++i) {
    if (warp.row() < kRows) {
#pragma unroll
      for (int k = 0; k < kChunk; k += 4) {
        const float* x = statistics[i] + k;
        *reinterpret_cast<float4*>(mine + k) = {x[0], x[1], x[2], x[3]};
      }
    }
    __syncthreads();
    for (int channel = static_cast<int>(threadIdx.x); channel < args.head_dim;
         channel += static_cast<int>(blockDim.x)) {
      float all = of_rows[channel];
#pragma unroll
      for (int k = 1; k < kRows; ++k) {
        const float next = of_rows[k * args.head_dim + channel];
        all = i < 2 ? all + next : i == 2 ? fmaxf(all, next) : fminf(all, next);
      }
      to[i * args.head_dim + channel] = all;
    }
    __syncthreads();
  }
}

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_QUANTIZE_H_
