// Backward (Dao et al., "FlashAttention-2", 2023, algorithm 2): five products per tile, probabilities recomputed from
// the saved row maximum and row sum, S x S never stored.
//   P = exp(S - max) / sum       dV += P^T dO      dP = dO V^T      dS = P (dP - delta + dLSE)
//   dQ += dS K scale             dK += dS^T Q scale                 delta = rowsum(dO * O)
//
// A task owns one (batch, kv head), all query heads of its group, and a range of keys: it keeps dK, dV of a key block
// at hand while it walks the query rows, and dQ of all rows. With few (batch, kv head) pairs the keys are split between
// tasks, each with a dQ of its own, added up in fixed order; how many depends on the problem alone.
#pragma once
#include <algorithm>
#include <vector>

#include "cpu/blocks.h"
#include "cpu/score.h"
#include "cpu/threads.h"

namespace {

// Query rows ready for the products: channels by lanes (for scores) and lanes by channels (for dK, dV), and row
// statistics.
template <class T>
struct QueryBlock {
  Rows rows;
  T *q_t, *do_t, *q, *dout;         // [d][lanes] tile after tile, scaled; [dv][lanes]; [lanes][dp]; [lanes][dvp]
  T *max, *inverse, *shift, *dlse;  // row maximum, 1 / row sum, dLSE - delta, dLSE
  bool finite = true;

  static int64_t elements(const Problem& p, int64_t rows, bool by_channels) {
    const int64_t n = round_up(rows, kLanes<T>);
    const int64_t dp = round_up(p.d, kLanes<T>), dvp = round_up(p.dv, kLanes<T>);
    return n * (p.d + p.dv + (by_channels ? dp + dvp : 0) + 4) + 8 * kLanes<T>;
  }

  void pack(const Problem& p, int64_t b, bool by_channels, T* memory) {
    const int64_t n = round_up(rows.n, kLanes<T>);
    const int64_t dp = round_up(p.d, kLanes<T>), dvp = round_up(p.dv, kLanes<T>);
    auto take = [&](int64_t count) {
      T* r = memory;
      memory += round_up(count, kLanes<T>);
      return r;
    };
    q_t = take(n * p.d), do_t = take(n * p.dv), max = take(n), inverse = take(n), shift = take(n), dlse = take(n);
    if (by_channels) q = take(n * dp), dout = take(n * dvp);
    for (int f = 0; f < rows.n; f += kTileLanes<T>) {
      const int lanes = int(round_up(std::min(rows.n - f, kTileLanes<T>), kLanes<T>));
      pack_transposed<T>(p, p.q, b, rows, f, lanes, p.d, query_scale(p), q_t + f * p.d);
      pack_transposed<T>(p, p.dout, b, rows, f, lanes, p.dv, 1, do_t + f * p.dv);
    }
    const int padded = int(round_up(rows.n, kLanes<T>));
    fill(max, padded, T(0));
    fill(inverse, padded, T(0));
    fill(shift, padded, T(0));
    fill(dlse, padded, T(0));
    for (int r = 0; r < rows.n; ++r) {
      const int64_t at = p.stat(b, rows.head[r], rows.query[r]), row = p.seq[b].q_base + rows.query[r];
      if (by_channels) {
        unpack(p.q, b, rows.head[r], row, p.d, q + r * dp);
        unpack(p.dout, b, rows.head[r], row, p.dv, dout + r * dvp);
      }
      if (p.row_sum[at] == 0) continue;                               // no key: probabilities are exp2(-inf - 0) * 0
      max[r] = p.row_max[at] == -INFINITY ? T(0) : T(p.row_max[at]);  // -inf beside a sum: every score was NaN
      inverse[r] = T(1) / T(p.row_sum[at]);
      dlse[r] = p.dlse ? T(p.dlse[at]) : T(0);
      shift[r] = dlse[r] - delta(p, b, rows.head[r], row);
      const T sum = max[r] + inverse[r] + shift[r];
      finite &= sum - sum == T(0);
    }
  }

 private:
  void unpack(const Tensor4& x, int64_t b, int64_t h, int64_t row, int64_t channels, T* dst) {
    with_storage(x.dtype, [&](auto* storage) {
      using S = std::remove_pointer_t<decltype(storage)>;
      finite &= unpack_row(reinterpret_cast<const S*>(x.row(b, h, row)), channels, dst);
    });
  }

