// Scores of one tile (some keys x some query rows): product, then the pieces that vary: softcap, bias, ALiBi, mask,
// band, dropout. Each piece is one pass over a tile that sits in L1, and is not entered when the problem does not have
// it.
#pragma once
#include "common/philox.h"
#include "cpu/microkernel.h"
#include "cpu/pack.h"

namespace {

using msf::Band;
using msf::BlockRange;

constexpr double kLog2e = 1.4426950408889634074, kLn2 = 0.69314718055994530942;

// Scores are kept in units of log2, so that exp2 needs no factor; in natural units where a bias, fill or sink enters,
// because the lowest finite numbers, which many models use there, times log2(e) would be -inf, a mask. `per_nat` of
// these units are one.
inline bool natural(const Problem& p) { return p.bias || p.has_fill || p.sinks; }
inline double per_nat(const Problem& p) { return natural(p) ? 1 : kLog2e; }
inline double to_log2(const Problem& p) { return natural(p) ? kLog2e : 1; }

// A row maximum as the backward will find it, in float32. Near 2^24 and beyond, where float32 is coarser than a score's
// unit, what is lost cannot be made up for in the row sum: there the rounded one is used throughout.
inline double storable(const Problem& p, double m) {
  const double stored = double(float(m));
  return (m - stored) * to_log2(p) > 1 || (stored - m) * to_log2(p) > 1 ? stored : m;
}

// The queries carry the scale already; where softcap stands between, scale / softcap, the argument of tanh.
inline double query_scale(const Problem& p) { return p.softcap > 0 ? p.scale / p.softcap : p.scale * per_nat(p); }

template <class T>
constexpr int kTileLanes = LaneTile::NV * kLanes<T>;  // query rows whose accumulators fit the registers

// Scratch of one thread, cut into aligned pieces.
struct Arena {
  char* at;
  template <class T>
  T* take(int64_t n) {
    T* r = reinterpret_cast<T*>(at);
    at += round_up(n * int64_t(sizeof(T)), 64);
    return r;
  }
};

// One tile: rows [first, first + lanes) of a task, keys [j0 + lo, j0 + hi).
struct Tile {
  int64_t b;
  const Rows* rows;
  int first, lanes;
  int64_t j0, lo, hi;
  bool whole;  // the band excludes nothing here

  int valid() const { return rows->n - first < lanes ? rows->n - first : lanes; }
};

// The tile of rows [first, ...) for keys [j0, j1), cut down to what the band lets through.
template <class T>
Tile make_tile(const Band& band, int64_t b, const Rows& rows, int first, int64_t j0, int64_t j1) {
  Tile t{b, &rows, first, 0, j0, 0, 0, false};
  t.lanes = int(round_up(rows.n - first < kTileLanes<T> ? rows.n - first : kTileLanes<T>, kLanes<T>));
  BlockRange r = block_range(band, rows.query[first], rows.query[first + t.valid() - 1] + 1, j0, j1);
  t.lo = r.lo - j0;
  t.hi = r.empty() ? t.lo : r.hi - j0;
  t.whole = r.whole;
  return t;
}

template <class T>
struct ScorePieces {
  // [keys of a block][kTileLanes] each, null when the problem does not have the piece
  T *mask = nullptr, *bias = nullptr, *keep = nullptr;
  T* slope = nullptr;       // d(score) / d(q.k * scale) where it is not 1: softcap, and 0 under a fill
  T* bias_slope = nullptr;  // d(score) / d(bias): 0 under a fill

