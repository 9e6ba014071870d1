// From products q.k to scores: scale or softcap, bias, ALiBi, mask, band. Each piece is one pass over a tile in UB and
// is not entered when the problem does not have it. A position that is excluded is overwritten, never added to: a NaN
// there must not survive.
#pragma once
#include "dropout.h"

namespace msf {

// `padded` (a multiple of 8) rows of which `count` count, against keys [key0, key0 + keys) in `width` columns.
struct ScoreTile {
  int64_t batch;
  int32_t first, count, padded;  // first: its row in the tile of the block
  int32_t key0, keys, width;
  __aicore__ inline int32_t Elements() const { return padded * width; }
  __aicore__ inline uint8_t Repeats() const { return uint8_t(Elements() / kLanes); }
};

template <class T>
class ScorePieces {
 public:
  // UB from `plane` on: a tile of float32 for what comes from GM and one bit per element; `scratch`: one more tile;
  // `index`: one row.
  __aicore__ inline void SetUp(const AttentionTiling& a, const Inputs& in, int32_t tile_bytes, int32_t plane,
                               int32_t scratch, int32_t index, int32_t index_bytes, int32_t event) {
    a_ = &a;
    in_ = &in;
    planes_.SetUp(plane, tile_bytes, 1, event);
    bits_ = Local<uint8_t>(TPosition::VECCALC, plane + tile_bytes, tile_bytes / 32);
    scratch_byte_ = scratch;
    tile_bytes_ = tile_bytes;
    index_ = Local<float>(TPosition::VECCALC, index, index_bytes);
    constant_ = Local<float>(TPosition::VECCALC, index + index_bytes, kBlockBytes);
    if (a.alibi) AscendC::CreateVecIndex(index_, 0.0f, uint32_t(index_bytes / 4));
    if (a.softcap > 0) AscendC::Duplicate(constant_, 2 * a.softcap, 8);
    if (a.dropout == 1) {
      philox_.SetUp(plane, scratch, tile_bytes);
      seed_ = a.seed, offset_ = a.offset;
      if (a.seed_from_input) {
        seed_ = uint64_t(Global<int64_t>(in.seed, 0).GetValue(0));
        offset_ = uint64_t(Global<int64_t>(in.seed, 0).GetValue(1));
      }
    }
  }
  __aicore__ inline void WaitAllEmpty() { planes_.WaitAllEmpty(); }

  // The backward wants d score / d (scale q.k) as well, or d score / d bias, which the softcap does not touch: 1 unless
  // there is a softcap or a fill.
  __aicore__ inline void KeepSlope(int32_t byte, bool of_bias) {
    slope_ = Local<float>(TPosition::VECCALC, byte, tile_bytes_);
    cap_slope_ = a_->softcap > 0 && !of_bias;
    has_slope_ = cap_slope_ || a_->has_fill;
  }
  __aicore__ inline bool HasSlope() const { return has_slope_; }
  __aicore__ inline LocalTensor<float> Slope() const { return slope_; }

  __aicore__ inline void Apply(const LocalTensor<float>& s, const ScoreTile& t, const TileRows& rows,
                               const Band& band) {
    if (a_->softcap > 0) {
      SoftCap(s, t);
    } else {
      AscendC::Muls(s, s, a_->scale, t.Elements());
    }
    if (has_slope_ && !cap_slope_) AscendC::Duplicate(slope_, 1.0f, t.Elements());
    AscendC::PipeBarrier<PIPE_V>();
    if (a_->bias.dtype != DataType::none) AddBias(s, t, rows);
    if (a_->alibi) AddAlibi(s, t, rows, band);
    if (a_->mask.dtype != DataType::none) ApplyMask(s, t, rows);
    ApplyBand(s, t, rows, band);
    if (t.keys < t.width) FillColumns(s, t.padded, t.width, t.keys, t.width, kMinusInf);
    AscendC::PipeBarrier<PIPE_V>();
  }

  // Which probabilities survive dropout; Keep may then be called any number of times for the same tile.
  __aicore__ inline void DrawKept(const ScoreTile& t, const TileRows& rows) {
    if (a_->dropout == 1) {
      planes_.template WaitEmpty<float>();
      planes_.SignalFull();
      philox_.Draw(bits_, *a_, seed_, offset_, t.batch, rows, t.first, t.count, t.key0, t.width);
      planes_.SignalEmpty();
    }
    if (a_->dropout == 2 && a_->drop_mask.k) FetchBits(a_->drop_mask, in_->drop_mask, AscendC::CMPMODE::NE, t, rows);
  }
  // What is dropped becomes 0, the rest grows to make up for it.
  __aicore__ inline void Keep(const LocalTensor<float>& p, const ScoreTile& t, const TileRows& rows) {
    if (a_->dropout == 2 && !a_->drop_mask.k) {
      for (int32_t r = 0; r < t.count; ++r)
        if (RowValue(a_->drop_mask, in_->drop_mask, t, rows, r) == 0) Fill(p[r * t.width], 0, t.keys, 0);
    } else {
      AscendC::Select(p, bits_, p, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(t.Elements()));
    }
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Muls(p, p, a_->keep_scale, t.Elements());
    AscendC::PipeBarrier<PIPE_V>();
  }

