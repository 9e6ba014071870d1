// half and bfloat16_t: storage types with one rounding step per operation, as the vector unit has it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace ms_twin {

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float HalfToFloat(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  if (exponent == 31) return FloatOf(sign | 0x7f800000 | (fraction << 13) | (fraction ? 0x400000 : 0));
  if (exponent == 0) return FloatOf(sign | BitsOf(std::ldexp(float(fraction), -24)));
  return FloatOf(sign | ((exponent + 112) << 23) | (fraction << 13));
#endif
}

// Round to nearest even; overflow becomes infinity (CTRL[48] = 1, the non saturating mode).
inline uint16_t FloatToHalf(float x) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const uint32_t bits = BitsOf(x), sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // subnormal half: the float adder rounds at 2^-24
    const float scaled = FloatOf(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (BitsOf(scaled) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13));
#endif
}

inline uint16_t FloatToBf16(float x) {
  const uint32_t bits = BitsOf(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float Bf16ToFloat(uint16_t b) { return FloatOf(uint32_t(b) << 16); }

template <float (*ToFloat)(uint16_t), uint16_t (*FromFloat)(float)>
struct Float16 {
  uint16_t bits;

  Float16() = default;
  template <class N, class = std::enable_if_t<std::is_arithmetic_v<N>>>
  Float16(N x) : bits(FromFloat(static_cast<float>(x))) {}  // NOLINT: the device converts silently, too
  static Float16 FromBits(uint16_t b) {
    Float16 value;
    value.bits = b;
    return value;
  }
  operator float() const { return ToFloat(bits); }
  Float16& operator+=(Float16 o) { return *this = Float16(float(*this) + float(o)); }
  Float16& operator*=(Float16 o) { return *this = Float16(float(*this) * float(o)); }
};

using Half = Float16<HalfToFloat, FloatToHalf>;
using Bf16 = Float16<Bf16ToFloat, FloatToBf16>;

template <class T>
constexpr bool kIsFloat16 = std::is_same_v<T, Half> || std::is_same_v<T, Bf16>;
template <class T>
constexpr bool kIsFloating = std::is_floating_point_v<T> || kIsFloat16<T>;

template <class T>
constexpr const char* TypeName() {
  if constexpr (std::is_same_v<T, Half>) return "half";
  if constexpr (std::is_same_v<T, Bf16>) return "bfloat16_t";
  if constexpr (std::is_same_v<T, float>) return "float";
  if constexpr (std::is_same_v<T, int8_t>) return "int8_t";
  if constexpr (std::is_same_v<T, uint8_t>) return "uint8_t";
  if constexpr (std::is_same_v<T, int16_t>) return "int16_t";
  if constexpr (std::is_same_v<T, uint16_t>) return "uint16_t";
  if constexpr (std::is_same_v<T, int32_t>) return "int32_t";
  if constexpr (std::is_same_v<T, uint32_t>) return "uint32_t";
  if constexpr (std::is_same_v<T, int64_t>) return "int64_t";
  if constexpr (std::is_same_v<T, uint64_t>) return "uint64_t";
  return "?";
}

}  // namespace ms_twin

using half = ms_twin::Half;
using bfloat16_t = ms_twin::Bf16;
