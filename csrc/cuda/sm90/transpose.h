// FP8 values (kv_batch, keys, kv_heads, 128) to (kv_batch, kv_heads, 128,
// padded keys): the matrix unit takes 8-bit operands along the depth of the
// product. Keys are in the order in which the accumulators of the logits hold
// them, and those beyond the end are zero.

#ifndef ZYFA_CUDA_SM90_TRANSPOSE_H_
#define ZYFA_CUDA_SM90_TRANSPOSE_H_

#include "csrc/cuda/sm90/intrinsics.h"
#include "csrc/cuda/sm90/tiles.h"

namespace zyfa::sm90 {

// Keys that some batch sees, of those that read key/value batch `kv_batch`.
ZYFA_DEVICE int KeysInUse(const AttentionArgs& args, int kv_batch) {
  const int share = args.batch / args.kv_batch;
  int keys = 0;
  for (int i = 0; i < share; ++i) {
    keys = max(keys, args.kv_lengths[kv_batch * share + i]);
  }
  return min(keys, args.kv_len);
}

// Four words of four bytes each: byte i of word j becomes byte j of word i.
ZYFA_DEVICE void TransposeBytes(uint32_t (&words)[4]) {
  const uint32_t low01 = __byte_perm(words[0], words[1], 0x5140);
  const uint32_t high01 = __byte_perm(words[0], words[1], 0x7362);
  const uint32_t low23 = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t high23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low01, low23, 0x5410);
  words[1] = __byte_perm(low01, low23, 0x7632);
  words[2] = __byte_perm(high01, high23, 0x5410);
  words[3] = __byte_perm(high01, high23, 0x7632);
}

// One tile of 128 keys, by way of shared memory: in by 16 dimensions of a key,
// out by 16 keys of a dimension, eight neighbouring threads to a line of 128
// bytes each time. Pieces of 16 bytes change places within a row, so that
// neither way has two threads at one bank.
ZYFA_DEVICE void TransposeValues(const AttentionArgs& args) {
  constexpr int kThreads = cuda::kPrepareThreads;
  constexpr int kPieces = kValueDim / 16;
  constexpr int kGroups = kKeyBlock / 16;  // of keys
  static_assert(kPieces == 8 && kGroups == 8 && kThreads == 256);
  __shared__ uint4 tile[kKeyBlock * kPieces];
  const int thread = static_cast<int>(threadIdx.x);
  const int tiles = TileCount(args);
  const int number = static_cast<int>(blockIdx.x);
  const int first = number % tiles * kKeyBlock;
  const int head = number / tiles;  // of all batches
  const int kv_batch = head / args.kv_heads;
  const int kv_head = head % args.kv_heads;
  const int keys = KeysInUse(args, kv_batch) - first;

  const uint8_t* const from =
      static_cast<const uint8_t*>(args.v) +
      ((int64_t{kv_batch} * args.kv_len + first) * args.kv_heads + kv_head) *
          kValueDim;
  const int64_t key_bytes = int64_t{args.kv_heads} * kValueDim;
  uint4 pieces[kKeyBlock * kPieces / kThreads];
#pragma unroll
  for (int i = 0; i < kKeyBlock * kPieces / kThreads; ++i) {
    const int key = (i * kThreads + thread) / kPieces;
    pieces[i] = key < keys ? *reinterpret_cast<const uint4*>(
                                 from + key * key_bytes + thread % kPieces * 16)
                           : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kKeyBlock * kPieces / kThreads; ++i) {
    const int key = (i * kThreads + thread) / kPieces;
    tile[key * kPieces + (thread % kPieces ^ key / 16)] = pieces[i];
  }
  __syncthreads();

  const int piece = thread / 32;           // of the dimensions
  const int word = thread % 32 / kGroups;  // of the piece
  const int group = thread % kGroups;
  const auto* const column = reinterpret_cast<const uint32_t*>(
      &tile[group * 16 * kPieces + (piece ^ group)]);
  uint32_t rows[4][4];  // words of the keys, then dimensions
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      rows[i][j] = column[KeyAt(4 * i + j) * kPieces * 4 + word];
    }
    TransposeBytes(rows[i]);
  }
  const int64_t padded = int64_t{tiles} * kKeyBlock;
  uint8_t* const to =
      static_cast<uint8_t*>(args.workspace) + cuda::kCounterBytes +
      (int64_t{head} * kValueDim + piece * 16 + word * 4) * padded + first +
      group * 16;
#pragma unroll
  for (int dim = 0; dim < 4; ++dim) {
    *reinterpret_cast<uint4*>(to + dim * padded) =
        make_uint4(rows[0][dim], rows[1][dim], rows[2][dim], rows[3][dim]);
  }
}

ZYFA_DEVICE void AddSquares(uint32_t e4m3s, float& sum) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float low, high;
    WidenHalves(HalvesOfE4m3(e4m3s >> 16 * half), low, high);
    sum = fmaf(low, low, fmaf(high, high, sum));
  }
}

// The largest norm of a tile's keys in use. Loads come before other work of the
// block, and what is made of them after it.
template <int kHeadDim>
class KeyNorm {
 public:
  ZYFA_DEVICE explicit KeyNorm(const AttentionArgs& args) {
    const int head = static_cast<int>(blockIdx.x) / TileCount(args);
    const int tile = static_cast<int>(blockIdx.x) % TileCount(args);
    const int kv_batch = head / args.kv_heads;
    const int key = tile * kKeyBlock + static_cast<int>(threadIdx.x) / kShare;
    const bool valid = key < KeysInUse(args, kv_batch);
    const auto* const from = reinterpret_cast<const uint4*>(
        static_cast<const uint8_t*>(args.k) +
        ((int64_t{kv_batch} * args.kv_len + key) * args.kv_heads +
         head % args.kv_heads) *
            kHeadDim);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      pieces_[i] =
          LoadIf(valid, from + threadIdx.x % kShare + kShare * i, KeepPolicy());
    }
  }

  ZYFA_DEVICE void Store(const AttentionArgs& args) const {
    __shared__ uint32_t most;
    if (threadIdx.x == 0) most = 0;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      AddSquares(pieces_[i].x, squares);
      AddSquares(pieces_[i].y, squares);
      AddSquares(pieces_[i].z, squares);
      AddSquares(pieces_[i].w, squares);
    }
    squares += __shfl_xor_sync(~0u, squares, 1);
    // Integers have the order of numbers from zero on, and NaN beyond those.
    const uint32_t largest =
        __reduce_max_sync(~0u, __float_as_uint(sqrtf(squares)) & 0x7fffffff);
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(&most, largest);
    __syncthreads();
    if (threadIdx.x == 0) KeyNorms(args)[blockIdx.x] = __uint_as_float(most);
  }

 private:
  static constexpr int kShare =
      cuda::kPrepareThreads / kKeyBlock;  // threads of a key
  static constexpr int kPieces = kHeadDim / 16 / kShare;
  static_assert(kShare == 2);

  uint4 pieces_[kPieces];
};

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_TRANSPOSE_H_
