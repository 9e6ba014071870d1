// Forward: tiled attention with on-line softmax (Dao et al., "FlashAttention-2", 2023, algorithm 1), split between the
// cube core, which multiplies, and its two vector cores, which do the rest for half of the rows each. For stack t of
// `stack_n` keys:
//
//   cube     S_t = Q K_t^T                                       -> ring in GM, float32       kScoreReady
//   vectors  m' = max(m, rowmax S_t)   alpha_t = exp(m - m')
//            P_t = exp(S_t - m')       l = l alpha_t + rowsum P_t -> ring in GM, 16 bit        kProbReady
//   cube     O_t = P_t V_t, summed over the stack in L0C         -> ring in GM, float32       kOutReady
//   vectors  O = O alpha_t + O_t                                    kept in UB; out = O / l after the last stack
//
// The cube runs `depth` stacks ahead: it issues S_t, then O_{t - depth}, so that it multiplies while the vectors work.
// Stacks of successive items follow each other without a gap. A ring holds depth + 1 stacks; that its place t may be
// written again follows from the flags of the stacks between, no flag says it by itself.
#pragma once
#include "cube.h"
#include "guard.h"
#include "score.h"

namespace msf {

struct Outputs {
  Address out, lse, row_max, row_sum;
};

// The rings of one block, and the partial results.
template <class T>
struct ForwardWorkspace {
  Address base;
  const ForwardTiling* t;
  int64_t core;

  __aicore__ inline GlobalTensor<float> Score(int64_t turn) const {
    return Global<float>(base + t->ws.score, Place(turn) * t->block_m * t->stack_n);
  }
  __aicore__ inline GlobalTensor<T> Prob(int64_t turn) const {
    return Global<T>(base + t->ws.prob, Place(turn) * t->block_m * t->stack_n);
  }
  __aicore__ inline GlobalTensor<float> PartialOut(int64_t turn) const {
    return Global<float>(base + t->ws.partial_out, Place(turn) * t->block_m * t->a.dv);
  }
  // A partial result: block_m rows of dv, then the row maxima, then the row sums.
  __aicore__ inline GlobalTensor<float> Slot(int64_t slot) const {
    return Global<float>(base + t->ws.slots + slot * t->ws.slot_bytes, 0);
  }

 private:
  __aicore__ inline int64_t Place(int64_t turn) const { return core * (t->depth + 1) + turn % (t->depth + 1); }
};

using Items = const __gm__ WorkItem*;
using MergeTable = const __gm__ MergeItem*;

template <class T>
class ForwardCube {
 public:
  __aicore__ inline ForwardCube(const ForwardTiling& t, Items items, const Inputs& in, const KeysValues& kv,
                                Address workspace)
      : t_(t), items_(items), in_(in), kv_(kv), ws_{workspace, &t, AscendC::GetBlockIdx()} {}

  __aicore__ inline void Run() {
    l0_.SetUp();
    keys_.SetUp(t_.l1.kv, t_.block_n * (t_.a.d > t_.a.dv ? t_.a.d : t_.a.dv) * int32_t(sizeof(T)), t_.kv_slots, 0);
    probs_.SetUp(t_.l1.p, t_.block_m * t_.block_n * int32_t(sizeof(T)), t_.p_slots, t_.kv_slots);
    queries_.SetUp(t_.l1.q, t_.block_m * t_.a.d * int32_t(sizeof(T)), 2, t_.kv_slots + t_.p_slots);
    const Sequences sequences{t_.a, in_};
    Stream<Items, Sequences> ahead(t_, items_, sequences, ws_.core), behind(t_, items_, sequences, ws_.core);
    Stack s;
    for (int64_t turn = 0;; ++turn) {
      if (ahead.next(&s) && s.keys) Scores(s, turn);
      if (turn < t_.depth) continue;
      if (!behind.next(&s)) break;
      if (s.keys) Values(s, turn - t_.depth);
    }
    keys_.WaitAllEmpty();
    probs_.WaitAllEmpty();
    queries_.WaitAllEmpty();
    l0_.WaitAllEmpty();
  }

