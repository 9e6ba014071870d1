// Compare and Select: one bit per element, little end first.
#pragma once
#include "vector.h"

namespace ms_twin {

using AscendC::CMPMODE;
using AscendC::SELMODE;

// Select with a tensor of bits uses the last 8 KB of UB as scratch.
constexpr int64_t kSelectScratch = 8 << 10;

template <class T>
bool Compared(T a, T b, CMPMODE mode) {
  switch (mode) {
    case CMPMODE::LT:
      return a < b;
    case CMPMODE::GT:
      return a > b;
    case CMPMODE::EQ:
      return a == b;
    case CMPMODE::LE:
      return a <= b;
    case CMPMODE::GE:
      return a >= b;
    default:
      return a != b;
  }
}

// Bits of all lanes of whole repeats, written one after the other. The mask is ignored on this hardware.
template <class U, class T, size_t N, class F>
void CompareLanes(const char* name, const VectorRate& rate, const AscendC::LocalTensor<U>& dst, int64_t repeats,
                  const std::array<Operand, N>& sources, CMPMODE mode, Site site, F&& value) {
  static_assert(sizeof(U) == 1, "the result of a comparison is uint8_t or int8_t");
  static_assert(kOneOf<T, half, float, int32_t>, "comparisons take half, float and int32_t");
  Instruction in(name, PIPE_V, site);
  in.Require(!std::is_same_v<T, int32_t> || mode == CMPMODE::EQ, Fault::parameter, "int32_t compares with EQ only");
  const int64_t lanes = kRepeat / int64_t(sizeof(T));
  const Shape shape = CountShape(repeats * lanes, lanes);
  for (const Operand& source : sources) AddOperand(in, "src", source, shape, false);
  const Region target = dst.Bytes(repeats * lanes / 8);
  in.Align("dst", target, kBlock);
  in.Require(!target.memory || dst.GetHardware() == AscendC::Hardware::UB, Fault::parameter, "dst is not in UB");
  in.Write(target);
  const auto each = [&](auto&& f) {  // f(element, offsets)
    for (int64_t r = 0; r < repeats; ++r)
      for (int64_t l = 0; l < lanes; ++l) {
        std::array<int64_t, N> at;
        for (size_t i = 0; i < N; ++i) at[i] = sources[i].Offset(r, l);
        f(r * lanes + l, at);
      }
  };
  in.Issue(
      VectorCost(rate, static_cast<double>(repeats)),
      [&] {
        std::vector<uint8_t> bits(static_cast<size_t>(target.run));
        each([&](int64_t element, const std::array<int64_t, N>& at) {
          bits[element / 8] |= static_cast<uint8_t>(value(at) << (element % 8));
        });
        if (!bits.empty()) std::memcpy(dst.Data(), bits.data(), bits.size());
      },
      [&] {
        MarkUndefined(target, false);
        each([&](int64_t element, const std::array<int64_t, N>& at) {
          for (size_t i = 0; i < N; ++i)
            for (size_t b = 0; b < sizeof(T); ++b) dst.Undefined()[element / 8] |= FlagsOf(sources[i], at[i])[b];
        });
      });
}

template <class T>
T ValueAt(const Operand& o, int64_t at) {
  T x;
  std::memcpy(&x, DataOf(o, at), sizeof(T));
  return x;
}

template <class U, class T>
void CompareTensors(const AscendC::LocalTensor<U>& dst, const AscendC::LocalTensor<T>& a,
                    const AscendC::LocalTensor<T>& b, CMPMODE mode, int64_t repeats,
                    const AscendC::BinaryRepeatParams& p, Site site) {
  const std::array<Operand, 2> sources = {MakeOperand(a, p.src0BlkStride, p.src0RepStride),
                                          MakeOperand(b, p.src1BlkStride, p.src1RepStride)};
  CompareLanes<U, T>("Compare", kRateCompare, dst, repeats, sources, mode, site, [&](const std::array<int64_t, 2>& at) {
    return Compared(ValueAt<T>(sources[0], at[0]), ValueAt<T>(sources[1], at[1]), mode);
  });
}
template <class U, class T>
void CompareWithScalar(const AscendC::LocalTensor<U>& dst, const AscendC::LocalTensor<T>& a, T scalar, CMPMODE mode,
                       int64_t repeats, const AscendC::UnaryRepeatParams& p, Site site) {
  const std::array<Operand, 1> sources = {MakeOperand(a, p.srcBlkStride, p.srcRepStride)};
  CompareLanes<U, T>(
      "CompareScalar", kRateCompareScalar, dst, repeats, sources, mode, site,
      [&](const std::array<int64_t, 1>& at) { return Compared(ValueAt<T>(sources[0], at[0]), scalar, mode); });
}

// The count of a comparison must fill whole repeats.
template <class T>
bool WholeRepeats(const char* name, uint32_t count, Site site) {
  Instruction in(name, PIPE_V, site);
  return in.Require(count * sizeof(T) % kRepeat == 0, Fault::alignment, "count = %u is no multiple of 256 bytes",
                    count);
}

// dst = bit ? src0 : (src1 or scalar). Mode 0 takes the same leading bits for every repeat, from `bits`, or, without
// it, from the comparison register.
template <class T, class U>
void SelectLanes(const AscendC::LocalTensor<T>& dst, const AscendC::LocalTensor<U>* bits,
                 const AscendC::LocalTensor<T>& src0, const AscendC::LocalTensor<T>* src1, T scalar, SELMODE mode,
                 const Mask& mask, int64_t repeat, const AscendC::BinaryRepeatParams& p, Site site) {
  static_assert(kFloats<T>, "Select takes half and float");
  Instruction in("Select", PIPE_V, site);
  CheckBinary(in, p);
  in.Require((mode == SELMODE::VSEL_TENSOR_SCALAR_MODE) == (src1 == nullptr), Fault::parameter,
             "mode 1 takes a scalar, modes 0 and 2 a tensor");
  const Shape shape = MakeShape(in, mask, repeat, sizeof(T));
  if (!in.ok() || shape.parts.empty()) return;
  const Operand out = MakeOperand(dst, p.dstBlkStride, p.dstRepStride);
  Operand a = MakeOperand(src0, p.src0BlkStride, p.src0RepStride);
  Operand b = src1 ? MakeOperand(*src1, p.src1BlkStride, p.src1RepStride) : a;
  for (Operand* source : {&a, &b}) source->base.in_place = SamePlace(*source, out) && source->repeat == out.repeat;
  const bool same_bits = mode == SELMODE::VSEL_CMPMASK_SPR;
  AddOperand(in, "src0", a, shape, false);
  if (src1) AddOperand(in, "src1", b, shape, false);
  AddOperand(in, "dst", out, shape, true);
  if (bits) {
    const Region choice = bits->Bytes(same_bits ? shape.lanes / 8 : shape.repeats * shape.lanes / 8);
    in.Align("selMask", choice, kBlock);
    in.Read(choice);
  }
  Region scratch;
  if (!same_bits) {
    scratch = dst.Bytes(kSelectScratch);
    scratch.begin = scratch.offset = static_cast<int64_t>(scratch.memory->bytes) - kSelectScratch;
    scratch.end = static_cast<int64_t>(scratch.memory->bytes);
    scratch.trusts_pipe_order = true;
    in.Write(scratch);
  }
  const std::array<Operand, 3> operands = {out, a, b};
  // Lane numbers in the order ForEachSpan visits them.
  std::vector<int64_t> element;
  element.reserve(static_cast<size_t>(shape.elements));
  for (const LanePart& part : shape.parts)
    for (int64_t r = part.first; r < part.first + part.repeats; ++r)
      for (const auto& [begin, end] : part.runs)
        for (int64_t l = begin; l < end; ++l) element.push_back((same_bits ? 0 : r * shape.lanes) + l);
  const auto* mask_bytes = bits ? bits->Data() : reinterpret_cast<const uint8_t*>(Current().compare_mask);
  const auto bit = [&](int64_t i) { return mask_bytes[i / 8] >> (i % 8) & 1; };
  in.Issue(
      VectorCost(kRateSelect, Repeats(shape)),
      [&] {
        int64_t next = 0;
        ForEachSpan(shape, operands, [&](int64_t n, const std::array<int64_t, 3>& at) {
          for (int64_t x = 0; x < n; ++x) {
            const int64_t step = x * int64_t(sizeof(T));
            const T value = bit(element[next++]) ? ValueAt<T>(a, at[1] + step)
                            : src1               ? ValueAt<T>(b, at[2] + step)
                                                 : scalar;
            std::memcpy(DataOf(out, at[0] + step), &value, sizeof(T));
          }
        });
        if (!same_bits) {
          std::memset(scratch.memory->data + scratch.offset, 0x7f, static_cast<size_t>(scratch.run));
          MarkUndefined(scratch, true);
        }
      },
      [&] {
        int64_t next = 0;
        ForEachSpan(shape, operands, [&](int64_t n, const std::array<int64_t, 3>& at) {
          for (int64_t x = 0; x < n; ++x, ++next) {
            const int64_t step = x * int64_t(sizeof(T));
            uint8_t undefined = bits ? bits->Undefined()[element[next] / 8] : 0;
            const bool first = bit(element[next]);
            if (first || src1)
              for (size_t i = 0; i < sizeof(T); ++i)
                undefined |= FlagsOf(first ? a : b, (first ? at[1] : at[2]) + step)[i];
            std::memset(FlagsOf(out, at[0] + step), undefined, sizeof(T));
          }
        });
      });
}

// One repeat, compared into the register that Select's mode 0 reads. Lanes that the mask leaves out give 0.
template <class T>
void CompareToRegister(const AscendC::LocalTensor<T>& src0, const AscendC::LocalTensor<T>& src1, CMPMODE mode,
                       const Mask& mask, const AscendC::BinaryRepeatParams& p, Site site) {
  static_assert(kFloats<T>, "a comparison into the register takes half and float");
  Instruction in("Compare", PIPE_V, site);
  CheckBinary(in, p);
  const Shape shape = MakeShape(in, mask, 1, sizeof(T));
  if (!in.ok()) return;
  const std::array<Operand, 2> sources = {MakeOperand(src0, p.src0BlkStride, p.src0RepStride),
                                          MakeOperand(src1, p.src1BlkStride, p.src1RepStride)};
  for (const Operand& source : sources) AddOperand(in, "src", source, shape, false);
  Core& core = Current();
  in.Issue(
      VectorCost(kRateCompare, 1),
      [&] {
        core.compare_mask[0] = core.compare_mask[1] = 0;
        for (const LanePart& part : shape.parts)
          for (const auto& [begin, end] : part.runs)
            for (int64_t l = begin; l < end; ++l)
              if (Compared(ValueAt<T>(sources[0], sources[0].Offset(0, l)),
                           ValueAt<T>(sources[1], sources[1].Offset(0, l)), mode))
                core.compare_mask[l / 64] |= 1ull << (l % 64);
      },
      [&] { in.Fail(Fault::uninitialised, "compares a value that nobody wrote"); });
}

// The 16 bytes of the comparison register to or from UB.
inline void MoveCompareMask(const char* name, Region region, bool store, Site site) {
  Instruction in(name, PIPE_V, site);
  region.Run(16);
  in.Align(store ? "dst" : "src", region, store ? kBlock : 16);
  store ? in.Write(region) : in.Read(region);
  Core& core = Current();
  in.Issue(
      VectorCost(kRateCopy, 1),
      [&] {
        uint8_t* bytes = region.memory->data + region.offset;
        store ? std::memcpy(bytes, core.compare_mask, 16) : std::memcpy(core.compare_mask, bytes, 16);
      },
      [&] { in.Fail(Fault::uninitialised, "takes a mask that nobody wrote"); });
}

}  // namespace ms_twin

