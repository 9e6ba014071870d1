// What the tilings of the kernels share.
#pragma once
#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "ascendc/op_host/tiling.h"

namespace msf {

constexpr int64_t kFractal = 16, kSelectScratch = 8 * 1024;

template <class... Parts>
[[noreturn]] void reject(const Parts&... parts) {
  std::ostringstream text;
  text << "For 'flash_attention' on Ascend, ";
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

inline int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

inline TensorLayout layout_of(const Tensor4& x) { return {x.b, x.h, x.s, 0}; }

// Takes bytes from a memory of a given size.
class Budget {
 public:
  Budget(const char* name, int64_t size) : name_(name), size_(size) {}
  int32_t take(int64_t bytes) {
    const int64_t at = used_;
    used_ += round_up(bytes, 32);
    return int32_t(at);
  }
  bool fits() const { return used_ <= size_; }
  int32_t used() const { return int32_t(used_); }
  void check() const {
    if (!fits()) reject("the buffers in ", name_, " take ", used_, " bytes of ", size_, ": choose smaller blocks.");
  }

 private:
  const char* name_;
  int64_t size_, used_ = 0;
};

// Room for guard.h from byte `at` on; `end` is what follows it.
inline GuardSpace guard_space(const Problem& p, const AttentionTiling& a, int64_t cores, bool clean_key, int64_t at,
                              int64_t* end) {
  const int64_t rows = (p.varlen ? 1 : p.batch) * p.kv_heads * (p.cached ? p.max_k : p.k_rows);
  GuardSpace g{at, at + 3 * cores * 32, 0, 0};
  g.value = g.key + rows * p.d * 2;
  const int64_t behind = g.value + rows * p.dv * 2;
  g.clean_key = clean_key ? behind : -1;
  *end = a.guard ? round_up(behind + (clean_key ? rows * p.d * 2 : 0), 512) : at;
  return g;
}

// A tiling buffer that begins with another struct than the forward's and has the forward's tables.
template <class Head>
std::vector<uint8_t> with_tables(const Head& head, const ForwardPlan& forward) {
  const std::vector<uint8_t> inner = forward.bytes();
  const size_t tables = inner.size() - sizeof(ForwardTiling);
  std::vector<uint8_t> buffer(sizeof(Head) + tables);
  std::memcpy(buffer.data(), &head, sizeof(Head));
  if (tables) std::memcpy(buffer.data() + sizeof(Head), inner.data() + sizeof(ForwardTiling), tables);
  return buffer;
}

// Largest over mean, minus 1.
inline double imbalance_of(const std::vector<double>& cores) {
  const double total = std::accumulate(cores.begin(), cores.end(), 0.0);
  return total > 0 ? *std::max_element(cores.begin(), cores.end()) * cores.size() / total - 1 : 0;
}

// The core counts of the chips that exist: what results depend on is decided for these, not for the chip at hand.
constexpr int64_t kCoreCounts[] = {20, 24};

}  // namespace msf
