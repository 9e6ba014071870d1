// Forward: tiled attention with on-line softmax (Dao et al., "FlashAttention-2", 2023, algorithm 1), scores transposed:
//   S^T[key][query] = K Q^T,  O^T[channel][query] += V^T P^T
// so that maximum, sum and rescaling run down a register and K, V are read as they lie in memory.
//
// A task (cpu/forward_plan.h) walks its keys in blocks; the parts of rows whose keys were split are merged at the end.
#pragma once
#include <algorithm>
#include <vector>

#include "cpu/blocks.h"
#include "cpu/forward_plan.h"
#include "cpu/narrow.h"
#include "cpu/prefetch.h"
#include "cpu/threads.h"

namespace {

template <class T>
struct ForwardState {  // O^T, row maximum and row sum of a task's rows, tile after tile
  T *o, *max, *sum;

  static int64_t elements(int64_t rows, int64_t dv) { return round_up(rows, kLanes<T>) * (dv + 2); }
  void place(T* at, int64_t rows, int64_t dv) {
    const int64_t padded = round_up(rows, kLanes<T>);
    o = at;
    max = o + padded * dv;
    sum = max + padded;
  }
};

template <class T>
class Forward {
 public:
  explicit Forward(const Problem& p) : p_(p) {
    // 192 rows share each block of K and V: measured 20 % faster than 96 for float32 (AVX-512, head_dim 64), and no
    // slower for 16-bit, which also widens the block. 384 gains little and leaves fewer tasks.
    const msf::Blocks tuned = msf::tuned_blocks(p, false);
    block_m_ = Band::clamp(round_up(first_set(p.block_m, tuned.rows, 192), kTileLanes<T>), kTileLanes<T>, kMaxRows);
    block_n_ = Band::clamp(round_up(first_set(p.block_n, tuned.keys, 128), 8), 8, 1024);
    // decoding one query in caches of 1024 and 8192 tokens with head_dim 64: parts of 1024 keys, 6 to 9 % faster than
    // 512
    keys_per_part_ = first_set(0, tuned.keys_per_part, 1024);
  }

  void run() {
    plan();
    msf::run_tasks(int64_t(tasks_.size()), [this](int64_t i) { task(i); });
    if (slots_) msf::run_tasks(int64_t(tasks_.size()), [this](int64_t i) { merge(tasks_[i]); });
  }

 private:
  void plan() {
    ForwardPlan plan = plan_forward(p_, block_m_, keys_per_part_, threads_);
    tasks_.swap(plan.tasks);
    slots_ = plan.slots;
    slot_size_ = ForwardState<T>::elements(block_m_, p_.dv);
    parts_.resize(slots_ * slot_size_);
  }

  void task(int64_t index) {
    const ForwardTask& t = tasks_[index];
    Rows rows;
    rows.fill(t.kv_head * p_.group(), p_.group(), t.row0, t.row1);
    const int64_t padded = round_up(rows.n, kLanes<T>);
    const int64_t dp = round_up(p_.d, kLanes<T>), dvp = round_up(p_.dv, kLanes<T>);
    Arena arena{msf::thread_scratch(
        (padded * dp + ForwardState<T>::elements(rows.n, p_.dv) + block_n_ * (dp + dvp + kTileLanes<T>)) * sizeof(T) +
        ScorePieces<T>::bytes(p_, block_n_) + 16 * 64)};
    const bool narrow = rows.n <= kNarrowRows<T>;
    T* q = arena.take<T>(padded * dp);
    ForwardState<T> state;
    state.place(arena.take<T>(ForwardState<T>::elements(rows.n, p_.dv)), rows.n, p_.dv);
    if (t.parts > 1) state.place(parts_.data + t.slot * slot_size_, rows.n, p_.dv);
    if (narrow) pack_rows<T>(p_, p_.q, t.b, rows, p_.d, query_scale(p_), q);
    for (int f = 0; f < rows.n && !narrow; f += kTileLanes<T>) {
      const int lanes = int(round_up(std::min(rows.n - f, kTileLanes<T>), kLanes<T>));
      pack_transposed<T>(p_, p_.q, t.b, rows, f, lanes, p_.d, query_scale(p_), q + f * p_.d);
    }
    // NaN or Inf in a value row that some query must not see would reach it as 0 * NaN. That shows in the output, so
    // the rare case is found there, and costs nothing where values are finite.
    if (!attend<Guard::none>(index, rows, q, state, arena)) attend<Guard::zero_in_b>(index, rows, q, state, arena);
    if (t.parts == 1) finish(t, rows, state);
  }

