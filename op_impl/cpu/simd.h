// Vectors of the width this file is compiled for, over GCC/Clang vector extensions: one source, one build per ISA.
//
// Contract of every operation: lanes are independent; loads and stores need no alignment; NaN propagates through
// exp2 and tanh. The width comes from MSF_VECTOR_BYTES (64, 32 or 16) and not from the machine, so the 512-bit form of
// the source also builds for AVX2.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__F16C__) || defined(__AVX512F__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns about its own _mm512_undefined_*
#include <immintrin.h>
#endif

#ifndef MSF_VECTOR_BYTES
#if defined(__AVX512F__)
#define MSF_VECTOR_BYTES 64
#elif defined(__AVX__)
#define MSF_VECTOR_BYTES 32
#else
#define MSF_VECTOR_BYTES 16
#endif
#endif

#define MSF_INLINE inline __attribute__((always_inline))

// Everything below has internal linkage: the same names are compiled with other instruction sets in other files, and
// the linker must never merge them.
namespace {

template <class T, int N>
using vec __attribute__((vector_size(N * sizeof(T)), may_alias)) = T;
template <class T, int N>
using unaligned_vec __attribute__((vector_size(N * sizeof(T)), aligned(sizeof(T)), may_alias)) = T;

template <class T>
constexpr int kLanes = MSF_VECTOR_BYTES / int(sizeof(T));
template <class T>
using V = vec<T, kLanes<T>>;

template <class T>
struct IntOf;
template <>
struct IntOf<float> {
  using type = int32_t;
};
template <>
struct IntOf<double> {
  using type = int64_t;
};
template <class T>
using Int = typename IntOf<T>::type;
template <class T>
using VI = vec<Int<T>, kLanes<T>>;

template <class T, int N = kLanes<T>>
MSF_INLINE vec<T, N> load(const T* p) {
  return *reinterpret_cast<const unaligned_vec<T, N>*>(p);
}
template <class T, int N>
MSF_INLINE void store(T* p, vec<T, N> v) {
  *reinterpret_cast<unaligned_vec<T, N>*>(p) = v;
}
template <class T>
struct Same {
  using type = T;
};
template <class T>
MSF_INLINE void put(T* p, typename Same<V<T>>::type v) {
  *reinterpret_cast<unaligned_vec<T, kLanes<T>>*>(p) = v;
}
// x - 0 is x for every x (x + 0 is not: -0), so this folds to one broadcast
template <class T>
MSF_INLINE V<T> splat(T x) {
  return x - V<T>{};
}
template <class T>
MSF_INLINE V<T> bits(VI<T> v) {
  return reinterpret_cast<V<T>&>(v);
}

// the second operand is returned when either is NaN, so write max(x, bound) as larger(bound, x) to keep x's NaN
template <class T>
MSF_INLINE V<T> larger(V<T> a, V<T> b) {
  return a > b ? a : b;
}

template <class T>
MSF_INLINE T sum_lanes(V<T> v) {
  T s = 0;
  for (int i = 0; i < kLanes<T>; ++i) s += v[i];
  return s;
}

// ---- storage types -------------------------------------------------------------------------------------------------
struct f16 {
  uint16_t raw;
};
struct bf16 {
  uint16_t raw;
};
struct keep8 {
  uint8_t raw;
};

template <int N>
MSF_INLINE vec<float, N> widen(const bf16* p) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {  // GCC 12 widens the halves of a vector one after the other, and puts them together
    auto r = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16);
    return reinterpret_cast<vec<float, N>&>(r);
  }
#endif
  vec<uint16_t, N> h = load<uint16_t, N>(reinterpret_cast<const uint16_t*>(p));
  vec<uint32_t, N> w = __builtin_convertvector(h, vec<uint32_t, N>) << 16;
  return reinterpret_cast<vec<float, N>&>(w);
}

template <int N>
MSF_INLINE vec<float, N> widen(const f16* p) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    auto r = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return reinterpret_cast<vec<float, N>&>(r);
  }
#endif
#if defined(__F16C__)
  if constexpr (N == 8) {
    auto r = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return reinterpret_cast<vec<float, N>&>(r);
  }
