// DataCopy, DataCopyPad, Nd2Nz: moves between GM, UB and L1, and atomic accumulation into GM.
#pragma once
#include "cost.h"
#include "params.h"
#include "tensor.h"
#include "types.h"

namespace ms_twin {

enum AtomicKind { kAtomicOff, kAtomicAdd, kAtomicMax, kAtomicMin };

// target[i] = op(target[i], source[i]) in T, element by element, over regions of the same shape.
template <class T>
void AccumulateBytes(const Region& target, const Region& source, int kind) {
  uint8_t *to = target.memory->data, *to_flags = target.memory->undefined;
  const uint8_t *from = source.memory->data, *from_flags = source.memory->undefined;
  for (int64_t i = 0; i < target.count[0]; ++i)
    for (int64_t j = 0; j < target.count[1]; ++j)
      for (int64_t k = 0; k < target.count[2]; ++k) {
        const int64_t t = target.offset + i * target.stride[0] + j * target.stride[1] + k * target.stride[2];
        const int64_t s = source.offset + i * source.stride[0] + j * source.stride[1] + k * source.stride[2];
        for (int64_t b = 0; b < target.run; b += sizeof(T)) {
          T x, y;
          std::memcpy(&x, to + t + b, sizeof(T));
          std::memcpy(&y, from + s + b, sizeof(T));
          if (kind == kAtomicAdd)
            x = T(x + y);
          else if (kind == kAtomicMax)
            x = x < y ? y : x;
          else
            x = y < x ? y : x;
          std::memcpy(to + t + b, &x, sizeof(T));
        }
        if (to_flags && from_flags)
          for (int64_t b = 0; b < target.run; ++b) to_flags[t + b] |= from_flags[s + b];
      }
}

template <class T>
void RequireAtomicType(Instruction& in) {
  in.Require(!std::strcmp(Current().atomic_type, TypeName<T>()), Fault::atomic, "atomic mode is set for %s, not for %s",
             Current().atomic_type, TypeName<T>());
}

// Issues the move of `source` to `target` (same shape); into GM it may accumulate.
template <class T>
void IssueMove(Instruction& in, const Cost& cost, const Region& target, const Region& source) {
  const int atomic = target.memory && target.memory->hardware == AscendC::Hardware::GM ? Current().atomic : kAtomicOff;
  in.Read(source);
  if (!atomic) {
    in.Write(target);
    in.Issue(cost, [&] { MoveBytes(target, source, true); }, Instruction::Moves{});
    return;
  }
  RequireAtomicType<T>(in);
  in.Accumulate(target);
  in.Issue(cost, [&] { AccumulateBytes<T>(target, source, atomic); }, Instruction::Moves{});
}

struct Path {
  const char* name;
  pipe_t pipe;
  const PathRate* rate;
};

inline Path LoadPath(AscendC::Hardware target) {
  if (target == AscendC::Hardware::UB) return {"DataCopy GM->UB", PIPE_MTE2, &kGmToUb};
  if (target == AscendC::Hardware::L1) return {"DataCopy GM->L1", PIPE_MTE2, &kGmToL1};
  return {"DataCopy GM->?", PIPE_MTE2, nullptr};
}
inline Path StorePath(AscendC::Hardware source) {
  if (source == AscendC::Hardware::UB) return {"DataCopy UB->GM", PIPE_MTE3, &kUbToGm};
  if (source == AscendC::Hardware::L1) return {"DataCopy L1->GM", PIPE_MTE3, &kL1ToGm};
  return {"DataCopy ?->GM", PIPE_MTE3, nullptr};
}
inline Path LocalPath(AscendC::Hardware target, AscendC::Hardware source) {
  using AscendC::Hardware;
  if (source == Hardware::UB && target == Hardware::UB) return {"DataCopy UB->UB", PIPE_V, &kUbToUb};
  if (source == Hardware::L1 && target == Hardware::BIAS) return {"DataCopy L1->BT", PIPE_MTE1, &kL1ToBias};
  if (source == Hardware::L1 && target == Hardware::FIXBUF) return {"DataCopy L1->FB", PIPE_FIX, &kL1ToBias};
  return {"DataCopy", PIPE_V, nullptr};
}

inline int64_t LocalAlign(const Region& region, int64_t element) {
  if (!region.memory) return 1;
  switch (region.memory->hardware) {
    case AscendC::Hardware::GM:
      return element;
    case AscendC::Hardware::BIAS:
    case AscendC::Hardware::FIXBUF:
      return 64;
    default:
      return kBlock;
  }
}

// Burst copies in units of 32 bytes.
template <class T>
void BurstCopy(const Path& path, Region target, Region source, const AscendC::DataCopyParams& p, Site site) {
  Instruction in(path.name, path.pipe, site);
  if (!in.Require(path.rate != nullptr, Fault::parameter, "there is no such path between these memories")) return;
  in.Field("blockCount", p.blockCount, 0, 4095);
  in.Field("blockLen", p.blockLen, 0, 65535);
  in.Field("srcGap", p.srcGap, 0, 65535);
  in.Field("dstGap", p.dstGap, 0, 65535);
  const int64_t run = p.blockLen * kBlock;
  if (p.blockCount == 0 || run == 0) return;
  source.Run(run).Dim(p.blockCount, run + p.srcGap * kBlock);
  target.Run(run).Dim(p.blockCount, run + p.dstGap * kBlock);
  in.Align("dst", target, LocalAlign(target, sizeof(T)));
  in.Align("src", source, LocalAlign(source, sizeof(T)));
  IssueMove<T>(in, PathCost(*path.rate, static_cast<double>(target.Bytes())), target, source);
}

template <class T>
void CountCopy(const Path& path, Region target, Region source, int64_t count, Site site) {
  Instruction in(path.name, path.pipe, site);
  if (!in.Require(path.rate != nullptr, Fault::parameter, "there is no such path between these memories")) return;
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  in.Require(bytes % kBlock == 0, Fault::alignment, "count = %lld is no multiple of 32 bytes",
             static_cast<long long>(count));
  in.Align("dst", target, LocalAlign(target, sizeof(T)));
  in.Align("src", source, LocalAlign(source, sizeof(T)));
  if (bytes == 0) return;
  IssueMove<T>(in, PathCost(*path.rate, static_cast<double>(bytes)), target.Run(bytes), source.Run(bytes));
}

}  // namespace ms_twin

