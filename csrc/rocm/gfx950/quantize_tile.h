// The part of a tile that a wave holds: loads, rotation, magnitudes, rounding.
// See quantize.h.

#ifndef ZYFA_ROCM_GFX950_QUANTIZE_TILE_H_
#define ZYFA_ROCM_GFX950_QUANTIZE_TILE_H_

#include "csrc/gpu/quantize_args.h"
#include "csrc/rocm/gfx950/intrinsics.h"
#include "csrc/rocm/quantize_plan.h"

namespace zyfa::gfx950 {

using gpu::kChunk;
using gpu::kGuardAbove;
using gpu::kInfinityBits;
using gpu::kInt8Max;
using gpu::kInverseFp8Max;
using gpu::kInverseInt8Max;
using gpu::kSmallestNormal;
using gpu::QuantizeArgs;

constexpr int kQuantizeWaves = rocm::kQuantizeThreads / 64;
constexpr int kPairs = kChunk / 2;

using Chunk = F32x2[kPairs];

// ---- Element types: eight elements from memory to float32.

struct FromBF16 {
  static constexpr int kBytes = 2;
  static constexpr bool kOverflows = true;
  using Raw = I32x4;
  static __attribute__((device, always_inline)) void Widen(Raw raw, Chunk& y) {
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t both = raw[i];
      y[i] = {BitCast<float>(both << 16), BitCast<float>(both & 0xffff0000u)};
    }
  }
};

struct FromF16 {
  static constexpr int kBytes = 2;
  static constexpr bool kOverflows = false;
  using Raw = I32x4;
  static __attribute__((device, always_inline)) void Widen(Raw raw, Chunk& y) {
    for (int i = 0; i < kPairs; ++i) {
      const int32_t both = raw[i];
      y[i] = __builtin_convertvector(BitCast<F16x2>(both), F32x2);
    }
  }
};

struct FromF32 {
  static constexpr int kBytes = 4;
  static constexpr bool kOverflows = true;
  using Raw = I32x8;
  static __attribute__((device, always_inline)) void Widen(Raw raw, Chunk& y) {
    for (int i = 0; i < kPairs; ++i) {
      y[i] = {BitCast<float>(int32_t{raw[2 * i]}),
              BitCast<float>(int32_t{raw[2 * i + 1]})};
    }
  }
};

// ---- Memory

class Buffer {
 public:
  // `bytes` from `address`; what is beyond reads as zeros.
  __attribute__((device, always_inline)) Buffer(const void* address, int bytes)
      : resource_(__builtin_amdgcn_make_buffer_rsrc(
            const_cast<void*>(address), 0, Uniform(bytes), 0x00020000)) {}

  template <class T>
  __attribute__((device, always_inline)) T Load(int offset) const {
    if constexpr (sizeof(T) == 32) {
      const I32x4 low = Load<I32x4>(offset);
      const I32x4 high = Load<I32x4>(offset + 16);
      return BitCast<T>(
          __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7));
    } else {
      static_assert(sizeof(T) == 16);
      return BitCast<T>(
          __builtin_amdgcn_raw_buffer_load_b128(resource_, offset, 0, 0));
    }
  }
  __attribute__((device, always_inline)) uint8_t LoadByte(int offset) const {
    return __builtin_amdgcn_raw_buffer_load_b8(resource_, offset, 0, 0);
  }
  __attribute__((device, always_inline)) void Store(I32x2 x, int offset) const {
    __builtin_amdgcn_raw_buffer_store_b64(x, resource_, offset, 0, 0);
  }
  __attribute__((device, always_inline)) void Store(float x, int offset) const {
    __builtin_amdgcn_raw_buffer_store_b32(BitCast<uint32_t>(x), resource_,
                                          offset, 0, 0);
  }
  __attribute__((device, always_inline)) void Store(uint8_t x,
                                                    int offset) const {
    __builtin_amdgcn_raw_buffer_store_b8(x, resource_, offset, 0, 0);
  }

 private:
  __amdgpu_buffer_rsrc_t resource_;
};

// ---- Between lanes

