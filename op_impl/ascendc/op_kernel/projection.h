// y = x W^T + b on the cube cores: the projections around the attention.
#pragma once
#include "cube.h"

namespace msf {

template <class T>
class Projection {
 public:
  __aicore__ inline explicit Projection(int64_t cores) : cores_(cores), first_(AscendC::GetBlockIdx()) {}

  __aicore__ inline void SetUp(int32_t l1_byte) {
    l0_.SetUp();
    rows_.SetUp(l1_byte, kTile * kTile * 2, kSlots, 0);
    weights_.SetUp(l1_byte + kSlots * kTile * kTile * 2, kTile * kTile * 2, kSlots, kSlots);
    ones_ = {Local<T>(TPosition::A1, l1_byte + 2 * kSlots * kTile * kTile * 2, kTile * kFractal * 2), kTile};
    AscendC::Fill(ones_.data, AscendC::InitConstValueParams<T>(1, kTile, 0, static_cast<T>(1.0f)));
  }
  __aicore__ inline void WaitAllEmpty() {
    rows_.WaitAllEmpty();
    weights_.WaitAllEmpty();
    l0_.WaitAllEmpty();
  }

  // Tiles of y are dealt out to the cores in turn. The weight is (out, in), or (in, out) if `transposed`.
  __aicore__ inline void Run(const ProjectionTiling& p, Address x, Address weight, Address bias, Address y) {
    const int64_t down = (p.rows + kTile - 1) / kTile, across = (p.out + kTile - 1) / kTile;
    for (int64_t tile = first_; tile < down * across; tile += cores_) {
      const int64_t row = tile / across * kTile, column = tile % across * kTile;
      const int32_t m = int32_t(p.rows - row < kTile ? p.rows - row : kTile);
      const int32_t n = int32_t(p.out - column < kTile ? p.out - column : kTile);
      Tile(p, Global<T>(x, p.x_offset + row * p.in), weight, bias, column, m, n, Global<T>(y, row * p.out + column));
    }
    // the next projection starts with the core after the last that had a tile
    first_ = (first_ + cores_ - down * across % cores_) % cores_;
  }

 private:
  static constexpr int32_t kTile = 128, kSlots = 4;

  __aicore__ inline void Tile(const ProjectionTiling& p, const GlobalTensor<T>& x, Address weight, Address bias,
                              int64_t column, int32_t m, int32_t n, const GlobalTensor<T>& y) {
    const int32_t m16 = Align(m, kFractal), n16 = Align(n, kFractal);
    l0_.WaitResult();
    for (int32_t k0 = 0; k0 < p.in; k0 += kTile) {
      const int32_t k = Min(kTile, int32_t(p.in) - k0), k16 = Align(k, kFractal);
      const L1Tile<T> left = Load(rows_, x[k0], p.in, m, k16, k);
      if (p.transposed) {
        const L1Tile<T> right =
            Load(weights_, Global<T>(weight, p.w_offset + k0 * p.w_pitch + column), p.w_pitch, k, n16, n);
        l0_.Multiply<Stored::plain, Stored::plain>(left, 0, right, 0, m16, 0, n16, k16, k0 == 0);
      } else {
        const L1Tile<T> right =
            Load(weights_, Global<T>(weight, p.w_offset + column * p.w_pitch + k0), p.w_pitch, n, k16, k);
        l0_.Multiply<Stored::plain, Stored::transposed>(left, 0, right, 0, m16, 0, n16, k16, k0 == 0);
      }
      rows_.SignalEmpty();
      weights_.SignalEmpty();
    }
    if (bias) {  // a product of depth 16: ones times the bias in the first row and zeros below
      const L1Tile<T> row = Load(weights_, Global<T>(bias, p.b_offset + column), p.out, 1, n16, n);
      l0_.Multiply<Stored::plain, Stored::plain>(ones_, 0, row, 0, m16, 0, n16, kFractal, false);
      weights_.SignalEmpty();
    }
    l0_.Store(y, p.out, m16, m, n);
  }

  __aicore__ inline L1Tile<T> Load(L1Ring& ring, const GlobalTensor<T>& x, int64_t pitch, int32_t rows, int32_t width16,
                                   int32_t columns) {
    const L1Tile<T> tile = ring.WaitEmpty<T>(rows);
    ClearTail(tile, rows, width16);
    CopyRows(tile, 0, x, pitch, rows, columns);  // fills up the last fractal's columns with zeros
    ring.SignalFull();
    return tile;
  }

  int64_t cores_, first_;
  L0 l0_;
  L1Ring rows_, weights_;
  L1Tile<T> ones_;
};

}  // namespace msf
