// The node ai.msflash::FlashAttention (onnx_export/schema.py) as a kernel meets it: its attributes, and one call.
// Everything here throws Error, whose text becomes the status that ONNX Runtime reports.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "ort_ops/ort_api.h"

namespace ort_ops {

struct Error : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// Takes over a status of the runtime: throws its text unless it is null.
void check(const ort::Api* api, ort::Status* status);

struct Attributes {
  double scale, softcap;  // a scale of 0 is 1 / sqrt(D)
  int64_t left, right;    // -1: no limit; is_causal is in `right`
  bool bottom_right;
};
Attributes read_attributes(const ort::Api* api, const ort::KernelInfo* info);

struct Tensor {
  void* data = nullptr;
  std::vector<int64_t> shape;
  ort::ElementType type = ort::UNDEFINED;

  explicit operator bool() const { return type != ort::UNDEFINED; }
  int64_t count() const;
};

// The tensors of one call, of shapes that fit together; the outputs are allocated.
struct Call {
  Tensor q, k, v, mask, y, lse;  // mask and lse may be absent
  int64_t batch, heads, kv_heads, q_len, k_len, d, dv;
};
Call read_call(const ort::Api* api, ort::KernelContext* context);

const char* name_of(ort::ElementType type);

}  // namespace ort_ops
