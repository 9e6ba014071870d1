// Conversions.
#include "call.h"

namespace driver {

// Every combination: those that the hardware has not are for the twin to refuse.
void Call::Convert() const {
  const auto mode = static_cast<RoundMode>(I("mode"));
  const auto run = [&](auto to, auto from) {
    using T = typename decltype(to)::type;
    using U = typename decltype(from)::type;
    const auto dst = Local<T>("dst");
    const auto src = Local<U>("src");
    const auto p = Unary();
    using Wide = std::conditional_t<(sizeof(T) > sizeof(U)), T, U>;
    Masked<Wide>([&](auto count) { Cast(dst, src, mode, count); },
                 [&](auto mask, auto repeat) { Cast(dst, src, mode, mask, repeat, p); },
                 [&](auto repeat) { Cast<T, U, false>(dst, src, mode, MASK_PLACEHOLDER, repeat, p); });
  };
  const std::string& to = S("dst_type");
  ForType<half, bfloat16_t, float, int8_t, uint8_t, int16_t, int32_t, int64_t>(S("src_type"), [&](auto from) {
    using U = typename decltype(from)::type;
    if constexpr (std::is_same_v<U, half>) {
      ForType<float, int8_t, uint8_t, int16_t, int32_t>(to, [&](auto type) { run(type, from); });
    } else if constexpr (std::is_same_v<U, float>) {
      ForType<half, bfloat16_t, int16_t, int32_t, int64_t, float>(to, [&](auto type) { run(type, from); });
    } else if constexpr (std::is_same_v<U, bfloat16_t>) {
      ForType<float, int32_t>(to, [&](auto type) { run(type, from); });
    } else if constexpr (sizeof(U) == 1) {
      ForType<half>(to, [&](auto type) { run(type, from); });
    } else if constexpr (std::is_same_v<U, int16_t>) {
      ForType<half, float>(to, [&](auto type) { run(type, from); });
    } else if constexpr (std::is_same_v<U, int32_t>) {
      ForType<float, int16_t, int64_t>(to, [&](auto type) { run(type, from); });
    } else {
      ForType<int32_t, float>(to, [&](auto type) { run(type, from); });
    }
  });
}

}  // namespace driver