  static T delta(const Problem& p, int64_t b, int64_t h, int64_t row) {
    constexpr int W = kLanes<T>;
    V<T> sum{};
    with_storage(p.out.dtype, [&](auto* storage) {
      using S = std::remove_pointer_t<decltype(storage)>;
      const S *o = reinterpret_cast<const S*>(p.out.row(b, h, row)),
              *g = reinterpret_cast<const S*>(p.dout.row(b, h, row));
      // the output of a row without keys is 0, and then so is delta, whatever lies in dout
      auto add = [&](V<T> x, V<T> y) { sum += x != T(0) ? x * y : V<T>{}; };
      int64_t c = 0;
      for (; c + W <= p.dv; c += W) add(load_as<T>(o + c), load_as<T>(g + c));
      if (c < p.dv) add(load_part<T>(o + c, int(p.dv - c)), load_part<T>(g + c, int(p.dv - c)));
    });
    return sum_lanes<T>(sum);
  }
};

// Probabilities (with dropout) and score gradients of a tile, from its scores in `prob` and dP in `grad`, both
// rewritten. `slope` multiplies the gradient: d(score)/d(q.k scale), or d(score)/d(bias). GUARDED: a row may hold NaN,
// which must not reach the keys it does not see.
template <class T, bool GUARDED>
void probabilities_and_gradients(const Problem& p, const Tile& t, const QueryBlock<T>& q, T* prob, T* grad, int64_t ld,
                                 T* keep, const T* slope, bool all_keys) {
  constexpr int W = kLanes<T>;
  const bool is_natural = natural(p);
  if (keep) dropout_tile(p, t, keep);
  for (int l = 0; l < t.lanes; l += W) {
    const V<T> max = load(q.max + t.first + l), inverse = load(q.inverse + t.first + l);
    auto probability = [&](int64_t j) {
      const V<T> x = load(prob + j * ld + l);
      V<T> above = is_natural ? (x - max) * T(kLog2e) : x - max;
      // a double score may pass the maximum by what that lost in float32, see storable()
      if (sizeof(T) == 8) above = above > T(1) ? splat(T(1)) : above;
      V<T> e = exp2(above) * inverse;
      if (GUARDED) e = x == T(-INFINITY) ? V<T>{} : e;
      return e;
    };
    auto gradient = [&](int64_t j) {
      V<T> g = load(grad + j * ld + l);
      return keep ? g * load(keep + j * t.lanes + l) : g;
    };
    V<T> shift = load(q.shift + t.first + l);
    if (all_keys) {  // rowsum(P * dP) is delta too, without the rounding of a 16-bit output
      V<T> delta{};
      each_key(t, [&](int64_t j) {
        V<T> e = probability(j);
        delta += e == T(0) ? V<T>{} : e * gradient(j);
      });
      shift = load(q.dlse + t.first + l) - delta;
    }
    each_key(t, [&](int64_t j) {
      V<T> e = probability(j), g = gradient(j);
      put(prob + j * ld + l, keep ? e * load(keep + j * t.lanes + l) : e);
      V<T> ds = e * (g + shift);
      if (slope) {
        V<T> d = load(slope + j * t.lanes + l);  // 0 under a fill, where ds may be NaN
        ds = d != T(0) ? ds * d : V<T>{};
      }
      put(grad + j * ld + l, e == T(0) ? V<T>{} : ds);  // a masked key's dP may be NaN
    });
  }
}

template <class T>
class Backward {
  struct Task {
    int64_t b, kv_head, key0, key1, part, parts;
    double cost;
  };

 public:
  explicit Backward(const Problem& p) : p_(p) {
    constexpr int64_t step = kTileLanes<T>;
    const msf::Blocks tuned = msf::tuned_blocks(p, true);
    block_m_ = Band::clamp(round_up(first_set(p.block_m, tuned.rows, 96), step), step, kMaxRows);
    block_n_ = Band::clamp(round_up(first_set(p.block_n, tuned.keys, 144), 24), 24, 960);
    keys_per_part_ = first_set(0, tuned.keys_per_part, 256);
  }

