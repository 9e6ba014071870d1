// Backward (Dao et al., "FlashAttention-2", 2023, algorithm 2), for pairs of a query block and a key block:
//
//   vectors  delta = rowsum(dO * O) - dLSE for all rows; the accumulators become 0          SyncAll
//            where queries may see no key, a copy of dO without what those have
//   cube     S = Q K^T   dP = dO V^T                          -> ring in GM, float32        kScoreReady
//   vectors  P = exp(S - max) / sum    dS = P (dP - delta)    -> ring in GM, 16 bit         kProbReady
//   cube     dV += P^T dO   dK += dS^T Q   dQ += dS K         summed over the pair in L0C, added to GM in float32
//   vectors  scale, conversion to the output's type                                         SyncAll before
//
// The cube issues S, dP of pair t, then the three sums of pair t - depth. In the deterministic form an accumulator in
// GM is added to by one core only, in the order of its pairs: keys are shared out between cores, and each share has a
// dQ of its own, added up in order at the end. With parts = 1 all cores add to one dQ.
//
// The gradient of the bias is a launch of its own, for those who ask for it: the same pairs, but dS goes to bias_grad.h
// and no sums are made of it.
#pragma once
#include "bias_grad.h"
#include "cube.h"
#include "guard.h"

namespace msf {

struct Saved {
  Address out, row_max, row_sum, dout, dlse;
};
struct Gradients {
  Address dq, dk, dv, dsinks, dbias;
};

// What a launch is for.
struct OfInputs {
  static constexpr bool kBias = false;
  using Items = const __gm__ BackwardItem*;
  using Pairs = PairStream<Items, Sequences>;
};
struct OfBias {
  static constexpr bool kBias = true;
  using Items = const __gm__ BiasItem*;
  using Pairs = BiasStream<Items, Sequences>;
};

template <class T>
struct BackwardWorkspace {
  Address base;
  const BackwardTiling* t;
  int64_t core;

  __aicore__ inline GlobalTensor<float> Score(int64_t turn) const {
    return Global<float>(base + t->ws.score, At(turn));
  }
  __aicore__ inline GlobalTensor<float> Grad(int64_t turn) const { return Global<float>(base + t->ws.grad, At(turn)); }
  __aicore__ inline GlobalTensor<T> Prob(int64_t turn) const { return Global<T>(base + t->ws.prob, At(turn)); }
  __aicore__ inline GlobalTensor<T> DScore(int64_t turn) const { return Global<T>(base + t->ws.dscore, At(turn)); }
  // by row of Q, counted as the row statistics are, or by row of K
  __aicore__ inline GlobalTensor<float> Delta(int64_t row) const { return Global<float>(base + t->ws.delta, row); }
  __aicore__ inline GlobalTensor<float> DQuery(int64_t part, int64_t row) const {
    return Global<float>(base + t->ws.dq + (t->parts > 1 ? part : 0) * t->ws.dq_part, row * t->a.d);
  }
  __aicore__ inline GlobalTensor<float> DKey(int64_t row) const { return Global<float>(base + t->ws.dk, row * t->a.d); }
  __aicore__ inline GlobalTensor<float> DValue(int64_t row) const {
    return Global<float>(base + t->ws.dv, row * t->a.dv);
  }

 private:
  __aicore__ inline int64_t At(int64_t turn) const {
    return (core * (t->depth + 1) + turn % (t->depth + 1)) * t->block_q * t->block_k;
  }
};

__aicore__ inline int64_t QueryRow(const AttentionTiling& a, const Sequence& seq, int64_t b, int64_t h, int64_t row) {
  return b * a.stat_b + h * a.stat_h + seq.q_base + row;
}
__aicore__ inline int64_t KeyRow(const BackwardTiling& t, const Sequence& seq, int64_t b, int64_t h, int64_t row) {
  return b * t.a.k_stat_b + h * t.a.k_stat_h + seq.k_base + row;
}

template <class T, class Goal>
class BackwardCube {
 public:
  __aicore__ inline BackwardCube(const BackwardTiling& t, typename Goal::Items items, const Inputs& in,
                                 const Saved& saved, const KeysValues& kv, Address workspace)
      : t_(t),
        items_(items),
        in_(in),
        dout_(saved.dout),
        dout_layout_(t.dout),
        kv_(kv),
        ws_{workspace, &t, AscendC::GetBlockIdx()} {
    if (!t.clean_dout) return;
    dout_ = workspace + t.ws.dout;
    dout_layout_ = {t.a.stat_b * t.a.dv, t.a.stat_h * t.a.dv, t.a.dv, 0};
  }