namespace AscendC {

template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count,
              ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CountCopy<T>(ms_twin::LoadPath(dst.GetHardware()), dst.Bytes(0), src.Bytes(0), count, site);
}
template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count,
              ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CountCopy<T>(ms_twin::StorePath(src.GetHardware()), dst.Bytes(0), src.Bytes(0), count, site);
}
template <class T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count,
              ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CountCopy<T>(ms_twin::LocalPath(dst.GetHardware(), src.GetHardware()), dst.Bytes(0), src.Bytes(0), count,
                        site);
}
template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params,
              ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::BurstCopy<T>(ms_twin::LoadPath(dst.GetHardware()), dst.Bytes(0), src.Bytes(0), params, site);
}
template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
              ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::BurstCopy<T>(ms_twin::StorePath(src.GetHardware()), dst.Bytes(0), src.Bytes(0), params, site);
}
template <class T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
              ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::BurstCopy<T>(ms_twin::LocalPath(dst.GetHardware(), src.GetHardware()), dst.Bytes(0), src.Bytes(0), params,
                        site);
}

// GM, row major -> L1, NZ: columns in strips of 32 bytes, each strip row after row. A last strip that is not full is
// filled with zeros.
template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const Nd2NzParams& p,
              ms_twin::Site site = ms_twin::Site::Here()) {
  using namespace ms_twin;
  Instruction in("DataCopy GM->L1, ND to NZ", PIPE_MTE2, site);
  in.Require(dst.GetHardware() == Hardware::L1, Fault::parameter, "dst is in %s, not in L1",
             HardwareName(dst.GetHardware()));
  in.Field("ndNum", p.ndNum, 0, 4095);
  in.Field("nValue", p.nValue, 0, 16384);
  in.Field("dValue", p.dValue, 0, 65535);
  if (p.ndNum == 0 || p.nValue == 0 || p.dValue == 0) return;
  in.Field("srcDValue", p.srcDValue, 1, 65535);
  in.Field("srcNdMatrixStride", p.srcNdMatrixStride, 0, 65535);
  in.Field("dstNzC0Stride", p.dstNzC0Stride, 1, 16384);
  in.Field("dstNzNStride", p.dstNzNStride, 1, 16384);
  in.Field("dstNzMatrixStride", p.dstNzMatrixStride, 0, 16384);
  constexpr int64_t kSize = sizeof(T);
  const int64_t row = p.dValue * kSize, strips = (row + kBlock - 1) / kBlock, full = row / kBlock;
  const int64_t nd_step = p.ndNum > 1 ? p.srcNdMatrixStride * kSize : 0;
  const int64_t nz_step = p.ndNum > 1 ? p.dstNzMatrixStride * kSize : 0;
  const Region target = dst.Bytes(kBlock)
                            .Dim(p.ndNum, nz_step)
                            .Dim(strips, p.dstNzC0Stride * kBlock)
                            .Dim(p.nValue, p.dstNzNStride * kBlock);
  in.Align("dst", target, kBlock);
  if (nz_step % kBlock) in.Fail(Fault::alignment, "dstNzMatrixStride is no multiple of 32 bytes");
  in.Read(src.Bytes(row).Dim(p.ndNum, nd_step).Dim(p.nValue, p.srcDValue * kSize));
  in.Write(target);
  in.Issue(
      PathCost(kNd2Nz, static_cast<double>(p.ndNum * p.nValue * row)),
      [&] {
        Region to = target, from = src.Bytes(kBlock);
        from.Dim(p.ndNum, nd_step).Dim(full, kBlock).Dim(p.nValue, p.srcDValue * kSize);
        to.count[1] = full;
        MoveBytes(to, from, true);
        if (full == strips) return;
        to.count[1] = 1;
        to.offset += full * to.stride[1];
        const int64_t tail = row - full * kBlock;
        Region zero = to;
        zero.offset += tail;
        zero.run = kBlock - tail;
        zero.ForEachRun([&](int64_t offset, int64_t bytes) { std::memset(zero.memory->data + offset, 0, bytes); });
        MarkUndefined(zero, false);
        to.run = tail;
        from = src.Bytes(tail).At(full * kBlock).Dim(p.ndNum, nd_step).Dim(1, 0).Dim(p.nValue, p.srcDValue * kSize);
        MoveBytes(to, from, true);
      },
      Instruction::Moves{});
}

