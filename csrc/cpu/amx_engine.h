// Both products on tiles of bfloat16 with float32 accumulators: for bfloat16,
// FP8 and int8 operands, which are bfloat16 exactly, as are e4m3 probabilities
// times a power of two. Exact probabilities are rounded to bfloat16.

#ifndef ZYFA_CPU_AMX_ENGINE_H_
#define ZYFA_CPU_AMX_ENGINE_H_

#include <immintrin.h>

#include <atomic>
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
  using LogitOperand = uint16_t;

  static constexpr int kTile = 16;   // rows, and 32-bit columns, of a tile
  static constexpr int kDepth = 32;  // bfloat16 elements in a tile's row
  static constexpr int kRows = 2 * kTile;
  static constexpr int kCols = 2 * kTile;
  // One register tile, so that scores and probabilities stay in L1.
  static constexpr int kGroupRows = kRows;
  // Keys for which the output is loaded and stored once.
  static constexpr int kSpan = 2 * numerics::kKeyBlock;
  // Keys that are packed at a time; half a MiB of keys and values of 128.
  static constexpr int kPacked = 1024;
  static constexpr int kDepthStep = kDepth;
  static constexpr int kBesideDepth = 0;
  static constexpr int kLargestHeadDim = 256;
  static constexpr int64_t kTileBytes = 2000 << 10;  // a 2 MiB L2 cache
  static constexpr int kExpDegree = 4;
  static constexpr bool kSeparateProbabilities = true;
  static constexpr bool kInterleaved = true;
  static constexpr float kSlack = 8.0f;

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
    for (int64_t d = 0; d < width; d += kDepth) {
      const Halves x = LoadHalves<kType>(source + d * SizeOf(kType), width - d);
      std::memcpy(target + d, &x, sizeof(x));
      if (negate) Negate(target + d);
    }
  }

  template <DType kType>
  static void PackKeys(const RowsView& keys, bool negate, uint16_t* target) {
    const int64_t depth = RoundUp(keys.width, kDepthStep);
    const U32 flip = U32{} + (negate ? 0x80008000u : 0u);
    for (int64_t key = 0; key < numerics::kKeyBlock; key += kLanes) {
      uint16_t* panel = target + key / kCols * kCols * depth + key % kCols * 2;
      for (int64_t d = 0; d < depth; d += kDepth) {
        F32 square[kLanes];
        for (int i = 0; i < kLanes; ++i) {
          U32 pairs = {};
          if (key + i < keys.count) {
            pairs = (U32)LoadHalves<kType>(keys.At<kType>(key + i, d),
                                           keys.width - d) ^
                    flip;
          }
          square[i] = BitCast<F32>(pairs);
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
    static_assert(kCols == kDepth);
    KeySet special = {};
    for (int key = 0; key < numerics::kKeyBlock; key += 2) {
      for (int64_t c = 0; c < values.width; c += kCols) {
        Halves pair[2] = {};
        for (int i = 0; i < 2 && key + i < values.count; ++i) {
          const Halves x =
              LoadHalves<kType>(values.At<kType>(key + i, c), values.width - c);
          const __mmask32 bad = NonFinite(x);
          if (bad != 0) special.Add(key + i);
          pair[i] = _mm512_maskz_mov_epi16(~bad, x);
        }
        uint16_t* panel = target + c * kSpan + key * kCols;
        const Halves low = PairUp(pair[0], pair[1], 0);
        const Halves high = PairUp(pair[0], pair[1], kLanes);
        std::memcpy(panel, &low, sizeof(low));
        std::memcpy(panel + 2 * kLanes, &high, sizeof(high));
      }
    }
    return special;
  }

  // Products in a row, which run a tile product at a time, among other work: so
  // the processor, whose window is short against a product's 256 cycles,
  // executes both at a time. A product's sums are stored while the next one
  // starts, for the same reason.
  class Products {
   public:
    // scores (kRows, kCols) = queries . panel.
    void Scores(const uint16_t* queries, int64_t query_stride,
                const uint16_t* panel, int64_t depth, float* scores,
                int64_t score_stride) {
      Add({queries, query_stride, panel, RoundUp(depth, kDepth), scores,
           score_stride, false, 1.0f});
    }

    // out (kRows, kCols) += weight * probabilities . panel.
    void Accumulate(const uint16_t* probabilities, int64_t probability_stride,
                    const uint16_t* panel, int64_t depth, float weight,
                    float* out, int64_t out_stride) {
      Add({probabilities, probability_stride, panel, depth, out, out_stride,
           true, weight});
    }

    // From here each of `parts` calls of Advance runs an equal part.
    void Spread(int parts) {
      parts_ = parts;
      due_ = 0;
      tile_products_ = 0;
      for (int i = next_; i < count_; ++i) {
        tile_products_ += products_[i].depth / kDepth * 4;
      }
    }

    ZYFA_INLINE void Advance() {
      // The compiler does not know that tile loads read memory.
      std::atomic_signal_fence(std::memory_order_seq_cst);
      for (due_ += tile_products_; due_ >= parts_; due_ -= parts_) {
        const Product& product = products_[next_];
        switch (quarter_) {
          case 0:
            Quarter<0>(product, at_);
            break;
          case 1:
            Quarter<1>(product, at_);
            break;
          case 2:
            Quarter<2>(product, at_);
            break;
          default:
            Quarter<3>(product, at_);
        }
        quarter_ = (quarter_ + 1) % 4;
        if (quarter_ == 0) at_ += kDepth;
        if (at_ == product.depth) Complete(product);
      }
    }

    // Runs what is left and stores the last sums.
    void Finish() {
      std::atomic_signal_fence(std::memory_order_seq_cst);
      while (next_ < count_) {
        const Product& product = products_[next_];
        if (next_ + 1 < count_) Prefetch(products_[next_ + 1]);
        for (int64_t at = 0; at < product.depth; at += kDepth) {
          Quarter<0>(product, at);
          Quarter<1>(product, at);
          Quarter<2>(product, at);
          Quarter<3>(product, at);
        }
        Complete(product);
      }
      if (unsaved_.sums != nullptr) StoreSums(unsaved_.sums, unsaved_.stride);
      unsaved_.sums = nullptr;
      next_ = count_ = 0;
    }

   private:
    struct Sums {
      float* sums;
      int64_t stride;
    };

    struct Product {
      const uint16_t* left;
      int64_t left_stride;
      const uint16_t* right;
      int64_t depth;
      float* sums;
      int64_t stride;
      bool accumulate;
      float weight;
    };

    void Add(const Product& product) {
      if (next_ == count_) next_ = count_ = 0;
      products_[count_++] = product;
    }

    // One tile of the four, one kDepth.
    template <int kQuarter>
    ZYFA_INLINE void Quarter(const Product& product, int64_t at) {
      if (at == 0) {
        if (unsaved_.sums != nullptr) {
          StoreSum<kQuarter>(unsaved_.sums, unsaved_.stride);
        }
        if (product.accumulate && product.weight == 1.0f) {
          LoadSum<kQuarter>(product.sums, product.stride);
        } else {
          ClearSum<kQuarter>();
        }
      }
      MultiplyQuarter<kQuarter>(product.left + at, product.left_stride,
                                product.right + at * kCols);
    }

    void Complete(const Product& product) {
      unsaved_ = {product.sums, product.stride};
      if (product.weight != 1.0f) {
        AddWeighted(product);
        unsaved_.sums = nullptr;
      }
      at_ = 0;
      ++next_;
    }

    static void AddWeighted(const Product& product) {
      alignas(64) float sums[kRows * kCols];
      StoreSums(sums, kCols);
      const F32 weight = Simd::Set(product.weight);
      for (int row = 0; row < kRows; ++row) {
        for (int c = 0; c < kCols; c += kLanes) {
          float* at = product.sums + row * product.stride + c;
          Store(at,
                Simd::MulAdd(Load(sums + row * kCols + c), weight, Load(at)));
        }
      }
    }

    static void Prefetch(const Product& product) {
      if (!product.accumulate) return;
      for (int row = 0; row < kRows; ++row) {
        const float* sums = product.sums + row * product.stride;
        __builtin_prefetch(sums);
        __builtin_prefetch(sums + kTile);
      }
    }

    static constexpr int kMostProducts =
        (numerics::kKeyBlock + kLargestHeadDim) / kCols;
    Product products_[kMostProducts];
    int count_ = 0;
    int next_ = 0;
    int64_t at_ = 0;  // how far the next product is: its depth, and the tile
    int quarter_ = 0;
    Sums unsaved_ = {};  // where the tiles' sums belong
    int64_t tile_products_ = 0;
    int64_t parts_ = 1;
    int64_t due_ = 0;
  };

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
      // Saturating: what becomes too small for a normal float counts as zero.
      subnormals_ =
          _mm512_subs_epu16(SubnormalE4m3(), _mm512_set1_epi16(shift << 7));
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

    // Over the lanes.
    ZYFA_INLINE F32 Sum() const { return (F32)sum_; }

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
  using Halves = __m512i;  // 32 bfloat16 numbers

  // The first `count` of 32 elements, exactly, then zeros; reads nothing beyond
  // them.
  template <DType kType>
  static ZYFA_INLINE Halves LoadHalves(const unsigned char* source,
                                       int64_t count) {
    const __mmask32 first = count < kDepth ? (1u << count) - 1 : ~0u;
    if constexpr (kType == DType::kBF16) {
      return _mm512_maskz_loadu_epi16(first, source);
    } else if constexpr (kType == DType::kE4m3) {
      return DecodeE4m3(
          _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(first, source)));
    } else if constexpr (kType == DType::kI8) {
      const __m256i bytes = _mm256_maskz_loadu_epi8(first, source);
      const auto widen = [](__m128i half) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(half));
      };
      return (Halves)_mm512_cvtne2ps_pbh(
          widen(_mm256_extracti128_si256(bytes, 1)),
          widen(_mm256_castsi256_si128(bytes)));
    } else {
      return Halves{};  // a type that is not exactly bfloat16
    }
  }

  // From codes in 16-bit lanes. A normal magnitude is the high end of a
  // bfloat16 but for the exponent's bias; the eight subnormal ones are looked
  // up.
  static ZYFA_INLINE Halves DecodeE4m3(__m512i codes) {
    const __m512i magnitude = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
    const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4),
                                            _mm512_set1_epi16((127 - 7) << 7));
    const __m512i finite = _mm512_mask_permutexvar_epi16(
        normal,
        _mm512_cmplt_epu16_mask(
            magnitude, _mm512_set1_epi16(numerics::kE4m3FirstNormalCode)),
        magnitude, SubnormalE4m3());
    const __m512i x = _mm512_mask_mov_epi16(
        finite,
        _mm512_cmpeq_epi16_mask(magnitude,
                                _mm512_set1_epi16(numerics::kE4m3NaN)),
        _mm512_set1_epi16(0x7fc0));
    return _mm512_or_si512(
        x,
        _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)), 8));
  }

  // bfloat16 of 0, 1, ..., 7 times 2^-9.
  static ZYFA_INLINE Halves SubnormalE4m3() {
    return _mm512_castsi128_si512(_mm_setr_epi16(
        0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  }

  static void Negate(uint16_t* halves) {
    for (int i = 0; i < kDepth; ++i) halves[i] ^= 0x8000;
  }

  static ZYFA_INLINE __mmask32 NonFinite(Halves x) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
  }

  // Pairs of elements [first, first + 16) of a and of b.
  static ZYFA_INLINE Halves PairUp(Halves a, Halves b, int first) {
    const U32 lane = (U32)LaneNumbers() + first;
    const U32 order = lane | ((lane + kDepth) << 16);
    return _mm512_permutex2var_epi16(a, (__m512i)order, b);
  }

  // Tiles 0..3: sums, rows by columns; 4, 5: left operand; 6, 7: right operand.
  // An instruction names its tile, so each tile has its own.

  template <int kTileIndex>
  static ZYFA_INLINE void ClearSum() {
    if constexpr (kTileIndex == 0) _tile_zero(0);
    if constexpr (kTileIndex == 1) _tile_zero(1);
    if constexpr (kTileIndex == 2) _tile_zero(2);
    if constexpr (kTileIndex == 3) _tile_zero(3);
  }

  template <int kTileIndex>
  static ZYFA_INLINE void LoadSum(const float* sums, int64_t stride) {
    sums += kTileIndex / 2 * kTile * stride + kTileIndex % 2 * kTile;
    if constexpr (kTileIndex == 0) _tile_loadd(0, sums, stride * 4);
    if constexpr (kTileIndex == 1) _tile_loadd(1, sums, stride * 4);
    if constexpr (kTileIndex == 2) _tile_loadd(2, sums, stride * 4);
    if constexpr (kTileIndex == 3) _tile_loadd(3, sums, stride * 4);
  }

  template <int kTileIndex>
  static ZYFA_INLINE void StoreSum(float* sums, int64_t stride) {
    sums += kTileIndex / 2 * kTile * stride + kTileIndex % 2 * kTile;
    if constexpr (kTileIndex == 0) _tile_stored(0, sums, stride * 4);
    if constexpr (kTileIndex == 1) _tile_stored(1, sums, stride * 4);
    if constexpr (kTileIndex == 2) _tile_stored(2, sums, stride * 4);
    if constexpr (kTileIndex == 3) _tile_stored(3, sums, stride * 4);
  }

  static void StoreSums(float* sums, int64_t stride) {
    StoreSum<0>(sums, stride);
    StoreSum<1>(sums, stride);
    StoreSum<2>(sums, stride);
    StoreSum<3>(sums, stride);
  }

  // Tile kQuarter of kRows rows times kCols columns, one kDepth. Quarters come
  // in order: each finds in place what those before it have loaded.
  template <int kQuarter>
  static ZYFA_INLINE void MultiplyQuarter(const uint16_t* left, int64_t stride,
                                          const uint16_t* right) {
    if constexpr (kQuarter == 0) {
      _tile_loadd(4, left, stride * 2);
      _tile_loadd(6, right, kCols * 4);
      _tile_dpbf16ps(0, 4, 6);
    } else if constexpr (kQuarter == 1) {
      _tile_loadd(7, right + kTile * 2, kCols * 4);
      _tile_dpbf16ps(1, 4, 7);
    } else if constexpr (kQuarter == 2) {
      _tile_loadd(5, left + kTile * stride, stride * 2);
      _tile_dpbf16ps(2, 5, 6);
    } else {
      _tile_dpbf16ps(3, 5, 7);
    }
  }
};

}  // namespace
}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_AMX_ENGINE_H_
