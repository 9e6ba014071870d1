// Rows into a cache of keys and values, rotated on the way.
#pragma once
#include "cpu/cache.h"
#include "cpu/pack.h"
#include "cpu/threads.h"

namespace {

template <class T>
class AppendRows {
 public:
  explicit AppendRows(const msf::Append& a) : a_(a), padded_(round_up(a.channels, kLanes<T>)) {}

  void run() {
    // A decoded token is a few KiB, less work than waking a thread.
    constexpr int64_t kRows = 32;
    const int64_t chunks = (a_.rows + kRows - 1) / kRows;
    auto task = [&](int64_t i) {
      const int64_t row0 = i % chunks * kRows;
      move(i / chunks, row0, row0 + kRows < a_.rows ? row0 + kRows : a_.rows);
    };
    if (a_.batch * a_.rows * a_.heads * a_.channels < 1 << 15)
      for (int64_t i = 0; i < a_.batch * chunks; ++i) task(i);
    else
      msf::run_tasks(a_.batch * chunks, task);
  }

 private:
  void move(int64_t b, int64_t row0, int64_t row1) {
    const msf::Rotary& r = a_.rotary;
    const int64_t pairs = round_up(r.pairs, kLanes<T>);
    T* x = reinterpret_cast<T*>(msf::thread_scratch((2 * padded_ + 2 * pairs) * sizeof(T)));
    T *y = x + padded_, *cos = y + padded_, *sin = cos + pairs;
    for (int64_t i = row0; i < row1; ++i) {
      if (r.cos)
        with_storage(r.dtype, [&](auto* storage) {
          using S = std::remove_pointer_t<decltype(storage)>;
          const int64_t at = (a_.position[b] + i) * r.pairs;
          unpack_row(static_cast<const S*>(r.cos) + at, r.pairs, cos);
          unpack_row(static_cast<const S*>(r.sin) + at, r.pairs, sin);
        });
      for (int64_t h = 0; h < a_.heads; ++h) {
        with_storage(a_.from.dtype, [&](auto* storage) {
          using S = std::remove_pointer_t<decltype(storage)>;
          unpack_row(reinterpret_cast<const S*>(a_.from.row(b, h, i)), a_.channels, x);
        });
        if (r.cos) rotate(x, cos, sin, y);
        store(r.cos ? y : x, place(b, h, a_.first[b] + i));
      }
    }
  }

  char* place(int64_t b, int64_t h, int64_t at) const {
    const msf::Pages& pages = a_.pages;
    return pages ? a_.to.row(pages.table[b * pages.stride + at / pages.size], h, at % pages.size) : a_.to.row(b, h, at);
  }

  void rotate(const T* x, const T* cos, const T* sin, T* y) const {
    const int64_t pairs = a_.rotary.pairs, step = a_.rotary.interleaved ? 2 : 1;
    const int64_t other = a_.rotary.interleaved ? 1 : pairs;
    for (int64_t c = 0; c < pairs; ++c) {
      const T u = x[c * step], v = x[c * step + other];
      y[c * step] = u * cos[c] - v * sin[c];
      y[c * step + other] = v * cos[c] + u * sin[c];
    }
    for (int64_t c = 2 * pairs; c < a_.channels; ++c) y[c] = x[c];
  }

  void store(const T* x, char* row) const {
    with_storage(a_.to.dtype, [&](auto* storage) {
      using S = std::remove_pointer_t<decltype(storage)>;
      constexpr int W = kLanes<T>;
      S* to = reinterpret_cast<S*>(row);
      int64_t c = 0;
      for (; c + W <= a_.channels; c += W) store_as<T>(to + c, load(x + c));
      if (c < a_.channels) store_part<T>(to + c, load(x + c), int(a_.channels - c));
    });
  }

  const msf::Append& a_;
  const int64_t padded_;
};

}  // namespace
