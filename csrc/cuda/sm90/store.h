// Results to memory. Rows go 16 bytes at a time: four neighbouring threads
// hold a row; of each eight columns, a thread has two.

#ifndef ZYFA_CUDA_SM90_STORE_H_
#define ZYFA_CUDA_SM90_STORE_H_

#include "csrc/cuda/sm90/intrinsics.h"
#include "csrc/cuda/sm90/softmax.h"
#include "csrc/cuda/sm90/tiles.h"

namespace zyfa::sm90 {

// Swaps b of the thread whose `bit` is clear with a of its neighbour, whose bit
// is set.
template <int kBit>
ZYFA_DEVICE void SwapWithNeighbour(uint32_t& a, uint32_t& b) {
  const bool set = (threadIdx.x & kBit) != 0;
  const uint32_t got = __shfl_xor_sync(~0u, set ? a : b, kBit);
  (set ? a : b) = got;
}

// Word j of thread i of four becomes word i of thread j.
ZYFA_DEVICE void TransposeWords(uint32_t (&words)[4]) {
  SwapWithNeighbour<1>(words[0], words[1]);
  SwapWithNeighbour<1>(words[2], words[3]);
  SwapWithNeighbour<2>(words[0], words[2]);
  SwapWithNeighbour<2>(words[1], words[3]);
}

ZYFA_DEVICE void StoreWords(void* to, const uint32_t (&words)[4], bool stores) {
  if (!stores) return;
  *static_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

constexpr int kRowOutputs = kValueDim / 4;

// Elements of two bytes: 32 columns at a time.
template <uint32_t (*kPack)(float, float)>
ZYFA_DEVICE void StoreHalfRow(uint16_t* to, const float (&values)[kRowOutputs],
                              bool stores) {
  const int thread = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int group = 0; group < kValueDim / 32; ++group) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] =
          kPack(values[8 * group + 2 * i], values[8 * group + 2 * i + 1]);
    }
    TransposeWords(words);
    StoreWords(to + 32 * group + 8 * thread, words, stores);
  }
}

struct BF16Out {
  static ZYFA_DEVICE void Store(void* to, int64_t at,
                                const float (&values)[kRowOutputs],
                                bool stores) {
    StoreHalfRow<PackBFloats>(static_cast<uint16_t*>(to) + at, values, stores);
  }
};

struct F16Out {
  static ZYFA_DEVICE void Store(void* to, int64_t at,
                                const float (&values)[kRowOutputs],
                                bool stores) {
    StoreHalfRow<PackHalves>(static_cast<uint16_t*>(to) + at, values, stores);
  }
};

// 16 columns at a time: even threads get the first eight's, odd ones the
// others'.
struct F32Out {
  static ZYFA_DEVICE void Store(void* to, int64_t at,
                                const float (&values)[kRowOutputs],
                                bool stores) {
    const int thread = static_cast<int>(threadIdx.x) % 4;
    const int column = thread % 2 * 8 + thread / 2 * 4;
    float* const row = static_cast<float*>(to) + at;
#pragma unroll
    for (int group = 0; group < kValueDim / 16; ++group) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = __float_as_uint(values[4 * group + i]);
      }
      SwapWithNeighbour<1>(words[0], words[2]);
      SwapWithNeighbour<1>(words[1], words[3]);
      StoreWords(row + 16 * group + column, words, stores);
    }
  }
};

template <class Out, class Softmax>
ZYFA_DEVICE void StoreRows(const AttentionArgs& args, const WorkItem& item,
                           const ThreadQueries& queries,
                           const Softmax& softmax) {
  const int64_t kv_head = item.KvHead(args);
  const float* const v_scale =
      args.v_scale + (args.v_channels ? kv_head * kValueDim : kv_head);
#pragma unroll
  for (int row = 0; row < kThreadRows; ++row) {
    const int query = queries[row];
    const float sum = softmax.TotalSum(row);
    const bool empty =
        query >= item.q_length || softmax.Frame(row) == kLowestMax;
    const float weight = (args.v_channels ? 1.0f : *v_scale) / sum;
    float values[kRowOutputs];
#pragma unroll
    for (int i = 0; i < kRowOutputs; ++i) {
      const float value = softmax.out[i / 2 * 4 + row * 2 + i % 2];
      values[i] = empty ? 0.0f : value * weight;
    }
    if (args.v_channels && !empty) {
      const int column = 2 * (static_cast<int>(threadIdx.x) % 4);
#pragma unroll
      for (int i = 0; i < kRowOutputs; i += 2) {
        const float2 scales =
            *reinterpret_cast<const float2*>(v_scale + i / 2 * 8 + column);
        values[i] *= scales.x;
        values[i + 1] *= scales.y;
      }
    }
    const int64_t at =
        ((int64_t{item.batch} * args.q_len + query) * args.heads + item.head) *
        kValueDim;
    Out::Store(args.out, at, values, query < args.q_len);
    if (threadIdx.x % 4 == 0 && query < args.q_len) {
      const float lse = (softmax.Frame(row) + Log2(sum) - Softmax::kLog2Scale) *
                        static_cast<float>(numerics::kLn2);
      args.lse[(int64_t{item.batch} * args.heads + item.head) * args.q_len +
               query] = empty ? numerics::kNegativeInfinity : lse;
    }
  }
}

template <class Softmax>
ZYFA_DEVICE void StoreItem(const AttentionArgs& args, const WorkItem& item,
                           const ThreadQueries& queries,
                           const Softmax& softmax) {
  switch (args.out_type) {
    case cuda::OutType::kF32:
      return StoreRows<F32Out>(args, item, queries, softmax);
    case cuda::OutType::kBF16:
      return StoreRows<BF16Out>(args, item, queries, softmax);
    case cuda::OutType::kF16:
      return StoreRows<F16Out>(args, item, queries, softmax);
  }
}

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_STORE_H_