  static int64_t bytes(const Problem& p, int64_t block_n) {
    return (5 * block_n * kTileLanes<T> * int64_t(sizeof(T)) + 5 * 64) * needed(p);
  }
  static bool needed(const Problem& p) { return p.mask || p.bias || p.dropout > 0 || p.drop_mask || p.softcap > 0; }
  void place(const Problem& p, int64_t block_n, bool backward, Arena* arena) {
    auto tile = [&](bool on) { return on ? arena->take<T>(block_n * kTileLanes<T>) : nullptr; };
    mask = tile(bool(p.mask));
    bias = tile(bool(p.bias));
    keep = tile(p.dropout > 0 || p.drop_mask);
    slope = tile(backward && (p.softcap > 0 || p.has_fill));
    bias_slope = tile(backward && p.has_fill && p.bias);
  }
};

// s[j][lane] = k[j] . q[lane], the product of a tile; q is [channel][lanes], scaled.
template <class T, class BETWEEN = const Nothing>
void score_product(const Problem& p, const Tile& t, const T* q, const Block<T>& k, T* s, int64_t ld,
                   BETWEEN& between = Nothing()) {
  product<T, LaneTile, Side::rows, Start::zero, Guard::none>(t.hi - t.lo, t.lanes / kLanes<T>, p.d,
                                                             k.data + t.lo * k.ld, k.ld, q, t.lanes, s + t.lo * ld, ld,
                                                             static_cast<const T*>(nullptr), between);
}

template <class F>
MSF_INLINE void each_key(const Tile& t, F f) {
  for (int64_t j = t.lo; j < t.hi; ++j) f(j);
}

// s[j][lane] for keys lo..hi, from what `multiply` puts there; false when the tile has no key to see (then s is not
// written).
template <class T, class F>
bool score_tile(const Problem& p, const Band& band, const Tile& t, T* s, int64_t ld, const ScorePieces<T>& piece,
                F multiply) {
  constexpr int W = kLanes<T>;
  const Rows& rows = *t.rows;
  const int lanes = t.lanes;
  const int64_t n = t.hi - t.lo, from = t.lo * lanes;
  Coverage mask{false, true}, bias{false, true};
  if (p.mask) mask = load_plane(p.mask, false, t.b, rows, t.first, lanes, t.j0 + t.lo, n, piece.mask + from);
  if (p.bias) bias = load_plane(p.bias, true, t.b, rows, t.first, lanes, t.j0 + t.lo, n, piece.bias + from);
  if (!p.has_fill && !(mask.some_open && bias.some_open)) return false;

  multiply();
  if (p.softcap > 0) {
    const T cap = T(p.softcap * per_nat(p));
    each_key(t, [&](int64_t j) {
      for (int l = 0; l < lanes; l += W) {
        V<T> x = tanh<T>(load(s + j * ld + l));
        put(s + j * ld + l, x * cap);
        if (piece.slope) put(piece.slope + j * lanes + l, T(1) - x * x);
      }
    });
  } else if (piece.slope) {
    each_key(t, [&](int64_t j) {
      for (int l = 0; l < lanes; l += W) put(piece.slope + j * lanes + l, splat(T(1)));
    });
  }
  if (p.bias)
    each_key(t, [&](int64_t j) {
      for (int l = 0; l < lanes; l += W) {
        V<T> x = load(piece.bias + j * lanes + l);  // -inf replaces the score: a NaN key under it must not show
        put(s + j * ld + l, x == T(-INFINITY) ? x : load(s + j * ld + l) + x);
        if (piece.bias_slope) put(piece.bias_slope + j * lanes + l, splat(T(1)));
      }
    });
  if (p.alibi) {
    alignas(64) T slope[kTileLanes<T>] = {}, at[kTileLanes<T>] = {};
    for (int l = 0; l < t.valid(); ++l) {
      slope[l] = T(p.alibi[t.b * p.alibi_b + rows.head[t.first + l]] * per_nat(p));
      at[l] = T(rows.query[t.first + l] + band.off - t.j0);
    }
    each_key(t, [&](int64_t j) {
      for (int l = 0; l < lanes; l += W) {
        V<T> x = load(at + l) - T(j);
        put(s + j * ld + l, load(s + j * ld + l) - load(slope + l) * (x < T(0) ? -x : x));
      }
    });
  }
  if (mask.some_masked) {
    const V<T> masked = splat(p.has_fill ? T(p.fill) : T(-INFINITY));
    each_key(t, [&](int64_t j) {
      for (int l = 0; l < lanes; l += W) {
        VI<T> m = load(piece.mask + j * lanes + l) != T(0);
        put(s + j * ld + l, m ? masked : load(s + j * ld + l));
        if (piece.slope && p.has_fill) put(piece.slope + j * lanes + l, m ? V<T>{} : load(piece.slope + j * lanes + l));
        if (piece.bias_slope) put(piece.bias_slope + j * lanes + l, m ? V<T>{} : splat(T(1)));
      }
    });
  }
  if (!t.whole) {
    alignas(64) T begin[kTileLanes<T>] = {}, end[kTileLanes<T>] = {};
    for (int l = 0; l < t.valid(); ++l) {  // relative to the block, so that they are exact in T
      begin[l] = T(Band::clamp(band.begin(rows.query[t.first + l]) - t.j0, t.lo, t.hi));
      end[l] = T(Band::clamp(band.end(rows.query[t.first + l]) - t.j0, t.lo, t.hi));
    }
    auto cut = [&](int64_t from, int64_t to) {
      for (int64_t j = from; j < to; ++j)
        for (int l = 0; l < lanes; l += W) {
          VI<T> inside = (load(begin + l) <= T(j)) & (load(end + l) > T(j));
          put(s + j * ld + l, inside ? load(s + j * ld + l) : splat(T(-INFINITY)));
        }
    };
    // Bounds rise with the query: all rows see the keys from the last one's first to the first one's last. Lanes past
    // the rows are never stored.
    const int64_t seen = Band::clamp(band.begin(rows.query[t.first + t.valid() - 1]) - t.j0, t.lo, t.hi);
    const int64_t unseen = Band::clamp(band.end(rows.query[t.first]) - t.j0, seen, t.hi);
    cut(t.lo, seen);
    cut(unseen, t.hi);
  }
  return true;
}

// keep[j][lane] = 1 / (1 - p) where the probability survives dropout, else 0
template <class T>
void dropout_tile(const Problem& p, const Tile& t, T* keep) {
  constexpr int W = kLanes<T>;
  const Rows& rows = *t.rows;
  const T kept = T(1 / (1 - p.dropout));
  if (p.drop_mask) {
    load_plane(p.drop_mask, false, t.b, rows, t.first, t.lanes, t.j0 + t.lo, t.hi - t.lo, keep + t.lo * t.lanes);
    each_key(t, [&](int64_t j) {
      for (int l = 0; l < t.lanes; l += W)
        put(keep + j * t.lanes + l, load(keep + j * t.lanes + l) != T(0) ? splat(kept) : V<T>{});
    });
    return;
  }
  using U = vec<uint32_t, W>;
  const msf::PhiloxKey key(p.seed, p.offset);
  const uint32_t threshold = msf::drop_threshold(p.dropout);
  for (int l0 = 0; l0 < t.lanes; l0 += W) {
    U query{}, head{};
    for (int l = 0; l < W; ++l) {
      int r = t.first + l0 + l < rows.n ? t.first + l0 + l : rows.n - 1;
      query[l] = uint32_t(rows.query[r]);
      head[l] = uint32_t(t.b * p.heads + rows.head[r]);
    }
    for (int64_t j = t.j0 + t.lo; j < t.j0 + t.hi;) {
      U c[4] = {U{} + uint32_t(j >> 2), query, head, U{} + key.offset};
      msf::philox4x32_10(c, key.k0, key.k1, [](U a, uint32_t m, U* hi) { return mul_wide<W>(a, m, hi); });
      do {
        U word = c[j & 3];
        vec<int32_t, W> on = word >= threshold;
        put(keep + (j - t.j0) * t.lanes + l0, __builtin_convertvector(on, V<T>) * -kept);
      } while ((++j & 3) && j < t.j0 + t.hi);
    }
  }
}

}  // namespace