  __aicore__ inline void Run() {
    AscendC::SyncAll<false>();  // delta and the zeros are there
    l0_.SetUp();
    rows_.SetUp(t_.l1.rows, t_.l1.slot, 2, 0);
    channels_.SetUp(t_.l1.channels, t_.l1.slot, 2, 2);
    stream_.SetUp(t_.l1.stream, t_.l1.slot, 4, 4);
    const Sequences sequences{t_.a, in_};
    typename Goal::Pairs ahead(t_, items_, sequences, ws_.core), behind(t_, items_, sequences, ws_.core);
    Pair p;
    for (int64_t turn = 0;; ++turn) {
      if (ahead.next(&p)) Scores(p, turn);
      if (turn < t_.depth) continue;
      if (!behind.next(&p)) break;
      Sums(p, turn - t_.depth);
    }
    rows_.WaitAllEmpty();
    channels_.WaitAllEmpty();
    stream_.WaitAllEmpty();
    l0_.WaitAllEmpty();
    AscendC::SyncAll<false>();  // the sums are complete
  }

 private:
  static constexpr int32_t kTile = 128;  // rows and columns of a product's result, and its depth

  __aicore__ inline L1Tile<T> Load(L1Ring& ring, const GlobalTensor<T>& x, int64_t pitch, int32_t rows,
                                   int32_t columns) {
    const L1Tile<T> tile = ring.WaitEmpty<T>(rows);
    ClearTail(tile, rows, columns);
    CopyRows(tile, 0, x, pitch, rows, columns);
    ring.SignalFull();
    return tile;
  }
  __aicore__ inline GlobalTensor<T> QueryRows(const TensorLayout& x, Address gm, const Pair& p, int32_t i) const {
    const int64_t row = SequenceOf(t_.a, in_, p.batch).q_base + p.row0 + i;
    return Global<T>(gm, x.offset + p.batch * x.b + p.head * x.h + row * x.s);
  }
  __aicore__ inline GlobalTensor<T> KeyRows(const TensorLayout& x, Address gm, const Pair& p, int32_t j) const {
    const int64_t row = SequenceOf(t_.a, in_, p.batch).k_base + p.key0 + j;
    return Global<T>(gm, x.offset + p.batch * x.b + p.kv_head * x.h + row * x.s);
  }

  // to (rows x keys) = x y^T, depth `channels`
  __aicore__ inline void Outer(const L1Tile<T>& x, const L1Tile<T>& y, int32_t channels, const GlobalTensor<float>& to,
                               int32_t rows, int32_t keys) {
    l0_.WaitResult();
    for (int32_t k0 = 0, k; k0 < channels; k0 += k) {
      k = Min(kTile, channels - k0);
      l0_.Multiply<Stored::plain, Stored::transposed>(x, k0, y, k0, x.rows16, 0, y.rows16, k, k0 == 0);
    }
    l0_.Store(to, t_.block_k, x.rows16, rows, keys);
  }

  __aicore__ inline void Scores(const Pair& p, int64_t turn) {
    const AttentionTiling& a = t_.a;
    for (int32_t i = 0; i < p.rows; i += kTile) {
      const int32_t m = Min(kTile, p.rows - i);
      const L1Tile<T> q = Load(rows_, QueryRows(a.q, in_.query, p, i), a.q.s, m, a.d);
      const L1Tile<T> dout = Load(channels_, QueryRows(dout_layout_, dout_, p, i), dout_layout_.s, m, a.dv);
      for (int32_t j = 0; j < p.keys; j += kTile) {
        const int32_t n = Min(kTile, p.keys - j);
        const L1Tile<T> k = Load(stream_, KeyRows(kv_.k, kv_.key, p, j), kv_.k.s, n, a.d);
        Outer(q, k, a.d, ws_.Score(turn)[i * t_.block_k + j], m, n);
        stream_.SignalEmpty();
        const L1Tile<T> v = Load(stream_, KeyRows(kv_.v, kv_.value, p, j), kv_.v.s, n, a.dv);
        Outer(dout, v, a.dv, ws_.Grad(turn)[i * t_.block_k + j], m, n);
        stream_.SignalEmpty();
      }
      rows_.SignalEmpty();
      channels_.SignalEmpty();
    }
    AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kScoreReady);
  }

