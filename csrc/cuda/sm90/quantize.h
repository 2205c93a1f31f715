// Quantisation for Hopper, to FP8 and to int8: a block takes 128 tokens of one
// head, and holds them in registers from the one load of them to the one store.
//
// A row (a token of the head) is cut into parts of eight elements, 16 bytes of
// the two-byte types: consecutive threads hold consecutive parts of consecutive
// rows, so that a warp's load or store is of whole lines. Where rows are
// rotated by a Hadamard matrix, matrix products do most of it for two-byte
// types and the usual head dims, without an exchange between lanes, which hold
// numbers as the products take them. Else eight lanes (or fewer, of a smaller
// matrix) hold the row of it: a part is then one, two or four chunks of eight
// elements, eight chunks apart. Butterflies within a lane come first, then
// those between lanes.
//
// All loads of a thread start before the first is used. Blocks that read again
// what others have just read come in the reverse order: what those read last
// may still be in the L2 cache.
//
// NaN, infinities, and numbers so large that a sum of them overflows, all leave
// a maximum that is not finite. What they need beyond the common path is apart
// from it, and a warp decides for itself.

#ifndef ZYFA_CUDA_SM90_QUANTIZE_H_
#define ZYFA_CUDA_SM90_QUANTIZE_H_

#include <cstdint>

#include "csrc/cuda/quantize_plan.h"
#include "csrc/cuda/sm90/intrinsics.h"
#include "csrc/cuda/sm90/quantize_tile.h"
#include "csrc/gpu/quantize_args.h"

namespace zyfa::sm90 {

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
    // What others have measured or found is given, mean and weight or descales.
    const bool prepares = args.mean != nullptr || args.weight != nullptr;
    const bool reads_again = prepares != (args.given != nullptr);
    const uint32_t block =
        reads_again ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const uint32_t head_of_batch = block % heads;
    const uint32_t tile = block / heads % tiles;
    const uint32_t batch = block / heads / tiles;
    const int first_token = static_cast<int>(tile) * gpu::kQuantizeTokens;
    const int64_t token = int64_t{batch} * args.tokens + first_token;
    head = int64_t{batch} * heads + head_of_batch;
    index = head * tiles + tile;
    token_index = head * args.tokens + first_token;
    first_element = (token * heads + head_of_batch) * args.head_dim;
    valid_tokens = min(args.tokens - first_token, gpu::kQuantizeTokens);
  }

  int64_t head;         // of all batches
  int64_t index;        // of all heads' tiles
  int64_t token_index;  // of all heads' tokens, the tile's first
  int64_t first_element;
  int valid_tokens;
};

// Arguments of which the compiler knows that numbers are taken as they are.
ZYFA_DEVICE QuantizeArgs Unprepared(QuantizeArgs args) {
  args.mean = args.weight = nullptr;
  return args;
}

// Loads times a guard under which no sum overflows, and returns it. `largest`
// becomes largest_of(), which is NaN or infinite if a number is.
template <class Warp, class LargestOf>
ZYFA_DEVICE float LoadGuarded(Warp& warp, uint64_t policy, bool overflows,
                              const LargestOf& largest_of, float& largest) {
  float guard = 1.0f;
#pragma unroll 1
  for (;;) {
    warp.Load(guard, policy);
    largest = largest_of();
    if (IsFinite(largest) || !overflows || guard != 1.0f) return guard;
    guard = warp.Guard();
    if (guard == 1.0f) return guard;
  }
}

// The tile's descale from the warps' largest finite magnitudes, each times the
// warp's guard; thread 0 stores it.
ZYFA_DEVICE float FindDescale(const QuantizeArgs& args, const Tile& tile,
                              float largest, float inverse_max, float guard) {
  // Rounding keeps the order: the largest of the descales is the descale of the
  // largest.
  const float of_warp =
      largest == 0.0f ? 0.0f : DescaleOf(largest, inverse_max) / guard;
  const float of_tile = BlockMaximum(of_warp);
  const float descale = of_tile == 0.0f ? args.zero_descale : of_tile;
  if (threadIdx.x == 0) args.found[tile.index] = descale;
  return descale;
}