  void run() {
    constexpr int64_t kEnoughTasks = 8;
    const int64_t pairs = p_.batch * p_.kv_heads;
    parts_ =
        pairs == 0 || pairs >= kEnoughTasks ? 1 : Band::clamp(kEnoughTasks / pairs, 1, p_.max_k / keys_per_part_ + 1);
    for (int64_t b = 0; b < p_.batch; ++b)
      for (int64_t h = 0; h < p_.kv_heads; ++h)
        for (int64_t part = 0; part < parts_; ++part) {
          const int64_t k_len = p_.seq[b].k_len, key0 = split(k_len, part), key1 = split(k_len, part + 1);
          tasks_.push_back({b, h, key0, key1, part, parts_, double(key1 - key0) * p_.seq[b].q_len});
        }
    std::stable_sort(tasks_.begin(), tasks_.end(), [](auto& x, auto& y) { return x.cost > y.cost; });
    dq_size_ = blocks(p_.max_q) * dq_block();
    if (parts_ > 1) dq_parts_.resize(pairs * parts_ * dq_size_);
    if (p_.sinks) dsinks_.resize(p_.batch * p_.heads);
    msf::run_tasks(int64_t(tasks_.size()), [this](int64_t i) { task(tasks_[i]); });
    if (parts_ > 1)
      msf::run_tasks(pairs * blocks(p_.max_q), [this](int64_t i) {
        add_parts(i / blocks(p_.max_q) / p_.kv_heads, i / blocks(p_.max_q) % p_.kv_heads, i % blocks(p_.max_q));
      });
    if (p_.sinks) store_sinks();
  }

 private:
  int64_t split(int64_t k_len, int64_t part) const {
    return std::min(k_len, round_up(k_len * part / parts_, 24));  // 24: what the row tiles of dK, dV divide
  }
  int64_t blocks(int64_t q_len) const { return (q_len * p_.group() + block_m_ - 1) / block_m_; }
  int64_t dq_block() const { return block_m_ * p_.d; }

  void task(const Task& t) {
    constexpr int L = kTileLanes<T>;
    const int64_t rows = p_.seq[t.b].q_len * p_.group(), n_blocks = blocks(p_.seq[t.b].q_len);
    const int64_t dp = round_up(p_.d, kLanes<T>), dvp = round_up(p_.dv, kLanes<T>);
    const int64_t ld = round_up(block_m_, kLanes<T>),
                  block_elements = round_up(QueryBlock<T>::elements(p_, block_m_, true), 16);
    Arena arena{msf::thread_scratch(
        n_blocks * (sizeof(QueryBlock<T>) + (block_elements + (t.parts == 1) * dq_block()) * sizeof(T)) +
        block_n_ * (2 * dp + 2 * dvp + 2 * ld) * sizeof(T) + ScorePieces<T>::bytes(p_, block_n_) +
        (n_blocks + 32) * 64)};
    QueryBlock<T>* query = arena.take<QueryBlock<T>>(n_blocks);
    T* dq = t.parts == 1 ? arena.take<T>(n_blocks * dq_block())
                         : dq_parts_.data + ((t.b * p_.kv_heads + t.kv_head) * parts_ + t.part) * dq_size_;
    fill(dq, n_blocks * dq_block(), T(0));
    bool finite = true;
    for (int64_t i = 0; i < n_blocks; ++i) {
      new (&query[i]) QueryBlock<T>;
      query[i].rows.fill(t.kv_head * p_.group(), p_.group(), i * block_m_, std::min(rows, (i + 1) * block_m_));
      query[i].pack(p_, t.b, true, arena.take<T>(block_elements));
      finite &= query[i].finite;
    }
    if (p_.sinks && t.part == 0) sink_gradients(t, query, n_blocks);

    Work w;
    w.k = arena.take<T>(block_n_ * dp), w.v = arena.take<T>(block_n_ * dvp);
    w.dk = arena.take<T>(block_n_ * dp), w.dv = arena.take<T>(block_n_ * dvp);
    w.prob = arena.take<T>(block_n_ * ld), w.grad = arena.take<T>(block_n_ * ld), w.ld = ld;
    w.piece.place(p_, block_n_, true, &arena);
    for (int64_t j0 = t.key0; j0 < t.key1; j0 += block_n_) {
      const int64_t j1 = std::min(t.key1, j0 + block_n_);
      if (finite && finite_keys(t, j0, j1, w))
        key_block<Guard::none, Guard::none>(t, query, n_blocks, j0, j1, dq, w);
      else  // 0 * NaN must reach neither a gradient of a key that the NaN's query cannot see, nor the reverse
        key_block<Guard::zero_in_a, Guard::zero_in_b>(t, query, n_blocks, j0, j1, dq, w);
    }
    if (t.parts == 1)
      for (int64_t i = 0; i < n_blocks; ++i) {
        const Rows& r = query[i].rows;
        for (int f = 0; f < r.n; f += L) store_dq(t.b, r, f, dq + i * dq_block() + f * p_.d);
      }
  }