 private:
  // Rows [row0, row0 + n) of K or V.
  __aicore__ inline L1Tile<T> LoadKeys(const TensorLayout& x, Address gm, const Stack& s, int32_t row0, int32_t n,
                                       int32_t channels) {
    const Sequence seq = SequenceOf(t_.a, in_, s.item.batch);
    const L1Tile<T> tile = keys_.WaitEmpty<T>(n);
    ClearTail(tile, n, channels);
    for (int32_t r = 0; r < n;) {
      const RowRun run =
          RunOf(t_.a, in_, x, kv_.page_size, s.item.batch, s.head / t_.a.group, seq.k_base + s.key0 + row0 + r, n - r);
      CopyRows(tile, r, Global<T>(gm, run.at), x.s, run.rows, channels);
      r += run.rows;
    }
    keys_.SignalFull();
    return tile;
  }

  __aicore__ inline void LoadQueries(const Stack& s, const TileRows& rows) {
    const Sequence seq = SequenceOf(t_.a, in_, s.item.batch);
    const TensorLayout& x = t_.a.q;
    query_ = queries_.WaitEmpty<T>(rows.count);
    ClearTail(query_, rows.count, t_.a.d);
    for (int32_t p = 0; p < t_.pack; ++p) {
      const int64_t at = x.offset + s.item.batch * x.b + (s.head + p) * x.h + (seq.q_base + rows.row0) * x.s;
      CopyRows(query_, p * rows.rows, Global<T>(in_.query, at), x.s, rows.rows, t_.a.d);
    }
    queries_.SignalFull();
  }

  // S = Q K^T, in blocks of block_n keys
  __aicore__ inline void Scores(const Stack& s, int64_t turn) {
    const TileRows rows(s, t_.pack);
    const int32_t m = Align(rows.count, kFractal), d = t_.a.d;
    if (s.first) LoadQueries(s, rows);
    for (int32_t n0 = 0; n0 < s.keys; n0 += t_.block_n) {
      const int32_t n = Min(t_.block_n, s.keys - n0);
      const L1Tile<T> keys = LoadKeys(kv_.k, kv_.key, s, n0, n, d);
      l0_.WaitResult();
      for (int32_t k0 = 0, k; k0 < d; k0 += k) {
        k = Min(kMaxDepth, d - k0);
        l0_.Multiply<Stored::plain, Stored::transposed>(query_, k0, keys, k0, m, 0, keys.rows16, k, k0 == 0);
      }
      keys_.SignalEmpty();
      l0_.Store(ws_.Score(turn)[n0], t_.stack_n, m, rows.count, n);
    }
    if (s.last) queries_.SignalEmpty();
    AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kScoreReady);
  }

  // O = P V over the stack
  __aicore__ inline void Values(const Stack& s, int64_t turn) {
    const TileRows rows(s, t_.pack);
    const int32_t m = Align(rows.count, kFractal), dv = t_.a.dv;
    AscendC::CrossCoreWaitFlag(kProbReady);
    l0_.WaitResult();
    for (int32_t n0 = 0; n0 < s.keys; n0 += t_.block_n) {
      const int32_t n = Min(t_.block_n, s.keys - n0), n16 = Align(n, kFractal);
      const L1Tile<T> values = LoadKeys(kv_.v, kv_.value, s, n0, n, dv);
      const L1Tile<T> probs = probs_.WaitEmpty<T>(rows.count);
      ClearTail(probs, rows.count, n16);
      CopyRows(probs, 0, ws_.Prob(turn)[n0], t_.stack_n, rows.count, n16);
      probs_.SignalFull();
      for (int32_t k0 = 0, k; k0 < n16; k0 += k) {
        k = Min(t_.l0_k, n16 - k0);
        l0_.Multiply<Stored::plain, Stored::plain>(probs, k0, values, k0, m, 0, dv, k, n0 == 0 && k0 == 0);
      }
      probs_.SignalEmpty();
      keys_.SignalEmpty();
    }
    l0_.Store(ws_.PartialOut(turn), dv, m, rows.count, dv);
    AscendC::CrossCoreSetFlag<2, PIPE_FIX>(kOutReady);
  }