  // false when the output holds a NaN or Inf
  template <Guard GUARD>
  bool attend(int64_t index, const Rows& rows, const T* q, ForwardState<T>& state, Arena arena) {
    constexpr int W = kLanes<T>, L = kTileLanes<T>;
    const ForwardTask& t = tasks_[index];
    Prefetch ahead;
    const Band band = p_.band(t.b);
    const int64_t dp = round_up(p_.d, W), dvp = round_up(p_.dv, W);
    T* k_buffer = arena.take<T>(block_n_ * dp);
    T* v_buffer = arena.take<T>(block_n_ * dvp);
    T* s = arena.take<T>(block_n_ * L);
    const bool narrow = rows.n <= kNarrowRows<T>;
    ScorePieces<T> piece;
    piece.place(p_, block_n_, false, &arena);
    const int64_t padded = round_up(rows.n, W);
    bool started[(kMaxRows + L - 1) / L] = {};  // tiles whose outputs hold something
    if (narrow) fill(state.o, padded * p_.dv, T(0));
    fill(state.max, padded, T(-INFINITY));
    fill(state.sum, padded, T(0));
    for (int64_t j0 = t.key0; j0 < t.key1; j0 += block_n_) {
      const int64_t j1 = std::min(t.key1, j0 + block_n_);
      Block<T> k, v;
      if (!narrow) {
        k = load_block(p_, p_.k, t.b, t.kv_head, j0, j1, p_.d, k_buffer);
        v = load_block(p_, p_.v, t.b, t.kv_head, j0, j1, p_.dv, v_buffer);
        look_ahead(index, rows, j0, j1, &ahead);
      }
      for (int f = 0; f < rows.n; f += L) {
        const Tile tile = make_tile<T>(band, t.b, rows, f, j0, j1);
        auto multiply = [&] {
          if (narrow)
            narrow_score_product(p_, tile, t.kv_head, q, s);
          else
            score_product(p_, tile, q + f * p_.d, k, s, tile.lanes, ahead);
        };
        if (tile.hi <= tile.lo || !score_tile(p_, band, tile, s, tile.lanes, piece, multiply)) continue;
        alignas(64) T alpha[L];
        if (natural(p_))
          softmax<true>(tile, s, state.max + f, state.sum + f, alpha);
        else
          softmax<false>(tile, s, state.max + f, state.sum + f, alpha);
        if (piece.keep) {
          dropout_tile(p_, tile, piece.keep);
          for (int64_t i = tile.lo * tile.lanes; i < tile.hi * tile.lanes; i += W)
            put(s + i, load(s + i) * load(piece.keep + i));
        }
        if (narrow) {
          narrow_output_product<T, GUARD>(p_, tile, t.kv_head, s, state.o, alpha);
          continue;
        }
        auto add = started[f / L] ? product<T, LaneTile, Side::columns, Start::scale, GUARD, Prefetch>
                                  : product<T, LaneTile, Side::columns, Start::zero, GUARD, Prefetch>;
        add(p_.dv, tile.lanes / W, tile.hi - tile.lo, v.data + tile.lo * v.ld, v.ld, s + tile.lo * tile.lanes,
            tile.lanes, state.o + f * p_.dv, tile.lanes, alpha, ahead);
        started[f / L] = true;
      }
    }
    for (int f = 0; f < rows.n && !narrow; f += L)
      if (!started[f / L]) fill(state.o + f * p_.dv, std::min<int64_t>(L, padded - f) * p_.dv, T(0));
    V<T> bad{};
    for (int64_t i = 0; i < padded * p_.dv; i += W) {
      V<T> x = load(state.o + i);
      bad += x - x;
    }
    return sum_lanes<T>(bad) == T(0);
  }

