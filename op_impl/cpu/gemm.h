// Matrix products of any dtype, stride and orientation, summed in T; the projections around attention.
//
// B is widened once into panels as wide as the microkernel, [k][panel] each, that all tasks share; a task owns a block
// of C, widens its rows of A block by block of k, and stores C once. The terms of every element of C are added in the
// order of k, whatever the blocks are, so results depend neither on them nor on the number of threads.
#pragma once
#include <algorithm>

#include "cpu/matrix.h"
#include "cpu/microkernel.h"
#include "cpu/pack.h"
#include "cpu/score.h"
#include "cpu/threads.h"

namespace {

using msf::Gemm;
using msf::Matrix;

template <class T>
class Multiply {
  static constexpr int W = kLanes<T>, P = kTileLanes<T>;        // lanes of a vector, columns of a panel
  static constexpr int kRows = 96, kDepth = 256;                // of A in a block: L2 holds it beside the block of C
  static constexpr int64_t kPackedElements = int64_t(1) << 20;  // of B at a time
  static constexpr int64_t kPad = 16;  // between rows of A: at a distance of 1 KiB they would share few cache sets

 public:
  explicit Multiply(const Gemm& g) : g_(g) {}

  void run() {
    if (g_.m <= 0 || g_.n <= 0) return;
    int64_t depth = 0;
    for (int i = 0; i < g_.terms; ++i) depth += g_.term[i].k;
    const int64_t fits = kPackedElements / std::max<int64_t>(depth, 1) / P * P;
    const int64_t chunk = Band::clamp(fits, P, round_up(g_.n, P));
    packed_.resize(depth * chunk);
    depth_ = depth;
    for (int64_t n0 = 0; n0 < g_.n; n0 += chunk) {
      const int64_t n1 = std::min(g_.n, n0 + chunk), panels = (n1 - n0 + P - 1) / P;
      msf::run_tasks(panels, [&](int64_t i) { pack_panel(n0 + i * P, std::min(n1, n0 + (i + 1) * P), panel(i)); });
      // pieces of the columns, where the rows alone give too few tasks
      const int64_t row_blocks = (g_.m + kRows - 1) / kRows;
      const int64_t pieces =
          Band::clamp((kEnoughTasks + row_blocks - 1) / row_blocks, (panels + kMostPanels - 1) / kMostPanels, panels);
      msf::run_tasks(row_blocks * pieces, [&](int64_t i) {
        const int64_t m0 = i / pieces * kRows, piece = i % pieces;
        block(m0, std::min(g_.m, m0 + kRows), n0, n1, panels * piece / pieces, panels * (piece + 1) / pieces);
      });
    }
  }

 private:
  static constexpr int64_t kEnoughTasks = 16, kMostPanels = 8;

  T* panel(int64_t i) const { return packed_.data + i * depth_ * P; }

  // Columns [n0, n1) of every B, one below the other: [k][n1 - n0 rounded up to vectors]
  void pack_panel(int64_t n0, int64_t n1, T* dst) {
    const int64_t width = round_up(n1 - n0, W);
    for (int i = 0; i < g_.terms; ++i) {
      const Gemm::Term& t = g_.term[i];
      with_storage(t.b.dtype, [&](auto* storage) {
        using S = std::remove_pointer_t<decltype(storage)>;
        if (t.b.row.contiguous())
          pack_transposed_panel<S>(t.b, t.k, n0, n1, dst, width);
        else
          copy_block<S>(t.b, 0, t.k, n0, n1, dst, width);
      });
      dst += t.k * width;
    }
  }

  // dst[k][n] from rows of n along which k is contiguous
  template <class S>
  static void pack_transposed_panel(const Matrix& b, int64_t depth, int64_t n0, int64_t n1, T* dst, int64_t width) {
    for (int64_t n = n0; n < n1; n += W) {
      const int columns = int(std::min<int64_t>(W, n1 - n));
      const S* src[W];
      for (int c = 0; c < W; ++c) src[c] = reinterpret_cast<const S*>(b.at(0, n + std::min(c, columns - 1)));
      for (int64_t k = 0; k < depth; k += W) {
        const int rows = int(std::min<int64_t>(W, depth - k));
        V<T> x[W];
#pragma GCC unroll 16
        for (int c = 0; c < W; ++c)
          x[c] = c >= columns ? V<T>{} : rows == W ? load_as<T>(src[c] + k) : load_part<T>(src[c] + k, rows);
        transpose<T>(x);
        for (int r = 0; r < rows; ++r) put(dst + (k + r) * width + (n - n0), x[r]);
      }
    }
  }

