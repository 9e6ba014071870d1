// Which keys a query may see: the causal and window rule, and the block ranges that follow from it. Its only home.
#pragma once
#include <cstdint>

#include "common/inline.h"

namespace msf {

// Query i sees key j iff  i + off - left <= j <= i + off + right  and 0 <= j < k_len, with both bounds inclusive,
// off = k_len - q_len when the diagonal is aligned to the bottom right corner and 0 when to the top left.
struct Band {
  static constexpr int64_t kUnlimited = int64_t(1) << 40;
  int64_t off, left, right, k_len;

  MSF_ALWAYS_INLINE Band(int64_t q_len, int64_t k_len_, int64_t left_, int64_t right_, bool bottom_right)
      : off(bottom_right ? k_len_ - q_len : 0),
        left(left_ < 0 || left_ > kUnlimited ? kUnlimited : left_),
        right(right_ < 0 || right_ > kUnlimited ? kUnlimited : right_),
        k_len(k_len_) {}

  MSF_ALWAYS_INLINE static int64_t clamp(int64_t x, int64_t lo, int64_t hi) { return x < lo ? lo : x > hi ? hi : x; }
  // keys of query i: [begin, end), empty when end <= begin
  MSF_ALWAYS_INLINE int64_t begin(int64_t i) const { return clamp(i + off - left, 0, k_len); }
  MSF_ALWAYS_INLINE int64_t end(int64_t i) const { return clamp(i + off + right + 1, 0, k_len); }
  // queries of key j, before clamping to [0, q_len)
  MSF_ALWAYS_INLINE int64_t first_query(int64_t j) const { return j - off - right; }
  MSF_ALWAYS_INLINE int64_t last_query(int64_t j) const { return j - off + left; }
};

// What of keys [j0, j1) a run of queries [i0, i1) needs: nothing outside [lo, hi); no band test if `whole`.
struct BlockRange {
  int64_t lo, hi;
  bool whole;
  MSF_ALWAYS_INLINE bool empty() const { return hi <= lo; }
};

MSF_ALWAYS_INLINE inline BlockRange block_range(const Band& band, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  int64_t lo = band.begin(i0), hi = band.end(i1 - 1);
  lo = lo > j0 ? lo : j0;
  hi = hi < j1 ? hi : j1;
  return {lo, hi, band.begin(i1 - 1) <= lo && band.end(i0) >= hi};
}

}  // namespace msf
