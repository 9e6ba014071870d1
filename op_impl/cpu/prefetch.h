// Memory that is needed soon, fetched a few cache lines at a time while products keep the core busy. Without it a call
// whose inputs are not in the cache waits for them: 128 queries of 64 channels, 1.2 times as long.
#pragma once
#include "cpu/simd.h"

namespace {

class Prefetch {
 public:
  void clear() { ranges_ = 0, current_ = 0, lines_ = 0; }

  // Rows of `bytes`, `pitch` bytes apart. To be written: with the right to do so.
  void add(const char* first, int64_t rows, int64_t bytes, int64_t pitch, bool write = false) {
    if (rows <= 0 || ranges_ == kMost) return;
    if (pitch == bytes) bytes *= rows, rows = 1;
    range_[ranges_++] = {uintptr_t(first), uintptr_t(first), rows, bytes, pitch, write};
    lines_ += rows * ((bytes + kLine - 1) / kLine);
  }

  // So many calls will follow.
  void spread(int64_t calls) { step_ = int(calls > 0 ? (lines_ + calls - 1) / calls : 0); }

  MSF_INLINE void operator()() {
    for (int i = 0; i < step_ && current_ < ranges_; ++i) {
      Range& r = range_[current_];
      if (r.write)
        __builtin_prefetch(reinterpret_cast<const char*>(r.at), 1, 2);
      else
        __builtin_prefetch(reinterpret_cast<const char*>(r.at), 0, 2);
      r.at += kLine;
      if (r.at < r.row + uintptr_t(r.bytes)) continue;
      r.row += r.pitch;
      r.at = r.row;
      if (--r.rows == 0) ++current_;
    }
  }

 private:
  static constexpr int kMost = 24;
  static constexpr int64_t kLine = 64;
  struct Range {
    uintptr_t row, at;
    int64_t rows, bytes, pitch;
    bool write;
  };
  Range range_[kMost];
  int ranges_ = 0, current_ = 0, step_ = 0;
  int64_t lines_ = 0;
};

}  // namespace