  // to (keys x channels) += x^T y, x being the pair's P or dS, y rows of dO or Q: for each tile of keys over all rows
  __aicore__ inline void SumOverRows(const Pair& p, const GlobalTensor<T>& x, const TensorLayout& layout, Address y,
                                     int32_t channels, const GlobalTensor<float>& to) {
    for (int32_t j = 0; j < p.keys; j += kTile) {
      const int32_t n = Min(kTile, p.keys - j), n16 = Align(n, kFractal);
      for (int32_t c = 0; c < channels; c += kTile) {
        const int32_t width = Min(kTile, channels - c);
        l0_.WaitResult();
        for (int32_t i = 0; i < p.rows; i += kTile) {
          const int32_t m = Min(kTile, p.rows - i);
          const L1Tile<T> left = Load(stream_, x[i * t_.block_k + j], t_.block_k, m, n16);
          const L1Tile<T> right = Load(rows_, QueryRows(layout, y, p, i)[c], layout.s, m, width);
          l0_.Multiply<Stored::transposed, Stored::plain>(left, 0, right, 0, n16, 0, width, left.rows16, i == 0);
          stream_.SignalEmpty();
          rows_.SignalEmpty();
        }
        Accumulate(to[j * channels + c], channels, n16, n, width);
      }
    }
  }

  // to (rows x channels) += dS K: for each tile of rows over all keys
  __aicore__ inline void SumOverKeys(const Pair& p, const GlobalTensor<T>& x, const GlobalTensor<float>& to) {
    const int32_t d = t_.a.d;
    for (int32_t i = 0; i < p.rows; i += kTile) {
      const int32_t m = Min(kTile, p.rows - i), m16 = Align(m, kFractal);
      for (int32_t c = 0; c < d; c += kTile) {
        const int32_t width = Min(kTile, d - c);
        l0_.WaitResult();
        for (int32_t j = 0; j < p.keys; j += kTile) {
          const int32_t n = Min(kTile, p.keys - j), n16 = Align(n, kFractal);
          const L1Tile<T> left = Load(stream_, x[i * t_.block_k + j], t_.block_k, m, n16);
          const L1Tile<T> right =
              Load(channels_, KeyRows(kv_.clean_k, kv_.clean_key, p, j)[c], kv_.clean_k.s, n, width);
          l0_.Multiply<Stored::plain, Stored::plain>(left, 0, right, 0, m16, 0, width, n16, j == 0);
          stream_.SignalEmpty();
          channels_.SignalEmpty();
        }
        Accumulate(to[i * d + c], d, m16, m, width);
      }
    }
  }

  __aicore__ inline void Accumulate(const GlobalTensor<float>& to, int32_t pitch, int32_t m, int32_t rows,
                                    int32_t columns) {
    AscendC::SetAtomicAdd<float>();
    l0_.Store(to, pitch, m, rows, columns);
    AscendC::DisableDmaAtomic();
  }

  __aicore__ inline void Sums(const Pair& p, int64_t turn) {
    AscendC::CrossCoreWaitFlag(kProbReady);
    if (Goal::kBias) return;
    const Sequence seq = SequenceOf(t_.a, in_, p.batch);
    const int64_t key_row = KeyRow(t_, seq, p.batch, p.kv_head, p.key0);
    SumOverRows(p, ws_.Prob(turn), dout_layout_, dout_, t_.a.dv, ws_.DValue(key_row));
    SumOverRows(p, ws_.DScore(turn), t_.a.q, in_.query, t_.a.d, ws_.DKey(key_row));
    SumOverKeys(p, ws_.DScore(turn), ws_.DQuery(p.part, QueryRow(t_.a, seq, p.batch, p.head, p.row0)));
  }

  const BackwardTiling& t_;
  typename Goal::Items items_;
  Inputs in_;
  Address dout_;  // as given, or the copy
  TensorLayout dout_layout_;
  KeysValues kv_;
  BackwardWorkspace<T> ws_;
  L0 l0_;
  L1Ring rows_, channels_, stream_;
};

template <class T, class Goal>
class BackwardVector {
 public:
  __aicore__ inline BackwardVector(const BackwardTiling& t, typename Goal::Items items, const Inputs& in,
                                   const Saved& saved, const Gradients& grads, Address workspace)
      : t_(t),
        items_(items),
        in_(in),
        saved_(saved),
        grads_(grads),
        ws_{workspace, &t, AscendC::GetBlockIdx() / AscendC::GetSubBlockNum()},
        bias_(t, workspace, grads.dbias),
        sequences_{t.a, in_},
        core_(AscendC::GetBlockIdx()),
        cores_(t.cores * AscendC::GetSubBlockNum()) {}

