// FP8 quantisation for gfx950: a workgroup takes 128 tokens of one head, and
// holds them in registers from the one load of them to the one store.
//
// A row (a token of the head) is cut into parts. Consecutive lanes hold
// consecutive parts of consecutive rows, whatever the head dim. Where rows are
// rotated by a Hadamard matrix, eight lanes (or fewer, of a smaller matrix)
// hold the row of it: a part is one, two or four chunks of eight elements,
// eight chunks apart, so that a load of chunks is of consecutive bytes.
// Butterflies within a lane come first, then those between the lanes whose
// numbers differ in bit 0, in bit 1 and in bit 3: these take one instruction
// each. So bits 2 and 3 of the lane's number are swapped where parts are dealt.
//
// No row needs a bounds check: a buffer ends with the head's last row in it,
// and loads beyond give zeros, stores nothing.
//
// NaN, infinities, and numbers so large that a sum of them overflows, all leave
// a maximum that is not finite. What they need beyond the common path is apart
// from it, and a wave decides for itself.

#ifndef ZYFA_ROCM_GFX950_QUANTIZE_H_
#define ZYFA_ROCM_GFX950_QUANTIZE_H_

#include "csrc/gpu/quantize_args.h"
#include "csrc/rocm/gfx950/intrinsics.h"
#include "csrc/rocm/quantize_plan.h"

