// Both products on tiles of bfloat16 with float32 accumulators: for bfloat16
// and FP8 operands, which are bfloat16 exactly, as are e4m3 probabilities times
// a power of two. Exact probabilities are rounded to bfloat16.

#ifndef ZYFA_CPU_AMX_ENGINE_H_
#define ZYFA_CPU_AMX_ENGINE_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "csrc/cpu/pack.h"
#include "csrc/cpu/simd.h"
#include "csrc/cpu/softmax.h"
#include "csrc/numerics/online_softmax.h"

namespace zyfa::cpu {
namespace {

// Layouts. Queries and probabilities: row-major. Keys: panels of kCols keys,
// each (depth / 2, kCols) pairs of neighbours in depth. Values: panels of kCols
// columns, each (64, kCols) pairs of neighbouring keys. A pair is what one lane
// of a tile's row holds.
struct AmxEngine {
  using Operand = uint16_t;

  static constexpr int kTile = 16;   // rows, and 32-bit columns, of a tile
  static constexpr int kDepth = 32;  // bfloat16 elements in a tile's row
  static constexpr int kRows = 2 * kTile;
  static constexpr int kCols = 2 * kTile;
  // One register tile, so that scores, probabilities and output stay in L1.
  static constexpr int kGroupRows = kRows;
  static constexpr int kDepthStep = kDepth;
  static constexpr int64_t kTileBytes = 1200 << 10;  // a 2 MiB L2 cache
  static constexpr int kExpDegree = 4;
  static constexpr bool kSeparateProbabilities = true;

  // All eight tiles are 16 rows of 64 bytes.
  static void BeginItem() {
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;  // palette
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = 64;  // bytes in a row
      config[48 + tile] = kTile;   // rows
    }
    _tile_loadconfig(config);
  }
  static void EndItem() { _tile_release(); }

  template <DType kType>
  static void PackQuery(const unsigned char* source, int64_t width, bool negate,
                        uint16_t* target) {
    for (int64_t d = 0; d < width; d += kLanes) {
      const F32 x = LoadFirst<kType>(source + d * SizeOf(kType), width - d);
      StoreHalves(target + d, HighHalves(FlipSign(x, negate)));
    }
  }

  template <DType kType>
  static void PackKeys(const RowsView& keys, bool negate, uint16_t* target) {
    const int64_t depth = RoundUp(keys.width, kDepthStep);
    for (int64_t key = 0; key < numerics::kKeyBlock; key += kLanes) {
      uint16_t* panel = target + key / kCols * kCols * depth + key % kCols * 2;
      for (int64_t d = 0; d < depth; d += kDepth) {
        F32 square[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          square[i] = key + i < keys.count
                          ? LoadPairs<kType>(keys, key + i, d, negate)
                          : F32{};
        }
        Transpose(square);
        for (int i = 0; i < kLanes; ++i) {
          std::memcpy(panel + (d / 2 + i) * kCols * 2, &square[i],
                      sizeof(square[i]));
        }
      }
    }
  }

  // Returns the keys with a value that is not finite. The products see zeros in
  // such a value's place, so that a query that gives the key no weight is not
  // touched (0 * NaN is NaN); the queries that see it get it one by one.
  template <DType kType>
  static KeySet PackValues(const RowsView& values, float /*weight*/,
                           uint16_t* target) {
    KeySet special = {};
    const int64_t columns = RoundUp(values.width, kCols);
    for (int key = 0; key < numerics::kKeyBlock; key += 2) {
      I32 seen[2] = {};
      for (int64_t c = 0; c < columns; c += kLanes) {
        U32 pair[2];
        for (int i = 0; i < 2; ++i) {
          F32 x = {};
          if (key + i < values.count && c < values.width) {
            x = LoadFirst<kType>(values.At<kType>(key + i, c),
                                 values.width - c);
          }
          const I32 bad = IsNonFinite(x);
          seen[i] |= bad;
          pair[i] = BitCast<U32>(Select(bad, F32{}, x));
        }
        uint16_t* panel = target + c / kCols * kCols * numerics::kKeyBlock;
        const U32 both = (pair[0] >> 16) | (pair[1] & 0xffff0000u);
        std::memcpy(panel + (key / 2 * kCols + c % kCols) * 2, &both,
                    sizeof(both));
      }
      for (int i = 0; i < 2; ++i) {
        if (AnyLane(seen[i])) special.Add(key + i);
      }
    }
    return special;
  }

  // scores (kRows, kCols), rows 128 apart, = queries . panel.
  static void Scores(const uint16_t* queries, int64_t query_stride,
                     const uint16_t* panel, int64_t depth, float* scores) {
    ClearSums();
    Multiply(queries, query_stride, panel, RoundUp(depth, kDepth));
    StoreSums(scores, numerics::kKeyBlock);
  }

  // out (kRows, kCols) += weight * probabilities . panel over keys [begin,
  // end).
  static void Accumulate(const uint16_t* probabilities, const uint16_t* panel,
                         int begin, int end, float weight, float* out,
                         int64_t out_stride) {
    const uint16_t* left = probabilities + begin;
    const uint16_t* right = panel + begin * kCols;
    if (weight == 1.0f) {
      LoadSums(out, out_stride);
      Multiply(left, numerics::kKeyBlock, right, end - begin);
      StoreSums(out, out_stride);
      return;
    }
    alignas(64) float product[kRows * kCols];
    ClearSums();
    Multiply(left, numerics::kKeyBlock, right, end - begin);
    StoreSums(product, kCols);
    for (int row = 0; row < kRows; ++row) {
      for (int c = 0; c < kCols; c += kLanes) {
        float* at = out + row * out_stride + c;
        Store(at, Simd::MulAdd(Load(product + row * kCols + c),
                               Simd::Set(weight), Load(at)));
      }
    }
  }

