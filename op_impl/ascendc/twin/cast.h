// Cast between number types with every rounding mode. Which pairs and modes exist is the documented table for this
// hardware; what does not fit the target saturates by default.
#pragma once
#include "vector.h"

namespace ms_twin {

using AscendC::RoundMode;

// Rounds the magnitude of a float to `bits` fewer fraction bits. Works on the bit pattern: a carry out of the fraction
// moves the exponent up, as it should.
inline uint32_t RoundBits(uint32_t magnitude, bool negative, int bits, RoundMode mode) {
  const uint32_t rest = magnitude & ((1u << bits) - 1), half_unit = 1u << (bits - 1);
  const uint32_t kept = magnitude >> bits;
  bool up = false;
  switch (mode) {
    case RoundMode::CAST_NONE:
    case RoundMode::CAST_RINT:
      up = rest > half_unit || (rest == half_unit && (kept & 1));
      break;
    case RoundMode::CAST_FLOOR:
      up = negative && rest;
      break;
    case RoundMode::CAST_CEIL:
      up = !negative && rest;
      break;
    case RoundMode::CAST_ROUND:
      up = rest >= half_unit;
      break;
    case RoundMode::CAST_TRUNC:
      break;
    case RoundMode::CAST_ODD:
      up = rest && !(kept & 1);
      break;
  }
  return kept + up;
}

inline uint16_t RoundToHalf(float x, RoundMode mode, bool saturate) {
  const uint32_t bits = BitsOf(x), magnitude = bits & 0x7fffffff;
  const bool negative = bits >> 31;
  const uint16_t sign = negative ? 0x8000 : 0;
  if (magnitude > 0x7f800000) return saturate ? 0 : static_cast<uint16_t>(sign | 0x7e00);
  uint32_t result;
  if (magnitude == 0x7f800000) {
    result = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // normal in half
    result = RoundBits(magnitude - 0x38000000, negative, 13, mode);
  } else {  // multiples of 2^-24: shift the significand so that its unit is that
    const int exponent = static_cast<int>(magnitude >> 23);
    const uint32_t significand = (magnitude & 0x7fffff) | (exponent ? 0x800000 : 0);
    const int shift = 126 - std::max(exponent, 1);
    if (shift > 24)  // below a quarter of the unit: only the sticky bit counts
      result = RoundBits(significand ? 1 : 0, negative, 2, mode);
    else
      result = RoundBits(significand, negative, shift, mode);
  }
  if (result >= 0x7c00) result = saturate ? 0x7bff : 0x7c00;
  return static_cast<uint16_t>(sign | result);
}

inline uint16_t RoundToBf16(float x, RoundMode mode, bool saturate) {
  const uint32_t bits = BitsOf(x), magnitude = bits & 0x7fffffff;
  const bool negative = bits >> 31;
  const uint16_t sign = negative ? 0x8000 : 0;
  if (magnitude > 0x7f800000) return saturate ? 0 : static_cast<uint16_t>(sign | 0x7fc0);
  uint32_t result = magnitude == 0x7f800000 ? 0x7f80 : RoundBits(magnitude, negative, 16, mode);
  if (result >= 0x7f80) result = saturate ? 0x7f7f : 0x7f80;
  return static_cast<uint16_t>(sign | result);
}

inline double RoundToInteger(double x, RoundMode mode) {
  switch (mode) {
    case RoundMode::CAST_FLOOR:
      return std::floor(x);
    case RoundMode::CAST_CEIL:
      return std::ceil(x);
    case RoundMode::CAST_ROUND:
      return std::round(x);
    case RoundMode::CAST_TRUNC:
      return std::trunc(x);
    case RoundMode::CAST_ODD: {
      const double low = std::floor(x);
      return low == x || std::fmod(low, 2) != 0 ? low : low + 1;
    }
    default:
      return std::nearbyint(x);
  }
}

template <class D, class S>
D Converted(S x, RoundMode mode, bool saturate) {
  if constexpr (std::is_integral_v<D> && std::is_integral_v<S>) {
    const int64_t value = static_cast<int64_t>(x);
    const int64_t low = static_cast<int64_t>(std::numeric_limits<D>::min());
    const int64_t high = static_cast<int64_t>(std::numeric_limits<D>::max());
    return static_cast<D>(value < low ? low : value > high ? high : value);
  } else if constexpr (std::is_integral_v<D>) {
    const double value = RoundToInteger(static_cast<double>(float(x)), mode);
    if (value != value) return 0;
    if (value <= static_cast<double>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
    if (value >= static_cast<double>(std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
    return static_cast<D>(value);
  } else if constexpr (std::is_same_v<D, half>) {
    return half::FromBits(RoundToHalf(static_cast<float>(x), mode, saturate));
  } else if constexpr (std::is_same_v<D, bfloat16_t>) {
    return bfloat16_t::FromBits(RoundToBf16(static_cast<float>(x), mode, saturate));
  } else if constexpr (std::is_integral_v<S>) {  // to float: 24 bits of an integer
    const float nearest = static_cast<float>(x);
    const auto back = static_cast<__int128>(nearest);
    const __int128 exact = x;
    const float below = back <= exact ? nearest : std::nextafter(nearest, -INFINITY);
    const float above = back >= exact ? nearest : std::nextafter(nearest, INFINITY);
    switch (mode) {
      case RoundMode::CAST_FLOOR:
        return below;
      case RoundMode::CAST_CEIL:
        return above;
      case RoundMode::CAST_TRUNC:
        return x < 0 ? above : below;
      case RoundMode::CAST_ROUND: {
        const __int128 up = static_cast<__int128>(above) - exact, down = exact - static_cast<__int128>(below);
        return up < down ? above : down < up ? below : x < 0 ? below : above;
      }
      default:
        return nearest;
    }
  } else if constexpr (std::is_same_v<S, float>) {  // float to float: rounded to an integer
    return static_cast<float>(RoundToInteger(static_cast<double>(x), mode));
  } else {
    return static_cast<float>(x);
  }
}

// 0: the pair does not exist; else the modes, one bit each.
template <class D, class S>
constexpr unsigned CastModes() {
  constexpr auto bit = [](RoundMode mode) { return 1u << static_cast<int>(mode); };
  constexpr unsigned none = bit(RoundMode::CAST_NONE), odd = bit(RoundMode::CAST_ODD);
  constexpr unsigned five = bit(RoundMode::CAST_RINT) | bit(RoundMode::CAST_FLOOR) | bit(RoundMode::CAST_CEIL) |
                            bit(RoundMode::CAST_ROUND) | bit(RoundMode::CAST_TRUNC);
  constexpr auto pair = [](auto s, auto d) { return std::is_same_v<S, decltype(s)> && std::is_same_v<D, decltype(d)>; };
  if (pair(int8_t(), half()) || pair(uint8_t(), half()) || pair(int16_t(), float()) || pair(half(), float()) ||
      pair(bfloat16_t(), float()) || pair(int32_t(), int16_t()) || pair(int32_t(), int64_t()) ||
      pair(int64_t(), int32_t()))
    return none;
  if (pair(int16_t(), half()) || pair(half(), int8_t()) || pair(half(), uint8_t()) || pair(int32_t(), float()))
    return five | none;
  if (pair(half(), int16_t()) || pair(half(), int32_t()) || pair(bfloat16_t(), int32_t()) || pair(float(), int16_t()) ||
      pair(float(), bfloat16_t()) || pair(float(), int32_t()) || pair(float(), float()) || pair(float(), int64_t()) ||
      pair(int64_t(), float()))
    return five;
  if (pair(float(), half())) return five | none | odd;
  return 0;
}

template <class D, class S>
void CastLanes(const AscendC::LocalTensor<D>& dst, const AscendC::LocalTensor<S>& src, RoundMode mode, const Mask& mask,
               int64_t repeat, const AscendC::UnaryRepeatParams& p, Site site) {
  constexpr unsigned modes = CastModes<D, S>();
  static_assert(modes != 0, "the hardware has no Cast between these types");
  if (!(modes >> static_cast<int>(mode) & 1)) {
    Instruction in("Cast", PIPE_V, site);
    static const char* const names[] = {"NONE", "RINT", "FLOOR", "CEIL", "ROUND", "TRUNC", "ODD"};
    in.Fail(Fault::parameter, "CAST_%s does not exist from %s to %s", names[static_cast<int>(mode) % 7], TypeName<S>(),
            TypeName<D>());
    return;
  }
  const bool saturate = Current().saturate;
  Unary("Cast", sizeof(D) > sizeof(S) ? kRateCastUp : kRateCastDown, dst, src, mask, repeat, p, site,
        [mode, saturate](S x) { return Converted<D>(x, mode, saturate); });
}

}  // namespace ms_twin

namespace AscendC {

template <class T, class U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, const uint32_t count,
          ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CastLanes(dst, src, mode, ms_twin::Mask::Count(count), 1, ms_twin::Contiguous<T, U>(), site);
}
template <class T, class U, bool isSetMask = true>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, const uint64_t mask,
          const ms_twin::U8 repeat, const UnaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CastLanes(dst, src, mode, ms_twin::Choose(isSetMask, ms_twin::Mask::Lanes(mask)), repeat, params, site);
}
template <class T, class U, bool isSetMask = true>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, const uint64_t mask[],
          const ms_twin::U8 repeat, const UnaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CastLanes(dst, src, mode, ms_twin::Choose(isSetMask, ms_twin::Mask::Bits(mask)), repeat, params, site);
}

// On the scalar unit.
inline float ToFloat(const bfloat16_t& x) { return float(x); }
inline float Cast(const bfloat16_t& x) { return float(x); }
inline bfloat16_t ToBfloat16(const float& x) { return bfloat16_t(x); }

enum class SaturationMode : uint8_t { FLOAT, CAST };
// FLOAT: half and bfloat16_t results saturate and NaN becomes 0 (the default), or infinity and NaN stay.
template <SaturationMode mode>
void SetSaturationFlag(bool enable) {
  static_assert(mode == SaturationMode::FLOAT, "the twin always saturates integers");
  ms_twin::Current().saturate = enable;
}

}  // namespace AscendC