// DPP controls: the lane that each lane reads from.
constexpr int kFlipBit0 = 0xb1;        // quad_perm:[1,0,3,2]
constexpr int kFlipBit1 = 0x4e;        // quad_perm:[2,3,0,1]
constexpr int kMirrorOfEight = 0x141;  // row_half_mirror
constexpr int kMirrorOfRow = 0x140;    // row_mirror
constexpr int kFlipBit3 = 0x128;       // row_ror:8

template <int kControl>
ZYFA_DEVICE float FromLane(float x) {
  return BitCast<float>(__builtin_amdgcn_update_dpp(0, BitCast<int32_t>(x),
                                                    kControl, 0xf, 0xf, true));
}

ZYFA_DEVICE float UniformFloat(float x) {
  return BitCast<float>(Uniform(BitCast<int32_t>(x)));
}

// y += sign * (y of the lane whose number differs in that bit). Written as
// text, since the compiler takes two instructions for one; a DPP read needs two
// cycles after the write.
#define ZYFA_ADD_FROM_LANE(name, control)                             \
  ZYFA_DEVICE void name(Chunk& y, float sign) {                       \
    float x[] = {y[0][0], y[0][1], y[1][0], y[1][1],                  \
                 y[2][0], y[2][1], y[3][0], y[3][1]};                 \
    asm("s_nop 1\n\t"                                                 \
        "v_fmac_f32_dpp %0, %0, %8 " control                          \
        "\n\t"                                                        \
        "v_fmac_f32_dpp %1, %1, %8 " control                          \
        "\n\t"                                                        \
        "v_fmac_f32_dpp %2, %2, %8 " control                          \
        "\n\t"                                                        \
        "v_fmac_f32_dpp %3, %3, %8 " control                          \
        "\n\t"                                                        \
        "v_fmac_f32_dpp %4, %4, %8 " control                          \
        "\n\t"                                                        \
        "v_fmac_f32_dpp %5, %5, %8 " control                          \
        "\n\t"                                                        \
        "v_fmac_f32_dpp %6, %6, %8 " control                          \
        "\n\t"                                                        \
        "v_fmac_f32_dpp %7, %7, %8 " control                          \
        : "+v"(x[0]), "+v"(x[1]), "+v"(x[2]), "+v"(x[3]), "+v"(x[4]), \
          "+v"(x[5]), "+v"(x[6]), "+v"(x[7])                          \
        : "v"(sign));                                                 \
    for (int i = 0; i < kPairs; ++i) y[i] = {x[2 * i], x[2 * i + 1]}; \
  }
ZYFA_ADD_FROM_LANE(AddFlippingBit0,
                   "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf")
ZYFA_ADD_FROM_LANE(AddFlippingBit1,
                   "quad_perm:[2,3,0,1] row_mask:0xf bank_mask:0xf")
ZYFA_ADD_FROM_LANE(AddFlippingBit3, "row_ror:8 row_mask:0xf bank_mask:0xf")
#undef ZYFA_ADD_FROM_LANE

// The largest of a wave's; NaN if any is.
ZYFA_DEVICE float WaveMaximum(float x) {
  x = Maximum(x, FromLane<kFlipBit0>(x));
  x = Maximum(x, FromLane<kFlipBit1>(x));
  x = Maximum(x, FromLane<kMirrorOfEight>(x));
  x = Maximum(x, FromLane<kMirrorOfRow>(x));
  const auto rows = __builtin_amdgcn_permlane16_swap(
      BitCast<uint32_t>(x), BitCast<uint32_t>(x), false, false);
  x = Maximum(BitCast<float>(rows[0]), BitCast<float>(rows[1]));
  const F32x2 halves = BothHalves(x);
  return UniformFloat(Maximum(halves[0], halves[1]));
}

// Of numbers below 2^24: one instruction, and no more bits than are needed.
ZYFA_DEVICE uint32_t Product24(uint32_t a, uint32_t b) {
  return (a & 0xffffffu) * (b & 0xffffffu);
}

ZYFA_DEVICE float Minimum(float a, float b) {
  return __builtin_elementwise_minimum(a, b);
}

// The magnitude, 0 of what is not finite.
ZYFA_DEVICE float FiniteMagnitude(float x) {
  const uint32_t bits = BitCast<uint32_t>(x) & 0x7fffffffu;
  return BitCast<float>(bits < kInfinityBits ? bits : 0u);
}

