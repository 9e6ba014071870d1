// LoadData (L1 -> L0A, L0B), Mmad, Fixpipe (L0C -> GM, L1).
#pragma once
#include "cast.h"
#include "copy.h"
#include "cost.h"
#include "matmul.h"
#include "params.h"
#include "tensor.h"

namespace ms_twin {

inline int64_t Ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }

// dst[c][r] = src[r][c] of a square of `side`, in bytes of `Size`; definedness alike.
template <int Size>
void TransposeSquare(uint8_t* dst, const uint8_t* src, int side) {
  for (int r = 0; r < side; ++r)
    for (int c = 0; c < side; ++c) std::memcpy(dst + (c * side + r) * Size, src + (r * side + c) * Size, Size);
}

inline const PathRate& LoadRate(AscendC::Hardware target) {
  return target == AscendC::Hardware::L0A ? kL1ToL0a : kL1ToL0b;
}

inline void RequireL0(Instruction& in, AscendC::Hardware target) {
  in.Require(target == AscendC::Hardware::L0A || target == AscendC::Hardware::L0B, Fault::parameter,
             "dst is in %s, not in L0A or L0B", HardwareName(target));
}

template <class T, class Source>
void LoadFractals(const AscendC::LocalTensor<T>& dst, const Source& src, const AscendC::LoadData2DParams& p,
                  bool from_gm, Site site) {
  Instruction in(from_gm ? "LoadData GM->L0" : "LoadData L1->L0", from_gm ? PIPE_MTE2 : PIPE_MTE1, site);
  RequireL0(in, dst.GetHardware());
  in.Field("startIndex", p.startIndex, 0, 65535);
  in.Field("repeatTimes", p.repeatTimes, 0, 255);
  in.Field("srcStride", p.srcStride, 0, 65535);
  in.Field("dstGap", p.dstGap, 0, 65535);
  in.Require(p.addrMode == 0 || p.addrMode == 1, Fault::parameter, "addrMode = %lld is neither 0 nor 1",
             static_cast<long long>(p.addrMode));
  in.Require(!p.ifTranspose || (sizeof(T) == 2 && !from_gm), Fault::parameter,
             "ifTranspose takes 16-bit types from L1 only");
  if (p.repeatTimes == 0) return;
  const int64_t step = (p.addrMode ? -1 : 1) * p.srcStride.value * int64_t(kFractal);
  const Region source = src.Bytes(kFractal).At(p.startIndex * int64_t(kFractal)).Dim(p.repeatTimes, step);
  const Region target = dst.Bytes(kFractal).Dim(p.repeatTimes, (1 + p.dstGap) * int64_t(kFractal));
  in.Align("dst", target, kFractal);
  if (!from_gm) in.Align("src", source, kBlock);
  in.Read(source);
  in.Write(target);
  in.Issue(
      PathCost(from_gm ? kGmToL1 : LoadRate(dst.GetHardware()), static_cast<double>(target.Bytes())),
      [&] {
        if (!p.ifTranspose) return MoveBytes(target, source, true);
        for (int64_t i = 0; i < p.repeatTimes; ++i) {
          const int64_t t = target.offset + i * target.stride[0], s = source.offset + i * source.stride[0];
          TransposeSquare<2>(target.memory->data + t, source.memory->data + s, 16);
          TransposeSquare<2>(target.memory->undefined + t, source.memory->undefined + s, 16);
        }
      },
      Instruction::Moves{});
}