  __aicore__ inline void Run() {
    SetUp();
    if (Goal::kBias) {
      Clear(bias_.Sums(0), t_.bias_parts * t_.bias_part_elements);
    } else {
      Clear(ws_.DQuery(0, 0), t_.parts * t_.q_stats * t_.a.d);
      Clear(ws_.DKey(0), t_.k_stats * t_.a.d);
      Clear(ws_.DValue(0), t_.k_stats * t_.a.dv);
    }
    const bool delta = !t_.whole_rows || (!Goal::kBias && t_.a.sinks != DataType::none);
    if (delta || t_.clean_dout) Prepare(delta);
    AscendC::SyncAll<false>();
    typename Goal::Pairs pairs(t_, items_, sequences_, ws_.core);
    Pair p;
    for (int64_t turn = 0; pairs.next(&p); ++turn) Gradient(p, turn);
    AscendC::SyncAll<false>();
    if (Goal::kBias) {
      bias_.Finish(&score_, &prob_, core_, cores_);
    } else {
      FinishQueries();
      FinishKeys();
      if (t_.a.sinks != DataType::none) FinishSinks();
    }
    score_.WaitAllEmpty();
    grad_.WaitAllEmpty();
    stats_in_.WaitAllEmpty();
    prob_.WaitAllEmpty();
    if (!Goal::kBias) dscore_.WaitAllEmpty();
    pieces_.WaitAllEmpty();
  }

 private:
  static constexpr int32_t kChunk = 64;  // rows of the passes before and after

  __aicore__ inline void SetUp() {
    AscendC::Duplicate(Local<float>(TPosition::VECCALC, 0, t_.ub.end), 0.0f, t_.ub.end / 4);
    AscendC::PipeBarrier<PIPE_V>();
    score_.SetUp(t_.ub.score, t_.ub.tile, 2, 0);
    grad_.SetUp(t_.ub.grad, t_.ub.tile, 2, 2);
    stats_in_.SetUp(t_.ub.stats, 3 * StatBytes(), 1, 4);
    // what leaves is P and dS in 16 bit, or dS in 32 bit, which takes the room of both
    prob_.SetUp(t_.ub.prob, Goal::kBias ? t_.ub.tile : t_.ub.tile / 2, 2, 0);
    if (!Goal::kBias) dscore_.SetUp(t_.ub.dscore, t_.ub.tile / 2, 2, 2);
    spread_ = Local<float>(TPosition::VECCALC, t_.ub.spread, kLanes * kBlockBytes);
    scratch_ = Local<float>(TPosition::VECCALC, t_.ub.scratch, t_.ub.tile);
    pieces_.SetUp(t_.a, in_, t_.ub.tile, t_.ub.plane, t_.ub.scratch, t_.ub.index, t_.block_k * 4, 5);
    pieces_.KeepSlope(t_.ub.slope, Goal::kBias);
  }
  __aicore__ inline int32_t StatBytes() const { return Align((t_.block_q + 1) / 2, kLanes) * 4; }

  // This core's part of an accumulator becomes 0.
  __aicore__ inline void Clear(const GlobalTensor<float>& x, int64_t elements) {
    const LocalTensor<float> zeros = prob_.WaitEmpty<float>();
    const int32_t most = t_.ub.tile / 2 / 4;
    AscendC::Duplicate(zeros, 0.0f, most);
    prob_.SignalFull();
    for (int64_t at = core_ * most; at < elements; at += cores_ * most) {
      const int64_t left = elements - at;
      AscendC::DataCopy(x[at], zeros, uint32_t(left < most ? left : most));
    }
    prob_.SignalEmpty();
  }