  struct Work {
    T *k, *v, *dk, *dv, *prob, *grad;
    int64_t ld;
    ScorePieces<T> piece;
  };

  bool finite_keys(const Task& t, int64_t j0, int64_t j1, const Work& w) {
    bool finite = true;
    for (const Tensor4* x : {&p_.k, &p_.v})
      with_storage(x->dtype, [&](auto* storage) {
        using S = std::remove_pointer_t<decltype(storage)>;
        for (int64_t j = j0; j < j1; ++j)
          finite &= unpack_row(reinterpret_cast<const S*>(x->row(t.b, t.kv_head, p_.seq[t.b].k_base + j)),
                               x == &p_.k ? p_.d : p_.dv, w.prob);
      });
    return finite;
  }

  template <Guard IN_A, Guard IN_B>
  void key_block(const Task& t, const QueryBlock<T>* query, int64_t n_blocks, int64_t j0, int64_t j1, T* dq, Work& w) {
    constexpr int W = kLanes<T>, L = kTileLanes<T>;
    const Band band = p_.band(t.b);
    const int64_t n = j1 - j0, dp = round_up(p_.d, W), dvp = round_up(p_.dv, W), g = p_.group();
    const Block<T> k = load_block(p_, p_.k, t.b, t.kv_head, j0, j1, p_.d, w.k);
    const Block<T> v = load_block(p_, p_.v, t.b, t.kv_head, j0, j1, p_.dv, w.v);
    const bool all_keys = n == p_.seq[t.b].k_len && p_.out.dtype != DType::f32;
    fill(w.dk, n * dp, T(0));
    fill(w.dv, n * dvp, T(0));
    for (int64_t i = 0; i < n_blocks; ++i) {
      const QueryBlock<T>& q = query[i];
      bool any = false, whole = true;
      for (int f = 0; f < q.rows.n; f += L) {
        Tile tile = make_tile<T>(band, t.b, q.rows, f, j0, j1);
        T *prob = w.prob + f, *grad = w.grad + f;
        auto multiply = [&] { score_product(p_, tile, q.q_t + f * p_.d, k, prob, w.ld); };
        if (tile.hi <= tile.lo || !score_tile(p_, band, tile, prob, w.ld, w.piece, multiply)) tile.lo = tile.hi = 0;
        whole &= tile.whole && tile.lo == 0 && tile.hi == n;
        any |= tile.hi > tile.lo;
        product<T, LaneTile, Side::rows, Start::zero, Guard::none>(tile.hi - tile.lo, tile.lanes / W, p_.dv,
                                                                   v.data + tile.lo * v.ld, v.ld, q.do_t + f * p_.dv,
                                                                   tile.lanes, grad + tile.lo * w.ld, w.ld);
        probabilities_and_gradients<T, IN_A != Guard::none>(p_, tile, q, prob, grad, w.ld, w.piece.keep, w.piece.slope,
                                                            all_keys);
        product<T, LaneTile, Side::columns, Start::keep, IN_B>(p_.d, tile.lanes / W, tile.hi - tile.lo,
                                                               k.data + tile.lo * k.ld, k.ld, grad + tile.lo * w.ld,
                                                               w.ld, dq + i * dq_block() + f * p_.d, tile.lanes);
        for (int64_t j = 0; j < n; ++j)
          if (j < tile.lo || j >= tile.hi)
            for (int l = 0; l < tile.lanes; l += W) put(prob + j * w.ld + l, V<T>{}), put(grad + j * w.ld + l, V<T>{});
      }
      if (!any) continue;
      // dK, dV: rows of keys against the run of query rows that sees them
      const int64_t step = whole ? n : 24, row0 = i * block_m_;
      for (int64_t j = 0; j < n; j += step) {
        const int64_t m = std::min(step, n - j);
        int64_t first = 0, last = q.rows.n;
        if (!whole) {
          first = Band::clamp(band.first_query(j0 + j) * g - row0, 0, q.rows.n);
          last = Band::clamp((band.last_query(j0 + j + m - 1) + 1) * g - row0, first, q.rows.n);
        }
        product<T, ChannelTile, Side::rows, Start::keep, IN_A>(m, int(dvp / W), last - first, w.prob + j * w.ld + first,
                                                               w.ld, q.dout + first * dvp, dvp, w.dv + j * dvp, dvp);
        product<T, ChannelTile, Side::rows, Start::keep, IN_A>(m, int(dp / W), last - first, w.grad + j * w.ld + first,
                                                               w.ld, q.q + first * dp, dp, w.dk + j * dp, dp);
      }
    }
    store_rows(p_.dk, t, j0, j1, p_.d, w.dk, dp, T(p_.scale));
    store_rows(p_.dv_, t, j0, j1, p_.dv, w.dv, dvp, T(1));
  }