ZYFA_DEVICE bool IsFinite(float x) {
  return (BitCast<uint32_t>(x) & kInfinityBits) != kInfinityBits;
}

// The descale of numbers up to `largest`. One below the normal range could be
// flushed to zero.
ZYFA_DEVICE float DescaleOf(float largest, float inverse_max) {
  return Maximum(largest * inverse_max, kSmallestNormal);
}

// A small number plus this is rounded to an integer, and has it as its lowest
// bits.
constexpr float kByteFrame = 0x1.8p23f;

ZYFA_DEVICE int32_t LowBytes(F32x2 low, F32x2 high) {
  const auto both = [](F32x2 x) {
    return __builtin_amdgcn_perm(BitCast<uint32_t>(x[1]),
                                 BitCast<uint32_t>(x[0]), 0x0c0c0400);
  };
  return static_cast<int32_t>(
      __builtin_amdgcn_perm(both(high), both(low), 0x05040100));
}

// The larger magnitude, with a sign bit if either has one: a mark beside it.
ZYFA_DEVICE float LargerMarked(float a, float b) {
  const float larger = Maximum(__builtin_fabsf(a), __builtin_fabsf(b));
  const uint32_t marks = (BitCast<uint32_t>(a) | BitCast<uint32_t>(b)) >> 31;
  return BitCast<float>(BitCast<uint32_t>(larger) | marks << 31);
}

// ---- The wave's share of the tile

ZYFA_DEVICE void GroupBarrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Where rows meet of which a wave has a part.
template <int kSlots>
struct RowsLds {
  float of_parts[kSlots * rocm::kQuantizeThreads];
  float of_rows[gpu::kQuantizeTokens];
};

// kSlots parts of kChunks chunks each for every lane.
template <class Type, int kSlots, int kChunks, bool kRotates>
class WaveTile {
 public:
  __attribute__((device, always_inline)) WaveTile(const QuantizeArgs& args,
                                                  int64_t first_element,
                                                  int valid_tokens,
                                                  int64_t head)
      : input_(static_cast<const char*>(args.x) + first_element * Type::kBytes,
               Extent(args, valid_tokens) * Type::kBytes),
        output_(static_cast<char*>(args.values) + first_element,
                Extent(args, valid_tokens)),
        mean_(args.mean + head * args.head_dim, args.head_dim * 4),
        weight_(args.weight + head * args.head_dim, args.head_dim * 4),
        centers_(args.mean != nullptr),
        weighs_(args.weight != nullptr),
        hadamard_(args.hadamard),
        row_inverse_(args.row_inverse) {
    const int lane = Thread() % 64;
    const uint32_t parts = args.head_dim / (kChunk * kChunks);
    const uint32_t row = args.heads * args.head_dim;
    for (int i = 0; i < kSlots; ++i) {
      const uint32_t token = TokenOf(i);
      const uint32_t channel = (PartOf(i) - Product24(token, parts)) * kChunk;
      // A token beyond the tile stays within the range of an offset.
      const uint32_t within =
          token < gpu::kQuantizeTokens ? token : gpu::kQuantizeTokens;
      element_[i] = Product24(within, row) + channel;
      channel_[i] =
          token < static_cast<uint32_t>(valid_tokens) ? channel : kNoChannel;
    }
    if constexpr (kRotates) {
      const float norm = __builtin_sqrtf(static_cast<float>(hadamard_));
      norm_ = 1.0f / norm;
      const int bits[] = {0, 1, 3};
      for (int i = 0; i < 3; ++i) {
        const bool odd = (lane >> bits[i] & 1) != 0;
        sign_[i] = odd ? -1.0f : 1.0f;
        if (Crosses(i) && odd) norm_ = -norm_;
      }
    }
  }