 private:
  // cap tanh(x) = cap - 2 cap / (exp(2 x) + 1), x = scale / cap q.k: right at both ends, where exp is 0 or infinite
  __aicore__ inline void SoftCap(const LocalTensor<float>& s, const ScoreTile& t) {
    AscendC::Muls(s, s, 2 * a_->scale / a_->softcap, t.Elements());
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Exp(s, s, t.Elements());
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(s, s, 1.0f, t.Elements());
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Div(s, constant_, s, uint64_t(kLanes), t.Repeats(), AscendC::BinaryRepeatParams(1, 0, 1, 8, 0, 8));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Muls(s, s, -1.0f, t.Elements());
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(s, s, a_->softcap, t.Elements());
    if (!cap_slope_) return;
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Muls(slope_, s, 1 / a_->softcap, t.Elements());
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Mul(slope_, slope_, slope_, t.Elements());
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Muls(slope_, slope_, -1.0f, t.Elements());
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(slope_, slope_, 1.0f, t.Elements());
  }

  // The tile's part of a plane, one head after another.
  template <class P>
  __aicore__ inline LocalTensor<P> Fetch(const PlaneLayout& plane, Address gm, const ScoreTile& t,
                                         const TileRows& rows) {
    const LocalTensor<P> x = planes_.WaitEmpty<P>();
    const int32_t end = t.first + t.count;
    for (int32_t r = t.first, n; r < end; r += n) {
      n = rows.Run(r, end);
      const int64_t at = t.batch * plane.b + rows.Head(r) * plane.h + int64_t(rows.Query(r)) * plane.q + t.key0;
      CopyIn(x[(r - t.first) * t.width], Global<P>(gm, at), plane.q, n, t.keys, t.width);
    }
    planes_.SignalFull();
    return x;
  }

  // One number of a plane that holds one per row.
  __aicore__ inline float RowValue(const PlaneLayout& plane, Address gm, const ScoreTile& t, const TileRows& rows,
                                   int32_t r) const {
    const int64_t at =
        t.batch * plane.b + rows.Head(t.first + r) * plane.h + int64_t(rows.Query(t.first + r)) * plane.q;
    if (plane.dtype == DataType::u8) return float(Global<uint8_t>(gm, at).GetValue(0));
    if (plane.dtype == DataType::f32) return Global<float>(gm, at).GetValue(0);
    return ScalarToFloat(Global<T>(gm, at).GetValue(0));
  }

  __aicore__ inline LocalTensor<float> Scratch() const {
    return Local<float>(TPosition::VECCALC, scratch_byte_, tile_bytes_);
  }

  __aicore__ inline LocalTensor<float> FetchFloat(const PlaneLayout& plane, Address gm, const ScoreTile& t,
                                                  const TileRows& rows) {
    if (plane.dtype == DataType::f32) return Fetch<float>(plane, gm, t, rows);
    const LocalTensor<T> narrow = Fetch<T>(plane, gm, t, rows);
    AscendC::Cast(Scratch(), narrow, AscendC::RoundMode::CAST_NONE, uint32_t(t.Elements()));
    AscendC::PipeBarrier<PIPE_V>();
    return Scratch();
  }

  __aicore__ inline void AddBias(const LocalTensor<float>& s, const ScoreTile& t, const TileRows& rows) {
    if (!a_->bias.k) {
      for (int32_t r = 0; r < t.count; ++r) {
        const float value = RowValue(a_->bias, in_->bias, t, rows, r);
        if (value == kMinusInf)
          Fill(s[r * t.width], 0, t.keys, kMinusInf);
        else
          AscendC::Adds(s[r * t.width], s[r * t.width], value, t.width);
      }
      AscendC::PipeBarrier<PIPE_V>();
      return;
    }
    const LocalTensor<float> bias = FetchFloat(a_->bias, in_->bias, t, rows);
    AscendC::Add(s, s, bias, t.Elements());
    AscendC::CompareScalar(bits_, bias, kMinusInf, AscendC::CMPMODE::NE, uint32_t(t.Elements()));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Select(s, bits_, s, kMinusInf, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(t.Elements()));
    planes_.SignalEmpty();
    AscendC::PipeBarrier<PIPE_V>();
  }

