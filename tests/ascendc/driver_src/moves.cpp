// Copies and fills.
#include "call.h"

namespace driver {

bool Call::Moves(const std::string& op) const {
  if (op == "DataCopy") {
    ForType<uint8_t, half, bfloat16_t, float, int32_t>(S("dtype"), [&](auto type) {
      using T = typename decltype(type)::type;
      const auto move = [&](auto dst, auto src) {
        if (Has("count")) return DataCopy(dst, src, I("count"));
        DataCopyParams p;
        p.blockCount = I("block_count");
        p.blockLen = I("block_len");
        p.srcGap = I("src_gap");
        p.dstGap = I("dst_gap");
        DataCopy(dst, src, p);
      };
      if constexpr (sizeof(T) > 1) {
        if (Has("atomic")) SetAtomicAdd<T>();
      }
      if (S("src") == "gm") {
        move(Local<T>("dst", S("dst")), Global<T>("src"));
      } else if (S("dst") == "gm") {
        move(Global<T>("dst"), Local<T>("src", S("src")));
      } else {
        move(Local<T>("dst", S("dst")), Local<T>("src", S("src")));
      }
      if (Has("atomic")) SetAtomicNone();
    });
    return true;
  }
  if (op == "DataCopyPad") {
    ForType<uint8_t, half, bfloat16_t, float, int32_t>(S("dtype"), [&](auto type) {
      using T = typename decltype(type)::type;
      DataCopyExtParams p;
      p.blockCount = I("block_count");
      p.blockLen = I("block_len");
      p.srcStride = I("src_stride");
      p.dstStride = I("dst_stride");
      p.rsv = 0;
      if (S("dst") == "gm") return DataCopyPad(Global<T>("dst"), Local<T>("src"), p);
      DataCopyPadExtParams<T> pad;
      pad.isPad = Has("pad.2");
      pad.leftPadding = I("pad.0", 0);
      pad.rightPadding = I("pad.1", 0);
      pad.paddingValue = static_cast<T>(Has("pad.2") ? a_.Real("pad.2") : 0.0);
      DataCopyPad(Local<T>("dst"), Global<T>("src"), p, pad);
    });
    return true;
  }
  if (op == "Nd2Nz") {
    ForType<int8_t, half, bfloat16_t, float>(S("dtype"), [&](auto type) {
      using T = typename decltype(type)::type;
      Nd2NzParams p;
      p.ndNum = I("nd_num");
      p.nValue = I("n_value");
      p.dValue = I("d_value");
      p.srcNdMatrixStride = I("src_matrix");
      p.srcDValue = I("src_row");
      p.dstNzC0Stride = I("strip");
      p.dstNzNStride = I("dst_row");
      p.dstNzMatrixStride = I("dst_matrix");
      DataCopy(Local<T>("dst", "L1"), Global<T>("src"), p);
    });
    return true;
  }
  if (op == "Copy") {
    ForType<half, bfloat16_t, float, int16_t, uint16_t, int32_t, uint32_t>(S("dtype"), [&](auto type) {
      using T = typename decltype(type)::type;
      CopyRepeatParams p;
      p.dstStride = I("dst.block");
      p.srcStride = I("src.block");
      p.dstRepeatSize = I("dst.repeat");
      p.srcRepeatSize = I("src.repeat");
      if (S("mask") == "bits") {
        uint64_t bits[2] = {static_cast<uint64_t>(I("mask.0")), static_cast<uint64_t>(I("mask.1"))};
        return Copy(Local<T>("dst"), Local<T>("src"), bits, I("repeat"), p);
      }
      Copy(Local<T>("dst"), Local<T>("src"), static_cast<uint64_t>(I("mask.0")), I("repeat"), p);
    });
    return true;
  }
  return false;
}

}  // namespace driver