// GM -> UB, any number of bytes: every burst starts on 32 bytes in UB and is filled up to 32 bytes. Without isPad, and
// where no padding was asked for, the filling is unspecified and must not be used.
template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p,
                 const DataCopyPadExtParams<T>& pad, ms_twin::Site site = ms_twin::Site::Here()) {
  using namespace ms_twin;
  const bool to_l1 = dst.GetHardware() == Hardware::L1;
  Instruction in(to_l1 ? "DataCopyPad GM->L1" : "DataCopyPad GM->UB", PIPE_MTE2, site);
  in.Require(to_l1 || dst.GetHardware() == Hardware::UB, Fault::parameter, "dst is in %s, not in UB or L1",
             HardwareName(dst.GetHardware()));
  constexpr int64_t kSize = sizeof(T);
  in.Field("blockCount", p.blockCount, 0, 4095);
  in.Field("blockLen", p.blockLen, 0, 2097151);
  in.Field("srcStride", p.srcStride, 0, 0xffffffffll);
  in.Field("dstStride", p.dstStride, 0, 0xffffffffll);
  in.Require(p.blockLen % kSize == 0, Fault::parameter, "blockLen = %lld is no multiple of the element",
             static_cast<long long>(p.blockLen));
  const int64_t left = pad.leftPadding * kSize, right = pad.rightPadding * kSize;
  in.Require(left >= 0 && left <= kBlock, Fault::parameter, "leftPadding = %lld elements is more than 32 bytes",
             static_cast<long long>(pad.leftPadding));
  in.Require(right >= 0 && right <= kBlock, Fault::parameter, "rightPadding = %lld elements is more than 32 bytes",
             static_cast<long long>(pad.rightPadding));
  if (p.blockCount == 0 || p.blockLen == 0) return;
  const int64_t used = left + p.blockLen + right, burst = (used + kBlock - 1) / kBlock * kBlock;
  const Region source = src.Bytes(p.blockLen).Dim(p.blockCount, p.blockLen + p.srcStride);
  const Region target = dst.Bytes(burst).Dim(p.blockCount, burst + p.dstStride * kBlock);
  in.Align("dst", target, kBlock);
  in.Read(source);
  in.Write(target);
  in.Issue(
      PathCost(to_l1 ? kGmToL1 : kGmToUb, static_cast<double>(source.Bytes())),
      [&] {
        Region body = target, before = target, after = target;
        body.run = p.blockLen;
        body.offset += left;
        before.run = left;
        after.offset += left + p.blockLen;
        after.run = burst - left - p.blockLen;
        const bool known = pad.isPad && (left || right);
        for (const Region* filling : {&before, &after}) {
          filling->ForEachRun([&](int64_t offset, int64_t bytes) {
            for (int64_t b = 0; b + kSize <= bytes; b += kSize)
              std::memcpy(filling->memory->data + offset + b, &pad.paddingValue, kSize);
            if (!known) std::memset(filling->memory->data + offset, 0x7f, bytes);
          });
          MarkUndefined(*filling, !known);
        }
        MoveBytes(body, source, true);
      },
      Instruction::Moves{});
}

