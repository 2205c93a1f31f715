// The first product on int8 operands with int32 sums, by instructions that
// multiply unsigned by signed bytes (VNNI); the second one on float32.

#ifndef ZYFA_CPU_INT8_ENGINE_H_
#define ZYFA_CPU_INT8_ENGINE_H_

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "csrc/cpu/float_engine.h"
#include "csrc/cpu/pack.h"
#include "csrc/cpu/simd.h"
#include "csrc/numerics/online_softmax.h"

namespace zyfa::cpu {
namespace {

// Layouts. Queries: row-major, each number with 128 added, so that it is
// unsigned; behind it the sign of its scores. Keys: panels of kCols keys: what
// begins their sums, -128 times the sum of each key; the signs of their scores;
// and (depth / 4, kCols) groups of four neighbours in depth.
//
// A negative scale is a sign of scores and not of operands, as -128 has no
// opposite.
struct Int8Engine : FloatEngine {
  using LogitOperand = uint8_t;

  static constexpr int kGroup = 4;  // bytes in a lane
  static constexpr int kDepthStep = kGroup * kLanes;
  static constexpr int kBesideDepth = 2 * kGroup;  // see above

  template <DType kType>
  static void PackQuery(const unsigned char* source, int64_t width, bool negate,
                        uint8_t* target) {
    if constexpr (kType == DType::kI8) {
      for (int64_t d = 0; d < width; ++d) target[d] = source[d] ^ 0x80;
      const float sign = negate ? -1.0f : 1.0f;
      std::memcpy(target + RoundUp(width, kDepthStep), &sign, sizeof(sign));
    }
  }

  template <DType kType>
  static void PackKeys(const RowsView& keys, bool negate, uint8_t* target) {
    if constexpr (kType == DType::kI8) {
      const int64_t stride = RoundUp(keys.width, kDepthStep) + kBesideDepth;
      const F32 sign = Simd::Set(negate ? -1.0f : 1.0f);
      for (int64_t key = 0; key < numerics::kKeyBlock; key += kLanes) {
        uint8_t* column =
            target + key / kCols * kCols * stride + key % kCols * kGroup;
        I32 total = {};
        for (int64_t d = 0; d < keys.width; d += kDepthStep) {
          F32 square[kLanes];
          for (int i = 0; i < kLanes; ++i) {
            square[i] = F32{};
            if (key + i < keys.count) {
              const int64_t left = keys.width - d;
              std::memcpy(&square[i], keys.At<kType>(key + i, d),
                          left < kDepthStep ? left : kDepthStep);
            }
          }
          Transpose(square);
          for (int i = 0; i < kLanes; ++i) {
            std::memcpy(column + (2 + d / kGroup + i) * kCols * kGroup,
                        &square[i], sizeof(square[i]));
            total = AddProducts(total, (I32){} + 0x01010101,
                                BitCast<I32>(square[i]));
          }
        }
        const I32 begin = total * -128;
        std::memcpy(column, &begin, sizeof(begin));
        std::memcpy(column + kCols * kGroup, &sign, sizeof(sign));
      }
    }
  }

  class Products : public FloatEngine::Products {
   public:
    // scores (kRows, kCols) = queries . panel.
    void Scores(const uint8_t* queries, int64_t query_stride,
                const uint8_t* panel, int64_t depth, float* scores,
                int64_t score_stride) {
      const auto right = [panel](int64_t group, int vector) {
        return LoadAs<I32>(panel + (group * kCols + vector * kLanes) * kGroup);
      };
      I32 sum[kRows][kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j) sum[i][j] = right(0, j);
      }
      for (int64_t d = 0; d < depth; d += kGroup) {
        const I32 keys[kVectors] = {right(2 + d / kGroup, 0),
                                    right(2 + d / kGroup, 1)};
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
          const I32 query =
              (I32){} + LoadAs<int32_t>(queries + i * query_stride + d);
#pragma GCC unroll 2
          for (int j = 0; j < kVectors; ++j) {
            sum[i][j] = AddProducts(sum[i][j], query, keys[j]);
          }
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const F32 sign = Simd::Set(
            LoadAs<float>(queries + (i + 1) * query_stride - kBesideDepth));
#pragma GCC unroll 2
        for (int j = 0; j < kVectors; ++j) {
          Store(scores + i * score_stride + j * kLanes,
                __builtin_convertvector(sum[i][j], F32) *
                    (sign * BitCast<F32>(right(1, j))));
        }
      }
    }
  };

 private:
  static_assert(kVectors == 2);

  // sum + the products of a's bytes, unsigned, and b's, signed, by fours.
  static ZYFA_INLINE I32 AddProducts(I32 sum, I32 a, I32 b) {
    return (I32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
  }
};

}  // namespace
}  // namespace zyfa::cpu

#endif  // ZYFA_CPU_INT8_ENGINE_H_
