// Plumbing of the vector cores: operations on matrices of float32 in UB, row by row without loops over elements.
// Unless said otherwise a matrix has `rows` (a multiple of 8) times `width` elements without gaps.
#pragma once
#include "device.h"

namespace msf {

constexpr float kLowest = -3.402823466e+38f;  // the lowest finite float32: a maximum that any score reaches
constexpr float kMinusInf = -__builtin_inff(), kNaN = __builtin_nanf("");

__aicore__ inline uint64_t LanesFrom(int32_t first, int32_t end) {  // bits [first, end) of 64
  const uint64_t below = end >= kLanes ? ~uint64_t(0) : (uint64_t(1) << end) - 1;
  return first >= kLanes ? 0 : below & (~uint64_t(0) << first);
}

// x[0..count) = value on lanes [first, end) of every row; begin and end of any alignment.
__aicore__ inline void FillColumns(const LocalTensor<float>& x, int32_t rows, int32_t width, int32_t first, int32_t end,
                                   float value) {
  for (int32_t c = first / kLanes * kLanes; c < end; c += kLanes) {
    uint64_t mask[2] = {LanesFrom(first > c ? first - c : 0, end - c), 0};
    AscendC::Duplicate(x[c], value, mask, uint8_t(rows), 1, uint8_t(width / 8));
  }
}

// Lanes [first, end) of one vector of 64.
__aicore__ inline void FillLanes(const LocalTensor<float>& x, int32_t first, int32_t end, float value) {
  uint64_t mask[2] = {LanesFrom(first, end), 0};
  AscendC::Duplicate(x, value, mask, 1, 1, 8);
}

// spread[r] = 8 copies of x[r]: the form in which a number per row meets a matrix.
__aicore__ inline void Spread(const LocalTensor<float>& spread, const LocalTensor<float>& x, int32_t rows) {
  AscendC::Brcb(spread, x, uint8_t(rows / 8), AscendC::BrcbRepeatParams(1, 8));
}

struct SubtractRow {
  static __aicore__ inline void Do(const LocalTensor<float>& y, const LocalTensor<float>& x,
                                   const LocalTensor<float>& r, int32_t lanes, int32_t rows,
                                   const AscendC::BinaryRepeatParams& p) {
    AscendC::Sub(y, x, r, uint64_t(lanes), uint8_t(rows), p);
  }
};
struct AddRow {
  static __aicore__ inline void Do(const LocalTensor<float>& y, const LocalTensor<float>& x,
                                   const LocalTensor<float>& r, int32_t lanes, int32_t rows,
                                   const AscendC::BinaryRepeatParams& p) {
    AscendC::Add(y, x, r, uint64_t(lanes), uint8_t(rows), p);
  }
};
struct MultiplyRow {
  static __aicore__ inline void Do(const LocalTensor<float>& y, const LocalTensor<float>& x,
                                   const LocalTensor<float>& r, int32_t lanes, int32_t rows,
                                   const AscendC::BinaryRepeatParams& p) {
    AscendC::Mul(y, x, r, uint64_t(lanes), uint8_t(rows), p);
  }
};

// y = x (op) one number per row.
template <class Op>
__aicore__ inline void WithRow(const LocalTensor<float>& y, const LocalTensor<float>& x,
                               const LocalTensor<float>& spread, int32_t rows, int32_t width) {
  const uint8_t pitch = uint8_t(width / 8);
  for (int32_t c = 0; c < width; c += kLanes)
    Op::Do(y[c], x[c], spread, Min(kLanes, width - c), rows, AscendC::BinaryRepeatParams(1, 1, 0, pitch, pitch, 1));
}

struct Larger {
  static __aicore__ inline void Pair(const LocalTensor<float>& y, const LocalTensor<float>& a,
                                     const LocalTensor<float>& b, int32_t repeats,
                                     const AscendC::BinaryRepeatParams& p) {
    AscendC::Max(y, a, b, uint64_t(kLanes), uint8_t(repeats), p);
  }
  static __aicore__ inline void Blocks(const LocalTensor<float>& y, const LocalTensor<float>& x, int32_t repeats,
                                       int32_t lanes) {
    AscendC::BlockReduceMax(y, x, repeats, lanes, 1, 1, 8);
  }
};
struct Plus {
  static __aicore__ inline void Pair(const LocalTensor<float>& y, const LocalTensor<float>& a,
                                     const LocalTensor<float>& b, int32_t repeats,
                                     const AscendC::BinaryRepeatParams& p) {
    AscendC::Add(y, a, b, uint64_t(kLanes), uint8_t(repeats), p);
  }
  static __aicore__ inline void Blocks(const LocalTensor<float>& y, const LocalTensor<float>& x, int32_t repeats,
                                       int32_t lanes) {
    AscendC::BlockReduceSum(y, x, repeats, lanes, 1, 1, 8);
  }
};

// y[r] = reduction of row r. The width is 64 times a power of two, so that halves of all rows lie evenly spaced: each
// step folds odd runs of 64 onto even ones, in one instruction for all rows; then 64 to 8 to 1. `scratch` takes three
// quarters of the matrix: no step may write where it reads.
template <class Op>
__aicore__ inline void ReduceRows(const LocalTensor<float>& y, const LocalTensor<float>& x,
                                  const LocalTensor<float>& scratch, int32_t rows, int32_t width) {
  LocalTensor<float> from = x, to = scratch, other = scratch[rows * width / 2];
  for (int32_t runs = width / kLanes; runs > 1; runs /= 2) {
    Op::Pair(to, from, from[kLanes], rows * runs / 2, AscendC::BinaryRepeatParams(1, 1, 1, 8, 16, 16));
    AscendC::PipeBarrier<PIPE_V>();
    from = to;
    to = other;
    other = from;
  }
  Op::Blocks(to, from, rows, kLanes);
  AscendC::PipeBarrier<PIPE_V>();
  Op::Blocks(y, to, rows / 8, kLanes);
}

__aicore__ inline int32_t PaddedWidth(int32_t columns) {  // 64 times a power of two
  int32_t width = kLanes;
  while (width < columns) width *= 2;
  return width;
}

// GM rows of `columns` elements become rows of `width` in UB. Up to the next whole block they end in zeros, what
// follows stays as it was: vectors work on whole rows, and what they read has to be numbers.
template <class T>
__aicore__ inline void CopyIn(const LocalTensor<T>& dst, const GlobalTensor<T>& src, int64_t pitch, int32_t rows,
                              int32_t columns, int32_t width) {
  constexpr int32_t kSize = int32_t(sizeof(T)), kPerBlock = kBlockBytes / kSize;
  const int32_t whole = Align(columns, kPerBlock);
  const AscendC::DataCopyPadExtParams<T> pad{whole > columns, 0, uint8_t(whole - columns), static_cast<T>(0)};
  const uint32_t bytes = uint32_t(columns * kSize), gap = uint32_t((width - whole) / kPerBlock);
  if (pitch >= columns && (pitch - columns) * kSize <= int64_t(0xffffffff)) {
    AscendC::DataCopyPad(
        dst, src, AscendC::DataCopyExtParams(uint16_t(rows), bytes, uint32_t((pitch - columns) * kSize), gap, 0), pad);
    return;
  }
  for (int32_t r = 0; r < rows; ++r)  // a row that repeats, or rows too far apart
    AscendC::DataCopyPad(dst[r * width], src[r * pitch], AscendC::DataCopyExtParams(1, bytes, 0, 0, 0), pad);
}

// Rows of `columns` elements, `width` apart in UB, become rows `pitch` apart in GM.
template <class T>
__aicore__ inline void CopyOut(const GlobalTensor<T>& dst, const LocalTensor<T>& src, int64_t pitch, int32_t rows,
                               int32_t columns, int32_t width) {
  constexpr int32_t kSize = int32_t(sizeof(T)), kPerBlock = kBlockBytes / kSize;
  const uint32_t bytes = uint32_t(columns * kSize), gap = uint32_t((width - Align(columns, kPerBlock)) / kPerBlock);
  if ((pitch - columns) * kSize <= int64_t(0xffffffff)) {
    AscendC::DataCopyPad(
        dst, src, AscendC::DataCopyExtParams(uint16_t(rows), bytes, gap, uint32_t((pitch - columns) * kSize), 0));
    return;
  }
  for (int32_t r = 0; r < rows; ++r)
    AscendC::DataCopyPad(dst[r * pitch], src[r * width], AscendC::DataCopyExtParams(1, bytes, 0, 0, 0));
}

// Two or more buffers in UB that one pipe fills and the vector unit empties, in turn.
class InputRing {
 public:
  __aicore__ inline void SetUp(int32_t byte, int32_t bytes, int32_t slots, int32_t first_event) {
    byte_ = byte, bytes_ = bytes, slots_ = slots, event_ = first_event, turn_ = 0;
    for (int32_t i = 0; i < slots_; ++i) SetFlag<HardEvent::V_MTE2>(event_ + i);
  }
  __aicore__ inline void WaitAllEmpty() {
    for (int32_t i = 0; i < slots_; ++i) WaitFlag<HardEvent::V_MTE2>(event_ + i);
  }
  template <class T>
  __aicore__ inline LocalTensor<T> WaitEmpty() {
    WaitFlag<HardEvent::V_MTE2>(event_ + turn_);
    return Local<T>(TPosition::VECIN, byte_ + turn_ * bytes_, bytes_);
  }
  __aicore__ inline void SignalFull() {
    SetFlag<HardEvent::MTE2_V>(event_ + turn_);
    WaitFlag<HardEvent::MTE2_V>(event_ + turn_);
  }
  __aicore__ inline void SignalEmpty() {
    SetFlag<HardEvent::V_MTE2>(event_ + turn_);
    turn_ = turn_ + 1 < slots_ ? turn_ + 1 : 0;
  }

