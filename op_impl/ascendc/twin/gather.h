// Gather by byte offsets, element by element or block by block, and the 16x16 Transpose.
#pragma once
#include "lanes.h"

namespace AscendC {

struct GatherRepeatParams {
  ms_twin::U8 dstBlkStride = 1;
  ms_twin::U16 dstRepStride = 8;
  GatherRepeatParams() = default;
  GatherRepeatParams(ms_twin::U8 block, ms_twin::U16 repeat) : dstBlkStride(block), dstRepStride(repeat) {}
};

}  // namespace AscendC

namespace ms_twin {

// Reads `n` offsets at `offsets`, checks them and gives the part of src that they reach.
template <class T>
bool OffsetHull(Instruction& in, const AscendC::LocalTensor<T>& src, const AscendC::LocalTensor<uint32_t>& offsets,
                const std::vector<int64_t>& which, int64_t base, int64_t bytes, int64_t align, Region* hull) {
  int64_t low = INT64_MAX, high = 0;
  for (int64_t i : which) {
    uint32_t offset;
    std::memcpy(&offset, offsets.Data() + i * 4, 4);
    if (!in.Require(!offsets.Undefined()[i * 4], Fault::uninitialised, "srcOffset %lld is a value that nobody wrote",
                    static_cast<long long>(i)))
      return false;
    if (!in.Require((offset + base) % align == 0, Fault::alignment, "srcOffset %u + srcBaseAddr is no multiple of %lld",
                    offset, static_cast<long long>(align)))
      return false;
    low = std::min<int64_t>(low, offset + base);
    high = std::max<int64_t>(high, offset + base + bytes);
  }
  *hull = which.empty() ? src.Bytes(0) : src.Bytes(high - low).At(low);
  return true;
}

template <class T>
void GatherLanes(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<T>& src,
                 const AscendC::LocalTensor<uint32_t>& offsets, int64_t base, const Mask& mask, int64_t repeat,
                 int64_t rep_stride, Site site) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Gather takes 16-bit and 32-bit types");
  Instruction in("Gather", PIPE_V, site);
  in.Field("dstRepStride", rep_stride, 0, 65535);
  in.Require(base >= 0 && base % int64_t(sizeof(T)) == 0, Fault::alignment,
             "srcBaseAddr is no multiple of the element");
  const Shape shape = MakeShape(in, mask, repeat, sizeof(T));
  if (!in.ok()) return;
  const std::array<Operand, 1> operands = {MakeOperand(dst, 1, rep_stride)};
  std::vector<int64_t> which;
  for (const LanePart& part : shape.parts)
    for (int64_t r = part.first; r < part.first + part.repeats; ++r)
      for (const auto& [begin, end] : part.runs)
        for (int64_t l = begin; l < end; ++l) which.push_back(r * shape.lanes + l);
  const Region table = offsets.Bytes(which.empty() ? 0 : (which.back() + 1) * 4);
  in.Align("srcOffset", table, kBlock);
  in.Align("src", src.Bytes(0), kBlock);
  in.CheckRegion(table);
  Region hull = src.Bytes(0);
  if (!in.ok()) return;
  if (Twin().options.effects && !OffsetHull(in, src, offsets, which, base, sizeof(T), sizeof(T), &hull)) return;
  in.Read(table);
  in.Read(hull);
  AddOperand(in, "dst", operands[0], shape, true);
  const auto pick = [&](const uint8_t* from, uint8_t* to_base) {
    size_t next = 0;
    ForEachSpan(shape, operands, [&](int64_t n, const std::array<int64_t, 1>& at) {
      for (int64_t x = 0; x < n; ++x) {
        uint32_t offset;
        std::memcpy(&offset, offsets.Data() + which[next++] * 4, 4);
        std::memcpy(to_base + at[0] + x * int64_t(sizeof(T)), from + offset + base, sizeof(T));
      }
    });
  };
  in.Issue(
      VectorCost(kRateGather, Repeats(shape)), [&] { pick(src.Data(), dst.Data()); },
      [&] { pick(src.Undefined(), dst.Undefined()); });
}

}  // namespace ms_twin