  // What the pairs need of every row. delta = rowsum(dO * O) - dLSE; and a copy of dO in which queries without keys
  // have 0: their NaN would reach keys, and the query itself, as 0 * NaN.
  __aicore__ inline void Prepare(bool delta) {
    const AttentionTiling& a = t_.a;
    const int32_t width = PaddedWidth(a.dv), chunk = Min(kChunk, t_.ub.tile / 4 / width), lanes = StatBytes() / 4;
    ChunkStream chunks(sequences_, a.heads, false, chunk, core_, cores_);
    for (Chunk c; chunks.Next(&c);) {
      const Sequence seq = sequences_(c.b);
      const int32_t n = c.rows, padded = Align(n, 8);
      const int64_t b = c.b, h = c.head, row = seq.q_base + c.first, at = QueryRow(a, seq, b, h, c.first);
      const LocalTensor<T> out16 = score_.WaitEmpty<T>(), dout16 = grad_.WaitEmpty<T>();
      if (delta)
        CopyIn(out16, Global<T>(saved_.out, b * a.out.b + h * a.out.h + row * a.out.s), a.out.s, n, a.dv, width);
      CopyIn(dout16, Global<T>(saved_.dout, b * t_.dout.b + h * t_.dout.h + row * t_.dout.s), t_.dout.s, n, a.dv,
             width);
      grad_.SignalFull();  // both: MTE2 sets its flags after all it has copied
      const LocalTensor<float> stats = stats_in_.WaitEmpty<float>();
      if (t_.has_dlse) CopyIn(stats, Global<float>(saved_.dlse, at), n, 1, n, lanes);
      if (t_.clean_dout) {
        CopyIn(stats[lanes], Global<float>(saved_.row_sum, at), n, 1, n, lanes);
        CopyIn(stats[2 * lanes], Global<float>(saved_.row_max, at), n, 1, n, lanes);
      }
      stats_in_.SignalFull();
      const LocalTensor<float> product = scratch_, dout = out16.template ReinterpretCast<float>();
      if (delta) {
        AscendC::Cast(product, out16, AscendC::RoundMode::CAST_NONE, uint32_t(padded * width));
        AscendC::PipeBarrier<PIPE_V>();
      }
      // the tile of O has room for dO in float32 once it has been read
      AscendC::Cast(dout, dout16, AscendC::RoundMode::CAST_NONE, uint32_t(padded * width));
      AscendC::PipeBarrier<PIPE_V>();
      if (t_.clean_dout) {
        DropUnseeing(dout, dout16.template ReinterpretCast<float>(), stats[lanes], stats[2 * lanes], h, padded, width);
        const LocalTensor<T> clean = prob_.WaitEmpty<T>();
        AscendC::Cast(clean, dout, AscendC::RoundMode::CAST_RINT, uint32_t(padded * width));
        prob_.SignalFull();
        AscendC::PipeBarrier<PIPE_V>();
        CopyOut(Global<T>(ws_.base + t_.ws.dout, at * a.dv), clean, a.dv, n, a.dv, width);
        prob_.SignalEmpty();
      }
      if (delta) {
        AscendC::Mul(product, product, dout, padded * width);
        AscendC::PipeBarrier<PIPE_V>();
        const LocalTensor<float> sum = prob_.WaitEmpty<float>();
        ReduceRows<Plus>(sum, product, dout, padded, width);
        AscendC::PipeBarrier<PIPE_V>();
        if (t_.has_dlse) AscendC::Sub(sum, sum, stats, n);
        prob_.SignalFull();
        CopyOut(ws_.Delta(at), sum, n, 1, n, kLanes);
        prob_.SignalEmpty();
      }
      // columns beyond dv are read as zeros next time as well
      AscendC::Duplicate(dout, 0.0f, padded * width);
      if (t_.clean_dout) AscendC::Duplicate(dout16.template ReinterpretCast<float>(), 0.0f, padded * width);
      score_.SignalEmpty();
      grad_.SignalEmpty();
      stats_in_.SignalEmpty();
    }
  }

  // x becomes 0 in the rows of one head that see no key: their sum is 0, or with sinks that of the sink alone, which is
  // the maximum then. A row that sees keys has the same statistics only where these are below 2^-24 of the sink.
  __aicore__ inline void DropUnseeing(const LocalTensor<float>& x, const LocalTensor<float>& seen,
                                      const LocalTensor<float>& row_sum, const LocalTensor<float>& row_max, int64_t h,
                                      int32_t rows, int32_t width) {
    const LocalTensor<uint8_t> bits = spread_.template ReinterpretCast<uint8_t>();
    AscendC::Duplicate(seen, 0.0f, rows * width);
    if (t_.a.sinks != DataType::none) {
      AscendC::Adds(row_sum, row_sum, -1.0f, rows);
      AscendC::Adds(row_max, row_max, -Sink(h), rows);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Abs(row_sum, row_sum, rows);
      AscendC::Abs(row_max, row_max, rows);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Add(row_sum, row_sum, row_max, rows);
      AscendC::PipeBarrier<PIPE_V>();
    }
    Spread(spread_, row_sum, rows);
    AscendC::PipeBarrier<PIPE_V>();
    WithRow<AddRow>(seen, seen, spread_, rows, width);
    AscendC::PipeBarrier<PIPE_V>();
    Select(x, seen, bits, rows * width);
  }

  // x where `chosen` is not 0, elsewhere 0
  __aicore__ inline void Select(const LocalTensor<float>& x, const LocalTensor<float>& chosen,
                                const LocalTensor<uint8_t>& bits, int32_t elements) {
    AscendC::CompareScalar(bits, chosen, 0.0f, AscendC::CMPMODE::NE, uint32_t(elements));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Select(x, bits, x, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(elements));
    AscendC::PipeBarrier<PIPE_V>();
  }

