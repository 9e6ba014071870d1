// A Problem, through the host tiling and onto the twin.
#pragma once
#include <string>

#include "ascendc/op_host/tiling.h"
#include "common/problem.h"

namespace msf {

void run_forward(const Problem& p);
void run_backward(const Problem& p);
void run_bias_grad(const Problem& p);

// Arrays around the attention of a block; absent ones are null. Biases have the weights' type. Weights may share an
// array, of which each then takes its part.
struct BlockWeight {
  const void *data = nullptr, *bias = nullptr;
  int64_t bytes = 0, bias_bytes = 0;
  BlockShape::Weight place;
};
struct BlockArrays {
  const void *x = nullptr, *context = nullptr, *context_v = nullptr;
  int64_t embed = 0, k_embed = 0, v_embed = 0, out = 0;
  BlockWeight q, k, v, o;
  void *y = nullptr, *kept_q = nullptr, *kept_k = nullptr, *kept_v = nullptr, *kept_attn = nullptr;
};
void run_block(const Problem& attention, const BlockArrays& arrays);

std::string describe_forward(const Problem& p);
std::string describe_backward(const Problem& p);
std::string describe_bias_grad(const Problem& p);

void configure(const std::string& key, const std::string& value);
const std::string& last_report();  // of this thread
std::string totals(bool reset);    // of all launches of the process

}  // namespace msf
