// Philox4x32-10 (common/philox.h) on the vector unit, for a tile of probabilities.
//
// The unit multiplies and adds int32 but does not say what an overflow gives, compares floats only, and has no
// exclusive or. So a product of 32 x 32 bits is made of digits of 11 bits, whose products and sums stay below 2^24; an
// exclusive or is (a | b) & ~(a & b) on halves; and a comparison of 32 bits is one of the upper 24, then of the
// lower 8. That makes dropout cost several times what the softmax does: where a mask is at hand, drop_mask is the fast
// way.
#pragma once
#include "vector.h"

namespace msf {

class Philox {
 public:
  // `plane` and `scratch`: a vector tile each.
  __aicore__ inline void SetUp(int32_t plane, int32_t scratch, int32_t tile_bytes) {
    plane_ = plane, scratch_ = scratch, block_bytes_ = tile_bytes / 16;
  }

  // bits of the tile's elements, 1 where the probability survives. head(r) and query(r) of a row come from `rows`,
  // counted from `first`; key0 is a multiple of 4.
  __aicore__ inline void Draw(const LocalTensor<uint8_t>& bits, const AttentionTiling& a, uint64_t seed,
                              uint64_t offset, int64_t batch, const TileRows& rows, int32_t first, int32_t count,
                              int32_t key0, int32_t width) {
    const int32_t groups = width / 4;  // four keys share the four words of a counter
    lanes_ = block_bytes_ / 4;
    const int32_t step = lanes_ / groups;
    MakeOffsets(width);
    for (int32_t r = 0; r < count; r += step) {
      for (int32_t i = 0; i < step; ++i) {
        const int32_t row = first + Min(r + i, count - 1), at = i * groups;
        AscendC::CreateVecIndex(Word(kC)[at], key0 / 4, uint32_t(groups));
        AscendC::Duplicate(Word(kC + 1)[at], rows.Query(row), groups);
        AscendC::Duplicate(Word(kC + 2)[at], int32_t(uint32_t(batch * a.heads + rows.Head(row))), groups);
        AscendC::Duplicate(Word(kC + 3)[at], int32_t(uint32_t(offset)), groups);
      }
      AscendC::PipeBarrier<PIPE_V>();
      Rounds(uint32_t(seed), uint32_t(seed >> 32) + uint32_t(offset >> 32));
      for (int32_t k = 0; k < 4; ++k) Threshold(k, a.drop_threshold);
      const LocalTensor<float> natural = Float(kNatural);  // four blocks
      for (int32_t i = 0; i < step; ++i)
        AscendC::Gather(natural[i * width], Float(kC), Unsigned(kOffsets), uint32_t(i * groups * 4), uint32_t(width));
      AscendC::PipeBarrier<PIPE_V>();
      AscendC::CompareScalar(bits[r * width / 8], natural, 0.0f, AscendC::CMPMODE::GE, uint32_t(step * width));
      AscendC::PipeBarrier<PIPE_V>();
    }
  }

 private:
  // Blocks of `lanes_` words each: 0 to 15 in the plane, 16 to 31 in the scratch.
  enum Block { kC = 0, kProduct = 4, kDigit = 8, kSum = 11, kTemp = 16, kOffsets = 20, kNatural = 24 };
  __aicore__ inline int32_t Byte(int32_t block) const {
    return block < 16 ? plane_ + block * block_bytes_ : scratch_ + (block - 16) * block_bytes_;
  }
  __aicore__ inline LocalTensor<int32_t> Word(int32_t b) const {
    return Local<int32_t>(TPosition::VECCALC, Byte(b), (b == kNatural ? 4 : 1) * block_bytes_);
  }
  __aicore__ inline LocalTensor<uint32_t> Unsigned(int32_t b) const {
    return Local<uint32_t>(TPosition::VECCALC, Byte(b), 4 * block_bytes_);
  }
  __aicore__ inline LocalTensor<uint16_t> Halves(int32_t b) const {
    return Local<uint16_t>(TPosition::VECCALC, Byte(b), block_bytes_);
  }
  __aicore__ inline LocalTensor<float> Float(int32_t b) const {
    return Local<float>(TPosition::VECCALC, Byte(b), 4 * block_bytes_);
  }

  // Bytes from a row's first word to that of each of its keys, the words of a row lying block after block.
  __aicore__ inline void MakeOffsets(int32_t width) {
    const LocalTensor<int32_t> offset = Local<int32_t>(TPosition::VECCALC, Byte(kOffsets), 4 * block_bytes_);
    const LocalTensor<int32_t> group = Local<int32_t>(TPosition::VECCALC, Byte(kNatural), 4 * block_bytes_);
    AscendC::CreateVecIndex(offset, 0, uint32_t(width));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::ShiftRight(group, offset, 2, width);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Muls(offset, offset, block_bytes_, width);  // (4 group + word) blocks ...
    AscendC::Muls(group, group, 4 * block_bytes_ - 4, width);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Sub(offset, offset, group, width);  // ... less 4 group blocks, plus the group's place
  }

