// Parameter structs. Their fields are wider than the hardware's, so that a value the hardware would wrap is still there
// to be reported.
#pragma once
#include <cstdint>
#include <type_traits>

#include "names.h"

namespace ms_twin {

// An integer field of the hardware's type T that remembers what it was given.
template <class T>
struct Field {
  int64_t value = 0;
  constexpr Field() = default;
  template <class N, class = std::enable_if_t<std::is_integral_v<N> || std::is_enum_v<N>>>
  constexpr Field(N n) : value(static_cast<int64_t>(n)) {}  // NOLINT: assigned like the plain field it stands for
  constexpr operator int64_t() const { return value; }
};
using U8 = Field<uint8_t>;
using U16 = Field<uint16_t>;
using U32 = Field<uint32_t>;

}  // namespace ms_twin

namespace AscendC {

struct DataCopyParams {
  ms_twin::U16 blockCount = 1, blockLen = 0;
  union {
    ms_twin::U16 srcGap = 0;
    ms_twin::U16 srcStride;
  };
  union {
    ms_twin::U16 dstGap = 0;
    ms_twin::U16 dstStride;
  };
  DataCopyParams() {}
  DataCopyParams(ms_twin::U16 count, ms_twin::U16 len, ms_twin::U16 src, ms_twin::U16 dst)
      : blockCount(count), blockLen(len), srcGap(src), dstGap(dst) {}
};

struct DataCopyExtParams {
  ms_twin::U16 blockCount = 1;
  ms_twin::U32 blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
  DataCopyExtParams() = default;
  DataCopyExtParams(ms_twin::U16 count, ms_twin::U32 len, ms_twin::U32 src, ms_twin::U32 dst, ms_twin::U32 reserved = 0)
      : blockCount(count), blockLen(len), srcStride(src), dstStride(dst), rsv(reserved) {}
};

template <class T>
struct DataCopyPadExtParams {
  bool isPad = false;
  ms_twin::U8 leftPadding = 0, rightPadding = 0;
  T paddingValue = T(0);
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool pad, ms_twin::U8 left, ms_twin::U8 right, T value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
};

struct Nd2NzParams {
  ms_twin::U16 ndNum = 0, nValue = 0, dValue = 0, srcNdMatrixStride = 0, srcDValue = 0, dstNzC0Stride = 0,
               dstNzNStride = 0, dstNzMatrixStride = 0;
  Nd2NzParams() = default;
  Nd2NzParams(ms_twin::U16 nd, ms_twin::U16 n, ms_twin::U16 d, ms_twin::U16 nd_stride, ms_twin::U16 src_d,
              ms_twin::U16 c0_stride, ms_twin::U16 n_stride, ms_twin::U16 nz_stride)
      : ndNum(nd),
        nValue(n),
        dValue(d),
        srcNdMatrixStride(nd_stride),
        srcDValue(src_d),
        dstNzC0Stride(c0_stride),
        dstNzNStride(n_stride),
        dstNzMatrixStride(nz_stride) {}
};

struct LoadData2DParams {
  ms_twin::U16 startIndex = 0, dstGap = 0, srcStride = 0;
  bool ifTranspose = false;
  ms_twin::U8 repeatTimes = 0, sid = 0, addrMode = 0;
  LoadData2DParams() = default;
  LoadData2DParams(ms_twin::U16 start, ms_twin::U8 repeat, ms_twin::U16 src_stride, ms_twin::U8 s, ms_twin::U16 gap,
                   bool transpose, ms_twin::U8 mode)
      : startIndex(start),
        dstGap(gap),
        srcStride(src_stride),
        ifTranspose(transpose),
        repeatTimes(repeat),
        sid(s),
        addrMode(mode) {}
};
using LoadData2dParams = LoadData2DParams;

struct LoadData2dTransposeParams {
  ms_twin::U16 startIndex = 0;
  ms_twin::U8 repeatTimes = 0;
  ms_twin::U16 srcStride = 0, dstGap = 0, dstFracGap = 0;
  ms_twin::U8 addrMode = 0;
  LoadData2dTransposeParams() = default;
  LoadData2dTransposeParams(ms_twin::U16 start, ms_twin::U8 repeat, ms_twin::U16 src_stride, ms_twin::U16 gap,
                            ms_twin::U16 frac_gap, ms_twin::U8 mode = 0)
      : startIndex(start),
        repeatTimes(repeat),
        srcStride(src_stride),
        dstGap(gap),
        dstFracGap(frac_gap),
        addrMode(mode) {}
};

template <class T>
struct InitConstValueParams {
  ms_twin::U16 repeatTimes = 0, blockNum = 0, dstGap = 0;
  T initValue = T(0);
  InitConstValueParams() = default;
  InitConstValueParams(ms_twin::U16 repeat, ms_twin::U16 blocks, ms_twin::U16 gap, T value)
      : repeatTimes(repeat), blockNum(blocks), dstGap(gap), initValue(value) {}
};

struct MmadParams {
  ms_twin::U16 m = 0, n = 0, k = 0;
  ms_twin::U8 unitFlag = 0;
  bool cmatrixSource = false, cmatrixInitVal = true, isBias = false, kDirectionAlign = false;
  MmadParams() = default;
  MmadParams(ms_twin::U16 m_, ms_twin::U16 n_, ms_twin::U16 k_, ms_twin::U8 unit, bool source, bool init)
      : m(m_), n(n_), k(k_), unitFlag(unit), cmatrixSource(source), cmatrixInitVal(init) {}
};

struct FixpipeConfig {
  CO2Layout format;
  constexpr explicit FixpipeConfig(CO2Layout f) : format(f) {}
};
constexpr FixpipeConfig CFG_NZ(CO2Layout::NZ);
constexpr FixpipeConfig CFG_ROW_MAJOR(CO2Layout::ROW_MAJOR);

struct FixpipeParamsV220 {
  ms_twin::U16 nSize = 0, mSize = 0, srcStride = 0;
  ms_twin::U32 dstStride = 0;
  QuantMode_t quantPre = NoQuant;
  uint64_t deqScalar = 0;  // for quantising modes, which the twin has not
  ms_twin::U16 ndNum = 1, srcNdStride = 0, dstNdStride = 0;
  bool reluEn = false;
  ms_twin::U8 unitFlag = 0;
  bool isChannelSplit = false;
  FixpipeParamsV220() = default;
  FixpipeParamsV220(ms_twin::U16 n, ms_twin::U16 m, ms_twin::U16 src, ms_twin::U32 dst, bool relu)
      : nSize(n), mSize(m), srcStride(src), dstStride(dst), reluEn(relu) {}
  FixpipeParamsV220(ms_twin::U16 n, ms_twin::U16 m, ms_twin::U16 src, ms_twin::U32 dst, bool relu, QuantMode_t quant,
                    uint64_t deq, ms_twin::U16 nd, ms_twin::U16 src_nd, ms_twin::U16 dst_nd)
      : FixpipeParamsV220(n, m, src, dst, relu, quant, deq, nd, src_nd, dst_nd, 0) {}
  FixpipeParamsV220(ms_twin::U16 n, ms_twin::U16 m, ms_twin::U16 src, ms_twin::U32 dst, bool relu, QuantMode_t quant,
                    uint64_t deq, ms_twin::U16 nd, ms_twin::U16 src_nd, ms_twin::U16 dst_nd, ms_twin::U8 unit)
      : nSize(n),
        mSize(m),
        srcStride(src),
        dstStride(dst),
        quantPre(quant),
        deqScalar(deq),
        ndNum(nd),
        srcNdStride(src_nd),
        dstNdStride(dst_nd),
        reluEn(relu),
        unitFlag(unit) {}
};

struct UnaryRepeatParams {
  ms_twin::U16 dstBlkStride = 1, srcBlkStride = 1;
  ms_twin::U8 dstRepStride = 8, srcRepStride = 8;
  UnaryRepeatParams() = default;
  UnaryRepeatParams(ms_twin::U16 dst_blk, ms_twin::U16 src_blk, ms_twin::U8 dst_rep, ms_twin::U8 src_rep)
      : dstBlkStride(dst_blk), srcBlkStride(src_blk), dstRepStride(dst_rep), srcRepStride(src_rep) {}
};

struct BinaryRepeatParams {
  ms_twin::U8 dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
  ms_twin::U8 dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
  BinaryRepeatParams() = default;
  BinaryRepeatParams(ms_twin::U8 dst_blk, ms_twin::U8 src0_blk, ms_twin::U8 src1_blk, ms_twin::U8 dst_rep,
                     ms_twin::U8 src0_rep, ms_twin::U8 src1_rep)
      : dstBlkStride(dst_blk),
        src0BlkStride(src0_blk),
        src1BlkStride(src1_blk),
        dstRepStride(dst_rep),
        src0RepStride(src0_rep),
        src1RepStride(src1_rep) {}
};

struct BrcbRepeatParams {
  ms_twin::U16 dstBlkStride = 1, dstRepStride = 8;
  BrcbRepeatParams() = default;
  BrcbRepeatParams(ms_twin::U16 blk, ms_twin::U16 rep) : dstBlkStride(blk), dstRepStride(rep) {}
};

struct CopyRepeatParams {
  ms_twin::U16 dstStride = 1, srcStride = 1, dstRepeatSize = 8, srcRepeatSize = 8;
  CopyRepeatParams() = default;
  CopyRepeatParams(ms_twin::U16 dst, ms_twin::U16 src, ms_twin::U16 dst_rep, ms_twin::U16 src_rep)
      : dstStride(dst), srcStride(src), dstRepeatSize(dst_rep), srcRepeatSize(src_rep) {}
};

}  // namespace AscendC
