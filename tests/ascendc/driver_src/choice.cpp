// Compare, Select.
#include "call.h"

namespace driver {

bool Call::Choice(const std::string& op) const {
  if (op != "Compare" && op != "CompareScalar" && op != "Select") return false;
  const auto run = [&](auto type) {
    using T = typename decltype(type)::type;
    const auto src0 = Local<T>("src0");
    if (op != "Select") {
      const auto bits = Local<uint8_t>("dst");
      const auto mode = static_cast<CMPMODE>(I("mode"));
      if (op == "CompareScalar") {
        const T scalar = Scalar<T>();
        if (Has("count")) return CompareScalar(bits, src0, scalar, mode, I("count"));
        return CompareScalar(bits, src0, scalar, mode, static_cast<uint64_t>(I("mask.0")), I("repeat"), Unary("src0"));
      }
      const auto src1 = Local<T>("src1");
      if (Has("count")) return Compare(bits, src0, src1, mode, I("count"));
      return Compare(bits, src0, src1, mode, static_cast<uint64_t>(I("mask.0")), I("repeat"), Binary());
    }
    if constexpr (ms_twin::kIsFloating<T>) {
      const auto dst = Local<T>("dst");
      const auto bits = Local<uint8_t>("bits");
      const auto mode = static_cast<SELMODE>(I("mode"));
      const auto p = Binary();
      if (mode == SELMODE::VSEL_TENSOR_SCALAR_MODE) {
        const T scalar = Scalar<T>();
        if (S("mask") == "count") return Select(dst, bits, src0, scalar, mode, I("mask.0"));
        return Masked([&](auto mask) { Select(dst, bits, src0, scalar, mode, mask, I("repeat"), p); });
      }
      const auto src1 = Local<T>("src1");
      if (S("mask") == "count") return Select(dst, bits, src0, src1, mode, I("mask.0"));
      Masked([&](auto mask) { Select(dst, bits, src0, src1, mode, mask, I("repeat"), p); });
    }
  };
  ForType<half, float, int32_t>(S("dtype"), run);
  return true;
}

}  // namespace driver
