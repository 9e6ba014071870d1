// Shapes and dtypes of an op's results, for the C interface of a library. Another kind of op than `Op` needs
// infer_shapes, dtype_source, saved_inputs and present of its own, in namespace msf.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "cpu/api.h"
#include "cpu/call.h"

namespace msf {

// For each output the present input that it takes its dtype from; -1: float32.
inline int dtype_source(Op op, const Spec& s, int output) {
  const bool statistics = op == Op::forward && output > 0, sinks = op == Op::backward && output == 3;
  return op == Op::bias_grad ? s.position(kBias)
         : statistics        ? -1
         : !sinks            ? s.position(kQuery)
         : s.has(kSinks)     ? s.position(kSinks)
                             : -1;
}

inline int saved_inputs(Op op) { return op == Op::forward ? 0 : kBackwardInputs - kForwardInputs; }
inline const std::string& present(const Spec& s) { return s.present; }

template <class Kind, class S>
void infer(Kind kind, const S& spec, int ninput, const int* ndims, const int64_t* const* shapes,
           MsFlashOutputs* outputs) {
  std::vector<std::vector<int64_t>> in(ninput);
  for (int i = 0; i < ninput; ++i) in[i].assign(shapes[i], shapes[i] + ndims[i]);
  const std::vector<std::vector<int64_t>> out = infer_shapes(kind, spec, in);
  outputs->count = int(out.size());
  for (size_t i = 0; i < out.size(); ++i) {
    outputs->ndims[i] = int(out[i].size());
    std::copy(out[i].begin(), out[i].end(), outputs->shapes[i]);
    outputs->dtype_of_input[i] = dtype_source(kind, spec, int(i));
  }
}

template <class Kind, class S>
int present_inputs(Kind kind, const S& spec) {
  return int(std::count(present(spec).begin(), present(spec).end(), '1')) + saved_inputs(kind);
}

}  // namespace msf
