// What the machine could do at most: the yardstick of `bench`. Measured with the vectors the kernels use, on as many
// threads.
#pragma once
#include <chrono>

#include "cpu/pack.h"
#include "cpu/threads.h"

namespace {

MSF_INLINE double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// FLOP/s of multiplications with addition on registers.
inline double fma_peak() {
#if MSF_VECTOR_BYTES == 64 || defined(__aarch64__)
  constexpr int kChains = 24;
#else
  constexpr int kChains = 12;  // of 16 registers; 10 cover latency times units
#endif
  constexpr int64_t kSteps = 1 << 20;
  const int threads = msf::num_threads();
  volatile float factor = 0.999f;
  const double start = now();
  msf::run_tasks(threads, [&](int64_t) {
    V<float> chain[kChains], x = splat(float(factor)), y = splat(float(factor));
    for (auto& c : chain) c = y;
    for (int64_t i = 0; i < kSteps; ++i)
#pragma GCC unroll 24
      for (int c = 0; c < kChains; ++c) chain[c] = chain[c] * x + y;
    V<float> sum{};
    for (auto& c : chain) sum += c;
    volatile float sink = sum_lanes<float>(sum);
    (void)sink;
  });
  return 2.0 * kChains * kLanes<float> * kSteps * threads / (now() - start);
}

// B/s of reading a block of memory that no cache holds, in order.
inline double read_bandwidth() {
  constexpr int64_t kChunk = int64_t(1) << 22, kChunks = 32;  // 32 x 16 MiB
  static const Buffer<float>& memory = *[] {
    auto* buffer = new Buffer<float>;
    buffer->resize(kChunk * kChunks);
    fill(buffer->data, kChunk * kChunks, 1.0f);
    return buffer;
  }();
  const double start = now();
  msf::run_tasks(kChunks, [&](int64_t chunk) {
    constexpr int W = kLanes<float>;
    V<float> sum[4] = {};
    for (const float *p = memory.data + chunk * kChunk, *end = p + kChunk; p < end; p += 4 * W)
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sum[i] += load(p + i * W);
    volatile float sink = sum_lanes<float>(sum[0] + sum[1] + sum[2] + sum[3]);
    (void)sink;
  });
  return double(kChunk * kChunks) * sizeof(float) / (now() - start);
}

}  // namespace