namespace AscendC {

template <class T, class U>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE mode,
             uint32_t count, ms_twin::Site site = ms_twin::Site::Here()) {
  if (!ms_twin::WholeRepeats<T>("Compare", count, site)) return;
  ms_twin::CompareTensors(dst, src0, src1, mode, count * sizeof(T) / ms_twin::kRepeat, {}, site);
}
template <class T, class U, bool isSetMask = true>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE mode,
             const uint64_t, const ms_twin::U8 repeat, const BinaryRepeatParams& params,
             ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CompareTensors(dst, src0, src1, mode, repeat, params, site);
}
template <class T, class U, bool isSetMask = true>
void Compare(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE mode,
             const uint64_t[], const ms_twin::U8 repeat, const BinaryRepeatParams& params,
             ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CompareTensors(dst, src0, src1, mode, repeat, params, site);
}

#define MS_TWIN_COMPARE_SCALAR(Name)                                                                                 \
  template <class T, class U>                                                                                        \
  void Name(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const std::common_type_t<T> scalar, CMPMODE mode, \
            uint32_t count, ms_twin::Site site = ms_twin::Site::Here()) {                                            \
    if (!ms_twin::WholeRepeats<T>(#Name, count, site)) return;                                                       \
    ms_twin::CompareWithScalar(dst, src0, scalar, mode, count * sizeof(T) / ms_twin::kRepeat, {}, site);             \
  }                                                                                                                  \
  template <class T, class U, bool isSetMask = true, class M>                                                        \
  void Name(const LocalTensor<U>& dst, const LocalTensor<T>& src0, const std::common_type_t<T> scalar, CMPMODE mode, \
            const M, const ms_twin::U8 repeat, const UnaryRepeatParams& params,                                      \
            ms_twin::Site site = ms_twin::Site::Here()) {                                                            \
    ms_twin::CompareWithScalar(dst, src0, scalar, mode, repeat, params, site);                                       \
  }
MS_TWIN_COMPARE_SCALAR(CompareScalar)
MS_TWIN_COMPARE_SCALAR(Compares)
#undef MS_TWIN_COMPARE_SCALAR

template <class T, class U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE mode, uint32_t count, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::SelectLanes<T, U>(dst, &selMask, src0, &src1, T(0), mode, ms_twin::Mask::Count(count), 1, {}, site);
}
template <class T, class U>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            std::common_type_t<T> src1, SELMODE mode, uint32_t count, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::SelectLanes<T, U>(dst, &selMask, src0, nullptr, src1, mode, ms_twin::Mask::Count(count), 1, {}, site);
}
template <class T, class U, bool isSetMask = true>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE mode, uint64_t mask, const ms_twin::U8 repeat,
            const BinaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::SelectLanes<T, U>(dst, &selMask, src0, &src1, T(0), mode, ms_twin::Mask::Lanes(mask), repeat, params, site);
}
template <class T, class U, bool isSetMask = true>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE mode, const uint64_t mask[], const ms_twin::U8 repeat,
            const BinaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::SelectLanes<T, U>(dst, &selMask, src0, &src1, T(0), mode, ms_twin::Mask::Bits(mask), repeat, params, site);
}
template <class T, class U, bool isSetMask = true>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            std::common_type_t<T> src1, SELMODE mode, uint64_t mask, const ms_twin::U8 repeat,
            const BinaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::SelectLanes<T, U>(dst, &selMask, src0, nullptr, src1, mode, ms_twin::Mask::Lanes(mask), repeat, params,
                             site);
}
template <class T, class U, bool isSetMask = true>
void Select(const LocalTensor<T>& dst, const LocalTensor<U>& selMask, const LocalTensor<T>& src0,
            std::common_type_t<T> src1, SELMODE mode, const uint64_t mask[], const ms_twin::U8 repeat,
            const BinaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::SelectLanes<T, U>(dst, &selMask, src0, nullptr, src1, mode, ms_twin::Mask::Bits(mask), repeat, params, site);
}

