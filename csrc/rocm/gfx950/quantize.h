// Quantisation for gfx950, to FP8 and to int8: a workgroup takes 128 tokens of
// one head, and holds them in registers from the one load of them to the one
// store.
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
#include "csrc/rocm/gfx950/quantize_tile.h"
#include "csrc/rocm/quantize_plan.h"

namespace zyfa::gfx950 {

// The largest of the group's; of none of them NaN.
ZYFA_DEVICE float GroupMaximum(float of_wave, float* lds) {
  const int wave = Uniform(Thread() / 64);
  if (Thread() % 64 == 0) lds[wave] = of_wave;
  GroupBarrier();
  float largest = lds[0];
  for (int i = 1; i < kQuantizeWaves; ++i) largest = Maximum(largest, lds[i]);
  return largest;
}

// The group's tile. Heads come first: what is loaded at one time lies together.
struct Tile {
  __attribute__((device,
                 always_inline)) explicit Tile(const QuantizeArgs& args) {
    const auto tiles = static_cast<uint32_t>(gpu::QuantizeTiles(args.tokens));
    const auto group = static_cast<uint32_t>(Group());
    const auto heads = static_cast<uint32_t>(args.heads);
    const uint32_t head_of_batch = group % heads;
    const uint32_t tile = group / heads % tiles;
    const uint32_t batch = group / heads / tiles;
    const int first_token = static_cast<int>(tile) * gpu::kQuantizeTokens;
    const int left = args.tokens - first_token;
    const int64_t token = int64_t{batch} * args.tokens + first_token;
    head = int64_t{batch} * heads + head_of_batch;
    index = head * tiles + tile;
    token_index = head * args.tokens + first_token;
    first_element = (token * heads + head_of_batch) * args.head_dim;
    valid_tokens = left < gpu::kQuantizeTokens ? left : gpu::kQuantizeTokens;
  }

