// NaN and Inf in keys and values that some query must not see. A product with a probability of 0 does not stop them,
// so where a problem can exclude keys, K and V are looked through first, which reads them once. Only if something is
// found are copies made, in which
//   V' holds 0 instead, and the same row of K' is NaN: who sees the row gets NaN, whoever does not is not touched;
//   K" holds 0 instead of NaN and Inf (the backward multiplies dS with it).
#pragma once
#include "vector.h"

namespace msf {

// What takes the place of K and V.
struct KeysValues {
  Address key, value, clean_key;
  TensorLayout k, v, clean_k;
  int64_t page_size;  // 0: copies have no pages
};

template <class T>
class Guard {
 public:
  __aicore__ inline Guard(const AttentionTiling& a, const GuardSpace& space, const Inputs& in, Address workspace,
                          int64_t cores)
      : a_(a), space_(space), in_(in), base_(workspace), blocks_(cores) {}

  // The K and V to compute with; every core calls it first.
  __aicore__ inline KeysValues Choose() {
    const KeysValues given{in_.key, in_.value, in_.key, a_.k, a_.v, a_.k, a_.page_size};
    if (!a_.guard) return given;
    bool found = false;
    if ASCEND_IS_AIC {
      AscendC::CrossCoreWaitFlag(kGuardReady);
      found = Verdict(AscendC::GetBlockIdx()).GetValue(0) != 0;
      if (found) AscendC::SyncAll<false>();
    }
    if ASCEND_IS_AIV {
      SetUp();
      Pass(false);
      found = Agree();
      if (found) {
        Pass(true);
        AscendC::SyncAll<false>();
      }
      keys_.WaitAllEmpty();
      values_.WaitAllEmpty();
      out_.WaitAllEmpty();
      AscendC::PipeBarrier<PIPE_ALL>();  // what follows lays out UB anew
    }
    if (!found) return given;
    return {base_ + space_.key,
            base_ + space_.value,
            base_ + space_.clean_key,
            Packed(a_.d),
            Packed(a_.dv),
            Packed(a_.d),
            0};
  }

 private:
  static constexpr int32_t kElements = 4096;  // of a tile
  enum Place {
    kKeyIn = 0,
    kValueIn = 8,
    kKey = 16,
    kValue = 32,
    kZero = 48,
    kFound = 64,
    kScratch = 80,
    kOut = 96,
    kSpread = 112,
    kEnd = 116
  };  // in KB of UB; the outputs are two

  __aicore__ inline TensorLayout Packed(int64_t channels) const {
    return {a_.k_stat_b * channels, a_.k_stat_h * channels, channels, 0};
  }
  __aicore__ inline GlobalTensor<float> Verdict(int64_t block) const {
    return Global<float>(base_ + space_.flags, (2 * blocks_ + block) * 8);
  }
  __aicore__ inline LocalTensor<float> Tile(Place place) const {
    return Local<float>(TPosition::VECCALC, place * 1024, kElements * 4);
  }

  __aicore__ inline void SetUp() {
    AscendC::Duplicate(Local<float>(TPosition::VECCALC, 0, kEnd * 1024), 0.0f, kEnd * 256);
    AscendC::PipeBarrier<PIPE_V>();
    keys_.SetUp(kKeyIn * 1024, kElements * 2, 1, 0);
    values_.SetUp(kValueIn * 1024, kElements * 2, 1, 1);
    out_.SetUp(kOut * 1024, kElements * 2, 2, 0);
  }

  // Reads all rows of K and V, in chunks dealt out to the vector cores: to look, or to write the copies.
  __aicore__ inline void Pass(bool copy) {
    const Sequences sequences{a_, in_};
    const int32_t wide = PaddedWidth(a_.d > a_.dv ? a_.d : a_.dv), chunk = kElements / wide;
    ChunkStream chunks(sequences, a_.kv_heads, true, chunk, AscendC::GetBlockIdx(), 2 * blocks_);
    for (Chunk c; chunks.Next(&c);) {
      const int64_t row = sequences(c.b).k_base + c.first;
      const int32_t padded = Align(c.rows, 8), elements = padded * wide;
      const LocalTensor<T> key16 = keys_.WaitEmpty<T>(), value16 = values_.WaitEmpty<T>();
      CopyRuns(key16, in_.key, a_.k, c, row, a_.d, wide);
      CopyRuns(value16, in_.value, a_.v, c, row, a_.dv, wide);
      values_.SignalFull();  // both: MTE2 sets its flags after all it has copied
      AscendC::Cast(Tile(kKey), key16, AscendC::RoundMode::CAST_NONE, uint32_t(elements));
      AscendC::Cast(Tile(kValue), value16, AscendC::RoundMode::CAST_NONE, uint32_t(elements));
      AscendC::PipeBarrier<PIPE_V>();
      keys_.SignalEmpty();
      values_.SignalEmpty();
      if (!copy) {  // 0 times a number is 0, or NaN
        Accumulate(Tile(kKey), elements);
        Accumulate(Tile(kValue), elements);
        continue;
      }
      const int64_t at = c.b * a_.k_stat_b + c.head * a_.k_stat_h + row;
      if (space_.clean_key >= 0)
        Write(Global<T>(base_ + space_.clean_key, at * a_.d), Clean(Tile(kKey), elements), c.rows, a_.d, wide);
      Write(Global<T>(base_ + space_.value, at * a_.dv), Clean(Tile(kValue), elements), c.rows, a_.dv, wide);
      // the value's zeros or NaN, summed over its row, go into every element of the key
      AscendC::Muls(Tile(kZero), Tile(kValue), 0.0f, elements);
      AscendC::PipeBarrier<PIPE_V>();
      const LocalTensor<float> spread = Local<float>(TPosition::VECCALC, kSpread * 1024, 4096);
      ReduceRows<Plus>(spread[512], Tile(kZero), Tile(kScratch), padded, wide);
      AscendC::PipeBarrier<PIPE_V>();
      Spread(spread, spread[512], padded);
      AscendC::PipeBarrier<PIPE_V>();
      WithRow<AddRow>(Tile(kKey), Tile(kKey), spread, padded, wide);
      AscendC::PipeBarrier<PIPE_V>();
      Write(Global<T>(base_ + space_.key, at * a_.d), Tile(kKey), c.rows, a_.d, wide);
    }
  }

