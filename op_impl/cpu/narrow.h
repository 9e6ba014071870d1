// Products for a task of few query rows, as in decoding: channels along the lanes, keys and values read once and as
// they are stored. With queries along the lanes, a single row would leave all lanes but one idle.
#pragma once
#include "cpu/score.h"

namespace {

// Up to here channels along the lanes need fewer instructions: D/W per row and key, against D for all W rows.
template <class T>
constexpr int kNarrowRows = kLanes<T> / 2;

// N vectors to one: lane narrow_lane<T, N>(i) of the result is the sum of vector i.
template <class T, int N, int STEP>
MSF_INLINE V<T> sum_vectors(const V<T>* v) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes<T>>{};
  if constexpr (N > 1) {
    V<T> half[N / 2];
#pragma GCC unroll 16
    for (int i = 0; i < N / 2; ++i) {
      V<T> low = exchange<T, STEP, false>(v[2 * i], v[2 * i + 1], lanes);
      half[i] = low + exchange<T, STEP, true>(v[2 * i], v[2 * i + 1], lanes);
    }
    return sum_vectors<T, N / 2, STEP / 2>(half);
  } else if constexpr (STEP > 0) {
    V<T> low = exchange<T, STEP, false>(v[0], v[0], lanes);
    V<T> sum = low + exchange<T, STEP, true>(v[0], v[0], lanes);
    return sum_vectors<T, 1, STEP / 2>(&sum);
  } else {
    return v[0];
  }
}
template <class T, int N>
constexpr int narrow_lane(int i) {
  int lane = 0;
  for (int step = kLanes<T> / 2, n = N; n > 1; n /= 2, step /= 2, i /= 2) lane += (i & 1) * step;
  return lane;
}

// Rows that are read next, fetched while others are worked on: both products wait for memory, and a stream that starts
// anew every block is beyond the hardware's prefetcher (measured: float16 6.3 to 8.5 GB/s with one thread). Into the
// second-level cache: a block of rows does not fit the first (up to 15 % slower with head_dim 128, AVX-512).
struct Ahead {
  uintptr_t first;
  int64_t stride, bytes;  // bytes = 0: nothing

  Ahead(const Tensor4& x, const char* row, int64_t channels)
      : first(uintptr_t(row)), stride(x.s * size_of(x.dtype)), bytes(row ? channels * size_of(x.dtype) : 0) {}
  MSF_INLINE void fetch(int64_t j) const {
    for (int64_t i = 0; i < bytes; i += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(first + j * stride + i), 0, 2);
  }
};

// Rows one stride apart, up to row `end` of a tile, and what is read after them.
template <class S>
struct Run {
  const S* first;
  int64_t end;
  Ahead ahead;
};

// s[j][row] = q[row] . k[j] for R rows and all n keys, `ks` elements apart; q is [row][qd], zero from d on.
template <class T, int R, int KEYS, class S>
MSF_INLINE int64_t narrow_scores(int64_t j, int64_t n, const S* k, int64_t ks, const T* q, int64_t qd, int64_t d, T* s,
                                 int64_t ld, const Ahead& ahead) {
  constexpr int W = kLanes<T>;
  for (; j + KEYS <= n; j += KEYS) {
    for (int i = 0; i < KEYS; ++i) ahead.fetch(j + i);
    V<T> acc[R * KEYS] = {};
    auto step = [&](int64_t c, auto read) {
      V<T> x[KEYS];
#pragma GCC unroll 8
      for (int i = 0; i < KEYS; ++i) x[i] = read(k + (j + i) * ks + c);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const V<T> y = load(q + r * qd + c);
#pragma GCC unroll 8
        for (int i = 0; i < KEYS; ++i) acc[r * KEYS + i] += x[i] * y;
      }
    };
    int64_t c = 0;
    for (; c + W <= d; c += W) step(c, [](const S* at) { return load_as<T>(at); });
    if (c < d) step(c, [&](const S* at) { return load_part<T>(at, int(d - c)); });
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const V<T> sum = sum_vectors<T, KEYS, W / 2>(acc + r * KEYS);
#pragma GCC unroll 8
      for (int i = 0; i < KEYS; ++i) s[(j + i) * ld + r] = sum[narrow_lane<T, KEYS>(i)];
    }
  }
  return j;
}

