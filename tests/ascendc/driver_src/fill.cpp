// Duplicate, Brcb, CreateVecIndex, Fill; reductions.
#include "call.h"

namespace driver {

bool Call::Fill(const std::string& op) const {
  if (op != "Duplicate" && op != "Brcb" && op != "CreateVecIndex" && op != "Fill") return false;
  if (op == "CreateVecIndex") {
    ForType<half, float, int16_t, int32_t>(S("dtype"), [&](auto type) {
      using T = typename decltype(type)::type;
      CreateVecIndex(Local<T>("dst"), Scalar<T>(), I("count"));
    });
    return true;
  }
  if (op == "Fill") {
    ForType<half, bfloat16_t, float>(S("dtype"), [&](auto type) {
      using T = typename decltype(type)::type;
      InitConstValueParams<T> p;
      p.repeatTimes = I("repeat");
      p.blockNum = I("block_num");
      p.dstGap = I("dst_gap");
      p.initValue = Scalar<T>();
      AscendC::Fill(Local<T>("dst", S("dst")), p);
    });
    return true;
  }
  const auto run = [&](auto type) {
    using T = typename decltype(type)::type;
    const auto dst = Local<T>("dst");
    if (op == "Duplicate") {
      const T scalar = Scalar<T>();
      return Masked<T>(
          [&](auto count) { Duplicate(dst, scalar, count); },
          [&](auto mask, auto repeat) { Duplicate(dst, scalar, mask, repeat, I("dst.block"), I("dst.repeat")); },
          [&](auto repeat) {
            Duplicate<T, false>(dst, scalar, MASK_PLACEHOLDER, repeat, I("dst.block"), I("dst.repeat"));
          });
    }
    BrcbRepeatParams p;
    p.dstBlkStride = I("dst.block");
    p.dstRepStride = I("dst.repeat");
    Brcb(dst, Local<T>("src"), I("repeat"), p);
  };
  ForType<half, bfloat16_t, float, int16_t, uint16_t, int32_t, uint32_t>(S("dtype"), run);
  return true;
}

bool Call::Reductions(const std::string& op) const {
  if (op.find("Reduce") == std::string::npos) return false;
  const auto run = [&](auto type) {
    using T = typename decltype(type)::type;
    const auto dst = Local<T>("dst"), src = Local<T>("src");
    Masked([&](auto mask) {
      const int64_t repeat = I("repeat"), to = I("dst_repeat"), block = I("src.block"), from = I("src.repeat");
      const auto order = static_cast<ReduceOrder>(I("order", 0));
      if (op == "WholeReduceMax") WholeReduceMax(dst, src, mask, repeat, to, block, from, order);
      if (op == "WholeReduceMin") WholeReduceMin(dst, src, mask, repeat, to, block, from, order);
      if (op == "WholeReduceSum") WholeReduceSum(dst, src, mask, repeat, to, block, from);
      if (op == "BlockReduceMax") BlockReduceMax(dst, src, repeat, mask, to, block, from);
      if (op == "BlockReduceMin") BlockReduceMin(dst, src, repeat, mask, to, block, from);
      if (op == "BlockReduceSum") BlockReduceSum(dst, src, repeat, mask, to, block, from);
      if (op == "PairReduceSum") PairReduceSum(dst, src, repeat, mask, to, block, from);
    });
  };
  ForType<half, float>(S("dtype"), run);
  return true;
}

}  // namespace driver