 private:
  int32_t byte_ = 0, bytes_ = 0, slots_ = 0, event_ = 0, turn_ = 0;
};

// The same the other way round: the vector unit fills, MTE3 empties.
class OutputRing {
 public:
  __aicore__ inline void SetUp(int32_t byte, int32_t bytes, int32_t slots, int32_t first_event) {
    byte_ = byte, bytes_ = bytes, slots_ = slots, event_ = first_event, turn_ = 0;
    for (int32_t i = 0; i < slots_; ++i) SetFlag<HardEvent::MTE3_V>(event_ + i);
  }
  __aicore__ inline void WaitAllEmpty() {
    for (int32_t i = 0; i < slots_; ++i) WaitFlag<HardEvent::MTE3_V>(event_ + i);
  }
  template <class T>
  __aicore__ inline LocalTensor<T> WaitEmpty() {
    WaitFlag<HardEvent::MTE3_V>(event_ + turn_);
    return Local<T>(TPosition::VECOUT, byte_ + turn_ * bytes_, bytes_);
  }
  __aicore__ inline void SignalFull() {
    SetFlag<HardEvent::V_MTE3>(event_ + turn_);
    WaitFlag<HardEvent::V_MTE3>(event_ + turn_);
  }
  __aicore__ inline void SignalEmpty() {
    SetFlag<HardEvent::MTE3_V>(event_ + turn_);
    turn_ = turn_ + 1 < slots_ ? turn_ + 1 : 0;
  }

 private:
  int32_t byte_ = 0, bytes_ = 0, slots_ = 0, event_ = 0, turn_ = 0;
};

}  // namespace msf