  // Loads; subtracts the mean, multiplies by the weight and rotates, all of it
  // times `guard`.
  __attribute__((device, always_inline)) void Load(float guard) {
    for (int i = 0; i < kSlots; ++i) {
      for (int j = 0; j < kChunks; ++j) Widen(i, j, y_[i][j]);
    }
    if (guard != 1.0f) Multiply(guard);
    if (centers_) {
      for (int i = 0; i < kSlots; ++i) {
        for (int j = 0; j < kChunks; ++j) {
          Chunk mean;
          LoadFrom(mean_, i, j, mean);
          for (int k = 0; k < kPairs; ++k) {
            y_[i][j][k] = Fma(-mean[k], F32x2{guard, guard}, y_[i][j][k]);
          }
        }
      }
    }
    if (kRotates && weighs_) {
      for (int i = 0; i < kSlots; ++i) {
        for (int j = 0; j < kChunks; ++j) {
          Chunk weight;
          LoadFrom(weight_, i, j, weight);
          for (int k = 0; k < kPairs; ++k) y_[i][j][k] *= weight[k];
        }
      }
    }
    if constexpr (kRotates) Rotate();
  }

  // The largest magnitude of the wave; NaN if any is.
  __attribute__((device, always_inline)) float Largest() {
    float largest = 0.0f;
    ForEach([&](F32x2 y) {
      largest = Maximum(largest, __builtin_fabsf(y[0]));
      largest = Maximum(largest, __builtin_fabsf(y[1]));
    });
    return WaveMaximum(largest);
  }

  __attribute__((device, always_inline)) float LargestFinite() {
    float largest = 0.0f;
    ForEach([&](F32x2 y) {
      largest = Maximum(largest, FiniteMagnitude(y[0]));
      largest = Maximum(largest, FiniteMagnitude(y[1]));
    });
    return WaveMaximum(largest);
  }

  // What to multiply input and mean with so that no sum overflows.
  __attribute__((device, always_inline)) float Guard() {
    Forget();
    float largest = 0.0f;
    const auto include = [&](const Chunk& x) {
      for (const F32x2 pair : x) {
        largest = Maximum(largest, FiniteMagnitude(pair[0]));
        largest = Maximum(largest, FiniteMagnitude(pair[1]));
      }
    };
    for (int i = 0; i < kSlots; ++i) {
      for (int j = 0; j < kChunks; ++j) {
        Chunk x;
        Widen(i, j, x);
        include(x);
        if (centers_) {
          LoadFrom(mean_, i, j, x);
          include(x);
        }
      }
    }
    Forget();
    return WaveMaximum(largest) > kGuardAbove ? 1.0f / kGuardAbove : 1.0f;
  }

  // Infinities become the largest FP8 numbers.
  __attribute__((device, always_inline)) void Saturate(float descale) {
    const float limit = kAlmostMax * descale;
    ForEach([&](F32x2& y) {
      y = {Saturated(y[0], limit), Saturated(y[1], limit)};
    });
  }

  // Divides by the descale, rounds and stores.
  __attribute__((device, always_inline)) void Store(float descale) {
    if (descale < kSmall) {
      descale *= 1.0f / kSmall;
      Multiply(1.0f / kSmall);
    }
    const F32x2 by = {descale, descale};
    const F32x2 inverse = {1.0f / descale, 1.0f / descale};
    for (int i = 0; i < kSlots; ++i) {
      for (int j = 0; j < kChunks; ++j) {
        I32x2 codes = {0, 0};
        for (int k = 0; k < kPairs; k += 2) {
          const F32x2 low = Divide(y_[i][j][k], by, inverse);
          const F32x2 high = Divide(y_[i][j][k + 1], by, inverse);
          codes[k / 2] = PackFp8(low, high);
        }
        output_.Store(codes, element_[i] + j * kChunkStride);
      }
    }
  }

  // The largest magnitude of each row's part; NaN if any is.
  __attribute__((device, always_inline)) void LargestOfRows(
      float (&of_row)[kSlots]) const {
    for (int i = 0; i < kSlots; ++i) {
      of_row[i] = 0.0f;
      for (const auto& chunk : y_[i]) {
        for (const F32x2 y : chunk) {
          of_row[i] = Maximum(of_row[i], __builtin_fabsf(y[0]));
          of_row[i] = Maximum(of_row[i], __builtin_fabsf(y[1]));
        }
      }
    }
  }

