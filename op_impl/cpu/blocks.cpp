#include "cpu/blocks.h"

#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace msf {
namespace {

struct Rule {
  std::string isa, dtype, pass;  // "*": any
  int64_t least_d, most_d;       // head_dim of the key
  int64_t least_k, most_k;       // keys of the longest sequence
  Blocks blocks;
};
using Rules = std::vector<Rule>;

std::mutex mutex;
std::shared_ptr<const Rules> rules;  // shared: a call may still read those that another thread replaces

const char* name_of(DType dtype) {
  return dtype == DType::f32 ? "float32" : dtype == DType::f16 ? "float16" : "bfloat16";
}

bool agrees(const std::string& wanted, const char* name) { return wanted == "*" || wanted == name; }

}  // namespace

Blocks tuned_blocks(const Problem& p, bool backward) {
  std::shared_ptr<const Rules> current;
  {
    std::lock_guard<std::mutex> lock(mutex);
    current = rules;
  }
  // float64 accumulation is another kernel: its vectors hold half as many rows. Who fixes the parts wants a sequence's
  // result not to depend on the other sequences of the batch, as the longest of them, on which a rule depends, does.
  if (!current || p.high || p.splits) return {};
  const char* pass = backward ? "backward" : p.max_q == 1 ? "decode" : "forward";
  for (const Rule& r : *current)
    if (agrees(r.isa, selected_kernels()->isa) && agrees(r.dtype, name_of(p.q.dtype)) && agrees(r.pass, pass) &&
        r.least_d <= p.d && p.d <= r.most_d && r.least_k <= p.max_k && p.max_k <= r.most_k)
      return r.blocks;
  return {};
}

void set_block_rules(const char* text) {
  auto parsed = std::make_shared<Rules>();
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream fields(line);
    Rule r;
    fields >> r.isa >> r.dtype >> r.pass >> r.least_d >> r.most_d >> r.least_k >> r.most_k >> r.blocks.rows >>
        r.blocks.keys >> r.blocks.keys_per_part;
    std::string rest;
    if (!fields || fields >> rest) throw std::invalid_argument("the block rule '" + line + "' cannot be read.");
    for (int64_t size : {r.blocks.rows, r.blocks.keys, r.blocks.keys_per_part})
      if (size < 0) throw std::invalid_argument("the block rule '" + line + "' has a negative size.");
    parsed->push_back(r);
  }
  std::lock_guard<std::mutex> lock(mutex);
  rules = parsed;
}

}  // namespace msf