#endif
  using U = vec<uint32_t, N>;
  using F = vec<float, N>;
  U h = __builtin_convertvector(load<uint16_t, N>(reinterpret_cast<const uint16_t*>(p)), U);
  U mag = (h & 0x7fffu) << 13, sign = (h & 0x8000u) << 16;
  // exponent rebias by a multiplication, which also normalizes the subnormals; 31 is the exponent of Inf and NaN
  F f = reinterpret_cast<F&>(mag) * 0x1p112f;
  U special = mag | 0x7f800000u, normal = reinterpret_cast<U&>(f);
  U r = (((h & 0x7c00u) == 0x7c00u) ? special : normal) | sign;
  return reinterpret_cast<F&>(r);
}

template <int N>
MSF_INLINE vec<float, N> widen(const float* p) {
  return load<float, N>(p);
}
template <int N>
MSF_INLINE vec<float, N> widen(const uint8_t* p) {
  return __builtin_convertvector(load<uint8_t, N>(p), vec<float, N>);
}
// ONNX's masks say what to keep; inside, as for MindSpore, 1 masks out.
template <int N>
MSF_INLINE vec<float, N> widen(const keep8* p) {
  const vec<float, N> x = widen<N>(reinterpret_cast<const uint8_t*>(p)), one = vec<float, N>{} + 1;
  return x == 0 ? one : vec<float, N>{};
}

template <int N>
MSF_INLINE void narrow(bf16* p, vec<float, N> v) {
  using U = vec<uint32_t, N>;
  U u = reinterpret_cast<U&>(v);
  U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16,
    quiet = (u >> 16) | 0x40u;  // round to nearest even; NaN stays NaN
  U r = v == v ? rounded : quiet;
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i&>(r)));
    return;
  }
#endif
  store<uint16_t, N>(reinterpret_cast<uint16_t*>(p), __builtin_convertvector(r, vec<uint16_t, N>));
}

template <int N>
MSF_INLINE void narrow(f16* p, vec<float, N> v) {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    auto r = _mm512_cvtps_ph(reinterpret_cast<__m512&>(v), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), r);
    return;
  }
#endif
#if defined(__F16C__)
  if constexpr (N == 8) {
    auto r = _mm256_cvtps_ph(reinterpret_cast<__m256&>(v), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), r);
    return;
  }
#endif
  using U = vec<uint32_t, N>;
  using F = vec<float, N>;
  U u = reinterpret_cast<U&>(v), sign = (u >> 16) & 0x8000u, mag = u & 0x7fffffffu;
  // below 2^-14 the result is subnormal: adding 0.5 puts its last bit at 2^-24, rounded by the adder
  F sub = reinterpret_cast<F&>(mag) + 0.5f;
  U tiny = reinterpret_cast<U&>(sub) - 0x3f000000u;
  U norm = (mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13;
  U r = mag < 0x38800000u ? tiny : norm;
  r = mag >= 0x477ff000u ? (U{} + 0x7c00u) : r;  // 65520 and above round to Inf
  r = mag > 0x7f800000u ? (U{} + 0x7e00u) : r;   // NaN
  r |= sign;
  store<uint16_t, N>(reinterpret_cast<uint16_t*>(p), __builtin_convertvector(r, vec<uint16_t, N>));
}

template <int N>
MSF_INLINE void narrow(float* p, vec<float, N> v) {
  store<float, N>(p, v);
}

// S in memory (float, f16, bf16, uint8_t, keep8), T in registers (float, double)
template <class T, class S>
MSF_INLINE V<T> load_as(const S* p) {
  vec<float, kLanes<T>> v = widen<kLanes<T>>(p);
  return __builtin_convertvector(v, V<T>);
}
template <class T, class S>
MSF_INLINE void store_as(S* p, V<T> v) {
  narrow<kLanes<T>>(p, __builtin_convertvector(v, vec<float, kLanes<T>>));
}
template <class T, class S>
MSF_INLINE V<T> load_part(const S* p, int n) {  // n < lanes valid elements, zero behind them
  S tail[kLanes<T>];
  memset(tail, 0, sizeof tail);
  memcpy(tail, p, n * sizeof(S));
  return load_as<T>(tail);
}
template <class T, class S>
MSF_INLINE void store_part(S* p, V<T> v, int n) {
  S tail[kLanes<T>];
  store_as<T>(tail, v);
  memcpy(p, tail, n * sizeof(S));
}
template <class T, class S>
MSF_INLINE T load_one(const S* p) {
  return load_part<T>(p, 1)[0];
}

// ---- transpose -----------------------------------------------------------------------------------------------------
template <class T, int STEP, bool HIGH, int... I>
MSF_INLINE V<T> exchange(V<T> a, V<T> b, std::integer_sequence<int, I...>) {
  constexpr int W = kLanes<T>;
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, (HIGH ? (I & STEP ? W + I : I + STEP) : (I & STEP ? W + I - STEP : I))...);
#else
  return __builtin_shuffle(a, b,
                           VI<T>{Int<T>(HIGH ? (I & STEP ? W + I : I + STEP) : (I & STEP ? W + I - STEP : I))...});
