// The arithmetic of the cube: C (+)= A * B on fractals. Operands are unpacked to fp32 panels once per instruction, then
// multiplied 16 columns at a time, which the compiler turns into fused multiply-adds over whole vectors.
#pragma once
#include <cstdint>
#include <vector>

#include "types.h"

namespace ms_twin {

#if defined(__GNUC__)
typedef float Lanes16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t IntLanes16 __attribute__((vector_size(64), aligned(4)));
#endif

template <class T>
struct Accumulator {
  using Type = float;
  using Vector = Lanes16;
};
template <>
struct Accumulator<int8_t> {
  using Type = int32_t;
  using Vector = IntLanes16;
};

// Row i of A as a dense row of k values. A is Zz: row fractals, then k fractals, each 16 rows of C0 values.
template <class T, class V>
void UnpackA(const T* a, int64_t m, int64_t k, int64_t k_fractals, bool vector, V* out) {
  constexpr int64_t c0 = 32 / sizeof(T);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t f = 0; f * c0 < k; ++f) {
      const T* row = vector ? a + f * c0 : a + ((i / 16) * k_fractals + f) * 16 * c0 + (i % 16) * c0;
      const int64_t n = k - f * c0 < c0 ? k - f * c0 : c0;
      for (int64_t x = 0; x < n; ++x) out[i * k + f * c0 + x] = static_cast<V>(row[x]);
    }
}

// Strip j of B as k rows of 16 values. B is Zn: k fractals, then column fractals, each 16 columns of C0 values.
template <class T, class V>
void UnpackB(const T* b, int64_t k, int64_t n_fractals, int64_t strip, V* out) {
  constexpr int64_t c0 = 32 / sizeof(T);
  for (int64_t f = 0; f * c0 < k; ++f) {
    const T* fractal = b + (f * n_fractals + strip) * 16 * c0;
    const int64_t depth = k - f * c0 < c0 ? k - f * c0 : c0;
    V block[16 * 32];
    for (int64_t i = 0; i < 16 * c0; ++i) block[i] = static_cast<V>(fractal[i]);
    for (int64_t x = 0; x < depth; ++x)
      for (int64_t column = 0; column < 16; ++column) out[(f * c0 + x) * 16 + column] = block[column * c0 + x];
  }
}

template <int ROWS, class V, class Vector>
void MultiplyRows(const V* a, int64_t k, const V* b, V* c, bool keep) {
  Vector sum[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    sum[r] = Vector{};
    if (keep) std::memcpy(&sum[r], c + r * 16, sizeof(Vector));
  }
  for (int64_t x = 0; x < k; ++x) {
    Vector row;
    std::memcpy(&row, b + x * 16, sizeof row);
    for (int r = 0; r < ROWS; ++r) sum[r] += a[r * k + x] * row;
  }
  for (int r = 0; r < ROWS; ++r) std::memcpy(c + r * 16, &sum[r], sizeof(Vector));
}

// c is Nz: column strips, each of `m_fractals` * 16 rows of 16 values.
template <class T>
void Multiply(const T* a, const T* b, typename Accumulator<T>::Type* c, int64_t m, int64_t n, int64_t k,
              int64_t k_fractals, bool keep) {
  using V = typename Accumulator<T>::Type;
  using Vector = typename Accumulator<T>::Vector;
  static thread_local std::vector<V> rows, strip;
  const int64_t m_fractals = (m + 15) / 16, n_fractals = (n + 15) / 16;
  rows.resize(static_cast<size_t>(m * k));
  strip.resize(static_cast<size_t>(k * 16));
  UnpackA<T, V>(a, m, k, k_fractals, m == 1, rows.data());
  constexpr int kRows = 8;
  for (int64_t j = 0; j < n_fractals; ++j) {
    UnpackB<T, V>(b, k, n_fractals, j, strip.data());
    V* out = c + j * m_fractals * 256;
    int64_t i = 0;
    for (; i + kRows <= m; i += kRows)
      MultiplyRows<kRows, V, Vector>(rows.data() + i * k, k, strip.data(), out + i * 16, keep);
    for (; i < m; ++i) MultiplyRows<1, V, Vector>(rows.data() + i * k, k, strip.data(), out + i * 16, keep);
  }
}

}  // namespace ms_twin