// o[c][row] = o[c][row] * alpha[row] + sum_j p[j][row] * v[j][c] for R rows, C vectors of channels at a time. The
// values come in runs of rows `vs` elements apart: run(j, fetch) is the one from row j on.
template <class T, int R, int C, Guard GUARD, class S, class F>
MSF_INLINE void narrow_output(int64_t n, F run, int64_t vs, int64_t dv, const T* p, int64_t ld, T* o, const T* alpha,
                              bool fetch) {
  constexpr int W = kLanes<T>;
  auto chunk = [&](int64_t c0, auto vectors, auto read) {
    constexpr int N = decltype(vectors)::value;
    V<T> acc[R][N] = {};
    for (int64_t j = 0; j < n;) {
      const Run<S> rows = run(j, fetch);
      const S* v = rows.first + c0;
      for (const int64_t j0 = j; j < rows.end; ++j, v += vs) {
        rows.ahead.fetch(j - j0);
        V<T> x[N];
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) x[i] = read(v + i * W);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const V<T> y = splat(p[j * ld + r]);
#pragma GCC unroll 8
          for (int i = 0; i < N; ++i) {
            const V<T> next = acc[r][i] + x[i] * y;
            acc[r][i] = GUARD == Guard::none ? next : y != T(0) ? next : acc[r][i];
          }
        }
      }
    }
    fetch = false;  // once is enough
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < N; ++i)
        for (int l = 0; l < W && c0 + i * W + l < dv; ++l) {
          T* at = o + (c0 + i * W + l) * ld + r;
          *at = *at * alpha[r] + acc[r][i][l];
        }
  };
  auto whole = [](const S* at) { return load_as<T>(at); };
  int64_t c = 0;
  for (; c + C * W <= dv; c += C * W) chunk(c, std::integral_constant<int, C>{}, whole);
  for (; c + W <= dv; c += W) chunk(c, std::integral_constant<int, 1>{}, whole);
  if (c < dv) chunk(c, std::integral_constant<int, 1>{}, [&](const S* at) { return load_part<T>(at, int(dv - c)); });
}

// Calls f(first row, R) for rows in groups of R, a compile-time constant.
template <class F>
MSF_INLINE void each_row_group(int rows, F f) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) f(r, std::integral_constant<int, 4>{});
  for (; r + 2 <= rows; r += 2) f(r, std::integral_constant<int, 2>{});
  if (r < rows) f(r, std::integral_constant<int, 1>{});
}

// The products of a tile whose rows are kNarrowRows at most. `q` is [row][channels, whole vectors], scaled.
template <class T>
void narrow_score_product(const Problem& p, const Tile& t, int64_t kv_head, const T* q, T* s) {
  constexpr int W = kLanes<T>;
  const int64_t qd = round_up(p.d, W);
  fill(s + t.lo * t.lanes, (t.hi - t.lo) * t.lanes, T(0));
  with_storage(p.k.dtype, [&](auto* storage) {
    using S = std::remove_pointer_t<decltype(storage)>;
    for (int64_t j0 = t.lo; j0 < t.hi;) {
      const int64_t end = p.key_run(t.j0 + j0, t.j0 + t.hi) - t.j0, n = end - j0;
      const S* k = reinterpret_cast<const S*>(p.key_row(p.k, t.b, kv_head, t.j0 + j0));
      Ahead values(p.v, p.key_row(p.v, t.b, kv_head, t.j0 + j0), p.dv);
      T* at = s + j0 * t.lanes;
      each_row_group(t.valid(), [&](int r, auto count) {
        constexpr int R = decltype(count)::value, KEYS = R == 1 ? W >= 8 ? 8 : W : 4;
        const int64_t j = narrow_scores<T, R, KEYS>(0, n, k, p.k.s, q + r * qd, qd, p.d, at + r, t.lanes, values);
        narrow_scores<T, R, 1>(j, n, k, p.k.s, q + r * qd, qd, p.d, at + r, t.lanes, values);
        values.bytes = 0;
      });
      j0 = end;
    }
  });
}

template <class T, Guard GUARD>
void narrow_output_product(const Problem& p, const Tile& t, int64_t kv_head, const T* prob, T* o, const T* alpha) {
  with_storage(p.v.dtype, [&](auto* storage) {
    using S = std::remove_pointer_t<decltype(storage)>;
    const int64_t n = t.hi - t.lo, first = t.j0 + t.lo;
    auto run = [&](int64_t j, bool fetch) {
      const int64_t next = first + j + n;  // the key that far into the next tile: fetched if it has a page
      const bool there = !p.pages || next < p.seq[t.b].k_len;
      return Run<S>{reinterpret_cast<const S*>(p.key_row(p.v, t.b, kv_head, first + j)),
                    p.key_run(first + j, first + n) - first,
                    Ahead(p.k, fetch && there ? p.key_row(p.k, t.b, kv_head, next) : nullptr, p.d)};
    };
    bool fetch = true;
    each_row_group(t.valid(), [&](int r, auto count) {
      constexpr int R = decltype(count)::value, C = R == 4 ? 4 : 8;
      narrow_output<T, R, C, GUARD, S>(n, run, p.v.s, p.dv, prob + t.lo * t.lanes + r, t.lanes, o + r, alpha + r,
                                       fetch);
      fetch = false;
    });
  });
}

// Rows of x, scaled, in whole vectors: dst[row][channels].
template <class T>
void pack_rows(const Problem& p, const Tensor4& x, int64_t b, const Rows& rows, int64_t channels, double scale,
               T* dst) {
  constexpr int W = kLanes<T>;
  const int64_t ld = round_up(channels, W);
  with_storage(x.dtype, [&](auto* storage) {
    using S = std::remove_pointer_t<decltype(storage)>;
    for (int r = 0; r < rows.n; ++r) {
      unpack_row(reinterpret_cast<const S*>(x.row(b, rows.head[r], p.seq[b].q_base + rows.query[r])), channels,
                 dst + r * ld);
      for (int64_t c = 0; c < ld; c += W) put(dst + r * ld + c, load(dst + r * ld + c) * T(scale));
    }
  });
}

}  // namespace