  // The largest finite magnitude of each row's part, marked if the row has NaN.
  __attribute__((device, always_inline)) void LargestFiniteOfRows(
      float (&of_row)[kSlots]) {
    Forget();
    for (int i = 0; i < kSlots; ++i) {
      of_row[i] = 0.0f;
      bool nan = false;
      for (int j = 0; j < kChunks; ++j) {
        for (const F32x2 y : y_[i][j]) {
          of_row[i] = Maximum(of_row[i], FiniteMagnitude(y[0]));
          of_row[i] = Maximum(of_row[i], FiniteMagnitude(y[1]));
        }
        Chunk x;
        Widen(i, j, x);
        for (const F32x2 y : x) nan |= y[0] != y[0] || y[1] != y[1];
      }
      if (nan) of_row[i] = -of_row[i];
    }
  }

  // From each part's, marked or not, to each row's. All waves call this.
  __attribute__((device, always_inline)) void OverRows(
      float (&of_row)[kSlots], int head_dim, RowsLds<kSlots>& lds) const {
    if constexpr (kWhole) {
      for (float& x : of_row) {
        x = LargerMarked(x, FromLane<kFlipBit0>(x));
        x = LargerMarked(x, FromLane<kFlipBit1>(x));
        x = LargerMarked(x, FromLane<kFlipBit3>(x));
      }
    } else {
      const uint32_t parts = head_dim / kChunk;
      for (int i = 0; i < kSlots; ++i) lds.of_parts[PartOf(i)] = of_row[i];
      GroupBarrier();
      if (Thread() < gpu::kQuantizeTokens) {
        const uint32_t first = Product24(Thread(), parts);
        float all = lds.of_parts[first];
        for (uint32_t i = 1; i < parts; ++i) {
          all = LargerMarked(all, lds.of_parts[first + i]);
        }
        lds.of_rows[Thread()] = all;
      }
      GroupBarrier();
      for (int i = 0; i < kSlots; ++i) {
        const uint32_t token = TokenOf(i);
        constexpr uint32_t kLast = gpu::kQuantizeTokens - 1;
        of_row[i] = lds.of_rows[token < kLast ? token : kLast];
      }
    }
  }

  // Stores a number of each row, of type T.
  template <class T>
  __attribute__((device, always_inline)) void StoreOfRows(
      const Buffer& to, const T (&of_row)[kSlots]) const {
    for (int i = 0; i < kSlots; ++i) {
      const int offset = TokenOf(i) * static_cast<int>(sizeof(T));
      to.Store(of_row[i], channel_[i] == 0 ? offset : kNowhere);
    }
  }

  // What int8 has no number for becomes one: NaN 0, infinities the largest.
  __attribute__((device, always_inline)) void SaturateInt8(
      const float (&descale)[kSlots]) {
    for (int i = 0; i < kSlots; ++i) {
      const float limit = kInt8Max * descale[i];
      for (auto& chunk : y_[i]) {
        for (F32x2& y : chunk) {
          for (int k = 0; k < 2; ++k) {
            y[k] = Saturated(y[k] == y[k] ? y[k] : 0.0f, limit);
          }
        }
      }
    }
  }

  // Divides each row by its descale, rounds to int8 and stores.
  __attribute__((device, always_inline)) void StoreInt8(
      const float (&descale)[kSlots]) const {
    const F32x2 frame = {kByteFrame, kByteFrame};
    for (int i = 0; i < kSlots; ++i) {
      const float inverse = Reciprocal(descale[i]);
      const F32x2 both = {inverse, inverse};
      for (int j = 0; j < kChunks; ++j) {
        F32x2 framed[kPairs];
        for (int k = 0; k < kPairs; ++k) {
          framed[k] = Fma(y_[i][j][k], both, frame);
        }
        output_.Store(I32x2{LowBytes(framed[0], framed[1]),
                            LowBytes(framed[2], framed[3])},
                      element_[i] + j * kChunkStride);
      }
    }
  }