  static ZYFA_INLINE void StoreProbabilities(uint16_t* target, F32 p,
                                             F32 next) {
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)next, (__m512)p);
    std::memcpy(target, &both, sizeof(both));
  }

  // Writes a row's probabilities from their codes, weighted by 2^-shift,
  // without passing through float32: a normal code is the high end of a
  // bfloat16 but for the exponent's bias; the eight subnormal ones are looked
  // up.
  class Fp8Writer {
   public:
    ZYFA_INLINE Fp8Writer(uint16_t* target, int shift)
        : target_(target), bias_(_mm512_set1_epi16((127 - 7 - shift) << 7)) {
      // bfloat16 of 0, 1, ..., 7 times 2^-9.
      const __m512i unscaled = _mm512_castsi128_si512(_mm_setr_epi16(
          0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
      // Saturating: what becomes too small for a normal float counts as zero.
      subnormals_ = _mm512_subs_epu16(unscaled, _mm512_set1_epi16(shift << 7));
    }

    ZYFA_INLINE void Write(int key, I32 codes, I32 next_codes) {
      // Packing works in 128-bit lanes; the permutation restores the keys'
      // order.
      const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
      const __m512i both = _mm512_permutexvar_epi64(
          order, _mm512_packus_epi32((__m512i)codes, (__m512i)next_codes));
      const __m512i normal =
          _mm512_add_epi16(_mm512_slli_epi16(both, 4), bias_);
      const __mmask32 is_subnormal = _mm512_cmplt_epu16_mask(
          both, _mm512_set1_epi16(numerics::kE4m3FirstNormalCode));
      const __m512i p = _mm512_mask_permutexvar_epi16(normal, is_subnormal,
                                                      both, subnormals_);
      std::memcpy(target_ + key, &p, sizeof(p));
      const __m512i ones = _mm512_set1_epi16(0x3f80);
      sum_ = _mm512_dpbf16_ps(sum_, (__m512bh)p, (__m512bh)ones);
    }

    ZYFA_INLINE float Sum() const { return ReduceAdd((F32)sum_); }

   private:
    uint16_t* target_;
    __m512i bias_;
    __m512i subnormals_;
    __m512 sum_ = _mm512_setzero_ps();
  };

  static float LoadProbability(const uint16_t* source) {
    return BitCast<float>(static_cast<uint32_t>(*source) << 16);
  }

 private:
  // bfloat16 of numbers that are bfloat16 already.
  static ZYFA_INLINE U32 HighHalves(F32 x) { return BitCast<U32>(x) >> 16; }

  static ZYFA_INLINE void StoreHalves(uint16_t* target, U32 halves) {
    const U16 narrow = __builtin_convertvector(halves, U16);
    std::memcpy(target, &narrow, sizeof(narrow));
  }

  // Elements [d, d + 32) of a row as bfloat16, zeros beyond its end.
  template <DType kType>
  static ZYFA_INLINE F32 LoadPairs(const RowsView& rows, int64_t row, int64_t d,
                                   bool negate) {
    const int64_t left = rows.width - d;
    const U32 flip = U32{} + (negate ? 0x80008000u : 0u);
    if constexpr (kType == DType::kBF16) {
      U32 pairs = {};
      std::memcpy(&pairs, rows.At<kType>(row, d),
                  left < kDepth ? left * 2 : sizeof(pairs));
      return BitCast<F32>(pairs ^ flip);
    } else {
      uint16_t halves[kDepth] = {};
      for (int64_t i = 0; i < kDepth && i < left; i += kLanes) {
        StoreHalves(halves + i, HighHalves(LoadFirst<kType>(
                                    rows.At<kType>(row, d + i), left - i)));
      }
      return BitCast<F32>(LoadAs<U32>(halves) ^ flip);
    }
  }

  // Tiles 0..3: sums, rows by columns; 4, 5: left operand; 6, 7: right operand.
  static ZYFA_INLINE void ClearSums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  static ZYFA_INLINE void LoadSums(const float* c, int64_t stride) {
    const float* lower = c + kTile * stride;
    _tile_loadd(0, c, stride * 4);
    _tile_loadd(1, c + kTile, stride * 4);
    _tile_loadd(2, lower, stride * 4);
    _tile_loadd(3, lower + kTile, stride * 4);
  }

  static ZYFA_INLINE void StoreSums(float* c, int64_t stride) {
    float* lower = c + kTile * stride;
    _tile_stored(0, c, stride * 4);
    _tile_stored(1, c + kTile, stride * 4);
    _tile_stored(2, lower, stride * 4);
    _tile_stored(3, lower + kTile, stride * 4);
  }

  static ZYFA_INLINE void Multiply(const uint16_t* a, int64_t a_stride,
                                   const uint16_t* b, int64_t depth) {
    for (int64_t k = 0; k < depth; k += kDepth) {
      const uint16_t* right = b + k * kCols;
      _tile_loadd(4, a + k, a_stride * 2);
      _tile_loadd(6, right, kCols * 4);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, right + kTile * 2, kCols * 4);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + kTile * a_stride + k, a_stride * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
};

}  // namespace
}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_AMX_ENGINE_H_