#endif
}
template <class T, int STEP>
MSF_INLINE void transpose_step(V<T> (&r)[kLanes<T>]) {
  constexpr int W = kLanes<T>;
  constexpr auto lanes = std::make_integer_sequence<int, W>{};
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) {
    if (i & STEP) continue;
    V<T> a = r[i], b = r[i + STEP];
    r[i] = exchange<T, STEP, false>(a, b, lanes);
    r[i + STEP] = exchange<T, STEP, true>(a, b, lanes);
  }
  if constexpr (STEP > 1) transpose_step<T, STEP / 2>(r);
}
// square block of lanes x lanes, by exchanging the off-diagonal halves, quarters, ...
template <class T>
MSF_INLINE void transpose(V<T> (&r)[kLanes<T>]) {
  if constexpr (kLanes<T> > 1) transpose_step<T, kLanes<T> / 2>(r);
}

// ---- functions -----------------------------------------------------------------------------------------------------
// 2^x for x <= 127. Below -126.5 the result is exactly 0, so a masked score of -inf needs no blend. Relative error
// 1.1e-7 (float, degree 5, minimax with p(0) = 1 so that 2^0 is exactly 1), 2e-16 (double, degree 12).
MSF_INLINE V<float> exp2(V<float> x) {
  x = larger<float>(splat(-127.0f), x);
  const float magic = 12582912.0f + 127.0f;  // 1.5 * 2^23: rounds to an integer; the low bits then hold x + 127
  V<float> t = x + magic, f = x - (t - magic);
  V<float> p = splat(1.326472724721e-03f);
  p = p * f + 9.671512688160e-03f;
  p = p * f + 5.550733743574e-02f;
  p = p * f + 2.402224208463e-01f;
  p = p * f + 6.931469775987e-01f;
  p = p * f + 1.0f;
  return p * bits<float>(reinterpret_cast<VI<float>&>(t) << 23);
}
MSF_INLINE V<double> exp2(V<double> x) {
  x = larger<double>(splat(-1023.0), x);
  const double magic = 6755399441055744.0 + 1023.0;
  V<double> t = x + magic, f = (x - (t - magic)) * 0.6931471805599453094;
  V<double> p = splat(1.0 / 479001600);
  const double c[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                      1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0,        1.0};
#pragma GCC unroll 12
  for (double k : c) p = p * f + k;
  return p * bits<double>(reinterpret_cast<VI<double>&>(t) << 52);
}

// 1 - 2 / (e^2|x| + 1); near 0, where that cancels, an odd polynomial (Cephes' tanhf; double: Taylor to x^17)
template <class T>
MSF_INLINE V<T> tanh(V<T> x) {
  constexpr bool single = sizeof(T) == 4;
  V<T> a = x < T(0) ? -x : x, z = x * x;
  V<T> small;
  if constexpr (single) {
    small = splat(-5.70498872745e-3f);
    small = small * z + 2.06390887954e-2f;
    small = small * z - 5.37397155531e-2f;
    small = small * z + 1.33314422036e-1f;
    small = small * z - 3.33332819422e-1f;
  } else {
    const double c[] = {-929569.0 / 638512875, 21844.0 / 6081075, -1382.0 / 155925, 62.0 / 2835,
                        -17.0 / 315,           2.0 / 15,          -1.0 / 3};
    small = splat(6404582.0 / 10854718875);
#pragma GCC unroll 7
    for (double k : c) small = small * z + k;
  }
  small = small * z * x + x;
  V<T> clipped = a > T(20) ? splat(T(20)) : a;  // NaN passes: the comparison is false
  V<T> e = exp2(clipped * T(2.885390081777926815));
  V<T> big = T(1) - T(2) / (e + T(1));
  big = x < T(0) ? -big : big;
  return a < T(single ? 0.625 : 0.15) ? small : big;
}

template <int N>
MSF_INLINE vec<uint32_t, N> mul_wide(vec<uint32_t, N> a, uint32_t m, vec<uint32_t, N>* hi) {
  using L = vec<uint64_t, N>;
  L p = __builtin_convertvector(a, L) * uint64_t(m);
  *hi = __builtin_convertvector(p >> 32, vec<uint32_t, N>);
  return a * m;
}

}  // namespace