  // Divides by a descale for each channel, rounds to FP8 and stores; tokens of
  // which `nan` is not 0 become NaN.
  __attribute__((device, always_inline)) void StoreByChannel(
      const Buffer& descales, const Buffer& nan, int head_dim) {
    // Whether a thread's channels are the same in every slot.
    const int rows =
        rocm::kQuantizeThreads * row_inverse_ >> gpu::kRowInverseShift;
    const bool same = rows * (head_dim / kChunk) == rocm::kQuantizeThreads;
    Chunk by, inverse;
    for (int i = 0; i < kSlots; ++i) {
      const bool marked = nan.LoadByte(TokenOf(i)) != 0;
      if (i == 0 || !same) {
        LoadFrom(descales, i, 0, by);
        for (int k = 0; k < kPairs; ++k) {
          inverse[k] = {Reciprocal(by[k][0]), Reciprocal(by[k][1])};
        }
      }
      float largest = 0.0f, smallest = 1.0f;
      for (int k = 0; k < kPairs; ++k) {
        for (int l = 0; l < 2; ++l) {
          largest = Maximum(largest, __builtin_fabsf(y_[i][0][k][l]));
          smallest = Minimum(smallest, by[k][l]);
        }
      }
      F32x2 quotients[kPairs];
      if (AnyLane(!IsFinite(largest) || smallest < kSmall)) {
        for (int k = 0; k < kPairs; ++k) {
          for (int l = 0; l < 2; ++l) {
            const float factor = by[k][l] < kSmall ? 1.0f / kSmall : 1.0f;
            const float descale = by[k][l] * factor;
            const float y =
                Saturated(y_[i][0][k][l] * factor, kAlmostMax * descale);
            const F32x2 both = {y, y};
            const float inverse = Reciprocal(descale);
            quotients[k][l] =
                Divide(both, {descale, descale}, {inverse, inverse})[0];
          }
        }
      } else {
        for (int k = 0; k < kPairs; ++k) {
          quotients[k] = Divide(y_[i][0][k], by[k], inverse[k]);
        }
      }
      I32x2 codes = {PackFp8(quotients[0], quotients[1]),
                     PackFp8(quotients[2], quotients[3])};
      constexpr int kNaNs = 0x7f7f7f7f;
      codes = marked ? I32x2{kNaNs, kNaNs} : codes;
      output_.Store(codes, element_[i]);
    }
  }

 private:
  static constexpr int kChunkStride = 8 * kChunk;
  // It rounds to the largest FP8 number; that times the largest descale
  // overflows.
  static constexpr float kAlmostMax = 447.0f;
  // Below it, remainders of the division could be too small for float32.
  static constexpr float kSmall = 0x1p-60f;
  // Beyond every buffer of rows.
  static constexpr int kNowhere = 1 << 24;
  // Whether eight lanes hold a row.
  static constexpr bool kWhole = kChunks > 1;
  // Beyond the mean, which is zero for tokens that are not there.
  static constexpr uint32_t kNoChannel = 1 << 24;

  // Elements from the tile's first to beyond its last.
  static __attribute__((device, always_inline)) int Extent(
      const QuantizeArgs& args, int valid_tokens) {
    return ((valid_tokens - 1) * args.heads + 1) * args.head_dim;
  }

  // y / descale, the sign of zeros included. The first quotient is within two
  // units of the last place; its remainder is exact, and corrects it.
  static __attribute__((device, always_inline)) F32x2 Divide(F32x2 y,
                                                             F32x2 descale,
                                                             F32x2 inverse) {
    const F32x2 quotient = y * inverse;
    const F32x2 excess = Fma(quotient, descale, -y);
    return Fma(-excess, inverse, quotient);
  }

  // The number, but for infinities a limit.
  static __attribute__((device, always_inline)) float Saturated(float y,
                                                                float limit) {
    const bool infinite = __builtin_fabsf(y) == __builtin_inff();
    return infinite ? __builtin_copysignf(limit, y) : y;
  }

  static __attribute__((device, always_inline)) int32_t PackFp8(F32x2 low,
                                                                F32x2 high) {
    const int32_t half =
        __builtin_amdgcn_cvt_pk_fp8_f32(low[0], low[1], 0, false);
    return __builtin_amdgcn_cvt_pk_fp8_f32(high[0], high[1], half, true);
  }

  // Has the compiler load again what else it would keep in registers.
  __attribute__((device, always_inline)) void Forget() {
    for (int i = 0; i < kSlots; ++i) {
      asm volatile("" : "+v"(element_[i]), "+v"(channel_[i]));
    }
  }

  // Whether the matrix is so large that it joins lanes by their i-th bit.
  __attribute__((device, always_inline)) bool Crosses(int i) const {
    return kChunks > 1 || hadamard_ >= kChunk << (i + 1);
  }

