// A Problem, through the host tiling and onto the twin.
#pragma once
#include <string>

#include "common/problem.h"

namespace msf {

void run_forward(const Problem& p);
void run_backward(const Problem& p);
void run_bias_grad(const Problem& p);

// Arrays around the attention of a block; absent ones are null. Weights are (out, in), biases of the weights' type.
struct BlockArrays {
  const void *x, *context, *context_v, *w_q, *w_k, *w_v, *b_q, *b_k, *b_v, *w_o, *b_o;
  int64_t embed, k_embed, v_embed, out;
  void* y;
};
void run_block(const Problem& attention, const BlockArrays& arrays);

std::string describe_forward(const Problem& p);
std::string describe_backward(const Problem& p);
std::string describe_bias_grad(const Problem& p);

void configure(const std::string& key, const std::string& value);
const std::string& last_report();  // of this thread
std::string totals(bool reset);    // of all launches of the process

}  // namespace msf
