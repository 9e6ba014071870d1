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

}  // namespace msf