namespace zyfa::gfx950 {

using gpu::kChunk;
using gpu::QuantizeArgs;

constexpr int kQuantizeWaves = rocm::kQuantizeThreads / 64;
constexpr int kPairs = kChunk / 2;
constexpr float kInverseFp8Max = 1.0f / 448.0f;
constexpr float kSmallestNormal = 0x1p-126f;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr float kGuardAbove = 0x1p64f;

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
  __attribute__((device, always_inline)) void Store(I32x2 x, int offset) const {
    __builtin_amdgcn_raw_buffer_store_b64(x, resource_, offset, 0, 0);
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

// The magnitude, 0 of what is not finite.
ZYFA_DEVICE float FiniteMagnitude(float x) {
  const uint32_t bits = BitCast<uint32_t>(x) & 0x7fffffffu;
  return BitCast<float>(bits < kInfinityBits ? bits : 0u);
}

ZYFA_DEVICE bool IsFinite(float x) {
  return (BitCast<uint32_t>(x) & kInfinityBits) != kInfinityBits;
}

// ---- The wave's share of the tile

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
        centers_(args.mean != nullptr),
        hadamard_(args.hadamard) {
    const int lane = Thread() % 64;
    const int thread = (Thread() & ~12) | (lane & 4) << 1 | (lane & 8) >> 1;
    const uint32_t parts = args.head_dim / (kChunk * kChunks);
    const uint32_t row = args.heads * args.head_dim;
    for (int i = 0; i < kSlots; ++i) {
      const uint32_t part = thread + i * rocm::kQuantizeThreads;
      const uint32_t token = (part * args.row_inverse) >> gpu::kRowInverseShift;
      const uint32_t channel = (part - Product24(token, parts)) * kChunk;
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

  // Loads, subtracts the mean and rotates, all of it times `guard`.
  __attribute__((device, always_inline)) void Load(float guard) {
    for (int i = 0; i < kSlots; ++i) {
      for (int j = 0; j < kChunks; ++j) Widen(i, j, y_[i][j]);
    }
    if (guard != 1.0f) Multiply(guard);
    if (centers_) {
      for (int i = 0; i < kSlots; ++i) {
        for (int j = 0; j < kChunks; ++j) {
          Chunk mean;
          LoadMean(i, j, mean);
          for (int k = 0; k < kPairs; ++k) {
            y_[i][j][k] = Fma(-mean[k], F32x2{guard, guard}, y_[i][j][k]);
          }
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
          LoadMean(i, j, x);
          include(x);
        }
      }
    }
    Forget();
    return WaveMaximum(largest) > kGuardAbove ? 1.0f / kGuardAbove : 1.0f;
  }

  // Infinities become the largest FP8 numbers.
  __attribute__((device, always_inline)) void Saturate(float descale) {
    // It rounds to the largest; that times the largest descale overflows.
    constexpr float kAlmostMax = 447.0f;
    const float limit = kAlmostMax * descale;
    ForEach([&](F32x2& y) {
      for (int k = 0; k < 2; ++k) {
        const bool infinite = __builtin_fabsf(y[k]) == __builtin_inff();
        y[k] = infinite ? __builtin_copysignf(limit, y[k]) : y[k];
      }
    });
  }

  // Divides by the descale, rounds and stores.
  __attribute__((device, always_inline)) void Store(float descale) {
    // Below this, remainders of the division could be too small for float32.
    if (descale < 0x1p-60f) {
      descale *= 0x1p64f;
      Multiply(0x1p64f);
    }
    const float inverse = 1.0f / descale;
    for (int i = 0; i < kSlots; ++i) {
      for (int j = 0; j < kChunks; ++j) {
        I32x2 codes = {0, 0};
        for (int k = 0; k < kPairs; k += 2) {
          const F32x2 low = Divide(y_[i][j][k], descale, inverse);
          const F32x2 high = Divide(y_[i][j][k + 1], descale, inverse);
          const int32_t half =
              __builtin_amdgcn_cvt_pk_fp8_f32(low[0], low[1], 0, false);
          codes[k / 2] =
              __builtin_amdgcn_cvt_pk_fp8_f32(high[0], high[1], half, true);
        }
        output_.Store(codes, element_[i] + j * kChunkStride);
      }
    }
  }

 private:
  static constexpr int kChunkStride = 8 * kChunk;
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
                                                             float descale,
                                                             float inverse) {
    const F32x2 quotient = y * inverse;
    const F32x2 excess = Fma(quotient, F32x2{descale, descale}, -y);
    return Fma(-excess, F32x2{inverse, inverse}, quotient);
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

  __attribute__((device, always_inline)) void LoadMean(int i, int j,
                                                       Chunk& mean) const {
    const int offset = (channel_[i] + j * kChunkStride) * 4;
    FromF32::Widen(mean_.template Load<I32x8>(offset), mean);
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
  const bool centers_;
  const int hadamard_;
  uint32_t channel_[kSlots];  // of the mean, the part's first
  uint32_t element_[kSlots];  // of the tile, the part's first
  float sign_[3];
  float norm_;
  F32x2 y_[kSlots][kChunks][kPairs];
};

// ---- The kernel

ZYFA_DEVICE float GroupMaximum(float of_wave, float* lds) {
  const int wave = Uniform(Thread() / 64);
  if (Thread() % 64 == 0) lds[wave] = of_wave;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  float largest = lds[0];
  for (int i = 1; i < kQuantizeWaves; ++i) largest = Maximum(largest, lds[i]);
  return largest;
}

template <class Type, int kSlots, int kChunks, bool kRotates>
ZYFA_DEVICE void Quantize(const QuantizeArgs& args) {
  __attribute__((shared)) static float lds[kQuantizeWaves];
  const auto tiles = static_cast<uint32_t>(gpu::QuantizeTiles(args.tokens));
  // Heads come first: what is loaded at one time lies together.
  const auto group = static_cast<uint32_t>(Group());
  const auto heads = static_cast<uint32_t>(args.heads);
  const uint32_t head_of_batch = group % heads;
  const uint32_t tile = group / heads % tiles;
  const uint32_t batch = group / heads / tiles;
  const int first_token = static_cast<int>(tile) * gpu::kQuantizeTokens;
  const int left = args.tokens - first_token;
  const int64_t head = int64_t{batch} * heads + head_of_batch;
  const int64_t token = int64_t{batch} * args.tokens + first_token;
  WaveTile<Type, kSlots, kChunks, kRotates> wave(
      args, (token * heads + head_of_batch) * args.head_dim,
      left < gpu::kQuantizeTokens ? left : gpu::kQuantizeTokens, head);

  float guard = 1.0f;
  float largest;
  bool finite;
  for (;;) {
    wave.Load(guard);
    largest = wave.Largest();
    finite = IsFinite(largest);
    const bool overflows =
        Type::kOverflows && (kRotates || args.mean != nullptr);
    if (finite || !overflows || guard != 1.0f) break;
    guard = wave.Guard();
    if (guard == 1.0f) break;
  }
  if (!finite) largest = wave.LargestFinite();

  const int64_t index = head * tiles + tile;
  float descale;
  if (args.given != nullptr) {
    descale = args.given[index];
  } else {
    // Rounding keeps the order: the largest of the descales is the descale of
    // the largest. A descale below the normal range could be flushed to zero.
    const float of_wave =
        largest == 0.0f
            ? 0.0f
            : Maximum(largest * kInverseFp8Max, kSmallestNormal) / guard;
    const float of_tile = GroupMaximum(of_wave, lds);
    descale = UniformFloat(of_tile == 0.0f ? args.zero_descale : of_tile);
    if (Thread() == 0) args.found[index] = descale;
  }
  if (args.values == nullptr) return;
  descale *= guard;
  if (!finite) wave.Saturate(descale);
  wave.Store(descale);
}

}  // namespace zyfa::gfx950

#endif  // ZYFA_ROCM_GFX950_QUANTIZE_H_
