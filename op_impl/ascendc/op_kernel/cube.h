// Plumbing of the cube core: tiles in L1, their way through L0, products.
#pragma once
#include "device.h"

namespace msf {

// A matrix in L1: columns in fractals of 16, each column of fractals `rows16` rows high (layout NZ).
template <class T>
struct L1Tile {
  LocalTensor<T> data;
  int32_t rows16;
};

// Rows of a matrix in GM become rows [row0, row0 + rows) of an L1 tile.
template <class T>
__aicore__ inline void CopyRows(const L1Tile<T>& tile, int32_t row0, const GlobalTensor<T>& src, int64_t pitch,
                                int32_t rows, int32_t cols) {
  constexpr int64_t kMaxPitch = 65535;  // the instruction's field
  const uint16_t height = uint16_t(tile.rows16);
  if (pitch <= kMaxPitch) {
    AscendC::DataCopy(tile.data[row0 * kFractal], src,
                      AscendC::Nd2NzParams(1, uint16_t(rows), uint16_t(cols), 0, uint16_t(pitch), height, 1, 0));
    return;
  }
  for (int32_t r = 0; r < rows; ++r)
    AscendC::DataCopy(tile.data[(row0 + r) * kFractal], src[r * pitch],
                      AscendC::Nd2NzParams(1, 1, uint16_t(cols), 0, uint16_t(cols), height, 1, 0));
}

// Rows [rows, rows16) become 0, so that products may run over whole fractals. Before the rows above them are copied.
template <class T>
__aicore__ inline void ClearTail(const L1Tile<T>& tile, int32_t rows, int32_t cols) {
  if (rows == tile.rows16) return;
  const int32_t above = tile.rows16 - kFractal;
  AscendC::Fill(tile.data[above * kFractal], AscendC::InitConstValueParams<T>(uint16_t(cols / kFractal), kFractal,
                                                                              uint16_t(above), static_cast<T>(0.0f)));
  AscendC::PipeBarrier<PIPE_MTE2>();
}

// Buffers in L1, used in turn: MTE2 fills, MTE1 empties, in the same order. Several may be full at a time.
class L1Ring {
 public:
  __aicore__ inline void SetUp(int32_t byte, int32_t bytes, int32_t slots, int32_t first_event) {
    byte_ = byte, bytes_ = bytes, slots_ = slots, event_ = first_event, fill_ = 0, empty_ = 0;
    for (int32_t i = 0; i < slots_; ++i) SetFlag<HardEvent::MTE1_MTE2>(event_ + i);
  }
  __aicore__ inline void WaitAllEmpty() {
    for (int32_t i = 0; i < slots_; ++i) WaitFlag<HardEvent::MTE1_MTE2>(event_ + i);
  }
  template <class T>
  __aicore__ inline L1Tile<T> WaitEmpty(int32_t rows) {
    WaitFlag<HardEvent::MTE1_MTE2>(event_ + fill_);
    return {Local<T>(TPosition::A1, byte_ + fill_ * bytes_, bytes_), Align(rows, kFractal)};
  }
  __aicore__ inline void SignalFull() {
    SetFlag<HardEvent::MTE2_MTE1>(event_ + fill_);
    WaitFlag<HardEvent::MTE2_MTE1>(event_ + fill_);
    fill_ = fill_ + 1 < slots_ ? fill_ + 1 : 0;
  }
  __aicore__ inline void SignalEmpty() {
    SetFlag<HardEvent::MTE1_MTE2>(event_ + empty_);
    empty_ = empty_ + 1 < slots_ ? empty_ + 1 : 0;
  }