  __aicore__ inline float Sink(int64_t h) const {
    return t_.a.sinks == DataType::f32 ? Global<float>(in_.sinks, h).GetValue(0)
                                       : ScalarToFloat(Global<T>(in_.sinks, h).GetValue(0));
  }

  // P and dS of this core's half of a pair's rows
  __aicore__ inline void Gradient(const Pair& p, int64_t turn) {
    const AttentionTiling& a = t_.a;
    const Sequence seq = SequenceOf(a, in_, p.batch);
    const Band band(seq.q_len, seq.k_len, a.left, a.right, a.bottom_right);
    const TileRows rows(p.head, p.row0, p.rows, 1);
    const int32_t half_rows = Min(p.rows, Align((p.rows + 1) / 2, 8));
    const int32_t first = AscendC::GetSubBlockIdx() == 0 ? 0 : half_rows;
    const int32_t count = first == 0 ? half_rows : p.rows - half_rows;
    const int32_t width = PaddedWidth(p.keys), step = Min(t_.ub.tile / 4 / width, kLanes), lanes = StatBytes() / 4;
    AscendC::CrossCoreWaitFlag(kScoreReady);
    if (count) {
      const int64_t at = QueryRow(a, seq, p.batch, p.head, p.row0 + first);
      const LocalTensor<float> stats = stats_in_.WaitEmpty<float>();  // row maximum, 1 / row sum, delta
      CopyIn(stats, Global<float>(saved_.row_max, at), count, 1, count, lanes);
      CopyIn(stats[lanes], Global<float>(saved_.row_sum, at), count, 1, count, lanes);
      if (!t_.whole_rows)
        CopyIn(stats[2 * lanes], ws_.Delta(at), count, 1, count, lanes);
      else if (t_.has_dlse)
        CopyIn(stats[2 * lanes], Global<float>(saved_.dlse, at), count, 1, count, lanes);
      stats_in_.SignalFull();
      AscendC::Maxs(stats[lanes], stats[lanes], 1e-30f, lanes);
      AscendC::Duplicate(scratch_, 1.0f, lanes);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Div(stats[lanes], scratch_, stats[lanes], lanes);
      for (int32_t r = 0; r < count; r += step) {
        ScoreTile tile{p.batch, first + r, Min(step, count - r), 0, p.key0, p.keys, width};
        tile.padded = Align(tile.count, 8);
        GradientTile(tile, rows, band, turn, stats[r], lanes);
      }
      stats_in_.SignalEmpty();
    }
    AscendC::CrossCoreSetFlag<2, PIPE_MTE3>(kProbReady);
  }

  __aicore__ inline void GradientTile(const ScoreTile& tile, const TileRows& rows, const Band& band, int64_t turn,
                                      const LocalTensor<float>& stats, int32_t lanes) {
    const int32_t n = tile.padded, width = tile.width, at = tile.first * t_.block_k;
    const LocalTensor<float> s = score_.WaitEmpty<float>();
    CopyIn(s, ws_.Score(turn)[at], t_.block_k, tile.count, tile.keys, width);
    const LocalTensor<float> g = grad_.WaitEmpty<float>();
    CopyIn(g, ws_.Grad(turn)[at], t_.block_k, tile.count, tile.keys, width);
    grad_.SignalFull();

    pieces_.Apply(s, tile, rows, band);
    Spread(spread_, stats, n);
    AscendC::PipeBarrier<PIPE_V>();
    WithRow<SubtractRow>(s, s, spread_, n, width);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Exp(s, s, tile.Elements());
    Spread(spread_, stats[lanes], n);
    AscendC::PipeBarrier<PIPE_V>();
    WithRow<MultiplyRow>(s, s, spread_, n, width);  // P
    if (tile.keys < width) FillColumns(g, n, width, tile.keys, width, 0);
    AscendC::PipeBarrier<PIPE_V>();
    if (t_.a.dropout) {
      pieces_.DrawKept(tile, rows);
      pieces_.Keep(g, tile, rows);
    }
    if (t_.whole_rows)
      SpreadOwnDelta(s, g, stats[2 * lanes], tile);
    else
      Spread(spread_, stats[2 * lanes], n);
    AscendC::PipeBarrier<PIPE_V>();
    WithRow<SubtractRow>(g, g, spread_, n, width);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Mul(g, g, s, tile.Elements());  // dS
    AscendC::PipeBarrier<PIPE_V>();
    if (t_.clean_dout) Select(g, s, spread_.template ReinterpretCast<uint8_t>(), tile.Elements());  // dLSE may be NaN
    if (pieces_.HasSlope()) {
      AscendC::Mul(g, g, pieces_.Slope(), tile.Elements());
      AscendC::PipeBarrier<PIPE_V>();
    }
    if (Goal::kBias) {
      score_.SignalEmpty();
      bias_.Add(g, tile, rows, scratch_, &prob_);
    } else {
      if (t_.a.dropout) pieces_.Keep(s, tile, rows);
      Emit(prob_, ws_.Prob(turn)[at], s, tile);
      score_.SignalEmpty();
      Emit(dscore_, ws_.DScore(turn)[at], g, tile);
    }
    grad_.SignalEmpty();
  }

