// The block op: projections around attention, from hidden states and weights to projected output, and its gradients.
#pragma once
#include <string>
#include <vector>

#include "cpu/call.h"

namespace msf {

// Input slots, in the order of op_impl/ops.yaml.
enum MhaSlot {
  kX,
  kContext,
  kContextV,
  kWq,
  kWk,
  kWv,
  kBq,
  kBk,
  kBv,
  kWo,
  kBo,
  kMhaMask,
  kMhaBias,
  kMhaAlibi,
  kMhaSinks,
  kMhaSeed,
  kMhaDropMask,
  kMhaInputs,
  kSavedQ = kMhaInputs,
  kSavedK,
  kSavedV,
  kSavedAttn,
  kSavedMax,
  kSavedSum,
  kDy,
  kMhaBackwardInputs
};

enum class MhaOp { forward, backward, bias_grad };

// Outputs of the backward; one more is working memory.
enum MhaGradient { kDx, kDcontext, kDcontextV, kDwq, kDwk, kDwv, kDbq, kDbk, kDbv, kDwo, kDbo, kDsinks, kMhaGradients };

// The `spec` attribute: "key=value;...|" and then that of the attention inside.
struct MhaSpec {
  bool recompute = false;    // the backward computes q, k and v again, and what it gets for them is not looked at
  bool interleaved = false;  // packed weights are ordered (head, part, channel), not (part, head, channel)
  bool transposed[4] = {};   // w_q, w_k, w_v, w_o: stored (in, out)
  std::string inputs;        // one 0 or 1 per input slot
  std::string grads;         // one 0 or 1 per output of the backward
  Spec attention;

  explicit MhaSpec(const std::string& text);
  bool has(int slot) const { return slot >= kMhaInputs || inputs[slot] == '1'; }
  bool wants(int gradient) const;
  int position(int slot) const;  // among the inputs that are present
};

// The input whose gradient this is.
int input_of(MhaGradient gradient);

void run(MhaOp op, const MhaSpec& spec, const std::vector<Array>& params);

std::vector<std::vector<int64_t>> infer_shapes(MhaOp op, const MhaSpec& spec,
                                               const std::vector<std::vector<int64_t>>& inputs);

// For infer.h.
inline int dtype_source(MhaOp op, const MhaSpec& s, int output) {
  if (op == MhaOp::bias_grad) return s.position(kMhaBias);
  if (op == MhaOp::forward) return output < 5 ? s.position(kX) : -1;
  return s.position(output < kMhaGradients && s.wants(output) ? input_of(MhaGradient(output)) : int(kX));
}
inline int saved_inputs(MhaOp op) { return op == MhaOp::forward ? 0 : kMhaBackwardInputs - kMhaInputs; }
inline const std::string& present(const MhaSpec& s) { return s.inputs; }

// The forward as a kernel sees it that does all of it in one launch. Arrays that are not there have no data.
struct MhaForward {
  struct Product {
    Array x, weight, bias, out;  // out: where the attention finds the result, and the backward
    int64_t heads, in, channels;
    int64_t first, group, group_stride;  // which channels of the weight: as Projection of mha.cpp
    bool transposed;                     // stored (in, out)
  };
  Product q, k, v;
  Array w_o, b_o, attn, y;  // attn: the input of the last product
  bool w_o_transposed;
};

}  // namespace msf