// L0C unit flags: with unitFlag 2 or 3 a Mmad writes a unit of 512 bytes only when it was read out, a Fixpipe reads it
// only when it is written; 3 turns the flag. This orders the two without events.
inline bool ClaimUnits(Instruction& in, const Region& region, int64_t unit_flag, bool full, const Cost& cost) {
  if (!unit_flag) return true;
  in.CheckRegion(region);
  if (!in.ok()) return false;
  Machine& machine = Twin();
  Core& core = Current();
  const int pipe = full ? PIPE_FIX : PIPE_M;
  uint32_t mmad = 0, fixpipe = 0;
  Moment begin, end;
  bool good = true;
  region.ForEachRun([&](int64_t offset, int64_t bytes) {
    for (int64_t u = offset / kFractal; u < Ceil(offset + bytes, kFractal); ++u) {
      const auto& unit = core.unit[u];
      good = good && unit.full == full;
      mmad = std::max(mmad, full ? unit.mmad : unit.read_out);
      fixpipe = std::max(fixpipe, unit.fixpipe);
      begin.After(unit.begin);
      end.After(unit.end);
    }
  });
  if (!in.Require(good, Fault::flag,
                  full ? "unitFlag: no Mmad with unitFlag 3 wrote this part of L0C, Fixpipe would wait"
                       : "unitFlag: this part of L0C was not read out with unitFlag 3, Mmad would wait"))
    return false;
  machine.Absorb(core, pipe);
  // A Fixpipe knows the Mmad that filled the units, a Mmad the Fixpipe that took them and what that one had waited for.
  Clock& known = core.known[pipe];
  uint32_t& known_mmad = known[core.index * 8 + PIPE_M];
  known_mmad = std::max(known_mmad, mmad);
  if (!full) known[core.index * 8 + PIPE_FIX] = std::max(known[core.index * 8 + PIPE_FIX], fixpipe);
  // It follows the other pipe unit by unit: begins after it, ends after it.
  double lag[kScenarios];
  for (int s = 0; s < kScenarios; ++s) lag[s] = std::max(0.0, end.at[s] - cost.occupancy[s] - begin.at[s]);
  begin.Spend(core.Part(full ? PIPE_M : PIPE_FIX), lag);
  core.gate[pipe].After(begin);
  return true;
}

inline void ReleaseUnits(const Region& region, int64_t unit_flag, bool full, const Cost& cost) {
  if (!unit_flag) return;
  Core& core = Current();
  const int pipe = full ? PIPE_M : PIPE_FIX;
  Moment begin = core.free[pipe];
  const Moment end = begin;
  for (int s = 0; s < kScenarios; ++s) {
    begin.at[s] -= cost.occupancy[s];
    begin.path[s][core.Part(pipe)] -= static_cast<float>(cost.occupancy[s]);
  }
  region.ForEachRun([&](int64_t offset, int64_t bytes) {
    for (int64_t u = offset / kFractal; u < Ceil(offset + bytes, kFractal); ++u) {
      auto& unit = core.unit[u];
      if (unit_flag == 3) unit.full = full;
      (full ? unit.mmad : unit.fixpipe) = core.tick[pipe];
      if (!full) unit.read_out = unit.mmad;
      unit.begin = begin;
      unit.end = end;
    }
  });
}

// The C values of a product's last fractals that lie outside m x n.
inline void MarkTail(uint8_t* flags, int64_t m, int64_t n) {
  const int64_t rows = Ceil(m, 16) * 16, columns = Ceil(n, 16) * 16;
  if (!flags || (rows == m && columns == n)) return;
  for (int64_t j = 0; j < columns; ++j)
    for (int64_t i = j < n ? m : 0; i < rows; ++i) std::memset(flags + ((j / 16 * rows + i) * 16 + j % 16) * 4, 1, 4);
}

