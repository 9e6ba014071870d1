// The one matrix product all kernels are made of:  C[m][lanes] (+)= sum_k A[m][k] * B[k][lanes].
//
// A is read one scalar at a time and broadcast, B and C are rows of vectors, the R x NV accumulators stay in registers.
// Every product of attention has this form, with K/V as A and queries along the lanes (scores, output, dQ) or with the
// probabilities as A and channels along the lanes (dK, dV).
#pragma once
#include "cpu/simd.h"

namespace {

enum class Start { zero, keep, scale };  // C = 0 | C | C * alpha[lane] before the products are added

// How A[m][k] is addressed: by rows (k contiguous) or by columns (m contiguous), `stride` to the next row or column.
enum class Side { rows, columns };

// Guarded products skip a zero probability instead of multiplying by it: 0 * NaN must not reach the sum. The zero is in
// B where queries run along the lanes, in A where channels do.
enum class Guard { none, zero_in_a, zero_in_b };

template <class T, int R, int NV, Side SIDE, Start START, Guard GUARD>
MSF_INLINE void tile(int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc, const T* alpha) {
  constexpr int W = kLanes<T>;
  V<T> acc[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      if constexpr (START == Start::zero) acc[r][v] = V<T>{};
      if constexpr (START == Start::keep) acc[r][v] = load(c + r * ldc + v * W);
      if constexpr (START == Start::scale) acc[r][v] = load(c + r * ldc + v * W) * load(alpha + v * W);
    }
  for (int64_t k = 0; k < K; ++k) {
    V<T> bv[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) bv[v] = load(b + k * ldb + v * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      V<T> x = splat(SIDE == Side::rows ? a[r * lda + k] : a[k * lda + r]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) {
        const V<T> next = acc[r][v] + x * bv[v];  // fused in all three, so that they agree to the last bit
        if constexpr (GUARD == Guard::none) acc[r][v] = next;
        if constexpr (GUARD == Guard::zero_in_a) acc[r][v] = x != T(0) ? next : acc[r][v];
        if constexpr (GUARD == Guard::zero_in_b) acc[r][v] = bv[v] != T(0) ? next : acc[r][v];
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) put(c + r * ldc + v * W, acc[r][v]);
}

// 24 accumulators where there are 32 registers, 12 where there are 16.
#if MSF_VECTOR_BYTES == 64 || defined(__aarch64__)
struct LaneTile {  // queries along the lanes
  static constexpr int R = 8, NV = 3;
};
struct ChannelTile {  // channels along the lanes: head sizes are powers of two more often than multiples of 3
  static constexpr int R = 6, NV = 4;
};
#else
struct LaneTile {
  static constexpr int R = 4, NV = 3;
};
struct ChannelTile {
  static constexpr int R = 6, NV = 2;
};
#endif

template <class T, int R, int NV, Side SIDE, Start START, Guard GUARD, class BETWEEN>
MSF_INLINE void strips(int64_t* m, int64_t M, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
                       int64_t ldc, const T* alpha, BETWEEN& between) {
  for (; *m + R <= M; *m += R) {
    tile<T, R, NV, SIDE, START, GUARD>(K, SIDE == Side::rows ? a + *m * lda : a + *m, lda, b, ldb, c + *m * ldc, ldc,
                                       alpha);
    between();
  }
}

template <class T, class SHAPE, int NV, Side SIDE, Start START, Guard GUARD, class BETWEEN>
void panel(int64_t M, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc, const T* alpha,
           BETWEEN& between) {
  int64_t m = 0;
  strips<T, SHAPE::R, NV, SIDE, START, GUARD>(&m, M, K, a, lda, b, ldb, c, ldc, alpha, between);
  if constexpr (SHAPE::R > 4) strips<T, 4, NV, SIDE, START, GUARD>(&m, M, K, a, lda, b, ldb, c, ldc, alpha, between);
  strips<T, 2, NV, SIDE, START, GUARD>(&m, M, K, a, lda, b, ldb, c, ldc, alpha, between);
  strips<T, 1, NV, SIDE, START, GUARD>(&m, M, K, a, lda, b, ldb, c, ldc, alpha, between);
}

struct Nothing {
  MSF_INLINE void operator()() const {}
};

// M rows of `vectors` vectors each; any M, K >= 0 and vectors >= 0. `between` is called after every few rows.
template <class T, class SHAPE, Side SIDE, Start START, Guard GUARD, class BETWEEN = const Nothing>
void product(int64_t M, int vectors, int64_t K, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
             const T* alpha = nullptr, BETWEEN& between = Nothing()) {
  constexpr int W = kLanes<T>, N = SHAPE::NV;
  int v = 0;
  for (; v + N <= vectors; v += N, alpha += START == Start::scale ? N * W : 0)
    panel<T, SHAPE, N, SIDE, START, GUARD>(M, K, a, lda, b + v * W, ldb, c + v * W, ldc, alpha, between);
  b += v * W;
  c += v * W;
  if constexpr (N > 3)
    if (vectors - v == 3) panel<T, SHAPE, 3, SIDE, START, GUARD>(M, K, a, lda, b, ldb, c, ldc, alpha, between);
  if constexpr (N > 2)
    if (vectors - v == 2) panel<T, SHAPE, 2, SIDE, START, GUARD>(M, K, a, lda, b, ldb, c, ldc, alpha, between);
  if (vectors - v == 1) panel<T, SHAPE, 1, SIDE, START, GUARD>(M, K, a, lda, b, ldb, c, ldc, alpha, between);
}

}  // namespace