  // Where a pair holds all keys of its queries, delta is the sum of P dP - dLSE, without the rounding of the output,
  // which is most of the error of short rows.
  __aicore__ inline void SpreadOwnDelta(const LocalTensor<float>& p, const LocalTensor<float>& g,
                                        const LocalTensor<float>& dlse, const ScoreTile& tile) {
    const int32_t n = tile.padded, width = tile.width;
    AscendC::Mul(scratch_, p, g, tile.Elements());
    AscendC::PipeBarrier<PIPE_V>();
    for (int32_t c = 0; c < width; c += kLanes)
      AscendC::WholeReduceSum(spread_[c], scratch_[c], kLanes, n, 1, 1, width / 8);
    AscendC::PipeBarrier<PIPE_V>();
    for (int32_t c = kLanes; c < width; c += kLanes) {
      AscendC::Add(spread_, spread_, spread_[c], n);
      AscendC::PipeBarrier<PIPE_V>();
    }
    if (t_.has_dlse)
      AscendC::Sub(scratch_, spread_, dlse, n);
    else
      AscendC::Adds(scratch_, spread_, 0.0f, n);
    AscendC::PipeBarrier<PIPE_V>();
    Spread(spread_, scratch_, n);
  }

  // x, rounded to the type of the operands, leaves for GM.
  __aicore__ inline void Emit(OutputRing& ring, const GlobalTensor<T>& to, const LocalTensor<float>& x,
                              const ScoreTile& tile) {
    const LocalTensor<T> narrow = ring.WaitEmpty<T>();
    AscendC::Cast(narrow, x, AscendC::RoundMode::CAST_RINT, uint32_t(tile.Elements()));
    ring.SignalFull();
    CopyOut(to, narrow, t_.block_k, tile.count, Align(tile.keys, kFractal), tile.width);
    ring.SignalEmpty();
  }

  // to = (sum of `parts` accumulators, in their order) * factor, as T
  __aicore__ inline void Finish(const GlobalTensor<T>& to, int64_t pitch, const GlobalTensor<float>& from,
                                int64_t parts, int64_t part_elements, int32_t rows, int32_t channels, float factor) {
    const int32_t elements = rows * channels;
    const LocalTensor<float> sum = scratch_;
    for (int64_t part = 0; part < parts; ++part) {
      const LocalTensor<float> x = score_.WaitEmpty<float>();
      AscendC::DataCopy(x, from[part * part_elements], uint32_t(elements));
      score_.SignalFull();
      if (part == 0) {
        AscendC::Adds(sum, x, 0.0f, elements);
      } else {
        AscendC::Add(sum, sum, x, elements);
      }
      AscendC::PipeBarrier<PIPE_V>();
      score_.SignalEmpty();
    }
    AscendC::Muls(sum, sum, factor, elements);
    AscendC::PipeBarrier<PIPE_V>();
    const LocalTensor<T> narrow = prob_.WaitEmpty<T>();
    AscendC::Cast(narrow, sum, AscendC::RoundMode::CAST_RINT, uint32_t(elements));
    prob_.SignalFull();
    AscendC::PipeBarrier<PIPE_V>();
    CopyOut(to, narrow, pitch, rows, channels, channels);
    prob_.SignalEmpty();
  }

  __aicore__ inline void FinishQueries() {
    const AttentionTiling& a = t_.a;
    const TensorLayout& x = t_.dq;
    ChunkStream chunks(sequences_, a.heads, false, t_.ub.tile / 4 / a.d, core_, cores_);
    for (Chunk c; chunks.Next(&c);) {
      const Sequence seq = sequences_(c.b);
      Finish(Global<T>(grads_.dq, x.offset + c.b * x.b + c.head * x.h + (seq.q_base + c.first) * x.s), x.s,
             ws_.DQuery(0, QueryRow(a, seq, c.b, c.head, c.first)), t_.parts, t_.ws.dq_part / 4, c.rows, a.d, a.scale);
    }
  }

