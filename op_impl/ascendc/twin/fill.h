// Instructions that spread or move values: Duplicate, Brcb, Copy, CreateVecIndex.
#pragma once
#include "lanes.h"

namespace ms_twin {

template <class T, class F>
void Fill(const char* name, const AscendC::LocalTensor<T>& dst, const Mask& mask, int64_t repeat, int64_t block,
          int64_t rep, Site site, F&& value) {
  Instruction in(name, PIPE_V, site);
  in.Field("dstBlockStride", block, 1, 65535);
  in.Field("dstRepeatStride", rep, 0, 255);
  const Shape shape = MakeShape(in, mask, repeat, sizeof(T));
  if (!in.ok()) return;
  const std::array<Operand, 1> operands = {MakeOperand(dst, block, rep)};
  int64_t element = 0;
  IssueLanes<T>(in, kRateDuplicate, shape, operands, [&](int64_t n, uint8_t* out, const std::array<int64_t, 1>&) {
    for (int64_t i = 0; i < n; ++i) {
      const T x = value(element++);
      std::memcpy(out + i * int64_t(sizeof(T)), &x, sizeof(T));
    }
  });
}

}  // namespace ms_twin

namespace AscendC {

template <class T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const std::common_type_t<T>& value, int32_t count,
               ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::Fill("Duplicate", dst,
                isSetMask ? ms_twin::Mask::Count(static_cast<uint64_t>(int64_t(count))) : ms_twin::Mask::Register(), 1,
                1, 8, site, [&](int64_t) { return value; });
}
template <class T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const std::common_type_t<T>& value, uint64_t mask, const ms_twin::U8 repeat,
               const ms_twin::U16 dstBlockStride, const ms_twin::U8 dstRepeatStride,
               ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::Fill("Duplicate", dst, isSetMask ? ms_twin::Mask::Lanes(mask) : ms_twin::Mask::Register(), repeat,
                dstBlockStride, dstRepeatStride, site, [&](int64_t) { return value; });
}
template <class T, bool isSetMask = true>
void Duplicate(const LocalTensor<T>& dst, const std::common_type_t<T>& value, const uint64_t mask[],
               const ms_twin::U8 repeat, const ms_twin::U16 dstBlockStride, const ms_twin::U8 dstRepeatStride,
               ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::Fill("Duplicate", dst, isSetMask ? ms_twin::Mask::Bits(mask) : ms_twin::Mask::Register(), repeat,
                dstBlockStride, dstRepeatStride, site, [&](int64_t) { return value; });
}

// first, first + 1, ...
template <class T>
void CreateVecIndex(const LocalTensor<T>& dst, const std::common_type_t<T>& first, uint32_t count,
                    ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::Fill("CreateVecIndex", dst, ms_twin::Mask::Count(count), 1, 1, 8, site, [&](int64_t i) {
    if constexpr (ms_twin::kIsFloating<T>)
      return T(float(first) + float(i));
    else
      return static_cast<T>(first + i);
  });
}

// Each of 8 elements fills a block of 32 bytes.
template <class T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, const ms_twin::U8 repeat, const BrcbRepeatParams& p,
          ms_twin::Site site = ms_twin::Site::Here()) {
  using namespace ms_twin;
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Brcb takes 16-bit and 32-bit types");
  Instruction in("Brcb", PIPE_V, site);
  in.Field("repeatTimes", repeat, 0, 255);
  in.Field("dstBlkStride", p.dstBlkStride, 1, 65535);
  in.Field("dstRepStride", p.dstRepStride, 0, 65535);
  in.Require(src.GetHardware() == Hardware::UB && dst.GetHardware() == Hardware::UB, Fault::parameter,
             "operands must be in UB");
  if (repeat == 0) return;
  const int64_t block = p.dstBlkStride;
  const int64_t size = sizeof(T);
  const Region from = src.Bytes(8 * size * repeat);
  const Region to = dst.Bytes(kBlock).Dim(repeat, p.dstRepStride * kBlock).Dim(8, block * kBlock);
  in.Align("dst", to, kBlock);
  in.Align("src", from, kBlock);
  in.Read(from);
  in.Write(to);
  const auto spread = [&](uint8_t* out, const uint8_t* values) {
    for (int64_t r = 0; r < repeat; ++r)
      for (int64_t i = 0; i < 8; ++i)
        for (int64_t x = 0; x < kBlock; x += size)
          std::memcpy(out + (r * p.dstRepStride + i * block) * kBlock + x, values + (r * 8 + i) * size, size);
  };
  in.Issue(
      VectorCost(kRateBrcb, static_cast<double>(repeat)), [&] { spread(dst.Data(), src.Data()); },
      [&] { spread(dst.Undefined(), src.Undefined()); });
}

namespace {
template <class T>
void CopyLanes(const LocalTensor<T>& dst, const LocalTensor<T>& src, const ms_twin::Mask& mask, int64_t repeat,
               const CopyRepeatParams& p, ms_twin::Site site) {
  using namespace ms_twin;
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Copy takes 16-bit and 32-bit types");
  Instruction in("Copy", PIPE_V, site);
  in.Field("dstStride", p.dstStride, 1, 65535);
  in.Field("srcStride", p.srcStride, 0, 65535);
  in.Field("dstRepeatSize", p.dstRepeatSize, 0, 4095);
  in.Field("srcRepeatSize", p.srcRepeatSize, 0, 4095);
  const Shape shape = MakeShape(in, mask, repeat, sizeof(T));
  if (!in.ok()) return;
  const std::array<Operand, 2> operands = {MakeOperand(dst, p.dstStride, p.dstRepeatSize),
                                           MakeOperand(src, p.srcStride, p.srcRepeatSize)};
  IssueLanes<T, T>(in, kRateCopy, shape, operands, [&](int64_t n, uint8_t* out, const std::array<int64_t, 2>& at) {
    std::memmove(out, DataOf(operands[1], at[1]), static_cast<size_t>(n) * sizeof(T));
  });
}
}  // namespace

template <class T, bool isSetMask = true>
void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask, const ms_twin::U8 repeat,
          const CopyRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {
  CopyLanes(dst, src, isSetMask ? ms_twin::Mask::Lanes(mask) : ms_twin::Mask::Register(), repeat, params, site);
}
template <class T, bool isSetMask = true>
void Copy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[], const ms_twin::U8 repeat,
          const CopyRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {
  CopyLanes(dst, src, isSetMask ? ms_twin::Mask::Bits(mask) : ms_twin::Mask::Register(), repeat, params, site);
}

}  // namespace AscendC