  __aicore__ inline void Rounds(uint32_t key0, uint32_t key1) {
    for (int32_t round = 0; round < 10; ++round) {
      Multiply(kC, 0xD2511F53u, kProduct);
      Multiply(kC + 2, 0xCD9E8D57u, kProduct + 2);
      Xor(kProduct + 3, kC + 1);
      XorKey(kProduct + 3, key0);
      Xor(kProduct + 1, kC + 3);
      XorKey(kProduct + 1, key1);
      Move(kC, kProduct + 3);
      Move(kC + 1, kProduct + 2);
      Move(kC + 2, kProduct + 1);
      Move(kC + 3, kProduct);
      AscendC::PipeBarrier<PIPE_V>();
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
  }

  __aicore__ inline void Move(int32_t to, int32_t from) {
    AscendC::ShiftLeft(Unsigned(to), Unsigned(from), uint32_t(0), lanes_);
  }

  // x ^= y
  __aicore__ inline void Xor(int32_t x, int32_t y) {
    AscendC::Or(Halves(kTemp), Halves(x), Halves(y), 2 * lanes_);
    AscendC::And(Halves(kTemp + 1), Halves(x), Halves(y), 2 * lanes_);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Not(Halves(kTemp + 1), Halves(kTemp + 1), 2 * lanes_);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::And(Halves(x), Halves(kTemp), Halves(kTemp + 1), 2 * lanes_);
    AscendC::PipeBarrier<PIPE_V>();
  }
  __aicore__ inline void XorKey(int32_t x, uint32_t key) {
    AscendC::Duplicate(Word(kTemp + 2), int32_t(key), lanes_);
    AscendC::PipeBarrier<PIPE_V>();
    Xor(x, kTemp + 2);
  }

  // to = (x << left) >> right, without sign
  __aicore__ inline void Bits(int32_t to, int32_t x, uint32_t left, uint32_t right) {
    AscendC::ShiftLeft(Unsigned(to), Unsigned(x), left, lanes_);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::ShiftRight(Unsigned(to), Unsigned(to), right, lanes_);
    AscendC::PipeBarrier<PIPE_V>();
  }
  __aicore__ inline void Include(int32_t to, int32_t x) {  // to |= x
    AscendC::Or(Halves(to), Halves(to), Halves(x), 2 * lanes_);
    AscendC::PipeBarrier<PIPE_V>();
  }

  // blocks low, low + 1 = the two halves of x * m
  __aicore__ inline void Multiply(int32_t x, uint32_t m, int32_t low) {
    constexpr int32_t kBits = 11, kMask = (1 << kBits) - 1;
    const int32_t digit[3] = {int32_t(m & kMask), int32_t((m >> kBits) & kMask), int32_t(m >> (2 * kBits))};
    Bits(kDigit, x, 21, 21);
    Bits(kDigit + 1, x, 10, 21);
    Bits(kDigit + 2, x, 0, 22);
    for (int32_t i = 0; i < 5; ++i) {  // sum of digits that are i apart, with what the one before carries
      const LocalTensor<int32_t> sum = Word(kSum + i), term = Word(kTemp);
      bool fresh = true;
      for (int32_t j = i < 2 ? 0 : i - 2; j <= (i < 2 ? i : 2); ++j) {
        if (fresh) {
          AscendC::Muls(sum, Word(kDigit + j), digit[i - j], lanes_);
        } else {
          AscendC::Muls(term, Word(kDigit + j), digit[i - j], lanes_);
          AscendC::PipeBarrier<PIPE_V>();
          AscendC::Add(sum, sum, term, lanes_);
          AscendC::PipeBarrier<PIPE_V>();
        }
        fresh = false;
      }
      if (i == 0) continue;
      Bits(kTemp, kSum + i - 1, 0, kBits);
      AscendC::Add(sum, sum, term, lanes_);
      AscendC::PipeBarrier<PIPE_V>();
    }
    // bits 0 to 10, 11 to 21, 22 to 31 of the product
    Bits(low, kSum, 21, 21);
    Bits(kTemp, kSum + 1, 21, 10);
    Include(low, kTemp);
    Bits(kTemp, kSum + 2, 22, 0);
    Include(low, kTemp);
    // bit 32, then 33 to 43, 44 to 54, 55 to 63
    Bits(low + 1, kSum + 2, 21, 31);
    Bits(kTemp, kSum + 3, 21, 20);
    Include(low + 1, kTemp);
    Bits(kTemp, kSum + 4, 21, 9);
    Include(low + 1, kTemp);
    AscendC::ShiftRight(Unsigned(kTemp), Unsigned(kSum + 4), uint32_t(kBits), lanes_);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::ShiftLeft(Unsigned(kTemp), Unsigned(kTemp), uint32_t(23), lanes_);
    AscendC::PipeBarrier<PIPE_V>();
    Include(low + 1, kTemp);
  }

  // word k becomes a float that is >= 0 exactly where the word is >= threshold
  __aicore__ inline void Threshold(int32_t k, uint32_t threshold) {
    Bits(kTemp, kC + k, 0, 8);
    Bits(kTemp + 1, kC + k, 24, 24);
    const LocalTensor<float> high = Float(kC + k), low = Float(kTemp + 2);
    AscendC::Cast(high, Word(kTemp), AscendC::RoundMode::CAST_NONE, uint32_t(lanes_));
    AscendC::Cast(low, Word(kTemp + 1), AscendC::RoundMode::CAST_NONE, uint32_t(lanes_));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Adds(high, high, -float(threshold >> 8), lanes_);
    AscendC::Adds(low, low, -float(threshold & 255), lanes_);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Muls(high, high, 512.0f, lanes_);  // any difference up here outweighs the lower bits
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(high, high, low, lanes_);
    AscendC::PipeBarrier<PIPE_V>();
  }

  int32_t plane_ = 0, scratch_ = 0, block_bytes_ = 0, lanes_ = 0;
};

}  // namespace msf