  __attribute__((device, always_inline)) void Widen(int i, int j,
                                                    Chunk& y) const {
    const int offset = (element_[i] + j * kChunkStride) * Type::kBytes;
    Type::Widen(input_.template Load<typename Type::Raw>(offset), y);
  }

  // Of the channels of a part, from what has one number for each.
  __attribute__((device, always_inline)) void LoadFrom(const Buffer& buffer,
                                                       int i, int j,
                                                       Chunk& x) const {
    const int offset = (channel_[i] + j * kChunkStride) * 4;
    FromF32::Widen(buffer.template Load<I32x8>(offset), x);
  }

  // Parts are dealt so that lanes which exchange numbers differ in a bit for
  // which there is an instruction.
  static __attribute__((device, always_inline)) uint32_t PartOf(int i) {
    const int lane = Thread() % 64;
    const int thread = (Thread() & ~12) | (lane & 4) << 1 | (lane & 8) >> 1;
    return thread + i * rocm::kQuantizeThreads;
  }
  __attribute__((device, always_inline)) uint32_t TokenOf(int i) const {
    return (PartOf(i) * row_inverse_) >> gpu::kRowInverseShift;
  }

  template <class Call>
  __attribute__((device, always_inline)) void ForEachChunk(const Call& call) {
    for (auto& part : y_) {
      for (auto& chunk : part) call(chunk);
    }
  }
  template <class Call>
  __attribute__((device, always_inline)) void ForEach(const Call& call) {
    ForEachChunk([&](Chunk& chunk) {
      for (F32x2& y : chunk) call(y);
    });
  }

  __attribute__((device, always_inline)) void Multiply(float factor) {
    ForEach([&](F32x2& y) { y *= factor; });
  }

  // Written as text, since the compiler takes three instructions for it.
  static __attribute__((device, always_inline)) F32x2
  SumAndDifference(F32x2 y) {
    F32x2 both;
    asm("v_pk_add_f32 %0, %1, %1 op_sel:[0,1] op_sel_hi:[0,1] neg_hi:[0,1]"
        : "=v"(both)
        : "v"(y));
    return both;
  }

  static __attribute__((device, always_inline)) void Butterfly(F32x2& a,
                                                               F32x2& b) {
    const F32x2 sum = a + b;
    b = a - b;
    a = sum;
  }

  __attribute__((device, always_inline)) void Rotate() {
    for (auto& part : y_) {
      for (auto& chunk : part) {
        for (F32x2& y : chunk) y = SumAndDifference(y);
        Butterfly(chunk[0], chunk[1]);
        Butterfly(chunk[2], chunk[3]);
        Butterfly(chunk[0], chunk[2]);
        Butterfly(chunk[1], chunk[3]);
      }
      for (int stride = 1; stride < kChunks; stride *= 2) {
        for (int j = 0; j < kChunks; ++j) {
          if (j & stride) continue;
          for (int k = 0; k < kPairs; ++k) {
            Butterfly(part[j][k], part[j + stride][k]);
          }
        }
      }
    }
    // The sum in the lane whose bit is 0; in the other, the difference with the
    // wrong sign, which `norm_` puts right.
    if (Crosses(0))
      ForEachChunk([&](Chunk& y) { AddFlippingBit0(y, sign_[0]); });
    if (Crosses(1))
      ForEachChunk([&](Chunk& y) { AddFlippingBit1(y, sign_[1]); });
    if (Crosses(2))
      ForEachChunk([&](Chunk& y) { AddFlippingBit3(y, sign_[2]); });
    Multiply(norm_);
  }

  const Buffer input_;
  const Buffer output_;
  const Buffer mean_;
  const Buffer weight_;
  const bool centers_;
  const bool weighs_;
  const int hadamard_;
  const uint32_t row_inverse_;
  uint32_t channel_[kSlots];  // of the mean, the part's first
  uint32_t element_[kSlots];  // of the tile, the part's first
  float sign_[3];
  float norm_;
  F32x2 y_[kSlots][kChunks][kPairs];
};

}  // namespace zyfa::gfx950

#endif  // ZYFA_ROCM_GFX950_QUANTIZE_TILE_H_