  // dst[i - i0][j - j0], rows `ld` apart and padded with zeros to whole vectors
  template <class S>
  static void copy_block(const Matrix& x, int64_t i0, int64_t i1, int64_t j0, int64_t j1, T* dst, int64_t ld) {
    for (int64_t i = i0; i < i1; ++i, dst += ld) {
      if (x.col.contiguous()) {
        unpack_row(reinterpret_cast<const S*>(x.at(i, j0)), j1 - j0, dst);
      } else {
        for (int64_t j = j0; j < j1; ++j) dst[j - j0] = load_one<T>(reinterpret_cast<const S*>(x.at(i, j)));
        fill(dst + (j1 - j0), round_up(j1 - j0, W) - (j1 - j0), T(0));
      }
    }
  }

  void block(int64_t m0, int64_t m1, int64_t n0, int64_t n1, int64_t panel0, int64_t panel1) {
    const int64_t rows = m1 - m0, first = n0 + panel0 * P, last = std::min(n1, n0 + panel1 * P);
    const int64_t ld = round_up(last - first, W), most_depth = std::min<int64_t>(kDepth, std::max<int64_t>(depth_, 1));
    const int64_t a_elements = std::max((round_up(most_depth, W) + kPad) * rows, most_depth * round_up(rows, W));
    Arena arena{msf::thread_scratch((rows * ld + ld + a_elements) * sizeof(T) + 4 * 64)};
    T *c = arena.take<T>(rows * ld), *bias = arena.take<T>(ld), *a = arena.take<T>(a_elements);
    if (depth_ == 0) fill(c, rows * ld, T(0));
    int64_t done = 0;
    for (int i = 0; i < g_.terms; ++i) {
      const Gemm::Term& t = g_.term[i];
      for (int64_t k = 0; k < t.k; k += kDepth) {
        const int64_t depth = std::min<int64_t>(kDepth, t.k - k);
        const bool by_rows = !t.a.row.contiguous();
        const int64_t lda = by_rows ? round_up(depth, W) + kPad : round_up(rows, W);
        with_storage(t.a.dtype, [&](auto* storage) {
          using S = std::remove_pointer_t<decltype(storage)>;
          if (by_rows)
            copy_block<S>(t.a, m0, m1, k, k + depth, a, lda);
          else
            copy_block<S>(t.a.transposed(), k, k + depth, m0, m1, a, lda);
        });
        for (int64_t p = panel0; p < panel1; ++p) {
          const int64_t width = round_up(std::min<int64_t>(P, n1 - n0 - p * P), W);
          const T* b = panel(p) + (done + k) * width;
          T* to = c + (p - panel0) * P;
          if (by_rows)
            add<Side::rows>(done + k == 0, rows, int(width / W), depth, a, lda, b, to, ld);
          else
            add<Side::columns>(done + k == 0, rows, int(width / W), depth, a, lda, b, to, ld);
        }
      }
      done += t.k;
    }
    fill(bias, ld, T(0));
    if (g_.bias.data)
      with_storage(g_.bias.dtype, [&](auto* storage) {
        copy_block<std::remove_pointer_t<decltype(storage)>>(g_.bias, 0, 1, first, last, bias, ld);
      });
    store(m0, m1, first, last, c, ld, bias);
  }

  template <Side SIDE>
  static void add(bool is_first, int64_t rows, int vectors, int64_t depth, const T* a, int64_t lda, const T* b, T* c,
                  int64_t ldc) {
    if (is_first)
      product<T, LaneTile, SIDE, Start::zero, Guard::none>(rows, vectors, depth, a, lda, b, vectors * W, c, ldc);
    else
      product<T, LaneTile, SIDE, Start::keep, Guard::none>(rows, vectors, depth, a, lda, b, vectors * W, c, ldc);
  }

  void store(int64_t m0, int64_t m1, int64_t n0, int64_t n1, const T* c, int64_t ld, const T* bias) {
    with_storage(g_.c.dtype, [&](auto* storage) {
      using S = std::remove_pointer_t<decltype(storage)>;
      for (int64_t m = m0; m < m1; ++m, c += ld) {
        const int64_t n = n1 - n0;
        if (g_.c.col.contiguous()) {
          S* out = reinterpret_cast<S*>(g_.c.at(m, n0));
          int64_t j = 0;
          for (; j + W <= n; j += W) store_as<T>(out + j, load(c + j) + load(bias + j));
          if (j < n) store_part<T>(out + j, load(c + j) + load(bias + j), int(n - j));
        } else {
          for (int64_t j = 0; j < n; ++j)
            store_part<T>(reinterpret_cast<S*>(g_.c.at(m, n0 + j)), splat(c[j] + bias[j]), 1);
        }
      }
    });
  }

  const Gemm& g_;
  int64_t depth_ = 0;
  Buffer<T> packed_;
};

}  // namespace