template <class Type, class Layout>
ZYFA_DEVICE void Quantize(const QuantizeArgs& args) {
  const Tile tile(args);
  WarpTile<Type, Layout> warp(args, tile.first_element, tile.valid_tokens,
                              tile.head);

  const bool finds = args.given == nullptr;
  const bool overflows =
      Type::kOverflows && (Layout::kRotates || args.mean != nullptr);
  const uint64_t policy =
      args.values == nullptr ? KeepPolicy() : LastUsePolicy();
  const auto largest_of = [&] {
    return finds || overflows ? warp.Largest() : 0.0f;
  };
  float largest;
  const float guard = LoadGuarded(warp, policy, overflows, largest_of, largest);
  float descale;
  if (!finds) {
    descale = __ldg(args.given + tile.index);
  } else {
    if (!IsFinite(largest)) largest = warp.LargestFinite();
    descale = FindDescale(args, tile, largest, kInverseFp8Max, guard);
  }
  if (args.values == nullptr) return;
  warp.Store(descale * guard);
}

// To FP8, with a descale given for each channel.
template <class Type, int kSlots>
ZYFA_DEVICE void QuantizeChannels(const QuantizeArgs& all_args) {
  const QuantizeArgs args = Unprepared(all_args);
  const Tile tile(args);
  WarpTile<Type, ByLanes<kSlots, 1, false>> warp(args, tile.first_element,
                                                 tile.valid_tokens, tile.head);
  warp.Load(1.0f, LastUsePolicy());
  warp.StoreByChannel(args.given + tile.head * args.head_dim,
                      args.nan + tile.token_index);
}

// To int8, with a descale found for each token or for the tile. Numbers that
// are not finite have no part in it. What int8 cannot say of NaN, the descale
// of a token or a mark does.
template <class Type, class Layout, bool kByToken>
ZYFA_DEVICE void QuantizeInt8(const QuantizeArgs& args) {
  const Tile tile(args);
  constexpr int kSlots = Layout::kSlots;
  WarpTile<Type, Layout> warp(args, tile.first_element, tile.valid_tokens,
                              tile.head);
  float of_row[kSlots];
  const auto largest_of = [&] {
    warp.LargestOfRows(of_row);
    float largest = 0.0f;
#pragma unroll
    for (const float x : of_row) largest = Maximum(largest, x);
    return WarpMaximum(largest);
  };
  float largest;
  const float guard =
      LoadGuarded(warp, LastUsePolicy(), Type::kOverflows, largest_of, largest);
  const bool finite = IsFinite(largest);
  // Stores of_slot(i) for each row, but for those with NaN.
  const auto store_of_rows = [&](auto* to, const auto& of_slot, auto of_nan) {
    to += tile.token_index;
    if (warp.channel() == 0) {
      warp.ForRows([&](int i, int token) { to[token] = of_slot(i); });
    }
    if constexpr (Layout::kWhole) {
      __syncwarp();  // of one warp are all lanes of a row
    } else {
      __syncthreads();
    }
    if (!finite) warp.ForNaN([&](int token) { to[token] = of_nan; });
  };
  float inverse[kSlots];
  if constexpr (kByToken) {
    __shared__ uint32_t of_rows[gpu::kQuantizeTokens];
    if (!finite) warp.LargestFiniteOfRows(of_row);
    warp.OverRows(of_row, of_rows);
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
      const bool zero = of_row[i] == 0.0f;
      const float descale =
          zero ? guard : DescaleOf(of_row[i], kInverseInt8Max);
      inverse[i] = warp.Norm() / descale;
      of_row[i] = descale / guard;
    }
    store_of_rows(
        args.found, [&](int i) { return of_row[i]; },
        __uint_as_float(0x7fffffffu));
  } else {
    store_of_rows(args.nan, [](int) { return uint8_t{0}; }, uint8_t{1});
    largest = finite ? largest * warp.Norm() : warp.LargestFinite();
    const float descale =
        guard * FindDescale(args, tile, largest, kInverseInt8Max, guard);
#pragma unroll
    for (float& x : inverse) x = warp.Norm() / descale;
  }
  if (finite) {
    warp.template StoreInt8<true>(inverse);
  } else {
    warp.template StoreInt8<false>(inverse);
  }
}