  // What follows keys [j0, j1): the next ones; after the last ones, the rows of the output and the next task.
  void look_ahead(int64_t index, const Rows& rows, int64_t j0, int64_t j1, Prefetch* ahead) const {
    const ForwardTask& t = tasks_[index];
    ahead->clear();
    auto keys = [&](const ForwardTask& of, int64_t from) {
      const int64_t to = std::min(of.key1, from + block_n_), size = msf::size_of(p_.k.dtype);
      if (from >= to) return;
      const int64_t rows = p_.key_run(from, to) - from;
      ahead->add(p_.key_row(p_.k, of.b, of.kv_head, from), rows, p_.d * size, p_.k.s * size);
      ahead->add(p_.key_row(p_.v, of.b, of.kv_head, from), rows, p_.dv * size, p_.v.s * size);
    };
    const int64_t group = p_.group();
    auto queries = [&](const ForwardTask& of, const Tensor4& x, int64_t channels, bool write) {
      const int64_t first = of.row0 / group, last = (of.row1 - 1) / group, size = msf::size_of(x.dtype);
      for (int64_t h = 0; h < group; ++h)
        ahead->add(x.row(of.b, of.kv_head * group + h, p_.seq[of.b].q_base + first), last + 1 - first, channels * size,
                   x.s * size, write);
    };
    if (j1 < t.key1) {
      keys(t, j1);
    } else {
      if (t.parts == 1) queries(t, p_.out, p_.dv, true);
      const size_t next = size_t(index) + size_t(threads_);
      if (next < tasks_.size()) {
        keys(tasks_[next], tasks_[next].key0);
        queries(tasks_[next], p_.q, p_.d, false);
      }
    }
    ahead->spread((rows.n + kTileLanes<T> - 1) / kTileLanes<T> * ((j1 - j0) / LaneTile::R + p_.dv / LaneTile::R));
  }

  // Scores become probabilities relative to the running maximum; alpha rescales what was summed before.
  template <bool NATURAL>
  static void softmax(const Tile& t, T* s, T* max, T* sum, T* alpha) {
    constexpr int W = kLanes<T>, N = LaneTile::NV;
    int l = 0;
    for (; l + N * W <= t.lanes; l += N * W) softmax_of<NATURAL, N>(t, l, s, max, sum, alpha);
    for (; l < t.lanes; l += W) softmax_of<NATURAL, 1>(t, l, s, max, sum, alpha);
  }