// The A and B values beyond m, n and k in the last fractals are ignored; the C values there are unspecified.
template <class C, class A>
void Product(const AscendC::LocalTensor<C>& c, const AscendC::LocalTensor<A>& a, const AscendC::LocalTensor<A>& b,
             const AscendC::LocalTensor<C>* bias, const AscendC::MmadParams& p, Site site) {
  static_assert(kIsFloat16<A> || std::is_same_v<A, float> || std::is_same_v<A, int8_t>,
                "Mmad takes half, bfloat16_t, float or int8_t");
  using AscendC::Hardware;
  Instruction in("Mmad", PIPE_M, site);
  in.Require(c.GetHardware() == Hardware::L0C, Fault::parameter, "C is in %s, not in L0C",
             HardwareName(c.GetHardware()));
  in.Require(a.GetHardware() == Hardware::L0A, Fault::parameter, "A is in %s, not in L0A",
             HardwareName(a.GetHardware()));
  in.Require(b.GetHardware() == Hardware::L0B, Fault::parameter, "B is in %s, not in L0B",
             HardwareName(b.GetHardware()));
  in.Field("m", p.m, 0, 4095);
  in.Field("n", p.n, 0, 4095);
  in.Field("k", p.k, 0, 4095);
  in.Require(p.unitFlag == 0 || p.unitFlag == 2 || p.unitFlag == 3, Fault::parameter, "unitFlag is none of 0, 2, 3");
  in.Require(!p.isBias, Fault::parameter, "isBias is out of use: take the form with a bias tensor, or cmatrixInitVal");
  in.Require(bias || !p.cmatrixSource, Fault::parameter, "cmatrixSource needs the form with a bias tensor");
  if (p.m == 0 || p.n == 0 || p.k == 0) return;
  constexpr int64_t kC0 = 32 / sizeof(A);
  const bool vector = p.m == 1;
  const int64_t m1 = Ceil(p.m, 16), n1 = Ceil(p.n, 16);
  const int64_t k1 = sizeof(A) == 4 && p.kDirectionAlign ? Ceil(p.k, 16) * 2 : Ceil(p.k, kC0);
  const bool keep = !p.cmatrixInitVal && !bias;
  const Region left = vector ? a.Bytes(p.k * int64_t(sizeof(A))) : a.Bytes(m1 * k1 * kFractal);
  const Region right = b.Bytes(Ceil(p.k, kC0) * n1 * kFractal);
  Region out = c.Bytes(m1 * n1 * 1024);
  in.Align("C", out, 1024);
  in.Align("A", left, kFractal);
  in.Align("B", right, kFractal);
  // Large products need no barrier between those that accumulate into the same C.
  out.trusts_pipe_order = (p.m / 16) * (p.n / 16) >= 10;
  in.Read(left);
  in.Read(right);
  if (bias) {
    in.Require(bias->GetHardware() == Hardware::BIAS, Fault::parameter, "bias is in %s, not in BT",
               HardwareName(bias->GetHardware()));
    in.Align("bias", bias->Bytes(1), 64);
    in.Read(bias->Bytes(p.n * int64_t(sizeof(C))));
  }
  out.in_place = true;  // C is read and written
  if (keep) in.Read(out);
  in.Write(out);
  const double per_fractal = sizeof(A) == 4 ? 2 : 1;  // 16x16x8 takes two cycles
  const auto compute = [&] {
    C* result = reinterpret_cast<C*>(c.Data());
    if (bias) {
      const C* start = reinterpret_cast<const C*>(bias->Data());
      for (int64_t j = 0; j < n1; ++j)
        for (int64_t i = 0; i < m1 * 16; ++i)
          for (int64_t x = 0; x < 16 && j * 16 + x < p.n; ++x) result[(j * m1 * 16 + i) * 16 + x] = start[j * 16 + x];
    }
    Multiply<A>(reinterpret_cast<const A*>(a.Data()), reinterpret_cast<const A*>(b.Data()), result, p.m, p.n, p.k, k1,
                keep || bias);
  };
  const auto taint = [&] {
    // Row i is undefined where a value of row i of A is, column j where one of column j of B is.
    const auto any = [](const uint8_t* flags, int64_t n) {
      return std::any_of(flags, flags + n, [](uint8_t f) { return f != 0; });
    };
    constexpr int64_t size = sizeof(A);
    std::vector<uint8_t> row(static_cast<size_t>(p.m)), column(static_cast<size_t>(p.n));
    for (int64_t f = 0; f * kC0 < p.k; ++f) {
      const int64_t depth = std::min<int64_t>(kC0, p.k - f * kC0) * size;
      for (int64_t i = 0; i < p.m; ++i)
        row[i] |= any(a.Undefined() + (vector ? f * 32 : ((i / 16) * k1 + f) * kFractal + (i % 16) * 32), depth);
      for (int64_t j = 0; j < p.n; ++j)
        column[j] |= any(b.Undefined() + (f * n1 + j / 16) * kFractal + (j % 16) * 32, depth);
    }
    uint8_t* flags = c.Undefined();
    for (int64_t j = 0; j < n1 * 16; ++j)
      for (int64_t i = 0; i < m1 * 16; ++i) {
        uint8_t* at = flags + ((j / 16 * m1 * 16 + i) * 16 + j % 16) * 4;
        const bool inside = i < p.m && j < p.n;
        const bool undefined = !inside || row[i] || column[j] || (keep && *at);
        std::memset(at, undefined, 4);
      }
  };
  const Cost cost = CubeCost(static_cast<double>(m1 * n1 * Ceil(p.k, kC0)) * per_fractal);
  if (in.ok() && !ClaimUnits(in, out, p.unitFlag, false, cost)) return;
  if (!in.Issue(cost, compute, taint)) return;
  MarkTail(c.Undefined(), p.m, p.n);
  ReleaseUnits(out, p.unitFlag, true, cost);
}

