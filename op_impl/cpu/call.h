// A call as MindSpore makes it (raw arrays, and one string with everything static), turned into a Problem.
#pragma once
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/problem.h"

namespace msf {

// Input slots, in the order of op_impl/ops.yaml.
enum Slot {
  kQuery,
  kKey,
  kValue,
  kMask,
  kBias,
  kAlibi,
  kSinks,
  kSeed,
  kDropMask,
  kCuQ,
  kCuK,
  kForwardInputs,
  kOut = kForwardInputs,
  kRowMax,
  kRowSum,
  kDout,
  kDlse,
  kBackwardInputs
};

enum class Op { forward, backward, bias_grad };

enum class Layout { BNSD, BSND, BSH, SBH, TND };

// The `spec` attribute, parsed. Throws std::invalid_argument on anything it does not know.
struct Spec {
  Layout layout = Layout::BNSD;
  int64_t heads = 0, kv_heads = 0;  // 0: from the shapes
  bool packed = false, default_scale = true;
  std::string present;  // one 0 or 1 per forward slot
  Problem fixed;        // the fields that do not depend on shapes

  explicit Spec(const std::string& text);
  bool has(int slot) const { return slot >= kForwardInputs || present[slot] == '1'; }
  int position(int slot) const;  // among the inputs that are present
  int rank() const;              // of query
};

struct Array {
  void* data;
  std::vector<int64_t> shape;
  DType dtype;
  bool on_device = false;  // in memory that only a device's kernels read
};

// Runs one op. `params` holds the inputs (absent ones: data null) and then the outputs.
void run(Op op, const Spec& spec, const std::vector<Array>& params);

// Output shapes from input shapes (absent inputs left out; -1: unknown length; {-2}: unknown rank).
std::vector<std::vector<int64_t>> infer_shapes(Op op, const Spec& spec,
                                               const std::vector<std::vector<int64_t>>& inputs);

DType dtype_of(const char* name);

// Throws what is wrong with a call of `function`.
template <class... Parts>
[[noreturn]] void fail_in(const char* function, const Parts&... parts) {
  std::ostringstream text;
  text << "For '" << function << "', ";
  (void)std::initializer_list<int>{((text << parts), 0)...};
  throw std::invalid_argument(text.str());
}
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  fail_in("flash_attention", parts...);
}

std::string show(const std::vector<int64_t>& shape);

}  // namespace msf