 private:
  int32_t byte_ = 0, bytes_ = 0, slots_ = 0, event_ = 0, fill_ = 0, empty_ = 0;
};

// How an operand lies in L1, relative to how the product needs it.
enum class Stored { plain, transposed };

// L0A takes A (m x k) in fractals, rows of them outermost (Zz).
template <Stored STORED, class T>
__aicore__ inline void LoadLeft(const LocalTensor<T>& a, const L1Tile<T>& x, int32_t m, int32_t k0, int32_t k) {
  const int32_t high = x.rows16 / kFractal;
  for (int32_t i = 0; i < m / kFractal; ++i) {
    if constexpr (STORED == Stored::plain) {  // x is m x k
      AscendC::LoadData(a[i * k * kFractal], x.data[(k0 * high + i * kFractal) * kFractal],
                        AscendC::LoadData2DParams(0, uint8_t(k / kFractal), uint16_t(high), 0, 0, false, 0));
    } else {  // x is k x m
      AscendC::LoadData(a[i * k * kFractal], x.data[(i * x.rows16 + k0) * kFractal],
                        AscendC::LoadData2DParams(0, uint8_t(k / kFractal), 1, 0, 0, true, 0));
    }
  }
}

// L0B takes B (k x n) in transposed fractals, rows of them outermost (Zn).
template <Stored STORED, class T>
__aicore__ inline void LoadRight(const LocalTensor<T>& b, const L1Tile<T>& y, int32_t n0, int32_t n, int32_t k0,
                                 int32_t k) {
  const int32_t high = y.rows16 / kFractal;
  for (int32_t i = 0; i < k / kFractal; ++i) {
    if constexpr (STORED == Stored::plain) {  // y is k x n
      AscendC::LoadData(b[i * n * kFractal], y.data[(n0 * high + k0 + i * kFractal) * kFractal],
                        AscendC::LoadData2DParams(0, uint8_t(n / kFractal), uint16_t(high), 0, 0, true, 0));
    } else {  // y is n x k: its fractals are what L0B wants
      AscendC::LoadData(b[i * n * kFractal], y.data[((k0 + i * kFractal) * high + n0) * kFractal],
                        AscendC::LoadData2DParams(0, uint8_t(n / kFractal), 1, 0, 0, false, 0));
    }
  }
}

// The two halves of L0A, L0B and L0C, used in turn.
class L0 {
 public:
  static constexpr int32_t kOperandBytes = 32 * 1024, kResultBytes = 64 * 1024;

  __aicore__ inline void SetUp() {
    for (int32_t i = 0; i < 2; ++i) {
      SetFlag<HardEvent::M_MTE1>(i);
      SetFlag<HardEvent::FIX_M>(i);
    }
  }
  __aicore__ inline void WaitAllEmpty() {
    for (int32_t i = 0; i < 2; ++i) {
      WaitFlag<HardEvent::M_MTE1>(i);
      WaitFlag<HardEvent::FIX_M>(i);
    }
  }

  __aicore__ inline LocalTensor<float> WaitResult() {
    WaitFlag<HardEvent::FIX_M>(result_);
    return Result();
  }

  // c (m x n) = or += depth [k0, k0 + k) of a product; sizes in whole fractals. When it returns, MTE1 has been told to
  // read the operands: a SignalEmpty after it is in order.
  template <Stored LEFT, Stored RIGHT, class T>
  __aicore__ inline void Multiply(const L1Tile<T>& x, int32_t x_k0, const L1Tile<T>& y, int32_t y_k0, int32_t m,
                                  int32_t n0, int32_t n, int32_t k, bool start) {
    const LocalTensor<T> a = Local<T>(TPosition::A2, operand_ * kOperandBytes, kOperandBytes);
    const LocalTensor<T> b = Local<T>(TPosition::B2, operand_ * kOperandBytes, kOperandBytes);
    WaitFlag<HardEvent::M_MTE1>(operand_);
    LoadLeft<LEFT>(a, x, m, x_k0, k);
    LoadRight<RIGHT>(b, y, n0, n, y_k0, k);
    SetFlag<HardEvent::MTE1_M>(operand_);
    WaitFlag<HardEvent::MTE1_M>(operand_);
    AscendC::Mmad(Result(), a, b, AscendC::MmadParams(uint16_t(m), uint16_t(n), uint16_t(k), 0, false, start));
    // sums that follow each other faster than the array's depth have to wait for it
    if ((m / kFractal) * (n / kFractal) < 10) {
      AscendC::PipeBarrier<PIPE_M>();
    }
    SetFlag<HardEvent::M_MTE1>(operand_);
    operand_ ^= 1;
  }

  // The result leaves for GM: `rows` x `cols` of the `m` rows that were computed.
  template <class D>
  __aicore__ inline void Store(const GlobalTensor<D>& dst, int64_t pitch, int32_t m, int32_t rows, int32_t cols) {
    SetFlag<HardEvent::M_FIX>(result_);
    WaitFlag<HardEvent::M_FIX>(result_);
    AscendC::FixpipeParamsV220 p(uint16_t(cols), uint16_t(rows), uint16_t(m), uint32_t(pitch), false);
    p.quantPre = kConversion<D>;
    p.deqScalar = 0;
    AscendC::Fixpipe<D, float, AscendC::CFG_ROW_MAJOR>(dst, Result(), p);
    SetFlag<HardEvent::FIX_M>(result_);
    result_ ^= 1;
  }

 private:
  template <class D>
  static constexpr QuantMode_t kConversion = sizeof(D) == 4                 ? QuantMode_t::NoQuant
                                             : std::is_same<D, half>::value ? QuantMode_t::F322F16
                                                                            : QuantMode_t::F322BF16;
  __aicore__ inline LocalTensor<float> Result() const {
    return Local<float>(TPosition::CO1, result_ * kResultBytes, kResultBytes);
  }
  int32_t operand_ = 0, result_ = 0;
};

}  // namespace msf