// L0C is Nz: column strips of 16 values; `columns` x `rows` of it go to `target`, converted one by one.
template <class T, class U>
void Convert(const Region& target, const Region& source, bool relu, int atomic, bool saturate) {
  uint8_t* flags = target.memory->undefined;
  const uint8_t* source_flags = source.memory->undefined;
  const int64_t n = target.run / int64_t(sizeof(T));
  for (int64_t i = 0; i < target.count[0]; ++i)
    for (int64_t j = 0; j < target.count[1]; ++j)
      for (int64_t k = 0; k < target.count[2]; ++k) {
        const int64_t t = target.offset + i * target.stride[0] + j * target.stride[1] + k * target.stride[2];
        const int64_t s = source.offset + i * source.stride[0] + j * source.stride[1] + k * source.stride[2];
        for (int64_t x = 0; x < n; ++x) {
          U value;
          std::memcpy(&value, source.memory->data + s + x * int64_t(sizeof(U)), sizeof(U));
          if (relu && !(value > 0)) value = 0;
          T result;
          if constexpr (std::is_same_v<T, U>)
            result = value;
          else
            result = Converted<T>(static_cast<float>(value), AscendC::RoundMode::CAST_RINT, saturate);
          uint8_t* to = target.memory->data + t + x * int64_t(sizeof(T));
          if (atomic) {
            T old;
            std::memcpy(&old, to, sizeof(T));
            result = atomic == kAtomicAdd   ? T(old + result)
                     : atomic == kAtomicMax ? std::max(old, result)
                                            : std::min(old, result);
          }
          std::memcpy(to, &result, sizeof(T));
          if (flags) {
            const uint8_t undefined = source_flags[s + x * int64_t(sizeof(U))];
            for (size_t b = 0; b < sizeof(T); ++b) {
              uint8_t& flag = flags[t + x * int64_t(sizeof(T)) + b];
              flag = atomic ? flag | undefined : undefined;
            }
          }
        }
      }
}