  static constexpr int32_t kMaxDepth = 128;  // of a product: 128 x 128 16-bit numbers fill half of L0A or L0B
  const ForwardTiling& t_;
  Items items_;
  Inputs in_;
  KeysValues kv_;
  ForwardWorkspace<T> ws_;
  L0 l0_;
  L1Ring keys_, probs_, queries_;
  L1Tile<T> query_;
};

template <class T>
class ForwardVector {
 public:
  __aicore__ inline ForwardVector(const ForwardTiling& t, Items items, const Inputs& in, const Outputs& out,
                                  Address workspace)
      : t_(t),
        items_(items),
        in_(in),
        out_(out),
        ws_{workspace, &t, AscendC::GetBlockIdx() / AscendC::GetSubBlockNum()} {}

  __aicore__ inline void Run() {
    SetUp();
    const Sequences sequences{t_.a, in_};
    Stream<Items, Sequences> ahead(t_, items_, sequences, ws_.core), behind(t_, items_, sequences, ws_.core);
    Stack s;
    for (int64_t turn = 0;; ++turn) {
      if (ahead.next(&s)) Softmax(s, turn);
      if (turn < t_.depth) continue;
      if (!behind.next(&s)) break;
      Accumulate(s, turn - t_.depth);
    }
    if (t_.merges) {
      AscendC::SyncAll<true>();
      Merge();
    }
    input_.WaitAllEmpty();
    prob_.WaitAllEmpty();
    stats_out_.WaitAllEmpty();
    pieces_.WaitAllEmpty();
  }

 private:
  // This core's share of a block's rows: [first, first + count).
  struct Share {
    int32_t first, count;
  };
  __aicore__ inline Share ShareOf(int32_t count, int64_t which) const {
    const int32_t half_rows = Min(count, Align((count + 1) / 2, 8));
    if (which == 0) return {0, half_rows};
    return {half_rows, count - half_rows};
  }

  __aicore__ inline LocalTensor<float> RowVector(int32_t byte, int64_t place) const {
    return Local<float>(TPosition::VECCALC, byte + int32_t(place) * kLanes * 4, kLanes * 4);
  }
  // After the stack of that turn; the last depth + 1 are kept.
  __aicore__ inline LocalTensor<float> RowMax(int64_t turn) const { return RowVector(t_.ub.row_max, Place(turn)); }
  __aicore__ inline LocalTensor<float> RowSum(int64_t turn) const { return RowVector(t_.ub.row_sum, Place(turn)); }
  __aicore__ inline LocalTensor<float> Alpha(int64_t turn) const { return RowVector(t_.ub.alpha, Place(turn)); }
  __aicore__ inline int64_t Place(int64_t turn) const { return turn % (t_.depth + 1); }

  __aicore__ inline void SetUp() {
    // rows and columns that pad a tile are computed on as well: they only have to be numbers
    AscendC::Duplicate(Local<float>(TPosition::VECCALC, 0, t_.ub.end), 0.0f, t_.ub.end / 4);
    AscendC::PipeBarrier<PIPE_V>();
    input_.SetUp(t_.ub.input, t_.ub.tile, 2, 0);
    prob_.SetUp(t_.ub.prob, t_.ub.tile / 2, 2, 0);
    stats_out_.SetUp(t_.ub.stats, 3 * kLanes * 4, 1, 2);
    acc_ = Local<float>(TPosition::VECCALC, t_.ub.acc, t_.ub.scratch - t_.ub.acc);
    scratch_ = Local<float>(TPosition::VECCALC, t_.ub.scratch, t_.ub.tile);
    spread_ = Local<float>(TPosition::VECCALC, t_.ub.spread, kLanes * kBlockBytes);
    alpha_sum_ = Local<float>(TPosition::VECCALC, t_.ub.stats + 3 * kLanes * 4, kLanes * 4);
    pieces_.SetUp(t_.a, in_, t_.ub.tile, t_.ub.plane, t_.ub.scratch, t_.ub.index, t_.stack_n * 4, 2);
  }