  __aicore__ inline void FinishKeys() {
    const AttentionTiling& a = t_.a;
    const TensorLayout &k = t_.dk, &v = t_.dv;
    ChunkStream chunks(sequences_, a.kv_heads, true, t_.ub.tile / 4 / (a.d > a.dv ? a.d : a.dv), core_, cores_);
    for (Chunk c; chunks.Next(&c);) {
      const Sequence seq = sequences_(c.b);
      const int64_t row = KeyRow(t_, seq, c.b, c.head, c.first);
      Finish(Global<T>(grads_.dk, k.offset + c.b * k.b + c.head * k.h + (seq.k_base + c.first) * k.s), k.s,
             ws_.DKey(row), 1, 0, c.rows, a.d, a.scale);
      Finish(Global<T>(grads_.dv, v.offset + c.b * v.b + c.head * v.h + (seq.k_base + c.first) * v.s), v.s,
             ws_.DValue(row), 1, 0, c.rows, a.dv, 1.0f);
    }
  }

  // dsinks = -sum over rows of exp(sink - max) / sum * delta, one head per core
  __aicore__ inline void FinishSinks() {
    const AttentionTiling& a = t_.a;
    const int32_t lanes = StatBytes() / 4;
    for (int64_t h = core_; h < a.heads; h += cores_) {
      const float sink = Sink(h);
      const LocalTensor<float> sum = scratch_, weight = scratch_[lanes];
      AscendC::Duplicate(sum, 0.0f, lanes);
      AscendC::PipeBarrier<PIPE_V>();
      for (int64_t b = 0; b < a.batch; ++b) {
        const Sequence seq = SequenceOf(a, in_, b);
        for (int64_t row = 0; row < seq.q_len; row += lanes) {
          const int32_t n = int32_t(seq.q_len - row < lanes ? seq.q_len - row : lanes);
          const int64_t at = QueryRow(a, seq, b, h, row);
          const LocalTensor<float> stats = stats_in_.WaitEmpty<float>();
          CopyIn(stats, Global<float>(saved_.row_max, at), n, 1, n, lanes);
          CopyIn(stats[lanes], Global<float>(saved_.row_sum, at), n, 1, n, lanes);
          CopyIn(stats[2 * lanes], ws_.Delta(at), n, 1, n, lanes);
          stats_in_.SignalFull();
          AscendC::Muls(weight, stats, -1.0f, n);
          AscendC::PipeBarrier<PIPE_V>();
          AscendC::Adds(weight, weight, sink, n);
          AscendC::PipeBarrier<PIPE_V>();
          AscendC::Exp(weight, weight, n);
          AscendC::PipeBarrier<PIPE_V>();
          AscendC::Div(weight, weight, stats[lanes], n);
          AscendC::PipeBarrier<PIPE_V>();
          AscendC::Mul(weight, weight, stats[2 * lanes], n);
          AscendC::PipeBarrier<PIPE_V>();
          AscendC::Sub(sum, sum, weight, n);
          AscendC::PipeBarrier<PIPE_V>();
          stats_in_.SignalEmpty();
        }
      }
      for (int32_t c = kLanes; c < lanes; c += kLanes) {
        AscendC::Add(sum, sum, sum[c], kLanes);
        AscendC::PipeBarrier<PIPE_V>();
      }
      AscendC::WholeReduceSum(weight, sum, kLanes, 1, 1, 1, 8);
      AscendC::PipeBarrier<PIPE_V>();
      if (a.sinks == DataType::f32) {
        const LocalTensor<float> out = prob_.WaitEmpty<float>();
        AscendC::Adds(out, weight, 0.0f, 8);
        prob_.SignalFull();
        CopyOut(Global<float>(grads_.dsinks, h), out, 1, 1, 1, 8);
      } else {
        const LocalTensor<T> out = prob_.WaitEmpty<T>();
        AscendC::Cast(out, weight, AscendC::RoundMode::CAST_RINT, 8);
        prob_.SignalFull();
        CopyOut(Global<T>(grads_.dsinks, h), out, 1, 1, 1, kFractal);
      }
      prob_.SignalEmpty();
    }
  }

  const BackwardTiling& t_;
  typename Goal::Items items_;
  Inputs in_;
  Saved saved_;
  Gradients grads_;
  BackwardWorkspace<T> ws_;
  BiasSums<T> bias_;
  Sequences sequences_;
  int64_t core_, cores_;
  InputRing score_, grad_, stats_in_;
  OutputRing prob_, dscore_;
  ScorePieces<T> pieces_;
  LocalTensor<float> spread_, scratch_;
};

}  // namespace msf