template <class T, class U>
void CopyOut(Region to, bool to_l1, const AscendC::LocalTensor<U>& src, AscendC::CO2Layout layout,
             const AscendC::FixpipeParamsV220& p, Site site) {
  using AscendC::CO2Layout;
  static_assert(std::is_same_v<T, U> || (std::is_same_v<U, float> && kIsFloat16<T>),
                "the twin has no quantising Fixpipe: float to half or bfloat16_t, or the type as it is");
  Instruction in(to_l1 ? "Fixpipe L0C->L1" : "Fixpipe L0C->GM", PIPE_FIX, site);
  const bool rows = layout == CO2Layout::ROW_MAJOR;
  in.Require(src.GetHardware() == AscendC::Hardware::L0C, Fault::parameter, "src is in %s, not in L0C",
             HardwareName(src.GetHardware()));
  in.Require(!to_l1 || (to.memory && to.memory->hardware == AscendC::Hardware::L1), Fault::parameter,
             "dst is not in L1");
  in.Require(layout != CO2Layout::COLUMN_MAJOR, Fault::parameter, "COLUMN_MAJOR does not exist on this hardware");
  in.Field("nSize", p.nSize, 0, 4095);
  in.Field("mSize", p.mSize, 0, rows ? 8192 : 65535);
  in.Field("srcStride", p.srcStride, 0, 65535);
  in.Field("ndNum", p.ndNum, 0, 65535);
  in.Require(p.unitFlag == 0 || p.unitFlag == 2 || p.unitFlag == 3, Fault::parameter, "unitFlag is none of 0, 2, 3");
  if (p.nSize == 0 || p.mSize == 0 || p.ndNum == 0) return;
  in.Field("dstStride", p.dstStride, 1, 0xffffffffll);
  const bool split = p.isChannelSplit;
  if (!rows) {
    in.Require(p.nSize % (split ? 8 : 16) == 0, Fault::parameter, "nSize = %lld is no multiple of %d in NZ",
               static_cast<long long>(p.nSize), split ? 8 : 16);
    in.Require(p.ndNum == 1, Fault::parameter, "ndNum is for ROW_MAJOR only");
  }
  in.Require(!split || (!rows && sizeof(T) == 4 && sizeof(U) == 4), Fault::parameter,
             "isChannelSplit goes with NZ and float only");
  if (p.ndNum > 1) {
    in.Field("srcNdStride", p.srcNdStride, 0, 512);
    in.Field("dstNdStride", p.dstNdStride, 0, 65535);
  }
  const QuantMode_t expected = std::is_same_v<T, U> ? NoQuant : std::is_same_v<T, half> ? F322F16 : F322BF16;
  in.Require(p.quantPre == expected, Fault::parameter, "quantPre = %d does not convert %s to %s",
             static_cast<int>(p.quantPre), TypeName<U>(), TypeName<T>());
  constexpr int64_t kC0 = 16 * sizeof(U);  // a row of a strip
  in.Align("src", src.Bytes(1), 64);
  if (!rows) in.Align("dst", to, kBlock);
  if (p.ndNum > 1 || p.nSize > 16)
    in.Require(p.srcStride * kC0 >= p.mSize * kC0, Fault::parameter, "srcStride = %lld is less than mSize",
               static_cast<long long>(p.srcStride));
  const int64_t width = split ? 8 : 16;
  const int64_t strips = p.nSize / width, tail = p.nSize % width, size = sizeof(T);
  const int64_t nd_source = p.srcNdStride * 16 * kC0, nd_target = p.dstNdStride * size;
  const int64_t matrices = p.ndNum;
  // Full strips, and the columns of the last one.
  Region from[2], target[2];
  int parts = 0;
  const auto add = [&](int64_t first, int64_t count, int64_t columns) {
    if (!count) return;
    if (split) {  // each strip of 16 gives two of 8
      from[parts] = src.Bytes(8 * int64_t(sizeof(U))).At(first / 2 * p.srcStride * kC0);
      from[parts].Dim(Ceil(count, 2), p.srcStride * kC0).Dim(count > 1 ? 2 : 1, kC0 / 2).Dim(p.mSize, kC0);
      target[parts] = to;
      target[parts].At(first * p.dstStride * kBlock).Run(8 * size).Dim(Ceil(count, 2), 2 * p.dstStride * kBlock);
      target[parts].Dim(count > 1 ? 2 : 1, p.dstStride * kBlock).Dim(p.mSize, 8 * size);
    } else {
      const int64_t source_step = p.srcStride * kC0;
      from[parts] = src.Bytes(columns * int64_t(sizeof(U))).At(first * source_step);
      from[parts].Dim(matrices, nd_source).Dim(count, source_step).Dim(p.mSize, kC0);
      const int64_t target_step = rows ? 16 * size : p.dstStride * kBlock;
      target[parts] = to;
      target[parts].At(first * target_step).Run(columns * size).Dim(matrices, nd_target).Dim(count, target_step);
      target[parts].Dim(p.mSize, rows ? p.dstStride * size : 16 * size);
    }
    ++parts;
  };
  if (split) {
    add(0, strips / 2 * 2, width);
    add(strips / 2 * 2, strips % 2, width);
  } else {
    add(0, strips, width);
    add(strips, tail ? 1 : 0, tail);
  }
  const int atomic = to_l1 ? kAtomicOff : Current().atomic;
  if (atomic) RequireAtomicType<T>(in);
  double bytes = 0;
  for (int i = 0; i < parts; ++i) {
    in.Read(from[i]);
    if (atomic)
      in.Accumulate(target[i]);
    else
      in.Write(target[i]);
    bytes += static_cast<double>(target[i].Bytes());
  }
  const Region units = src.Bytes(((Ceil(p.nSize, 16) - 1) * p.srcStride + p.mSize) * kC0);
  const Cost cost = PathCost(to_l1 ? kL0cToL1 : kL0cToGm, bytes);
  if (in.ok() && !ClaimUnits(in, units, p.unitFlag, true, cost)) return;
  const bool issued = in.Issue(
      cost,
      [&] {
        for (int i = 0; i < parts; ++i) Convert<T, U>(target[i], from[i], p.reluEn, atomic, Current().saturate);
      },
      Instruction::Moves{});
  if (issued) ReleaseUnits(units, p.unitFlag, false, cost);
}

}  // namespace ms_twin