template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p,
                 ms_twin::Site site = ms_twin::Site::Here()) {
  using namespace ms_twin;
  const bool from_l1 = src.GetHardware() == Hardware::L1;
  Instruction in(from_l1 ? "DataCopyPad L1->GM" : "DataCopyPad UB->GM", PIPE_MTE3, site);
  in.Require(from_l1 || src.GetHardware() == Hardware::UB, Fault::parameter, "src is in %s, not in UB or L1",
             HardwareName(src.GetHardware()));
  in.Field("blockCount", p.blockCount, 0, 4095);
  in.Field("blockLen", p.blockLen, 0, 2097151);
  in.Field("srcStride", p.srcStride, 0, 0xffffffffll);
  in.Field("dstStride", p.dstStride, 0, 0xffffffffll);
  in.Require(p.blockLen % static_cast<int64_t>(sizeof(T)) == 0, Fault::parameter,
             "blockLen = %lld is no multiple of the element", static_cast<long long>(p.blockLen));
  if (p.blockCount == 0 || p.blockLen == 0) return;
  const int64_t burst = (p.blockLen + kBlock - 1) / kBlock * kBlock;
  const Region source = src.Bytes(p.blockLen).Dim(p.blockCount, burst + p.srcStride * kBlock);
  const Region target = dst.Bytes(p.blockLen).Dim(p.blockCount, p.blockLen + p.dstStride);
  in.Align("src", source, kBlock);
  IssueMove<T>(in, PathCost(from_l1 ? kL1ToGm : kUbToGm, static_cast<double>(source.Bytes())), target, source);
}

template <class T>
void SetAtomicAdd(ms_twin::Site site = ms_twin::Site::Here()) {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat16_t> ||
                    std::is_same_v<T, int32_t> || std::is_same_v<T, int16_t> || std::is_same_v<T, int8_t>,
                "the hardware has no atomic add of this type");
  ms_twin::Current().atomic = ms_twin::kAtomicAdd;
  ms_twin::Current().atomic_type = ms_twin::TypeName<T>();
  ms_twin::Current().atomic_site = site;
}
template <class T>
void SetAtomicMax(ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::Current().atomic = ms_twin::kAtomicMax;
  ms_twin::Current().atomic_type = ms_twin::TypeName<T>();
  ms_twin::Current().atomic_site = site;
}
template <class T>
void SetAtomicMin(ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::Current().atomic = ms_twin::kAtomicMin;
  ms_twin::Current().atomic_type = ms_twin::TypeName<T>();
  ms_twin::Current().atomic_site = site;
}
inline void SetAtomicNone() { ms_twin::Current().atomic = ms_twin::kAtomicOff; }
inline void DisableDmaAtomic() { SetAtomicNone(); }

}  // namespace AscendC
