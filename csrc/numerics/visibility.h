// Which keys a query sees, and which key blocks a tile of queries therefore
// visits. Positions are 64 bits: the offset may be any int32.

#ifndef ZYFA_NUMERICS_VISIBILITY_H_
#define ZYFA_NUMERICS_VISIBILITY_H_

#include <cstdint>

namespace zyfa::numerics {

// Keys [begin, end); empty ranges are {0, 0}.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

static constexpr bool IsEmpty(KeyRange range) {
  return range.begin >= range.end;
}

// The static part of the mask. A bound below zero means unbounded; causal
// attention has right == 0.
struct Window {
  int64_t left;
  int64_t right;
};

// The per-batch part of the mask.
struct Extent {
  int64_t q_offset;   // position of query 0 on the keys' axis
  int64_t q_length;   // queries beyond it see nothing
  int64_t kv_length;  // keys beyond it are seen by nobody
};

static constexpr int64_t Clamp(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// The keys that any of the queries [first, last] sees. Both bounds grow with
// the query, and what neighbours see overlaps or adjoins.
static constexpr KeyRange VisibleKeys(Window window, Extent extent,
                                      int64_t first, int64_t last) {
  if (first >= extent.q_length) return {0, 0};
  const int64_t low = first + extent.q_offset;
  const int64_t high =
      (last < extent.q_length ? last : extent.q_length - 1) + extent.q_offset;
  const int64_t begin =
      window.left < 0 ? 0 : Clamp(low - window.left, 0, extent.kv_length);
  const int64_t end = window.right < 0
                          ? extent.kv_length
                          : Clamp(high + window.right + 1, 0, extent.kv_length);
  return begin < end ? KeyRange{begin, end} : KeyRange{0, 0};
}

static constexpr KeyRange VisibleKeys(Window window, Extent extent,
                                      int64_t query) {
  return VisibleKeys(window, extent, query, query);
}

// The smallest range that holds both.
static constexpr KeyRange Union(KeyRange a, KeyRange b) {
  if (IsEmpty(a)) return b;
  if (IsEmpty(b)) return a;
  return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}

// What both hold.
static constexpr KeyRange Intersection(KeyRange a, KeyRange b) {
  const KeyRange both = {a.begin > b.begin ? a.begin : b.begin,
                         a.end < b.end ? a.end : b.end};
  return IsEmpty(both) ? KeyRange{0, 0} : both;
}

// The part of `range` inside [origin, origin + size), relative to `origin`.
static constexpr KeyRange Within(KeyRange range, int64_t origin, int64_t size) {
  const int64_t begin = Clamp(range.begin - origin, 0, size);
  const int64_t end = Clamp(range.end - origin, 0, size);
  return begin < end ? KeyRange{begin, end} : KeyRange{0, 0};
}

// The same for kernels, in 32 bits and without the queries' length: query i
// sees keys [Begin(i), End(i)), nothing if these do not grow. Queries and keys
// are below kBandLimit, and a side further off than that is as good as there.
constexpr int32_t kBandLimit = 1 << 30;

struct Band {
  int32_t begin;  // of query 0; may lie outside [0, kv_length], and so may end
  int32_t end;
  int32_t kv_length;

  constexpr int32_t Begin(int32_t query) const { return Cut(query + begin); }
  constexpr int32_t End(int32_t query) const { return Cut(query + end); }

 private:
  constexpr int32_t Cut(int32_t key) const {
    return key < 0 ? 0 : key > kv_length ? kv_length : key;
  }
};

// a + b, cut to [-kBandLimit, kBandLimit].
static constexpr int32_t BandSum(int32_t a, int32_t b) {
  const uint32_t bits = static_cast<uint32_t>(a) + static_cast<uint32_t>(b);
  const auto sum = static_cast<int32_t>(bits);
  const bool overflows = ((a ^ sum) & (b ^ sum)) < 0;
  const bool negative = overflows ? a < 0 : sum < 0;
  if (negative) return overflows || sum < -kBandLimit ? -kBandLimit : sum;
  return overflows || sum > kBandLimit ? kBandLimit : sum;
}

// A side below zero is unbounded.
static constexpr Band BandOf(int32_t window_left, int32_t window_right,
                             int32_t q_offset, int32_t kv_length) {
  return {window_left < 0 ? -kBandLimit : BandSum(q_offset, -window_left),
          window_right < 0 ? kBandLimit : BandSum(q_offset, window_right) + 1,
          kv_length};
}

static_assert(VisibleKeys({-1, 0}, {0, 4, 4}, 2).end == 3);
static_assert(VisibleKeys({1, 0}, {2, 4, 4}, 1).begin == 2);
static_assert(IsEmpty(VisibleKeys({-1, 0}, {-3, 4, 4}, 2)));
// The first and the last of the queries see nothing; one between them does.
static_assert(IsEmpty(VisibleKeys({1, 0}, {-2, 8, 2}, 0)));
static_assert(IsEmpty(VisibleKeys({1, 0}, {-2, 8, 2}, 7)));
static_assert(VisibleKeys({1, 0}, {-2, 8, 2}, 0, 7).begin == 0);
static_assert(VisibleKeys({1, 0}, {-2, 8, 2}, 0, 7).end == 2);
static_assert(VisibleKeys({1, 0}, {0, 4, 8}, 2, 9).begin == 1);
static_assert(VisibleKeys({1, 0}, {0, 4, 8}, 2, 9).end == 4);
static_assert(BandSum(kBandLimit, INT32_MIN) == -kBandLimit);
static_assert(BandSum(INT32_MIN, INT32_MIN) == -kBandLimit);
static_assert(BandSum(INT32_MAX, 1) == kBandLimit);
static_assert(BandSum(INT32_MAX, -INT32_MAX + 5) == 5);
static_assert(BandOf(-1, 0, 0, 4).Begin(2) == 0);
static_assert(BandOf(-1, 0, 0, 4).End(2) == 3);
static_assert(BandOf(1, -1, 5, 9).Begin(2) == 6);
static_assert(BandOf(1, -1, 5, 9).End(2) == 9);
static_assert(BandOf(1, 0, INT32_MIN, 2).End(7) == 0);
static_assert(BandOf(1, INT32_MAX, INT32_MAX, 2).End(7) == 2);
static_assert(Intersection({1, 4}, {2, 9}).begin == 2);
static_assert(IsEmpty(Intersection({1, 4}, {4, 9})));

}  // namespace zyfa::numerics

#endif  // ZYFA_NUMERICS_VISIBILITY_H_