  // Whether keys of the stack have a page that is none of the cache's: its rows become NaN, like those of a sequence
  // without a length.
  __aicore__ inline bool Lost(const Stack& s) const {
    if (!t_.a.page_size) return false;
    const int64_t head = s.head / t_.a.group;
    for (int32_t r = 0; r < s.keys;) {
      const RowRun run = RunOf(t_.a, in_, t_.a.k, t_.a.page_size, s.item.batch, head, s.key0 + r, s.keys - r);
      if (run.lost) return true;
      r += run.rows;
    }
    return false;
  }

  // P = exp(S - m), the row statistics, and what the sums so far have to be multiplied with
  __aicore__ inline void Softmax(const Stack& s, int64_t turn) {
    const Sequence seq = SequenceOf(t_.a, in_, s.item.batch);
    if (!s.keys) {
      AscendC::Duplicate(RowMax(turn), seq.lost ? kNaN : kLowest, kLanes);
      AscendC::Duplicate(RowSum(turn), 0.0f, kLanes);
      return;
    }
    const TileRows rows(s, t_.pack);
    const Share share = ShareOf(rows.count, AscendC::GetSubBlockIdx());
    const bool lost = Lost(s);
    const Band band(seq.q_len, seq.k_len, t_.a.left, t_.a.right, t_.a.bottom_right);
    const int32_t width = PaddedWidth(s.keys), step = Min(t_.ub.tile / 4 / width, kLanes);
    AscendC::CrossCoreWaitFlag(kScoreReady);
    for (int32_t r = 0; r < share.count; r += step) {
      ScoreTile tile{s.item.batch, share.first + r, Min(step, share.count - r), 0, s.key0, s.keys, width};
      tile.padded = Align(tile.count, 8);
      SoftmaxTile(tile, rows, band, turn, r, s.first, lost);
    }
    AscendC::CrossCoreSetFlag<2, PIPE_MTE3>(kProbReady);
  }

  // Rows [r, ...) of this core's share.
  __aicore__ inline void SoftmaxTile(const ScoreTile& tile, const TileRows& rows, const Band& band, int64_t turn,
                                     int32_t r, bool first, bool lost) {
    const int32_t n = tile.padded, width = tile.width;
    const LocalTensor<float> row_max = RowMax(turn)[r], row_sum = RowSum(turn)[r], alpha = Alpha(turn)[r];
    const LocalTensor<float> s = input_.WaitEmpty<float>();
    CopyIn(s, ws_.Score(turn)[tile.first * t_.stack_n], t_.stack_n, tile.count, tile.keys, width);
    input_.SignalFull();
    pieces_.Apply(s, tile, rows, band);

    ReduceRows<Larger>(row_max, s, scratch_, n, width);
    AscendC::PipeBarrier<PIPE_V>();
    if (first) {
      AscendC::Maxs(row_max, row_max, kLowest, n);  // a row without keys so far: exp(-inf - lowest) is 0
      AscendC::PipeBarrier<PIPE_V>();
    } else {
      AscendC::Max(row_max, row_max, RowMax(turn - 1)[r], n);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Sub(alpha, RowMax(turn - 1)[r], row_max, n);
    }
    if (lost) {
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Duplicate(row_max, kNaN, n);
      AscendC::PipeBarrier<PIPE_V>();
    }
    Spread(spread_, row_max, n);
    AscendC::PipeBarrier<PIPE_V>();
    WithRow<SubtractRow>(s, s, spread_, n, width);
    if (!first) AscendC::Exp(alpha, alpha, n);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Exp(s, s, tile.Elements());
    AscendC::PipeBarrier<PIPE_V>();
    ReduceRows<Plus>(row_sum, s, scratch_, n, width);
    if (!first) AscendC::Mul(alpha_sum_, RowSum(turn - 1)[r], alpha, n);
    AscendC::PipeBarrier<PIPE_V>();
    if (!first) AscendC::Add(row_sum, row_sum, alpha_sum_, n);
    if (t_.a.dropout) {  // after the sum: dropout does not change it
      pieces_.DrawKept(tile, rows);
      pieces_.Keep(s, tile, rows);
    }
    const LocalTensor<T> p = prob_.WaitEmpty<T>();
    AscendC::Cast(p, s, AscendC::RoundMode::CAST_RINT, uint32_t(tile.Elements()));
    input_.SignalEmpty();
    prob_.SignalFull();
    CopyOut(ws_.Prob(turn)[tile.first * t_.stack_n], p, t_.stack_n, tile.count, Align(tile.keys, kFractal), width);
    prob_.SignalEmpty();
  }

