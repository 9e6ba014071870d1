// Gradient of the bias: dS, summed over whatever the bias repeats over. A number of the bias belongs to one block, so
// its sum has a fixed order; where the bias repeats over queries, the two vector cores of the block keep a sum each,
// and they are added at the end.
#pragma once
#include "score.h"

namespace msf {

template <class T>
class BiasSums {
 public:
  __aicore__ inline BiasSums(const BackwardTiling& t, Address workspace, Address out)
      : t_(t), workspace_(workspace), out_(out) {}

  __aicore__ inline GlobalTensor<float> Sums(int64_t element) const {
    return Global<float>(workspace_ + t_.ws.dbias, element);
  }

  // dS of a tile; it is not the same afterwards. Columns beyond the keys hold zeros, rows beyond the count anything.
  __aicore__ inline void Add(const LocalTensor<float>& ds, const ScoreTile& tile, const TileRows& rows,
                             const LocalTensor<float>& scratch, OutputRing* ring) {
    const PlaneLayout& bias = t_.a.bias;
    const int32_t width = tile.width;
    if (!bias.q) {  // all rows onto the first
      for (int32_t r = 1; r < tile.count; ++r) {
        AscendC::Add(ds, ds, ds[r * width], width);
        AscendC::PipeBarrier<PIPE_V>();
      }
    }
    const LocalTensor<float> out = ring->template WaitEmpty<float>();
    if (bias.k) {
      AscendC::Adds(out, ds, 0.0f, bias.q ? tile.count * width : width);
    } else {
      ReduceRows<Plus>(out, ds, scratch, bias.q ? tile.padded : 8, width);
    }
    ring->SignalFull();
    const int64_t at = (bias.q ? 0 : AscendC::GetSubBlockIdx() * t_.bias_part_elements) + tile.batch * bias.b +
                       rows.Head(tile.first) * bias.h + rows.Query(tile.first) * bias.q + int64_t(tile.key0) * bias.k;
    const int32_t count = bias.q ? tile.count : 1;
    AscendC::PipeBarrier<PIPE_MTE3>();  // copies may overtake each other, and the order of the sum is fixed
    AscendC::SetAtomicAdd<float>();
    if (bias.k) {
      CopyOut(Sums(at), out, bias.q ? bias.q : tile.keys, count, tile.keys, width);
    } else {
      CopyOut(Sums(at), out, count, 1, count, Align(count, 8));
    }
    AscendC::DisableDmaAtomic();
    ring->SignalEmpty();
  }

  // The sums, as the bias is stored; `core` of `cores` vector cores takes its share.
  __aicore__ inline void Finish(InputRing* in, OutputRing* ring, int64_t core, int64_t cores) {
    const int32_t most = t_.ub.tile / 8;  // two of them fill a place of the ring
    for (int64_t at = core * most; at < t_.bias_elements; at += cores * most) {
      const int32_t n = int32_t(t_.bias_elements - at < most ? t_.bias_elements - at : most);
      const LocalTensor<float> sum = in->template WaitEmpty<float>();
      for (int64_t part = 0; part < t_.bias_parts; ++part)
        CopyIn(sum[part * most], Sums(part * t_.bias_part_elements + at), n, 1, n, Align(n, 8));
      in->SignalFull();
      if (t_.bias_parts > 1) {
        AscendC::Add(sum, sum, sum[most], n);
        AscendC::PipeBarrier<PIPE_V>();
      }
      if (t_.a.bias.dtype == DataType::f32)
        Store(Global<float>(out_, at), sum, n, ring);
      else
        Store(Global<T>(out_, at), sum, n, ring);
      in->SignalEmpty();
    }
  }

 private:
  template <class D>
  __aicore__ inline void Store(const GlobalTensor<D>& to, const LocalTensor<float>& sum, int32_t n, OutputRing* ring) {
    const LocalTensor<D> out = ring->template WaitEmpty<D>();
    if constexpr (sizeof(D) == 4)
      AscendC::Adds(out, sum, 0.0f, n);
    else
      AscendC::Cast(out, sum, AscendC::RoundMode::CAST_RINT, uint32_t(n));
    ring->SignalFull();
    CopyOut(to, out, n, 1, n, Align(n, kFractal));
    ring->SignalEmpty();
  }

  const BackwardTiling& t_;
  Address workspace_, out_;
};

}  // namespace msf
