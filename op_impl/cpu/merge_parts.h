// Attention over parts of the keys to attention over all: out = sum_k exp(lse_k - lse) out_k, the parts in their order.
#pragma once
#include <cmath>

#include "cpu/cache.h"
#include "cpu/pack.h"
#include "cpu/threads.h"

namespace {

template <class T>
class MergeParts {
 public:
  explicit MergeParts(const msf::Merge& m) : m_(m) {}

  void run() {
    msf::run_tasks(m_.batch * m_.heads, [this](int64_t i) {
      for (int64_t row = 0; row < m_.rows; ++row) merge(i / m_.heads, i % m_.heads, row);
    });
  }

 private:
  void merge(int64_t b, int64_t h, int64_t row) {
    constexpr int W = kLanes<T>;
    const int64_t at = (b * m_.heads + h) * m_.rows + row, lses = m_.batch * m_.heads * m_.rows;
    const int64_t padded = round_up(m_.channels, W);
    double top = -INFINITY, sum = 0;
    for (int64_t k = 0; k < m_.parts; ++k) top = m_.lses[k * lses + at] > top ? m_.lses[k * lses + at] : top;
    // a part without a key has weight 0, whatever is in its output; NaN stays
    auto weight = [&](int64_t k) {
      const double lse = m_.lses[k * lses + at];
      return lse == -INFINITY ? 0 : lse == top ? 1 : __builtin_exp(lse - top);
    };
    for (int64_t k = 0; k < m_.parts; ++k) sum += weight(k);
    T *acc = reinterpret_cast<T*>(msf::thread_scratch(2 * padded * sizeof(T))), *x = acc + padded;
    fill(acc, padded, T(0));
    with_storage(m_.out.dtype, [&](auto* storage) {
      using S = std::remove_pointer_t<decltype(storage)>;
      for (int64_t k = 0; k < m_.parts; ++k) {
        const double w = weight(k);
        if (w == 0) continue;
        const T scale = T(w / sum);
        unpack_row(reinterpret_cast<const S*>(m_.outs.row(b, h, row)) + k * m_.part_elements, m_.channels, x);
        for (int64_t c = 0; c < padded; c += W) put(acc + c, load(acc + c) + load(x + c) * scale);
      }
      S* out = reinterpret_cast<S*>(m_.out.row(b, h, row));
      int64_t c = 0;
      for (; c + W <= m_.channels; c += W) store_as<T>(out + c, load(acc + c));
      if (c < m_.channels) store_part<T>(out + c, load(acc + c), int(m_.channels - c));
    });
    m_.lse[at] = float(sum == 0 ? -INFINITY : top + __builtin_log(sum));
  }

  const msf::Merge& m_;
};

}  // namespace
