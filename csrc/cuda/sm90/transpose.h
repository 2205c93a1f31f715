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

// One tile of 128 keys: in by 16 bytes of a key, out by 16 keys of a dimension.
ZYFA_DEVICE void TransposeValues(const AttentionArgs& args) {
  constexpr int kPitch = kValueDim + 4;  // a word more: no bank conflicts
  __shared__ uint8_t tile[kKeyBlock * kPitch];
  const int tiles = (args.kv_len + kKeyBlock - 1) / kKeyBlock;
  const int number = static_cast<int>(blockIdx.x);
  const int first = number % max(tiles, 1) * kKeyBlock;
  const int head = number / max(tiles, 1);  // of all batches
  const int kv_batch = head / args.kv_heads;
  const int kv_head = head % args.kv_heads;
  const int keys = KeysInUse(args, kv_batch);
  const int threads = static_cast<int>(blockDim.x);

  constexpr int kPieces = kValueDim / 16;
  for (int i = threadIdx.x; i < kKeyBlock * kPieces; i += threads) {
    const int key = i / kPieces;
    const int dim = i % kPieces * 16;
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (first + key < keys) {
      const int64_t row =
          (int64_t{kv_batch} * args.kv_len + first + key) * args.kv_heads +
          kv_head;
      piece = *reinterpret_cast<const uint4*>(
          static_cast<const uint8_t*>(args.v) + row * kValueDim + dim);
    }
    auto* to = reinterpret_cast<uint32_t*>(&tile[key * kPitch + dim]);
    to[0] = piece.x;
    to[1] = piece.y;
    to[2] = piece.z;
    to[3] = piece.w;
  }
  __syncthreads();
  const int64_t padded = int64_t{max(tiles, 1)} * kKeyBlock;
  auto* const out = static_cast<uint8_t*>(args.workspace) +
                    cuda::kCounterBytes + int64_t{head} * kValueDim * padded +
                    first;
  for (int i = threadIdx.x; i < kValueDim * (kKeyBlock / 16); i += threads) {
    const int dim = i % kValueDim;
    const int group = i / kValueDim * 16;
    uint32_t words[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      words[word] = 0;
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int key = group + KeyAt(4 * word + byte);
        words[word] |= uint32_t{tile[key * kPitch + dim]} << (8 * byte);
      }
    }
    *reinterpret_cast<uint4*>(out + dim * padded + group) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

}  // namespace zyfa::sm90

#endif  // ZYFA_CUDA_SM90_TRANSPOSE_H_