  // s -= slope |i + off - j|
  __aicore__ inline void AddAlibi(const LocalTensor<float>& s, const ScoreTile& t, const TileRows& rows,
                                  const Band& band) {
    const LocalTensor<float> distance = Scratch();
    for (int32_t r = 0; r < t.count; ++r)
      AscendC::Adds(distance[r * t.width], index_, float(t.key0 - rows.Query(t.first + r) - band.off), t.width);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Abs(distance, distance, t.count * t.width);
    AscendC::PipeBarrier<PIPE_V>();
    const int32_t end = t.first + t.count;
    for (int32_t r = t.first, n; r < end; r += n) {
      n = rows.Run(r, end);
      const float slope = Global<float>(in_->alibi, t.batch * a_->alibi_b).GetValue(rows.Head(r));
      const int32_t at = (r - t.first) * t.width;
      AscendC::Axpy(s[at], distance[at], -slope, n * t.width);
    }
    AscendC::PipeBarrier<PIPE_V>();
  }

  __aicore__ inline void ApplyMask(const LocalTensor<float>& s, const ScoreTile& t, const TileRows& rows) {
    const float masked = a_->has_fill ? a_->fill : kMinusInf;
    if (!a_->mask.k) {
      for (int32_t r = 0; r < t.count; ++r)
        if (RowValue(a_->mask, in_->mask, t, rows, r) != 0) {
          Fill(s[r * t.width], 0, t.keys, masked);
          if (has_slope_) Fill(slope_[r * t.width], 0, t.keys, 0);
        }
      AscendC::PipeBarrier<PIPE_V>();
      return;
    }
    FetchBits(a_->mask, in_->mask, AscendC::CMPMODE::EQ, t, rows);
    AscendC::Select(s, bits_, s, masked, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(t.Elements()));
    AscendC::PipeBarrier<PIPE_V>();
    if (!has_slope_) return;
    AscendC::Select(slope_, bits_, slope_, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(t.Elements()));
  }

  // bits_ = a plane of bytes, compared with 0
  __aicore__ inline void FetchBits(const PlaneLayout& plane, Address gm, AscendC::CMPMODE keep, const ScoreTile& t,
                                   const TileRows& rows) {
    const LocalTensor<uint8_t> bytes = Fetch<uint8_t>(plane, gm, t, rows);
    const LocalTensor<half> wide = Scratch().template ReinterpretCast<half>();
    AscendC::Cast(wide, bytes, AscendC::RoundMode::CAST_NONE, uint32_t(t.Elements()));
    planes_.SignalEmpty();
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::CompareScalar(bits_, wide, static_cast<half>(0.0f), keep, uint32_t(t.Elements()));
    AscendC::PipeBarrier<PIPE_V>();
  }

  // Columns [first, end) of one row.
  __aicore__ inline void Fill(const LocalTensor<float>& row, int32_t first, int32_t end, float value) {
    int32_t c = first / kLanes * kLanes;
    if (c < first && c < end) {
      FillLanes(row[c], first - c, end - c, value);
      c += kLanes;
    }
    const int32_t whole = (end - c) / kLanes;
    if (whole > 0) {
      AscendC::Duplicate(row[c], value, uint64_t(kLanes), uint8_t(whole), 1, 8);
      c += whole * kLanes;
    }
    if (c < end) FillLanes(row[c], 0, end - c, value);
  }

  __aicore__ inline void ApplyBand(const LocalTensor<float>& s, const ScoreTile& t, const TileRows& rows,
                                   const Band& band) {
    for (int32_t r = 0; r < t.count; ++r) {
      const int64_t query = rows.Query(t.first + r);
      const int64_t begin = band.begin(query) - t.key0, end = band.end(query) - t.key0;
      if (begin > 0) Fill(s[r * t.width], 0, int32_t(Band::clamp(begin, 0, t.keys)), kMinusInf);
      if (end < t.keys) Fill(s[r * t.width], int32_t(Band::clamp(end, 0, t.keys)), t.keys, kMinusInf);
    }
  }

  const AttentionTiling* a_ = nullptr;
  const Inputs* in_ = nullptr;
  InputRing planes_;
  Philox philox_;
  uint64_t seed_ = 0, offset_ = 0;
  LocalTensor<uint8_t> bits_;
  LocalTensor<float> index_, constant_, slope_;
  bool has_slope_ = false, cap_slope_ = false;
  int32_t scratch_byte_ = 0, tile_bytes_ = 0;
};

}  // namespace msf
