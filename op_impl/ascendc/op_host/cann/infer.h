// Shapes and dtypes of the results. Shapes come from cpu/call.cpp, as for every other backend.
#pragma once
#include "ascendc/op_host/cann/context.h"
#include "cpu/kvcache.h"
#include "cpu/merge.h"

namespace msf {

inline void set_shapes(gert::InferShapeContext* context, const std::vector<std::vector<int64_t>>& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    gert::Shape* result = context->GetOutputShape(i);
    result->SetDimNum(results[i].size());
    for (size_t d = 0; d < results[i].size(); ++d) result->SetDim(d, results[i][d]);
  }
}

// OP: of cpu/call.h. Absent inputs are left out, as infer_shapes wants it.
template <Op OP>
ge::graphStatus infer_shape(gert::InferShapeContext* context) {
  return guarded("InferShape", [&] {
    const Spec spec = spec_of(context);
    const int inputs = OP == Op::forward ? int(kForwardInputs) : int(kBackwardInputs);
    std::vector<std::vector<int64_t>> shapes;
    for (int slot = 0; slot < inputs; ++slot) {
      if (!spec.has(slot)) continue;
      const gert::Shape* shape = context->GetOptionalInputShape(slot);
      if (!shape) reject("input ", slot, " is absent, but the attribute 'present' says otherwise.");
      shapes.push_back(to_vector(*shape));
    }
    set_shapes(context, infer_shapes(OP, spec, shapes));
  });
}

inline ge::graphStatus infer_merge_shape(gert::InferShapeContext* context) {
  return guarded("InferShape", [&] {
    set_shapes(context, infer_shapes(MergeOp::forward, MergeSpec(text_of(context)),
                                     {to_vector(*context->GetRequiredInputShape(0)),
                                      to_vector(*context->GetRequiredInputShape(1))}));
  });
}

inline ge::graphStatus infer_kv_cache_shape(gert::InferShapeContext* context) {
  return guarded("InferShape", [&] {
    const KvCacheSpec spec(text_of(context));
    std::vector<std::vector<int64_t>> given;
    for (int slot = 0; slot < kKvCacheInputs; ++slot) {
      const gert::Shape* shape = context->GetOptionalInputShape(slot);
      if (spec.has(slot) != (shape != nullptr)) reject("input ", slot, " disagrees with the attribute 'inputs'.");
      if (shape) given.push_back(to_vector(*shape));
    }
    std::vector<std::vector<int64_t>> results = infer_shapes(KvCacheOp::forward, spec, given);
    results.push_back(given[kKeyCache]), results.push_back(given[kValueCache]);
    set_shapes(context, results);
  });
}

inline ge::graphStatus infer_kv_cache_dtype(gert::InferDataTypeContext* context) {
  for (size_t i : {0, 2, 3}) context->SetOutputDataType(i, context->GetRequiredInputDataType(kKvQuery));
  context->SetOutputDataType(1, ge::DT_FLOAT);
  return ge::GRAPH_SUCCESS;
}

inline ge::graphStatus infer_merge_dtype(gert::InferDataTypeContext* context) {
  context->SetOutputDataType(0, context->GetRequiredInputDataType(0));
  context->SetOutputDataType(1, ge::DT_FLOAT);
  return ge::GRAPH_SUCCESS;
}

inline ge::graphStatus infer_forward_dtype(gert::InferDataTypeContext* context) {
  context->SetOutputDataType(0, context->GetRequiredInputDataType(kQuery));
  for (size_t i = 1; i < 4; ++i) context->SetOutputDataType(i, ge::DT_FLOAT);
  return ge::GRAPH_SUCCESS;
}

inline ge::graphStatus infer_backward_dtype(gert::InferDataTypeContext* context) {
  for (size_t i = 0; i < 3; ++i) context->SetOutputDataType(i, context->GetRequiredInputDataType(kQuery));
  const ge::DataType sinks = context->GetOptionalInputDataType(kSinks);
  context->SetOutputDataType(3, sinks == ge::DT_UNDEFINED ? ge::DT_FLOAT : sinks);
  return ge::GRAPH_SUCCESS;
}

inline ge::graphStatus infer_bias_grad_dtype(gert::InferDataTypeContext* context) {
  context->SetOutputDataType(0, context->GetOptionalInputDataType(kBias));
  return ge::GRAPH_SUCCESS;
}

}  // namespace msf
