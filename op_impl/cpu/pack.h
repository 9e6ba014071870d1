// Between memory (any dtype, any strides) and the blocks the products run on.
#pragma once
#include <cmath>

#include "common/problem.h"
#include "cpu/simd.h"
#include "cpu/threads.h"

namespace {

using msf::DType;
using msf::Plane;
using msf::Problem;
using msf::Tensor4;

MSF_INLINE int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

// Calls f with a null pointer of the storage type.
template <class F>
MSF_INLINE void with_storage(DType t, F f) {
  switch (t) {
    case DType::f32:
      return f(static_cast<float*>(nullptr));
    case DType::f16:
      return f(static_cast<f16*>(nullptr));
    case DType::bf16:
      return f(static_cast<bf16*>(nullptr));
    default:
      return;
  }
}
template <class F>
MSF_INLINE void with_plane_storage(DType t, F f) {
  t == DType::u8     ? f(static_cast<uint8_t*>(nullptr))
  : t == DType::keep ? f(static_cast<keep8*>(nullptr))
                     : with_storage(t, f);
}

template <class T>
MSF_INLINE void fill(T* p, int64_t n, T value) {
  for (int64_t i = 0; i < n; ++i) p[i] = value;
}

// Uninitialized, 64-byte aligned memory that all threads of a call share.
template <class T>
struct Buffer {
  T* data = nullptr;

  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { msf::free_aligned(data); }
  void resize(int64_t n) {
    msf::free_aligned(data);
    data = n ? static_cast<T*>(msf::allocate_aligned(size_t(n) * sizeof(T))) : nullptr;
  }
};

// The caller's wish, what was measured, or the default: the first that is not 0.
MSF_INLINE int64_t first_set(int64_t wish, int64_t tuned, int64_t otherwise) {
  return wish ? wish : tuned ? tuned : otherwise;
}

constexpr int kMaxRows = 384;  // query rows of one task, at most

// The query rows one task works on: (query, head of the group) pairs of one (batch, kv head), queries outermost, so
// that a block of rows spans few queries (a tight causal range) and all heads of a group share each block of K and V.
struct Rows {
  int n = 0;       // rows
  int64_t i0 = 0;  // query of the first row
  int64_t query[kMaxRows];
  int64_t head[kMaxRows];

  void fill(int64_t first_head, int64_t group, int64_t row0, int64_t row1) {
    n = int(row1 - row0);
    for (int r = 0; r < n; ++r) {
      query[r] = (row0 + r) / group;
      head[r] = first_head + (row0 + r) % group;
    }
    i0 = query[0];
  }
};

// Channels of rows, transposed: dst[channel][lane] = scale * x[row of lane][channel]; lanes past the rows are 0.
template <class T>
void pack_transposed(const Problem& p, const Tensor4& x, int64_t b, const Rows& rows, int first, int lanes,
                     int64_t channels, double scale, T* dst) {
  constexpr int W = kLanes<T>;
  const T s = T(scale);
  with_storage(x.dtype, [&](auto* storage) {
    using S = std::remove_pointer_t<decltype(storage)>;
    for (int l0 = 0; l0 < lanes; l0 += W) {
      const S* src[W];
      for (int l = 0; l < W; ++l) {
        int r = first + l0 + l;
        src[l] = r < rows.n && l0 + l < lanes
                     ? reinterpret_cast<const S*>(x.row(b, rows.head[r], p.seq[b].q_base + rows.query[r]))
                     : nullptr;
      }
      V<T> block[W];
      int64_t c = 0;
      for (; c + W <= channels && src[W - 1]; c += W) {  // all lanes have a row: no branch per row
#pragma GCC unroll 16
        for (int l = 0; l < W; ++l) block[l] = load_as<T>(src[l] + c) * s;
        transpose<T>(block);
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) put(dst + (c + j) * lanes + l0, block[j]);
      }
      for (; c < channels; c += W) {
        const int n = int(channels - c < W ? channels - c : W);
#pragma GCC unroll 16
        for (int l = 0; l < W; ++l)
          block[l] = !src[l] ? V<T>{} : n == W ? load_as<T>(src[l] + c) * s : load_part<T>(src[l] + c, n) * s;
        transpose<T>(block);
        for (int j = 0; j < n; ++j) put(dst + (c + j) * lanes + l0, block[j]);
      }
    }
  });
}

// The inverse, on store: x[row of lane][channel] = src[channel][lane] * scale[lane].
template <class T>
void store_transposed(const Problem& p, const Tensor4& x, int64_t b, const Rows& rows, int first, int lanes,
                      int64_t channels, const T* src, const T* scale) {
  constexpr int W = kLanes<T>;
  with_storage(x.dtype, [&](auto* storage) {
    using S = std::remove_pointer_t<decltype(storage)>;
    for (int l0 = 0; l0 < lanes; l0 += W) {
      const V<T> s = load(scale + l0);
      const int valid = rows.n - first - l0 < W ? rows.n - first - l0 : W;
      S* out[W];
      for (int l = 0; l < valid; ++l) {
        const int r = first + l0 + l;
        out[l] = reinterpret_cast<S*>(x.row(b, rows.head[r], p.seq[b].q_base + rows.query[r]));
      }
      V<T> block[W];
      int64_t c = 0;
      for (; c + W <= channels && valid == W; c += W) {  // all lanes have a row: no branch per row
#pragma GCC unroll 16
        for (int j = 0; j < W; ++j) block[j] = load(src + (c + j) * lanes + l0) * s;
        transpose<T>(block);
#pragma GCC unroll 16
        for (int l = 0; l < W; ++l) store_as<T>(out[l] + c, block[l]);
      }
      for (; c < channels; c += W) {
        const int n = int(channels - c < W ? channels - c : W);
        for (int j = 0; j < W; ++j) block[j] = j < n ? load(src + (c + j) * lanes + l0) * s : V<T>{};
        transpose<T>(block);
        for (int l = 0; l < valid; ++l) {
          if (n == W)
            store_as<T>(out[l] + c, block[l]);
          else
            store_part<T>(out[l] + c, block[l], n);
        }
      }
    }
  });
}

