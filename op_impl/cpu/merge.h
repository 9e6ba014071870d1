// The merge of attentions over parts of the keys, as called: outs (part, then the axes of the layout) and lses (part,
// batch, head, row).
#pragma once
#include <string>
#include <vector>

#include "cpu/call.h"

namespace msf {

enum class MergeOp { forward };

struct MergeSpec {
  Layout layout = Layout::BNSD;

  explicit MergeSpec(const std::string& text);
};

void run(MergeOp op, const MergeSpec& spec, const std::vector<Array>& params);
std::vector<std::vector<int64_t>> infer_shapes(MergeOp op, const MergeSpec& spec,
                                               const std::vector<std::vector<int64_t>>& inputs);
int dtype_source(MergeOp op, const MergeSpec& spec, int output);
int saved_inputs(MergeOp op);
const std::string& present(const MergeSpec& spec);

}  // namespace msf