// The channels' statistics of a tile. Sums are of a thread's rows, from the
// first to the last, and then of the threads', likewise; of distances from the
// tile's first number, so that squares of a far mean do not hide those about
// it.
template <class Type, int kSlots>
ZYFA_DEVICE void Measure(const QuantizeArgs& all_args) {
  const QuantizeArgs args = Unprepared(all_args);
  constexpr int kRows = gpu::kQuantizeTokens / kSlots;
  alignas(16) __shared__ float of_rows[2][cuda::kMaxQuantizeThreads * kChunk];
  __shared__ float origins[gpu::kMaxQuantizeDim];
  const Tile tile(args);
  WarpTile<Type, ByLanes<kSlots, 1, false>> warp(args, tile.first_element,
                                                 tile.valid_tokens, tile.head);
  warp.Load(1.0f, KeepPolicy());
  Chunk origin, first, second;
  warp.Origin(origin);
  warp.Sums(origin, first, second);
  bool finite = true;
#pragma unroll
  for (const float x : second) finite &= IsFinite(x);
  if (!finite) warp.FiniteSums(origin, first, second);
  if (warp.row() == 0) {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) origins[warp.channel() + k] = origin[k];
  }
  const bool all_finite = __syncthreads_or(!finite) == 0;

  const int at = warp.row() * args.head_dim + warp.channel();
  const auto show = [&](int which, const Chunk& x) {
    if (warp.row() >= kRows) return;
#pragma unroll
    for (int k = 0; k < kChunk; k += 4) {
      *reinterpret_cast<float4*>(&of_rows[which][at + k]) = {
          x[k], x[k + 1], x[k + 2], x[k + 3]};
    }
  };
  // use(channel) by the thread of each channel, once all have shown theirs.
  const auto for_channels = [&](const auto& use) {
    __syncthreads();
    for (int channel = static_cast<int>(threadIdx.x); channel < args.head_dim;
         channel += static_cast<int>(blockDim.x)) {
      use(channel);
    }
    __syncthreads();
  };
  const auto of_row = [&](int which, int row, int channel) {
    return of_rows[which][row * args.head_dim + channel];
  };
  float* const to = args.found + tile.index * gpu::kStatistics * args.head_dim;

  if (!all_finite) {
    Chunk count;
    warp.Count(count);
    show(0, count);
    for_channels([&](int channel) {
      float all = 0.0f;
#pragma unroll
      for (int k = 0; k < kRows; ++k) all += of_row(0, k, channel);
      to[args.head_dim + channel] = all;
    });
  }
  show(0, first);
  show(1, second);
  for_channels([&](int channel) {
    float all = 0.0f, of_squares = 0.0f;
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      all += of_row(0, k, channel);
      of_squares += of_row(1, k, channel);
    }
    auto number = static_cast<float>(tile.valid_tokens);
    float* const counted = to + args.head_dim + channel;
    if (all_finite) {
      *counted = number;
    } else {
      number = *counted;  // what this thread has stored
    }
    to[channel] = __fmaf_rn(number * gpu::kSumScale, origins[channel], all);
    // Less what the mean's distance from the origin adds.
    constexpr float kScaled = 1.0f / (gpu::kSumScale * gpu::kSumScale);
    const float excess = number == 0.0f ? 0.0f : all / number * all * kScaled;
    to[4 * args.head_dim + channel] =
        IsFinite(of_squares) ? fmaxf(of_squares - excess, 0.0f) : of_squares;
  });
  warp.Extremes(finite, first, second);
  show(0, first);
  show(1, second);
  for_channels([&](int channel) {
    float largest = of_row(0, 0, channel), smallest = of_row(1, 0, channel);
#pragma unroll
    for (int k = 1; k < kRows; ++k) {
      largest = fmaxf(largest, of_row(0, k, channel));
      smallest = fminf(smallest, of_row(1, k, channel));
    }
    to[2 * args.head_dim + channel] = largest;
    to[3 * args.head_dim + channel] = smallest;
  });
}

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_QUANTIZE_H_