// One row of channels into dst (padded with zeros to whole vectors); returns whether all of it is finite.
template <class T, class S>
MSF_INLINE bool unpack_row(const S* src, int64_t channels, T* dst) {
  constexpr int W = kLanes<T>;
  V<T> bad{};
  int64_t c = 0;
  for (; c + W <= channels; c += W) {
    V<T> v = load_as<T>(src + c);
    bad += v - v;  // 0, or NaN from the first Inf or NaN on
    put(dst + c, v);
  }
  if (c < channels) {
    V<T> v = load_part<T>(src + c, int(channels - c));
    bad += v - v;
    put(dst + c, v);
  }
  return sum_lanes<T>(bad) == T(0);
}

// Rows [j0, j1) of K or V as a block of T, read in place when it already is one.
template <class T>
struct Block {
  const T* data = nullptr;
  int64_t ld = 0;
  bool finite = true;  // of what was unpacked; what is read in place is not looked at
};

template <class T>
Block<T> load_block(const Problem& p, const Tensor4& x, int64_t b, int64_t h, int64_t j0, int64_t j1, int64_t channels,
                    T* buffer) {
  const int64_t ld = round_up(channels, kLanes<T>);
  Block<T> block{buffer, ld, true};
  // rows far apart fall on the same cache sets, so they are gathered (2 KiB: measured no gain below it)
  if (sizeof(T) == 4 && x.dtype == DType::f32 && x.s <= 512 && p.key_run(j0, j1) == j1) {
    block.data = reinterpret_cast<const T*>(p.key_row(x, b, h, j0));
    block.ld = x.s;
    return block;
  }
  with_storage(x.dtype, [&](auto* storage) {
    using S = std::remove_pointer_t<decltype(storage)>;
    for (int64_t j = j0; j < j1;) {
      const S* row = reinterpret_cast<const S*>(p.key_row(x, b, h, j));
      for (const int64_t end = p.key_run(j, j1); j < end; ++j, row += x.s)
        block.finite &= unpack_row(row, channels, buffer + (j - j0) * ld);
    }
  });
  return block;
}

// The logit that joins the softmax denominator of a head, in natural units.
inline double read_sink(const Problem& p, int64_t head) {
  double x = 0;
  with_storage(p.sinks_dtype, [&](auto* storage) {
    using S = std::remove_pointer_t<decltype(storage)>;
    x = load_one<float>(static_cast<const S*>(p.sinks) + head);
  });
  return x;
}

// What a tile of a mask or bias says, so that work can be skipped.
struct Coverage {
  bool some_masked = false, some_open = false;
};

// dst[j][lane] = value of a broadcast plane at (row of lane, j0 + j), for j < n, rows of dst `lanes` apart; lanes past
// the rows repeat the last one. A mask covers where it is not 0, a bias where it is -inf.
template <class T>
Coverage load_plane(const Plane& x, bool is_bias, int64_t b, const Rows& rows, int first, int lanes, int64_t j0,
                    int64_t n, T* dst) {
  constexpr int W = kLanes<T>;
  VI<T> masked{}, open{};
  auto put_noted = [&](T* at, V<T> v) {
    VI<T> m = is_bias ? v == T(-INFINITY) : v != T(0);
    masked |= m;
    open |= ~m;
    put(at, v);
  };
  with_plane_storage(x.dtype, [&](auto* storage) {
    using S = std::remove_pointer_t<decltype(storage)>;
    for (int l0 = 0; l0 < lanes; l0 += W) {
      const S* src[W];
      for (int l = 0; l < W; ++l) {
        int r = first + l0 + l < rows.n ? first + l0 + l : rows.n - 1;
        src[l] = reinterpret_cast<const S*>(x.row(b, rows.head[r], rows.query[r])) + (x.k ? j0 : 0);
      }
      if (x.k == 0) {
        V<T> v{};
        for (int l = 0; l < W; ++l) v[l] = load_one<T>(src[l]);
        for (int64_t j = 0; j < n; ++j) put_noted(dst + j * lanes + l0, v);
      } else if (x.q == 0 && x.h == 0) {
        for (int64_t j = 0; j < n; ++j) put_noted(dst + j * lanes + l0, splat(load_one<T>(src[0] + j)));
      } else {
        for (int64_t j = 0; j < n; j += W) {
          const int m = int(n - j < W ? n - j : W);
          V<T> block[W];
#pragma GCC unroll 16
          for (int l = 0; l < W; ++l) block[l] = m == W ? load_as<T>(src[l] + j) : load_part<T>(src[l] + j, m);
          transpose<T>(block);
          for (int i = 0; i < m; ++i) put_noted(dst + (j + i) * lanes + l0, block[i]);
        }
      }
    }
  });
  Coverage c;
  for (int l = 0; l < W; ++l) {
    c.some_masked |= masked[l] != 0;
    c.some_open |= open[l] != 0;
  }
  return c;
}

}  // namespace