  __aicore__ inline void CopyRuns(const LocalTensor<T>& to, Address gm, const TensorLayout& x, const Chunk& c,
                                  int64_t row, int32_t columns, int32_t wide) const {
    for (int32_t r = 0; r < c.rows;) {
      const RowRun run = RunOf(a_, in_, x, a_.page_size, c.b, c.head, row + r, c.rows - r);
      CopyIn(to[r * wide], Global<T>(gm, run.at), x.s, run.rows, columns, wide);
      r += run.rows;
    }
  }

  __aicore__ inline void Accumulate(const LocalTensor<float>& x, int32_t elements) {
    AscendC::Muls(x, x, 0.0f, elements);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(Tile(kFound), Tile(kFound), x, elements);
    AscendC::PipeBarrier<PIPE_V>();
  }

  // x, with 0 where it is NaN or Inf
  __aicore__ inline LocalTensor<float> Clean(const LocalTensor<float>& x, int32_t elements) {
    const LocalTensor<float> zero = Tile(kZero);
    const LocalTensor<uint8_t> bits = Local<uint8_t>(TPosition::VECCALC, kSpread * 1024, kElements / 8);
    AscendC::Muls(zero, x, 0.0f, elements);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::CompareScalar(bits, zero, 0.0f, AscendC::CMPMODE::EQ, uint32_t(elements));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Select(zero, bits, x, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(elements));
    AscendC::PipeBarrier<PIPE_V>();
    return zero;
  }

  __aicore__ inline void Write(const GlobalTensor<T>& to, const LocalTensor<float>& x, int32_t rows, int32_t columns,
                               int32_t width) {
    const LocalTensor<T> narrow = out_.WaitEmpty<T>();
    AscendC::Cast(narrow, x, AscendC::RoundMode::CAST_RINT, uint32_t(Align(rows, 8) * width));
    out_.SignalFull();
    AscendC::PipeBarrier<PIPE_V>();
    CopyOut(to, narrow, columns, rows, columns, width);
    out_.SignalEmpty();
  }

  // Whether any vector core found something. Each tells all others, and the first of a block its cube core.
  __aicore__ inline bool Agree() {
    const LocalTensor<float> found = Tile(kFound), scratch = Tile(kScratch);
    Sum(found, scratch, kElements);
    const LocalTensor<float> mine = out_.WaitEmpty<float>();
    AscendC::Duplicate(mine, 0.0f, 8);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(mine, mine, found, 1);
    out_.SignalFull();
    AscendC::DataCopy(Global<float>(base_ + space_.flags, AscendC::GetBlockIdx() * 8), mine, 8);
    out_.SignalEmpty();
    AscendC::SyncAll<true>();
    const LocalTensor<float> all = keys_.WaitEmpty<float>();
    AscendC::DataCopy(all, Global<float>(base_ + space_.flags, 0), uint32_t(2 * blocks_ * 8));
    keys_.SignalFull();
    AscendC::Duplicate(found, 0.0f, 1024);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(found, found, all, int32_t(2 * blocks_ * 8));
    AscendC::PipeBarrier<PIPE_V>();
    keys_.SignalEmpty();
    Sum(found, scratch, 1024);
    SetFlag<HardEvent::V_S>(0);
    WaitFlag<HardEvent::V_S>(0);
    const bool any = found.GetValue(0) != 0;
    SetFlag<HardEvent::S_V>(0);
    WaitFlag<HardEvent::S_V>(0);
    if (AscendC::GetSubBlockIdx() == 0) {
      const LocalTensor<float> verdict = out_.WaitEmpty<float>();
      AscendC::Duplicate(verdict, any ? 1.0f : 0.0f, 8);
      out_.SignalFull();
      AscendC::DataCopy(Verdict(AscendC::GetBlockIdx() / 2), verdict, 8);
      out_.SignalEmpty();
    }
    AscendC::CrossCoreSetFlag<2, PIPE_MTE3>(kGuardReady);
    return any;
  }

  // x[0] = sum of x
  __aicore__ inline void Sum(const LocalTensor<float>& x, const LocalTensor<float>& scratch, int32_t elements) {
    for (int32_t n = elements / 2; n >= kLanes; n /= 2) {
      AscendC::Add(x, x, x[n], n);
      AscendC::PipeBarrier<PIPE_V>();
    }
    AscendC::WholeReduceSum(scratch, x, kLanes, 1, 1, 1, 8);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(x, scratch, 0.0f, 1);
  }

  const AttentionTiling& a_;
  const GuardSpace& space_;
  const Inputs& in_;
  Address base_;
  int64_t blocks_;
  InputRing keys_, values_;
  OutputRing out_;
};

}  // namespace msf