  int64_t head;         // of all batches
  int64_t index;        // of all heads' tiles
  int64_t token_index;  // of all heads' tokens, the tile's first
  int64_t first_element;
  int valid_tokens;
};

// Loads times a guard under which no sum overflows, and returns it. `finite`
// becomes is_finite(), whether all numbers are.
template <class Wave, class IsFinite>
ZYFA_DEVICE float LoadGuarded(Wave& wave, bool overflows,
                              const IsFinite& is_finite, bool& finite) {
  float guard = 1.0f;
  for (;;) {
    wave.Load(guard);
    finite = is_finite();
    if (finite || !overflows || guard != 1.0f) return guard;
    guard = wave.Guard();
    if (guard == 1.0f) return guard;
  }
}

// The tile's descale from the waves' largest finite magnitudes, each times the
// wave's guard; one thread stores it.
ZYFA_DEVICE float FindDescale(const QuantizeArgs& args, const Tile& tile,
                              float largest, float inverse_max, float guard) {
  __attribute__((shared)) static float lds[kQuantizeWaves];
  // Rounding keeps the order: the largest of the descales is the descale of the
  // largest.
  const float of_wave =
      largest == 0.0f ? 0.0f : DescaleOf(largest, inverse_max) / guard;
  const float of_tile = GroupMaximum(of_wave, lds);
  const float descale =
      UniformFloat(of_tile == 0.0f ? args.zero_descale : of_tile);
  if (Thread() == 0) args.found[tile.index] = descale;
  return descale;
}

template <class Type, int kSlots, int kChunks, bool kRotates>
ZYFA_DEVICE void Quantize(const QuantizeArgs& args) {
  const Tile tile(args);
  WaveTile<Type, kSlots, kChunks, kRotates> wave(args, tile.first_element,
                                                 tile.valid_tokens, tile.head);
  float largest;
  const auto is_finite = [&] {
    largest = wave.Largest();
    return IsFinite(largest);
  };
  const bool overflows = Type::kOverflows && (kRotates || args.mean != nullptr);
  bool finite;
  const float guard = LoadGuarded(wave, overflows, is_finite, finite);
  if (!finite) largest = wave.LargestFinite();
  float descale = args.given != nullptr
                      ? args.given[tile.index]
                      : FindDescale(args, tile, largest, kInverseFp8Max, guard);
  if (args.values == nullptr) return;
  descale *= guard;
  if (!finite) wave.Saturate(descale);
  wave.Store(descale);
}

// To FP8, with a descale given for each channel.
template <class Type, int kSlots>
ZYFA_DEVICE void QuantizeChannels(const QuantizeArgs& args) {
  const Tile tile(args);
  WaveTile<Type, kSlots, 1, false> wave(args, tile.first_element,
                                        tile.valid_tokens, tile.head);
  wave.Load(1.0f);
  wave.StoreByChannel(
      {args.given + tile.head * args.head_dim, args.head_dim * 4},
      {args.nan + tile.token_index, tile.valid_tokens}, args.head_dim);
}

// To int8, with a descale found for each token or for the tile. Numbers that
// are not finite have no part in it. What int8 cannot say of NaN, the descale
// of a token or a mark does.
template <class Type, int kSlots, int kChunks, bool kByToken>
ZYFA_DEVICE void QuantizeInt8(const QuantizeArgs& args) {
  __attribute__((shared)) static RowsLds<kSlots> lds;
  const Tile tile(args);
  WaveTile<Type, kSlots, kChunks, true> wave(args, tile.first_element,
                                             tile.valid_tokens, tile.head);
  float of_row[kSlots];
  const auto is_finite = [&] {
    wave.LargestOfRows(of_row);
    float largest = 0.0f;
    for (const float x : of_row) largest = Maximum(largest, x);
    return !AnyLane(!IsFinite(largest));
  };
  bool finite;
  const float guard = LoadGuarded(wave, Type::kOverflows, is_finite, finite);
  if (!finite) wave.LargestFiniteOfRows(of_row);
  float descale[kSlots];
  if constexpr (kByToken) {
    const float unguard = guard == 1.0f ? 1.0f : kGuardAbove;
    wave.OverRows(of_row, args.head_dim, lds);
    for (int i = 0; i < kSlots; ++i) {
      const float largest = __builtin_fabsf(of_row[i]);
      const bool nan = BitCast<int32_t>(of_row[i]) < 0;
      descale[i] =
          largest == 0.0f ? guard : DescaleOf(largest, kInverseInt8Max);
      of_row[i] = nan ? __builtin_nanf("") : descale[i] * unguard;
    }
    wave.StoreOfRows({args.found + tile.token_index, tile.valid_tokens * 4},
                     of_row);
  } else {
    float largest = 0.0f;
    for (const float x : of_row) {
      largest = Maximum(largest, __builtin_fabsf(x));
    }
    const float of_tile =
        FindDescale(args, tile, WaveMaximum(largest), kInverseInt8Max, guard);
    for (float& x : descale) x = of_tile * guard;
    // For the marks alone, of which a row within the wave has none.
    if (kChunks == 1 || !finite) wave.OverRows(of_row, args.head_dim, lds);
    uint8_t nan[kSlots];
    for (int i = 0; i < kSlots; ++i)
      nan[i] = BitCast<uint32_t>(of_row[i]) >> 31;
    wave.StoreOfRows({args.nan + tile.token_index, tile.valid_tokens}, nan);
  }
  if (!finite) wave.SaturateInt8(descale);
  wave.StoreInt8(descale);
}

// The channels' statistics of a tile. A thread takes the same channels of every
// `rows`th row; sums are of its rows, from the first to the last, and then of
// the threads', likewise; of distances from the tile's first number, so that
// squares of a far mean do not hide those about it.
template <class Type, int kSteps>
ZYFA_DEVICE void Measure(const QuantizeArgs& args) {
  struct Lds {
    float of_rows[2][rocm::kQuantizeThreads * kChunk];
    float origins[gpu::kMaxQuantizeDim];
    bool finite[kQuantizeWaves];
  };
  __attribute__((shared)) static Lds lds;
  const Tile tile(args);
  const int dim = args.head_dim;
  const auto row_of = [&](uint32_t part) {
    return static_cast<int>((part * args.row_inverse) >> gpu::kRowInverseShift);
  };
  const int rows = row_of(rocm::kQuantizeThreads);
  const int row = row_of(Thread());
  const int channel = Thread() * kChunk - row * dim;
  const int element = Product24(args.heads * dim, row) + channel;
  const int step = Product24(args.heads * dim, rows);
  const int valid = row < rows ? tile.valid_tokens : 0;
  const Buffer input(
      static_cast<const char*>(args.x) + tile.first_element * Type::kBytes,
      ((tile.valid_tokens - 1) * args.heads + 1) * dim * Type::kBytes);
  typename Type::Raw raw[kSteps];
  for (int i = 0; i < kSteps; ++i) {
    // The first row again in place of one that is not there.
    const bool there = row + i * rows < valid;
    const int from = there ? element + i * step : channel;
    raw[i] = input.template Load<typename Type::Raw>(from * Type::kBytes);
  }
  Chunk origin;
  Type::Widen(input.template Load<typename Type::Raw>(channel * Type::kBytes),
              origin);
  for (F32x2& x : origin) {
    for (int k = 0; k < 2; ++k) x[k] = IsFinite(x[k]) ? x[k] : 0.0f;
  }
  // use(k, x) for each number x, of channel k, of the rows that are there.
  const auto for_rows = [&](const auto& use) {
    for (int i = 0; i < kSteps; ++i) {
      if (row + i * rows >= valid) continue;
      Chunk y;
      Type::Widen(raw[i], y);
      for (int k = 0; k < kChunk; ++k) use(k, y[k / 2][k % 2]);
    }
  };
  // Shows the others what this thread has of its channels.
  const auto show = [&](int which, const auto& of_channel) {
    if (row >= rows) return;
    auto* to =
        reinterpret_cast<F32x4*>(&lds.of_rows[which][row * dim + channel]);
    to[0] = {of_channel(0), of_channel(1), of_channel(2), of_channel(3)};
    to[1] = {of_channel(4), of_channel(5), of_channel(6), of_channel(7)};
  };
  // use(channel) by the thread of each channel, once all have shown theirs.
  const auto for_channels = [&](const auto& use) {
    GroupBarrier();
    if (Thread() < dim) use(Thread());
    GroupBarrier();
  };
  const auto shown = [&](int which, int row, int channel) {
    return lds.of_rows[which][row * dim + channel];
  };
  float* const to = args.found + tile.index * gpu::kStatistics * dim;

  Chunk sum = {}, squares = {};
  float high[kChunk], low[kChunk];
  for (int k = 0; k < kChunk; ++k) high[k] = low[k] = origin[k / 2][k % 2];
  for (int i = 0; i < kSteps; ++i) {
    Chunk y;
    Type::Widen(raw[i], y);
    for (int k = 0; k < kPairs; ++k) {
      const F32x2 distance = y[k] - origin[k];
      sum[k] += distance;
      squares[k] = Fma(distance, distance, squares[k]);
      for (int l = 0; l < 2; ++l) {
        float& largest = high[2 * k + l];
        float& smallest = low[2 * k + l];
        largest = Maximum(largest, y[k][l]);
        smallest = Minimum(smallest, y[k][l]);
      }
    }
    if (i % 2 == 1) ScheduleFence();  // else too many are widened at one time
  }
  bool finite = true;
  for (int k = 0; k < kPairs; ++k) {
    sum[k] *= gpu::kSumScale;
    finite &= IsFinite(squares[k][0]) && IsFinite(squares[k][1]);
  }
  finite = !AnyLane(!finite);
  if (!finite) {
    // Of finite numbers alone, which may be so large that a sum needs its scale
    // from the first.
    for (int k = 0; k < kPairs; ++k) sum[k] = squares[k] = 0.0f;
    for (int k = 0; k < kChunk; ++k) {
      high[k] = -__builtin_inff();
      low[k] = __builtin_inff();
    }
    for_rows([&](int k, float x) {
      if (!IsFinite(x)) return;
      const float from = origin[k / 2][k % 2];
      sum[k / 2][k % 2] += Fma(x, gpu::kSumScale, -gpu::kSumScale * from);
      squares[k / 2][k % 2] += (x - from) * (x - from);
      high[k] = Maximum(high[k], x);
      low[k] = Minimum(low[k], x);
    });
  }
  if (Thread() % 64 == 0) lds.finite[Thread() / 64] = finite;
  if (row == 0) {
    for (int k = 0; k < kChunk; ++k) {
      lds.origins[channel + k] = origin[k / 2][k % 2];
    }
  }
  GroupBarrier();
  bool all_finite = true;
  for (const bool of_wave : lds.finite) all_finite &= of_wave;
  all_finite = Uniform(all_finite);

  float number = static_cast<float>(tile.valid_tokens);  // of the thread's
  if (!all_finite) {
    float count[kChunk] = {};
    for_rows([&](int k, float x) { count[k] += IsFinite(x) ? 1.0f : 0.0f; });
    show(0, [&](int k) { return count[k]; });
    for_channels([&](int channel) {
      number = 0.0f;
      for (int k = 0; k < rows; ++k) number += shown(0, k, channel);
    });
  }
  show(0, [&](int k) { return sum[k / 2][k % 2]; });
  show(1, [&](int k) { return squares[k / 2][k % 2]; });
  for_channels([&](int channel) {
    float all = 0.0f, of_squares = 0.0f;
    for (int k = 0; k < rows; ++k) {
      all += shown(0, k, channel);
      of_squares += shown(1, k, channel);
    }
    to[channel] = Fma(number * gpu::kSumScale, lds.origins[channel], all);
    to[dim + channel] = number;
    // Less what the mean's distance from the origin adds.
    constexpr float kScaled = 1.0f / (gpu::kSumScale * gpu::kSumScale);
    const float excess = number == 0.0f ? 0.0f : all / number * all * kScaled;
    const float about_mean = Maximum(of_squares - excess, 0.0f);
    to[4 * dim + channel] = IsFinite(of_squares) ? about_mean : of_squares;
  });
  show(0, [&](int k) { return high[k]; });
  show(1, [&](int k) { return low[k]; });
  for_channels([&](int channel) {
    float largest = shown(0, 0, channel), smallest = shown(1, 0, channel);
    for (int k = 1; k < rows; ++k) {
      largest = Maximum(largest, shown(0, k, channel));
      smallest = Minimum(smallest, shown(1, k, channel));
    }
    to[2 * dim + channel] = largest;
    to[3 * dim + channel] = smallest;
  });
}

}  // namespace zyfa::gfx950

#endif  // ZYFA_ROCM_GFX950_QUANTIZE_H_
