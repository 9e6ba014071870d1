#include "cpu/merge.h"

#include "cpu/kernels.h"

namespace msf {

namespace {

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  fail_in("merge_attention", parts...);
}

}  // namespace

MergeSpec::MergeSpec(const std::string& text) {
  if (text == "layout=BSND")
    layout = Layout::BSND;
  else if (text != "layout=BNSD")
    refuse("the attribute 'spec' must be the layout BNSD or BSND, but got '", text, "'.");
}

void run(MergeOp, const MergeSpec& spec, const std::vector<Array>& params) {
  if (params.size() != 4) refuse("the op takes 4 arrays, but got ", params.size(), ".");
  const Array &outs = params[0], &lses = params[1], &out = params[2], &lse = params[3];
  const std::vector<int64_t>& s = outs.shape;
  if (s.size() != 5) refuse("the rank of the stacked 'outs' must be 5, but got the shape ", show(s), ".");
  const bool bnsd = spec.layout == Layout::BNSD;
  Merge m;
  m.parts = s[0];
  m.batch = s[1];
  m.heads = s[bnsd ? 2 : 3];
  m.rows = s[bnsd ? 3 : 2];
  m.channels = s[4];
  if (lses.shape != std::vector<int64_t>{m.parts, m.batch, m.heads, m.rows})
    refuse("the shape of the stacked 'lses' must be ", show({m.parts, m.batch, m.heads, m.rows}), ", but got ",
           show(lses.shape), ".");
  if (outs.dtype != DType::f32 && outs.dtype != DType::f16 && outs.dtype != DType::bf16)
    refuse("'outs' must be float32, float16 or bfloat16.");
  if (lses.dtype != DType::f32) refuse("'lses' must be float32.");
  m.part_elements = s[1] * s[2] * s[3] * s[4];
  m.outs = {static_cast<char*>(outs.data), outs.dtype, s[2] * s[3] * s[4], bnsd ? s[3] * s[4] : s[4],
            bnsd ? s[4] : s[3] * s[4]};
  m.out = m.outs;
  m.out.data = static_cast<char*>(out.data);
  m.lses = static_cast<const float*>(lses.data);
  m.lse = static_cast<float*>(lse.data);
  selected_kernels()->merge(m);
}

std::vector<std::vector<int64_t>> infer_shapes(MergeOp, const MergeSpec&,
                                               const std::vector<std::vector<int64_t>>& inputs) {
  auto one_part = [](const std::vector<int64_t>& s, size_t rank) {
    return s.size() == rank + 1 ? std::vector<int64_t>(s.begin() + 1, s.end()) : std::vector<int64_t>(rank, -1);
  };
  return {one_part(inputs.at(0), 4), one_part(inputs.at(1), 3)};
}

int dtype_source(MergeOp, const MergeSpec&, int output) { return output == 0 ? 0 : -1; }
int saved_inputs(MergeOp) { return 0; }
const std::string& present(const MergeSpec&) {
  static const std::string both = "11";
  return both;
}

}  // namespace msf
