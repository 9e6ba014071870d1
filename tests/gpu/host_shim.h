// CUDA for the host, as much as onnx_export/gpu/flash_attention.cu needs: its kernels run block by block, each thread a
// fibre, and every access is checked. Included by onnx_export/gpu/device.h where the compiler is not nvcc.
//
// Found: barriers that not all threads reach, or not at the same place; shared memory read or written out of bounds,
// read before it is written, or accessed by two threads without a barrier between where one of them writes; global
// memory outside of the buffers that the test named.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

namespace shim {

struct Violation {};  // thrown through a fibre, caught at its start

extern Index3 thread, block;
extern int epoch;           // barriers passed by this block
extern long barriers_seen;  // by all blocks

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void barrier(int line);
void check_global(const void* p, size_t bytes, bool write);
void* shared_memory(size_t bytes, void (*construct)(void*));

template <class T>
T& shared() {
  return *static_cast<T*>(shared_memory(sizeof(T), [](void* p) { new (p) T; }));
}

// Runs `body` for every thread of every block; null, or the first violation.
const char* run(int64_t blocks_x, int64_t blocks_y, int threads, void (*body)(void*), void* context);

}  // namespace shim

#define threadIdx shim::thread
#define blockIdx shim::block
#define __syncthreads() shim::barrier(__LINE__)
#define MSF_SHARED(Type, name)                                                                             \
  static_assert(sizeof(Type) / shim::kOverhead <= 48 * 1024, "more shared memory than a kernel may have"); \
  Type& name = shim::shared<Type>()

namespace shim {
constexpr size_t kOverhead = 5;  // an element of a checked tile takes this many times a float
}

template <class T, int kRows, int kColumns>
class Tile {
 public:
  static constexpr int rows = kRows, columns = kColumns;

  T operator()(int r, int c) const {
    Element& e = at(r, c);
    if (!e.written) shim::fail("read of element (%d, %d) of a tile before it is written", r, c);
    if (e.write_epoch == shim::epoch && e.writer != int(shim::thread.x))
      shim::fail("element (%d, %d) of a tile written by thread %d and read by thread %u with no barrier between", r, c,
                 e.writer, shim::thread.x);
    if (e.read_epoch != shim::epoch)
      e.reader = int(shim::thread.x);
    else if (e.reader != int(shim::thread.x))
      e.reader = kMany;
    e.read_epoch = shim::epoch;
    return e.value;
  }

  void put(int r, int c, T value) {
    Element& e = at(r, c);
    if (e.written && e.write_epoch == shim::epoch && e.writer != int(shim::thread.x))
      shim::fail("element (%d, %d) of a tile written by threads %d and %u with no barrier between", r, c, e.writer,
                 shim::thread.x);
    if (e.read_epoch == shim::epoch && e.reader != int(shim::thread.x))
      shim::fail("element (%d, %d) of a tile read by thread %d and written by thread %u with no barrier between", r, c,
                 e.reader, shim::thread.x);
    e.value = value;
    e.written = true;
    e.writer = short(shim::thread.x);
    e.write_epoch = shim::epoch;
  }

 private:
  static constexpr short kMany = -1;
  struct Element {
    T value{};
    int write_epoch = -1, read_epoch = -1;
    short writer = -1, reader = -1;
    bool written = false;
  };

  Element& at(int r, int c) const {
    if (r < 0 || r >= kRows || c < 0 || c >= kColumns)
      shim::fail("element (%d, %d) of a tile of %d x %d", r, c, kRows, kColumns);
    return data_[r][c];
  }

  mutable Element data_[kRows][kColumns];
};

template <class T>
T read(const T* p) {
  shim::check_global(p, sizeof(T), false);
  return *p;
}

template <class T>
void write(T* p, T value) {
  shim::check_global(p, sizeof(T), true);
  *p = value;
}

template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks_x, int64_t blocks_y, int threads, void*,
                   Arguments... arguments) {
  auto body = [&] { kernel(arguments...); };
  return shim::run(blocks_x, blocks_y, threads, [](void* f) { (*static_cast<decltype(body)*>(f))(); }, &body);
}

// Storage types, rounded to nearest even as CUDA's functions do.
struct __half {
  _Float16 value;
};
inline float __half2float(__half x) { return float(x.value); }
inline __half __float2half_rn(float x) { return {_Float16(x)}; }

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {0x7fff};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
