// What the kernels need beside the language: tiles in shared memory, storage types, launches. With nvcc these are thin
// names for CUDA's own; without, tests/gpu/host_shim.h gives them a form that runs and is checked on the host.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define MSF_ALWAYS_INLINE __host__ __device__ __attribute__((always_inline))

// A tile of shared memory. Rows are one element longer than they look, so that the threads of a warp that read a column
// meet different banks.
template <class T, int kRows, int kColumns>
class Tile {
 public:
  static constexpr int rows = kRows, columns = kColumns;
  __device__ T operator()(int r, int c) const { return data_[r][c]; }
  __device__ void put(int r, int c, T value) { data_[r][c] = value; }

 private:
  T data_[kRows][kColumns + 1];
};

#define MSF_SHARED(Type, name)                                                           \
  static_assert(sizeof(Type) <= 48 * 1024, "more shared memory than a kernel may have"); \
  __shared__ Type name

template <class T>
__device__ T read(const T* p) {
  return *p;
}
template <class T>
__device__ void write(T* p, T value) {
  *p = value;
}

// Queues the kernel; null, or why it could not be.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks_x, int64_t blocks_y, int threads, void* stream,
                   Arguments... arguments) {
  if (blocks_x == 0 || blocks_y == 0) return nullptr;
  kernel<<<dim3(unsigned(blocks_x), unsigned(blocks_y)), threads, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
#else
#include "host_shim.h"
#endif

// Storage and arithmetic: everything is computed in float.
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T rounded(float x);
template <>
__device__ inline float rounded<float>(float x) {
  return x;
}
template <>
__device__ inline __half rounded<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 rounded<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