namespace AscendC {

template <class T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
            const ms_twin::U32 srcBaseAddr, const uint32_t count, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::GatherLanes(dst, src, srcOffset, srcBaseAddr, ms_twin::Mask::Count(count), 1, 8, site);
}
template <class T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
            const ms_twin::U32 srcBaseAddr, const uint64_t mask, const ms_twin::U8 repeat,
            const ms_twin::U16 dstRepStride, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::GatherLanes(dst, src, srcOffset, srcBaseAddr, ms_twin::Mask::Lanes(mask), repeat, dstRepStride, site);
}
template <class T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
            const ms_twin::U32 srcBaseAddr, const uint64_t mask[], const ms_twin::U8 repeat,
            const ms_twin::U16 dstRepStride, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::GatherLanes(dst, src, srcOffset, srcBaseAddr, ms_twin::Mask::Bits(mask), repeat, dstRepStride, site);
}

// 8 blocks of 32 bytes per repeat.
template <class T>
void Gatherb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& offset,
             const ms_twin::U8 repeat, const GatherRepeatParams& p, ms_twin::Site site = ms_twin::Site::Here()) {
  using namespace ms_twin;
  static_assert(std::is_same_v<T, uint16_t> || std::is_same_v<T, uint32_t>, "Gatherb takes uint16_t and uint32_t");
  Instruction in("Gatherb", PIPE_V, site);
  in.Field("repeatTime", repeat, 0, 255);
  in.Field("dstBlkStride", p.dstBlkStride, 0, 255);
  in.Field("dstRepStride", p.dstRepStride, 0, 65535);
  if (repeat == 0) return;
  const int64_t block = p.dstBlkStride == 0 ? 1 : p.dstBlkStride.value;
  const Region table = offset.Bytes(repeat * 32);
  const Region target = dst.Bytes(kBlock).Dim(repeat, p.dstRepStride * kBlock).Dim(8, block * kBlock);
  in.Align("offset", table, kBlock);
  in.Align("dst", target, kBlock);
  in.Align("src", src.Bytes(0), kBlock);
  in.CheckRegion(table);
  if (!in.ok()) return;
  std::vector<int64_t> which;
  for (int64_t i = 0; i < repeat * 8; ++i) which.push_back(i);
  Region hull = src.Bytes(0);
  if (Twin().options.effects && !OffsetHull(in, src, offset, which, 0, kBlock, kBlock, &hull)) return;
  in.Read(table);
  in.Read(hull);
  in.Write(target);
  const auto pick = [&](const uint8_t* from, uint8_t* to) {
    for (int64_t i = 0; i < repeat * 8; ++i) {
      uint32_t at;
      std::memcpy(&at, offset.Data() + i * 4, 4);
      std::memcpy(to + (i / 8 * p.dstRepStride + i % 8 * block) * kBlock, from + at, kBlock);
    }
  };
  in.Issue(
      VectorCost(kRateGather, static_cast<double>(repeat)), [&] { pick(src.Data(), dst.Data()); },
      [&] { pick(src.Undefined(), dst.Undefined()); });
}

// A square of 16 x 16 values.
template <class T>
void Transpose(const LocalTensor<T>& dst, const LocalTensor<T>& src, ms_twin::Site site = ms_twin::Site::Here()) {
  using namespace ms_twin;
  static_assert(sizeof(T) == 2, "Transpose takes 16-bit types");
  Instruction in("Transpose", PIPE_V, site);
  const Region source = src.Bytes(kFractal), target = dst.Bytes(kFractal);
  in.Require(src.GetHardware() == Hardware::UB && dst.GetHardware() == Hardware::UB, Fault::parameter,
             "operands must be in UB");
  in.Align("dst", target, kBlock);
  in.Align("src", source, kBlock);
  in.Read(source);
  in.Write(target);
  const auto turn = [](uint8_t* to, const uint8_t* from) {
    uint8_t square[kFractal];
    for (int r = 0; r < 16; ++r)
      for (int c = 0; c < 16; ++c) std::memcpy(square + (c * 16 + r) * 2, from + (r * 16 + c) * 2, 2);
    std::memcpy(to, square, kFractal);
  };
  in.Issue(
      VectorCost(kRateCopy, 2), [&] { turn(dst.Data(), src.Data()); }, [&] { turn(dst.Undefined(), src.Undefined()); });
}

}  // namespace AscendC