  // O = O alpha + O_t; after the last stack the rows are finished
  __aicore__ inline void Accumulate(const Stack& s, int64_t turn) {
    const TileRows rows(s, t_.pack);
    const Share share = ShareOf(rows.count, AscendC::GetSubBlockIdx());
    const int32_t dv = t_.a.dv, padded = Align(share.count, 8);
    if (s.keys) {
      AscendC::CrossCoreWaitFlag(kOutReady);
      if (share.count) {
        if (!s.first) {
          Spread(spread_, Alpha(turn), padded);
          AscendC::PipeBarrier<PIPE_V>();
          WithRow<MultiplyRow>(acc_, acc_, spread_, padded, dv);
          AscendC::PipeBarrier<PIPE_V>();
        }
        const int32_t step = t_.ub.tile / 4 / dv;
        for (int32_t r = 0; r < share.count; r += step) {
          const int32_t n = Min(step, share.count - r);
          const LocalTensor<float> o = input_.WaitEmpty<float>();
          AscendC::DataCopy(o, ws_.PartialOut(turn)[(share.first + r) * dv], uint32_t(n * dv));
          input_.SignalFull();
          if (s.first) {
            AscendC::Adds(acc_[r * dv], o, 0.0f, n * dv);
          } else {
            AscendC::Add(acc_[r * dv], acc_[r * dv], o, n * dv);
          }
          input_.SignalEmpty();
        }
        AscendC::PipeBarrier<PIPE_V>();
      }
    } else {
      const bool lost = SequenceOf(t_.a, in_, s.item.batch).lost;
      AscendC::Duplicate(acc_, lost ? kNaN : 0.0f, Align(share.count, 8) * dv);
      AscendC::PipeBarrier<PIPE_V>();
    }
    if (!s.last || !share.count) return;
    if (s.slot >= 0)
      StorePartial(s, share, turn);
    else
      Finish(s.item.batch, rows, share, RowMax(turn), RowSum(turn));
    AscendC::PipeBarrier<PIPE_V>();  // the next item starts to write where this one was read
  }

  __aicore__ inline void StorePartial(const Stack& s, const Share& share, int64_t turn) {
    const GlobalTensor<float> slot = ws_.Slot(s.slot);
    const int32_t dv = t_.a.dv, stats = t_.block_m * dv, step = t_.ub.tile / 2 / 4 / dv;
    for (int32_t r = 0; r < share.count; r += step) {
      const int32_t n = Min(step, share.count - r);
      const LocalTensor<float> o = prob_.WaitEmpty<float>();
      AscendC::Adds(o, acc_[r * dv], 0.0f, n * dv);
      prob_.SignalFull();
      AscendC::DataCopy(slot[(share.first + r) * dv], o, uint32_t(n * dv));
      prob_.SignalEmpty();
    }
    const LocalTensor<float> out = stats_out_.WaitEmpty<float>();
    AscendC::Adds(out, RowMax(turn), 0.0f, kLanes);
    AscendC::Adds(out[kLanes], RowSum(turn), 0.0f, kLanes);
    stats_out_.SignalFull();
    CopyOut(slot[stats + share.first], out, share.count, 1, share.count, kLanes);
    CopyOut(slot[stats + t_.block_m + share.first], out[kLanes], share.count, 1, share.count, kLanes);
    stats_out_.SignalEmpty();
  }

