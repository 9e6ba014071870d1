// One element of an array of any of the dtypes that floats come in.
#pragma once
#include "common/problem.h"
#include "types.h"

namespace msf {

inline float load(DType dtype, const void* data, int64_t at) {
  if (dtype == DType::f32) return static_cast<const float*>(data)[at];
  const uint16_t bits = static_cast<const uint16_t*>(data)[at];
  return dtype == DType::f16 ? ms_twin::HalfToFloat(bits) : ms_twin::Bf16ToFloat(bits);
}

inline void store(DType dtype, void* data, int64_t at, float x) {
  if (dtype == DType::f32)
    static_cast<float*>(data)[at] = x;
  else
    static_cast<uint16_t*>(data)[at] = dtype == DType::f16 ? ms_twin::FloatToHalf(x) : ms_twin::FloatToBf16(x);
}

}  // namespace msf
