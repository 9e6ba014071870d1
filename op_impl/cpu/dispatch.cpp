// Chooses the instruction set at run time.
#include "cpu/kernels.h"

namespace msf {

#if defined(__x86_64__)
extern const Kernels kernels_portable, kernels_avx2, kernels_wide, kernels_avx512;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#else
extern const Kernels kernels_portable;
#endif

const Kernels* const* usable_kernels() {
  static const Kernels* table[5] = {};
  static const bool filled = [] {
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();  // asks the operating system too: registers it does not save are not offered
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("bmi2"))
      table[n++] = &kernels_avx512;
    // F16C has come with every AVX2 processor; GCC names it for __builtin_cpu_supports only from 11 on
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
      table[n++] = &kernels_avx2;
#ifdef MSF_WIDE
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) table[n++] = &kernels_wide;
#endif
    table[n++] = &kernels_portable;
#elif defined(__aarch64__)
    table[n++] = &kernels_neon;
#else
    table[n++] = &kernels_portable;
#endif
    return n > 0;
  }();
  (void)filled;
  return table;
}

}  // namespace msf