  void store_rows(const Tensor4& x, const Task& t, int64_t j0, int64_t j1, int64_t channels, const T* src, int64_t ld,
                  T scale) {
    constexpr int W = kLanes<T>;
    with_storage(x.dtype, [&](auto* storage) {
      using S = std::remove_pointer_t<decltype(storage)>;
      for (int64_t j = j0; j < j1; ++j, src += ld) {
        S* out = reinterpret_cast<S*>(x.row(t.b, t.kv_head, p_.seq[t.b].k_base + j));
        int64_t c = 0;
        for (; c + W <= channels; c += W) store_as<T>(out + c, load(src + c) * scale);
        if (c < channels) store_part<T>(out + c, load(src + c) * scale, int(channels - c));
      }
    });
  }

  void store_dq(int64_t b, const Rows& rows, int f, const T* dq) {
    alignas(64) T scale[kTileLanes<T>];
    const int lanes = int(round_up(std::min(rows.n - f, kTileLanes<T>), kLanes<T>));
    fill(scale, lanes, T(p_.scale));
    store_transposed<T>(p_, p_.dq, b, rows, f, lanes, p_.d, dq, scale);
  }

  void add_parts(int64_t b, int64_t kv_head, int64_t block) {
    constexpr int W = kLanes<T>, L = kTileLanes<T>;
    const int64_t n = p_.seq[b].q_len * p_.group(), row0 = block * block_m_;
    if (row0 >= n) return;
    Rows rows;
    rows.fill(kv_head * p_.group(), p_.group(), row0, std::min(n, row0 + block_m_));
    T* first = dq_parts_.data + (b * p_.kv_heads + kv_head) * parts_ * dq_size_ + block * dq_block();
    for (int64_t part = 1; part < parts_; ++part)
      for (int64_t e = 0; e < round_up(rows.n, W) * p_.d; e += W)
        put(first + e, load(first + e) + load(first + part * dq_size_ + e));
    for (int f = 0; f < rows.n; f += L) store_dq(b, rows, f, first + f * p_.d);
  }

  // d(sink) = sum over rows of p_sink (dLSE - delta), p_sink = exp(sink) / denominator
  void sink_gradients(const Task& t, const QueryBlock<T>* query, int64_t n_blocks) {
    for (int64_t h = t.kv_head * p_.group(); h < (t.kv_head + 1) * p_.group(); ++h)
      dsinks_.data[t.b * p_.heads + h] = 0;
    for (int64_t i = 0; i < n_blocks; ++i)
      for (int r = 0; r < query[i].rows.n; ++r) {
        const int64_t head = query[i].rows.head[r];
        const double sink = read_sink(p_, head) * per_nat(p_);
        if (query[i].inverse[r] == 0 || sink == -INFINITY) continue;
        dsinks_.data[t.b * p_.heads + head] += __builtin_exp2((sink - double(query[i].max[r])) * to_log2(p_)) *
                                               double(query[i].inverse[r]) * double(query[i].shift[r]);
      }
  }

  void store_sinks() {
    with_storage(p_.sinks_dtype, [&](auto* storage) {
      using S = std::remove_pointer_t<decltype(storage)>;
      for (int64_t h = 0; h < p_.heads; ++h) {
        double sum = 0;
        for (int64_t b = 0; b < p_.batch; ++b) sum += dsinks_.data[b * p_.heads + h];
        store_part<T>(static_cast<S*>(p_.dsinks) + h, splat(T(sum)), 1);
      }
    });
  }

  const Problem& p_;
  int64_t block_m_, block_n_, keys_per_part_, parts_ = 1, dq_size_ = 0;
  std::vector<Task> tasks_;
  Buffer<T> dq_parts_;
  Buffer<double> dsinks_;
};

}  // namespace