  // Sinks, normalization, row statistics, and the store. acc_ holds O, relative to row_max.
  __aicore__ inline void Finish(int64_t b, const TileRows& rows, const Share& share, const LocalTensor<float>& row_max,
                                const LocalTensor<float>& row_sum) {
    const int32_t end = share.first + share.count, dv = t_.a.dv;
    const LocalTensor<float> factor = spread_, stats = stats_out_.WaitEmpty<float>();
    AscendC::Duplicate(factor, 1.0f, kLanes);
    if (t_.a.sinks != DataType::none) AddSinks(rows, share, row_max, row_sum, factor);
    AscendC::Ln(stats, row_sum, kLanes);
    AscendC::Adds(stats[kLanes], row_max, 0.0f, kLanes);
    AscendC::Adds(stats[2 * kLanes], row_sum, 0.0f, kLanes);
    // a row without keys has the sum 0 and O = 0; any other sum is about 1 or more
    AscendC::Maxs(row_sum, row_sum, 1e-30f, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(stats, stats, row_max, kLanes);
    AscendC::Div(row_sum, factor, row_sum, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    stats_out_.SignalFull();
    Spread(spread_, row_sum, Align(share.count, 8));
    AscendC::PipeBarrier<PIPE_V>();
    WithRow<MultiplyRow>(acc_, acc_, spread_, Align(share.count, 8), dv);
    AscendC::PipeBarrier<PIPE_V>();

    const Sequence seq = SequenceOf(t_.a, in_, b);
    const TensorLayout& x = t_.a.out;
    const int32_t step = t_.ub.tile / 4 / dv;
    for (int32_t r = share.first, n; r < end; r += n) {
      n = Min(rows.Run(r, end), step);
      const int64_t row = seq.q_base + rows.Query(r);
      const LocalTensor<T> o = prob_.WaitEmpty<T>();
      AscendC::Cast(o, acc_[(r - share.first) * dv], AscendC::RoundMode::CAST_RINT, uint32_t(n * dv));
      prob_.SignalFull();
      CopyOut(Global<T>(out_.out, b * x.b + rows.Head(r) * x.h + row * x.s), o, x.s, n, dv, dv);
      prob_.SignalEmpty();
    }
    // heads share a tile only where their statistics follow each other
    const int64_t at = b * t_.a.stat_b + rows.Head(share.first) * t_.a.stat_h + seq.q_base + rows.Query(share.first);
    CopyOut(Global<float>(out_.lse, at), stats, share.count, 1, share.count, kLanes);
    if (out_.row_max) {  // for the backward, which attention over a cache does not have
      CopyOut(Global<float>(out_.row_max, at), stats[kLanes], share.count, 1, share.count, kLanes);
      CopyOut(Global<float>(out_.row_sum, at), stats[2 * kLanes], share.count, 1, share.count, kLanes);
    }
    stats_out_.SignalEmpty();
  }

  // Partial results of the same rows are added up in their order, whoever computed them.
  __aicore__ inline void Merge() {
    const MergeTable merges = MergeTable(items_ + t_.items);
    const int64_t cores = t_.cores * AscendC::GetSubBlockNum(), units = t_.merges * t_.heads_per_item * 2;
    for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += cores) {
      const int64_t group = unit / 2 % t_.heads_per_item, index = unit / 2 / t_.heads_per_item;
      Stack s{};
      s.item.batch = merges[index].batch;
      s.item.row0 = merges[index].row0;
      s.item.rows = merges[index].rows;
      s.head = group * t_.pack;
      const TileRows rows(s, t_.pack);
      const Share share = ShareOf(rows.count, unit & 1);
      if (share.count) MergeRows(s, rows, share, merges[index].slot, merges[index].parts, group);
    }
  }

  __aicore__ inline void MergeRows(const Stack& s, const TileRows& rows, const Share& share, int32_t slot,
                                   int32_t parts, int64_t group) {
    const LocalTensor<float> row_max = RowMax(0), row_sum = RowSum(0), factor = Alpha(0);
    const int32_t dv = t_.a.dv, stats = t_.block_m * dv, step = t_.ub.tile / 4 / dv / 8 * 8;
    AscendC::Duplicate(row_max, kLowest, kLanes);
    AscendC::Duplicate(row_sum, 0.0f, kLanes);
    AscendC::Duplicate(acc_, 0.0f, Align(share.count, 8) * dv);
    AscendC::PipeBarrier<PIPE_V>();
    for (int32_t p = 0; p < parts; ++p) {
      const LocalTensor<float> x = input_.WaitEmpty<float>();
      CopyIn(x, PartOf(slot, p, group)[stats + share.first], share.count, 1, share.count, kLanes);
      input_.SignalFull();
      AscendC::Max(row_max, row_max, x, share.count);
      AscendC::PipeBarrier<PIPE_V>();
      input_.SignalEmpty();
    }
    for (int32_t p = 0; p < parts; ++p) {
      const GlobalTensor<float> part = PartOf(slot, p, group);
      const LocalTensor<float> x = input_.WaitEmpty<float>();
      CopyIn(x, part[stats + share.first], share.count, 1, share.count, kLanes);
      CopyIn(x[kLanes], part[stats + t_.block_m + share.first], share.count, 1, share.count, kLanes);
      input_.SignalFull();
      AscendC::Sub(factor, x, row_max, share.count);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Exp(factor, factor, share.count);
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Mul(x, x[kLanes], factor, share.count);
      Spread(spread_, factor, Align(share.count, 8));
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::Add(row_sum, row_sum, x, share.count);
      input_.SignalEmpty();
      for (int32_t r = 0; r < share.count; r += step) {
        const int32_t n = Min(step, share.count - r);
        const LocalTensor<float> o = input_.WaitEmpty<float>();
        AscendC::DataCopy(o, part[(share.first + r) * dv], uint32_t(n * dv));
        input_.SignalFull();
        WithRow<MultiplyRow>(o, o, spread_[r * 8], n, dv);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Add(acc_[r * dv], acc_[r * dv], o, n * dv);
        input_.SignalEmpty();
      }
    }
    Finish(s.item.batch, rows, share, row_max, row_sum);
    AscendC::PipeBarrier<PIPE_V>();
  }
  __aicore__ inline GlobalTensor<float> PartOf(int32_t slot, int32_t part, int64_t group) const {
    return ws_.Slot((slot + part) * t_.heads_per_item + group);
  }

  // One more logit per head in the denominator.
  __aicore__ inline void AddSinks(const TileRows& rows, const Share& share, const LocalTensor<float>& row_max,
                                  const LocalTensor<float>& row_sum, const LocalTensor<float>& factor) {
    const LocalTensor<float> sink = factor[kLanes], top = factor[2 * kLanes];
    const int32_t end = share.first + share.count;
    AscendC::Duplicate(sink, kLowest, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    for (int32_t r = share.first, n; r < end; r += n) {
      n = rows.Run(r, end);
      const int64_t h = rows.Head(r);
      const float value = t_.a.sinks == DataType::f32 ? Global<float>(in_.sinks, h).GetValue(0)
                                                      : ScalarToFloat(Global<T>(in_.sinks, h).GetValue(0));
      FillLanes(sink, r - share.first, r - share.first + n, value);
    }
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Max(top, row_max, sink, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Sub(factor, row_max, top, kLanes);
    AscendC::Sub(sink, sink, top, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(row_max, top, 0.0f, kLanes);
    AscendC::Exp(factor, factor, kLanes);
    AscendC::Exp(sink, sink, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Mul(row_sum, row_sum, factor, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(row_sum, row_sum, sink, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
  }

  const ForwardTiling& t_;
  Items items_;
  Inputs in_;
  Outputs out_;
  ForwardWorkspace<T> ws_;
  InputRing input_;
  OutputRing prob_, stats_out_;
  ScorePieces<T> pieces_;
  LocalTensor<float> acc_, scratch_, spread_, alpha_sum_;
};

}  // namespace msf
