// L1 -> L0, Mmad, Fixpipe.
#include "call.h"

namespace driver {

template <class From, class To>
void Call::FixpipeAs() const {
  FixpipeParamsV220 p;
  p.nSize = I("n_size");
  p.mSize = I("m_size");
  p.srcStride = I("src_stride");
  p.dstStride = I("dst_stride");
  p.reluEn = I("relu") != 0;
  const QuantMode_t fits = std::is_same_v<From, To> ? NoQuant : std::is_same_v<To, half> ? F322F16 : F322BF16;
  p.quantPre = Has("quant") ? static_cast<QuantMode_t>(I("quant")) : fits;
  p.deqScalar = 0;
  p.ndNum = I("nd.0", 1);
  p.srcNdStride = I("nd.1", 0);
  p.dstNdStride = I("nd.2", 0);
  p.unitFlag = I("unit_flag", 0);
  const auto move = [&](auto dst) {
    const auto src = Local<From>("src", "L0C");
    if (I("nz")) return Fixpipe<To, From, CFG_NZ>(dst, src, p);
    Fixpipe<To, From, CFG_ROW_MAJOR>(dst, src, p);
  };
  if (S("dst") == "gm") {
    if (Has("atomic")) SetAtomicAdd<To>();
    move(Global<To>("dst"));
    if (Has("atomic")) SetAtomicNone();
  } else if constexpr (!std::is_same_v<From, To>) {
    move(Local<To>("dst", S("dst")));
  }
}

void Call::Out() const {
  if (S("dtype") == "int32_t") return FixpipeAs<int32_t, int32_t>();
  ForType<float, half, bfloat16_t>(S("to"), [&](auto type) { FixpipeAs<float, typename decltype(type)::type>(); });
}

bool Call::Cube(const std::string& op) const {
  if (op == "LoadData") {
    ForType<int8_t, half, bfloat16_t, float>(S("dtype"), [&](auto type) {
      using T = typename decltype(type)::type;
      LoadData2DParams p;
      p.startIndex = I("start_index");
      p.repeatTimes = I("repeat");
      p.srcStride = I("src_stride");
      p.sid = 0;
      p.dstGap = I("dst_gap");
      p.ifTranspose = I("transpose") != 0;
      p.addrMode = 0;
      LoadData(Local<T>("dst", S("dst")), Local<T>("src", "L1"), p);
    });
    return true;
  }
  if (op == "LoadDataWithTranspose") {
    ForType<int8_t, half, bfloat16_t, float>(S("dtype"), [&](auto type) {
      using T = typename decltype(type)::type;
      LoadData2dTransposeParams p;
      p.startIndex = I("start_index");
      p.repeatTimes = I("repeat");
      p.srcStride = I("src_stride");
      p.dstGap = I("dst_gap");
      p.dstFracGap = I("frac_gap");
      p.addrMode = 0;
      LoadDataWithTranspose(Local<T>("dst", S("dst")), Local<T>("src", "L1"), p);
    });
    return true;
  }
  if (op == "Mmad") {
    ForType<int8_t, half, bfloat16_t, float>(S("dtype"), [&](auto type) {
      using T = typename decltype(type)::type;
      using C = std::conditional_t<std::is_same_v<T, int8_t>, int32_t, float>;
      MmadParams p;
      p.m = I("m");
      p.n = I("n");
      p.k = I("k");
      p.cmatrixInitVal = I("init") != 0;
      p.unitFlag = I("unit_flag", 0);
      const auto c = Local<C>("c", "L0C");
      const auto a = Local<T>("a", "L0A");
      const auto b = Local<T>("b", "L0B");
      if (Has("bias_at")) return Mmad(c, a, b, Local<C>("bias", "BT"), p);
      Mmad(c, a, b, p);
    });
    return true;
  }
  if (op == "Fixpipe") {
    Out();
    return true;
  }
  return false;
}

}  // namespace driver