namespace AscendC {

// Fractals of 512 bytes, one per repeat; a stride of 0 reads the same one again. With ifTranspose every 16x16 fractal
// is transposed.
template <class T>
void LoadData(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2DParams& p,
              ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::LoadFractals<T>(dst, src, p, false, site);
}
template <class T>
void LoadData(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const LoadData2DParams& p,
              ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::LoadFractals<T>(dst, src, p, true, site);
}

// Squares: one fractal of a 16-bit type, two fractals side by side of a 32-bit or 8-bit one (16x16, 32x32). The square
// is transposed and written as fractals again, dstFracGap apart.
template <class T>
void LoadDataWithTranspose(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LoadData2dTransposeParams& p,
                           ms_twin::Site site = ms_twin::Site::Here()) {
  using namespace ms_twin;
  Instruction in("LoadDataWithTranspose", PIPE_MTE1, site);
  RequireL0(in, dst.GetHardware());
  in.Field("startIndex", p.startIndex, 0, 65535);
  in.Field("repeatTimes", p.repeatTimes, 0, 255);
  in.Field("srcStride", p.srcStride, 0, 65535);
  in.Field("dstGap", p.dstGap, 0, 65535);
  in.Field("dstFracGap", p.dstFracGap, 0, 65535);
  if (p.repeatTimes == 0) return;
  constexpr int64_t kSize = sizeof(T), kFractals = kSize == 2 ? 1 : 2, kSide = kSize == 1 ? 32 : 16;
  constexpr int64_t kSquare = kFractals * kFractal;
  const int64_t step = (p.addrMode ? -1 : 1) * p.srcStride.value * kSquare;
  const int64_t frac = kSize == 2 ? 0 : (1 + p.dstFracGap) * int64_t(kFractal);
  const Region source = src.Bytes(kSquare).At(p.startIndex * kSquare).Dim(p.repeatTimes, step);
  const Region target = dst.Bytes(kFractal).Dim(p.repeatTimes, (1 + p.dstGap) * int64_t(kFractal)).Dim(kFractals, frac);
  in.Align("dst", target, kFractal);
  in.Align("src", source, kBlock);
  in.Read(source);
  in.Write(target);
  in.Issue(
      PathCost(LoadRate(dst.GetHardware()), static_cast<double>(target.Bytes())),
      [&] {
        // A fractal has 16 rows of C0 values. 32-bit: the square's row r is row r of both fractals (16x8 | 16x8);
        // 8-bit: the fractals (16x32) lie below each other.
        constexpr int64_t kC0 = 32 / kSize;
        const auto place = [=](int64_t r, int64_t c) -> int64_t {
          return kSize == 4 ? (c / kC0) * 16 * kC0 + r * kC0 + c % kC0 : r * kC0 + c;
        };
        uint8_t square[kSide * kSide * kSize];
        const auto transpose = [&](uint8_t* to, const uint8_t* from) {
          for (int64_t r = 0; r < kSide; ++r)
            for (int64_t c = 0; c < kSide; ++c)
              std::memcpy(square + place(c, r) * kSize, from + place(r, c) * kSize, kSize);
          for (int64_t f = 0; f < kFractals; ++f) std::memcpy(to + f * frac, square + f * kFractal, kFractal);
        };
        for (int64_t i = 0; i < p.repeatTimes; ++i) {
          const int64_t t = target.offset + i * target.stride[0], s = source.offset + i * source.stride[0];
          transpose(target.memory->data + t, source.memory->data + s);
          transpose(target.memory->undefined + t, source.memory->undefined + s);
        }
      },
      Instruction::Moves{});
}

template <class C, class A, class B>
void Mmad(const LocalTensor<C>& c, const LocalTensor<A>& a, const LocalTensor<B>& b, const MmadParams& p,
          ms_twin::Site site = ms_twin::Site::Here()) {
  static_assert(std::is_same_v<A, B>, "A and B have one type");
  static_assert(std::is_same_v<C, typename ms_twin::Accumulator<A>::Type>, "C is float, or int32_t for int8_t");
  ms_twin::Product<C, A>(c, a, b, nullptr, p, site);
}
template <class C, class A, class B, class D>
void Mmad(const LocalTensor<C>& c, const LocalTensor<A>& a, const LocalTensor<B>& b, const LocalTensor<D>& bias,
          const MmadParams& p, ms_twin::Site site = ms_twin::Site::Here()) {
  static_assert(std::is_same_v<A, B> && std::is_same_v<C, D>, "A and B have one type, bias has C's");
  ms_twin::Product<C, A>(c, a, b, &bias, p, site);
}

// L0C -> GM or L1. ROW_MAJOR: dstStride is the row pitch in elements. NZ: dstStride is the distance of column strips in
// blocks of 32 bytes.
template <class T, class U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const GlobalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& p,
             ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CopyOut<T, U>(dst.Bytes(0), false, src, config.format, p, site);
}
template <class T, class U, const FixpipeConfig& config = CFG_ROW_MAJOR>
void Fixpipe(const LocalTensor<T>& dst, const LocalTensor<U>& src, const FixpipeParamsV220& p,
             ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CopyOut<T, U>(dst.Bytes(0), true, src, config.format, p, site);
}

