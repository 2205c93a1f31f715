// How a tile of keys or values lies in LDS, how it gets there, and where a lane
// finds its part of it.
//
// A tile's rows (tokens) are cut into one or two panels of 64, 128 or 256 bytes
// a row. A copy fills 1024 consecutive bytes of LDS, whole rows of a panel. The
// 16-byte slots of a row are permuted by an exclusive or with a number that
// depends on the row, so that lanes that read the same columns of different
// rows find them in different banks, be there 32 of them or 64. The copy
// permutes for free: a lane chooses which bytes it fetches.

#ifndef ZYFA_ROCM_GFX950_LDS_TILE_H_
#define ZYFA_ROCM_GFX950_LDS_TILE_H_

#include "csrc/rocm/attention_args.h"
#include "csrc/rocm/gfx950/intrinsics.h"

namespace zyfa::gfx950 {

constexpr int kLanes = 64;
constexpr int kWaves = rocm::kThreads / kLanes;
constexpr int kSlotBytes = 16;
constexpr int kCopyBytes = kLanes * kSlotBytes;

constexpr int Bit(int x, int bit) { return (x >> bit) & 1; }

// For tiles whose lanes read 16 bytes each of consecutive rows.
struct RowReads {
  static constexpr int Swizzle(int panel_bytes, int row) {
    switch (panel_bytes) {
      case 64:
        return (Bit(row, 1) ^ Bit(row, 3)) | Bit(row, 2) << 1;
      case 128:
        return (row & 7) ^ Bit(row, 3);
      default:
        return row & 15;
    }
  }
};

// For tiles that are read transposed: two times four rows, eight apart, of two
// slots, or four rows of four slots, at a time.
struct TransposedReads {
  static constexpr int Swizzle(int panel_bytes, int row) {
    return panel_bytes == 128 ? (row & 3) | Bit(row, 3) << 2
                              : (Bit(row, 0) * 6) ^ (Bit(row, 1) * 10);
  }
};

// `row_count` rows of `row_bytes` bytes.
template <int row_count, int row_bytes, class ReadsOfTile>
struct LdsTile {
  using Reads = ReadsOfTile;
  static constexpr int kRows = row_count;
  static constexpr int kRowBytes = row_bytes;
  static constexpr int kFirstPanel = kRowBytes >= 256 ? 256 : 128;
  static constexpr int kSecondPanel = kRowBytes - kFirstPanel;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kCopies = kBytes / kCopyBytes / kWaves;  // of each wave
  static_assert(kBytes % (kCopyBytes * kWaves) == 0);
  static_assert(kSecondPanel == 0 || kSecondPanel == 64 || kSecondPanel == 128);

  // Bytes from row to row at column `byte`.
  static constexpr int Pitch(int byte) {
    return byte < kFirstPanel ? kFirstPanel : kSecondPanel;
  }

  // Where in the tile byte `byte` + `more` of `row` lies; both in one panel.
  // `byte` is known when the kernel is compiled.
  static constexpr int Address(int row, int byte, int more) {
    const int pitch = Pitch(byte);
    const int panel = byte < kFirstPanel ? 0 : kFirstPanel;
    const int column = byte - panel + more;
    return kRows * panel + row * pitch +
           (column ^ Reads::Swizzle(pitch, row) * kSlotBytes);
  }
};

// One wave's share of the copies of tiles that follow each other in memory.
template <class Tile>
class TileCopies {
 public:
  // From `source`, the first row of the first tile; of `rows` rows from there,
  // `stride` bytes apart, the copies take no more, and leave zeros instead.
  __attribute__((device, always_inline)) TileCopies(const void* source,
                                                    int stride, int rows,
                                                    int wave, int lane)
      : source_(BitCast<uint64_t>(source) & kAddressBits),
        stride_(stride),
        rows_(rows),
        first_target_(wave * kCopyBytes) {
#pragma unroll
    for (int i = 0; i < Tile::kCopies; ++i) {
      // A wave's copies of the first panel come first.
      const bool first =
          i * kWaves * kCopyBytes < Tile::kRows * Tile::kFirstPanel;
      const int panel = first ? Tile::kFirstPanel : Tile::kSecondPanel;
      const int start = first ? 0 : Tile::kRows * Tile::kFirstPanel;
      const int slots = panel / kSlotBytes;
      const int copy = i * kWaves + wave - start / kCopyBytes;
      const int row = copy * (kCopyBytes / panel) + lane / slots;
      const int slot = lane % slots ^ Tile::Reads::Swizzle(panel, row);
      offsets_[i] =
          row * stride + (first ? 0 : Tile::kFirstPanel) + slot * kSlotBytes;
    }
  }

  // Starts the copies of the next tile to `lds`.
  __attribute__((device, always_inline)) void StartNext(int lds) {
    const I32x4 buffer = NextTile();
#pragma unroll
    for (int i = 0; i < Tile::kCopies; ++i) Copy(buffer, i, lds);
    Advance();
  }

  // The same in parts, in order.
  __attribute__((device, always_inline)) void StartNext(int lds, int part) {
    Copy(NextTile(), part, lds);
    if (part == Tile::kCopies - 1) Advance();
  }

 private:
  __attribute__((device, always_inline)) I32x4 NextTile() const {
    const int rows = Uniform(rows_ < Tile::kRows ? rows_ : Tile::kRows);
    return BufferOf(source_, rows < 0 ? 0 : rows * stride_);
  }
  __attribute__((device, always_inline)) void Copy(I32x4 buffer, int i,
                                                   int lds) const {
    CopyToLds(buffer, offsets_[i],
              lds + first_target_ + i * kWaves * kCopyBytes);
  }
  __attribute__((device, always_inline)) void Advance() {
    rows_ -= Tile::kRows;
    source_ += static_cast<uint32_t>(Tile::kRows * stride_);
    Pin(source_);
  }

  // A buffer resource has other things in the bits above.
  static constexpr uint64_t kAddressBits = (uint64_t{1} << 48) - 1;

  uint64_t source_;
  int stride_;
  int rows_;  // left
  int first_target_;
  int offsets_[Tile::kCopies];
};

}  // namespace zyfa::gfx950

#endif  // ZYFA_ROCM_GFX950_LDS_TILE_H_