  // N vectors of rows at once: of one alone, every key would wait for the maximum and the sum up to the key before.
  template <bool NATURAL, int N>
  MSF_INLINE static void softmax_of(const Tile& t, int l, T* s, T* max, T* sum, T* alpha) {
    constexpr int W = kLanes<T>;
    auto exponential = [](V<T> x) { return exp2(NATURAL ? x * T(kLog2e) : x); };
    V<T> m[N], odd[N], base[N], total[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) m[v] = odd[v] = load(max + l + v * W);
    const int64_t pairs = (t.hi - t.lo) / 2 * 2;
    for (int64_t j = t.lo; j < t.lo + pairs; j += 2)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {  // NaN leaves the maximum
        m[v] = larger<T>(load(s + j * t.lanes + l + v * W), m[v]);
        odd[v] = larger<T>(load(s + (j + 1) * t.lanes + l + v * W), odd[v]);
      }
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      const int at = l + v * W;
      const V<T> before = load(max + at);
      m[v] = larger<T>(odd[v], m[v]);
      if (t.lo + pairs < t.hi) m[v] = larger<T>(load(s + (t.hi - 1) * t.lanes + at), m[v]);
      base[v] = m[v] == T(-INFINITY) ? V<T>{} : m[v];  // no key so far: every probability is exp2(-inf) = 0
      const V<T> a = exponential(before - base[v]);
      total[v] = load(sum + at) * a;
      put(max + at, m[v]);
      put(alpha + at, a);
    }
    for (int64_t j = t.lo; j < t.hi; ++j)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        T* x = s + j * t.lanes + l + v * W;
        const V<T> e = exponential(load(x) - base[v]);
        total[v] += e;
        put(x, e);
      }
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) put(sum + l + v * W, total[v]);
  }

  // Folds the parts of a split task into its first, in order.
  void merge(const ForwardTask& t) {
    if (t.parts == 1 || t.part != 0) return;
    constexpr int W = kLanes<T>, L = kTileLanes<T>;
    Rows rows;
    rows.fill(t.kv_head * p_.group(), p_.group(), t.row0, t.row1);
    ForwardState<T> into, from;
    const T unit = T(to_log2(p_));
    into.place(parts_.data + t.slot * slot_size_, rows.n, p_.dv);
    for (int64_t part = 1; part < t.parts; ++part) {
      from.place(parts_.data + (t.slot + part) * slot_size_, rows.n, p_.dv);
      for (int f = 0; f < rows.n; f += L) {
        const int lanes = int(round_up(std::min(rows.n - f, L), W));
        for (int l = 0; l < lanes; l += W) {
          V<T> m0 = load(into.max + f + l), m1 = load(from.max + f + l), m = larger<T>(m0, m1);
          V<T> base = m == T(-INFINITY) ? V<T>{} : m;
          V<T> a0 = exp2((m0 - base) * unit), a1 = exp2((m1 - base) * unit);
          put(into.max + f + l, m);
          put(into.sum + f + l, load(into.sum + f + l) * a0 + load(from.sum + f + l) * a1);
          for (int64_t c = 0; c < p_.dv; ++c) {
            const int64_t at = f * p_.dv + c * lanes + l;
            V<T> x0 = load(into.o + at) * a0, x1 = load(from.o + at) * a1;
            put(into.o + at, x0 + x1);
          }
        }
      }
    }
    finish(t, rows, into);
  }

  // Sinks, normalization, statistics and the store.
  void finish(const ForwardTask& t, const Rows& rows, ForwardState<T>& state) {
    const double unit = to_log2(p_), natural_unit = 1 / per_nat(p_);
    for (int f = 0; f < rows.n; f += kTileLanes<T>) {
      alignas(64) T inverse[kTileLanes<T>] = {};
      const int n = std::min(rows.n - f, kTileLanes<T>), lanes = int(round_up(n, kLanes<T>));
      for (int l = 0; l < n; ++l) {
        const int64_t head = rows.head[f + l], at = p_.stat(t.b, head, rows.query[f + l]);
        double m = storable(p_, double(state.max[f + l])), sum = double(state.sum[f + l]), rescale = 1;
        if (p_.sinks) {
          const double sink = read_sink(p_, head) * per_nat(p_), top = sink > m ? sink : m;
          if (top > -INFINITY) {
            rescale = __builtin_exp2((m - top) * unit);
            sum = sum * rescale + __builtin_exp2((sink - top) * unit);
            m = top;
          }
        }
        const double stored = double(float(m));  // the backward divides by a sum relative to this
        if (stored != m && m - m == 0) {
          sum *= __builtin_exp2((m - stored) * unit);
          rescale *= __builtin_exp2((m - stored) * unit);
        }
        inverse[l] = sum == 0 ? T(0) : T(rescale / sum);
        if (p_.row_max) {
          p_.row_max[at] = float(m);
          p_.row_sum[at] = float(sum);
        }
        p_.lse[at] = float(stored * natural_unit + __builtin_log2(sum) * kLn2);
      }
      store_transposed<T>(p_, p_.out, t.b, rows, f, lanes, p_.dv, state.o + f * p_.dv, inverse);
    }
  }

  const Problem& p_;
  int64_t block_m_, block_n_, keys_per_part_, threads_ = std::max(1, msf::num_threads()), slots_ = 0, slot_size_ = 0;
  std::vector<ForwardTask> tasks_;
  Buffer<T> parts_;
};

}  // namespace