// Fills blocks of L1 (32 bytes each, PIPE_MTE2) or L0A, L0B (512 bytes, PIPE_MTE1) with one value.
template <class T>
void Fill(const LocalTensor<T>& dst, const InitConstValueParams<T>& p, ms_twin::Site site = ms_twin::Site::Here()) {
  using namespace ms_twin;
  const bool l1 = dst.GetHardware() == Hardware::L1;
  Instruction in("Fill", l1 ? PIPE_MTE2 : PIPE_MTE1, site);
  if (!l1) RequireL0(in, dst.GetHardware());
  in.Field("repeatTimes", p.repeatTimes, 0, 32767);
  in.Field("blockNum", p.blockNum, 0, 32767);
  in.Field("dstGap", p.dstGap, 0, 32767);
  if (p.repeatTimes == 0 || p.blockNum == 0) return;
  const int64_t block = l1 ? kBlock : kFractal;
  const Region target = dst.Bytes(p.blockNum * block).Dim(p.repeatTimes, (p.blockNum + p.dstGap) * block);
  in.Align("dst", target, block);
  in.Write(target);
  in.Issue(PathCost(l1 ? kGmToL1 : LoadRate(dst.GetHardware()), static_cast<double>(target.Bytes())), [&] {
    target.ForEachRun([&](int64_t offset, int64_t bytes) {
      for (int64_t b = 0; b < bytes; b += sizeof(T))
        std::memcpy(target.memory->data + offset + b, &p.initValue, sizeof(T));
    });
  });
}

}  // namespace AscendC
