// Gradient of the additive bias: dBias = dS, summed over whatever the bias repeats over.
//
// A task owns a piece of the bias (all of an axis that repeats, a block of one that does not) and adds everything that
// falls on it in fixed order, so the sum is the same for any number of threads. Scores and dP are computed anew: two
// products more, for a bias that asks for its gradient only.
#pragma once
#include "cpu/backward.h"

namespace {

template <class T>
class BiasGrad {
  struct Task {
    int64_t b0, b1, h0, h1, q0, q1, k0, k1;
  };
  static constexpr int kRows = 96, kKeys = 144;

 public:
  explicit BiasGrad(const Problem& p) : p_(p), x_(p.dbias) {}

  void run() {
    auto pieces = [](int64_t n, int64_t piece, int64_t stride) { return stride ? (n + piece - 1) / piece : 1; };
    const int64_t nb = pieces(p_.batch, 1, x_.b), nh = pieces(p_.heads, 1, x_.h);
    const int64_t nq = pieces(p_.max_q, kRows, x_.q), nk = pieces(p_.max_k, kKeys, x_.k);
    auto piece = [](int64_t i, int64_t count, int64_t n, int64_t size) {
      return count == 1 ? std::make_pair(int64_t(0), n) : std::make_pair(i * size, std::min(n, (i + 1) * size));
    };
    msf::run_tasks(nb * nh * nq * nk, [&](int64_t i) {
      auto [k0, k1] = piece(i % nk, nk, p_.max_k, kKeys);
      auto [q0, q1] = piece(i / nk % nq, nq, p_.max_q, kRows);
      auto [h0, h1] = piece(i / nk / nq % nh, nh, p_.heads, 1);
      auto [b0, b1] = piece(i / nk / nq / nh, nb, p_.batch, 1);
      task({b0, b1, h0, h1, q0, q1, k0, k1});
    });
  }

 private:
  void task(const Task& t) {
    constexpr int W = kLanes<T>, L = kTileLanes<T>;
    const int64_t ld = round_up(kRows, L), dp = round_up(p_.d, W), dvp = round_up(p_.dv, W);
    const int64_t elements = round_up(QueryBlock<T>::elements(p_, kRows, false), 16);
    const int64_t cols = x_.k ? kKeys : 1;  // sums[key or 0][query row or 0]
    Arena arena{msf::thread_scratch((elements + kKeys * (dp + dvp + 2 * L) + cols * ld) * sizeof(T) +
                                    ScorePieces<T>::bytes(p_, kKeys) + sizeof(QueryBlock<T>) + 32 * 64)};
    QueryBlock<T>* query = new (arena.take<QueryBlock<T>>(1)) QueryBlock<T>;
    T *memory = arena.take<T>(elements), *k_buffer = arena.take<T>(kKeys * dp), *v_buffer = arena.take<T>(kKeys * dvp);
    T *prob = arena.take<T>(kKeys * L), *grad = arena.take<T>(kKeys * L), *sums = arena.take<T>(cols * ld);
    ScorePieces<T> piece;
    piece.place(p_, kKeys, true, &arena);
    fill(sums, cols * ld, T(0));
    for (int64_t b = t.b0; b < t.b1; ++b) {
      const Band band = p_.band(b);
      for (int64_t h = t.h0; h < t.h1; ++h)
        for (int64_t q0 = t.q0; q0 < std::min(t.q1, p_.seq[b].q_len); q0 += kRows) {
          query->rows.fill(h, 1, q0, std::min(std::min(t.q1, p_.seq[b].q_len), q0 + kRows));
          query->pack(p_, b, false, memory);
          for (int64_t k0 = t.k0; k0 < std::min(t.k1, p_.seq[b].k_len); k0 += kKeys) {
            const int64_t k1 = std::min(std::min(t.k1, p_.seq[b].k_len), k0 + kKeys), kv_head = h / p_.group();
            const Block<T> k = load_block(p_, p_.k, b, kv_head, k0, k1, p_.d, k_buffer);
            const Block<T> v = load_block(p_, p_.v, b, kv_head, k0, k1, p_.dv, v_buffer);
            for (int f = 0; f < query->rows.n; f += L) {
              const Tile tile = make_tile<T>(band, b, query->rows, f, k0, k1);
              auto multiply = [&] { score_product(p_, tile, query->q_t + f * p_.d, k, prob, tile.lanes); };
              if (tile.hi <= tile.lo || !score_tile(p_, band, tile, prob, tile.lanes, piece, multiply)) continue;
              product<T, LaneTile, Side::rows, Start::zero, Guard::none>(
                  tile.hi - tile.lo, tile.lanes / W, p_.dv, v.data + tile.lo * v.ld, v.ld, query->do_t + f * p_.dv,
                  tile.lanes, grad + tile.lo * tile.lanes, tile.lanes);
              probabilities_and_gradients<T, true>(p_, tile, *query, prob, grad, tile.lanes, piece.keep,
                                                   piece.bias_slope,
                                                   k1 - k0 == p_.seq[b].k_len && p_.out.dtype != DType::f32);
              add(tile, grad, sums, ld);
            }
          }
        }
    }
    store(t, sums, ld);
  }

  void add(const Tile& t, const T* grad, T* sums, int64_t ld) {
    constexpr int W = kLanes<T>;
    each_key(t, [&](int64_t j) {
      T* row = sums + (x_.k ? j : 0) * ld;
      for (int l = 0; l < t.lanes; l += W) {
        V<T> g = load(grad + j * t.lanes + l);
        if (x_.q)
          put(row + t.first + l, load(row + t.first + l) + g);
        else  // the lanes of a row that repeats are added at the end
          put(row + l, load(row + l) + g);
      }
    });
  }

  void store(const Task& t, const T* sums, int64_t ld) {
    constexpr int L = kTileLanes<T>;
    with_storage(x_.dtype, [&](auto* storage) {
      using S = std::remove_pointer_t<decltype(storage)>;
      for (int64_t q = 0; q < (x_.q ? t.q1 - t.q0 : 1); ++q) {
        S* out = reinterpret_cast<S*>(x_.row(t.b0, t.h0, t.q0 + q)) + (x_.k ? t.k0 : 0);
        for (int64_t k = 0; k < (x_.k ? t.k1 - t.k0 : 1); ++k) {
          T total = 0;
          if (x_.q)
            total = sums[k * ld + q];
          else
            for (int l = 0; l < L; ++l) total += sums[k * ld + l];
          store_part<T>(out + k, splat(total), 1);
        }
      }
    });
  }

  const Problem& p_;
  const Plane& x_;
};

}  // namespace