template <class T, bool isSetMask = true>
void Compare(const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE mode, const uint64_t mask,
             const BinaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CompareToRegister(src0, src1, mode, ms_twin::Choose(isSetMask, ms_twin::Mask::Lanes(mask)), params, site);
}
template <class T, bool isSetMask = true>
void Compare(const LocalTensor<T>& src0, const LocalTensor<T>& src1, CMPMODE mode, const uint64_t mask[],
             const BinaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CompareToRegister(src0, src1, mode, ms_twin::Choose(isSetMask, ms_twin::Mask::Bits(mask)), params, site);
}
template <class T>
void GetCmpMask(const LocalTensor<T>& dst, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::MoveCompareMask("GetCmpMask", dst.Bytes(0), true, site);
}
template <class T>
void SetCmpMask(const LocalTensor<T>& src, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::MoveCompareMask("SetCmpMask", src.Bytes(0), false, site);
}
// By the bits of the comparison register, the same ones for every repeat.
template <class T, SELMODE mode>
void Select(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const ms_twin::U8 repeat,
            const BinaryRepeatParams& p, ms_twin::Site site = ms_twin::Site::Here()) {
  static_assert(mode == SELMODE::VSEL_CMPMASK_SPR, "the twin has the register form of Select in mode 0 only");
  ms_twin::SelectLanes<T, uint8_t>(dst, nullptr, src0, &src1, T(0), mode, ms_twin::Mask::Register(), repeat, p, site);
}

}  // namespace AscendC
