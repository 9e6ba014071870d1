// A call as CANN's contexts hand it over, turned into what cpu/call.h takes.
#pragma once
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "ascendc/op_host/soc.h"
#include "ascendc/op_host/tiling_parts.h"
#include "cpu/call.h"
#include "register/op_def_registry.h"

namespace msf {

inline std::vector<int64_t> to_vector(const gert::Shape& shape) {
  std::vector<int64_t> dims(shape.GetDimNum());
  for (size_t i = 0; i < dims.size(); ++i) dims[i] = shape.GetDim(i);
  return dims;
}

inline DType to_dtype(ge::DataType dtype) {
  switch (dtype) {
    case ge::DT_FLOAT:
      return DType::f32;
    case ge::DT_FLOAT16:
      return DType::f16;
    case ge::DT_BF16:
      return DType::bf16;
    case ge::DT_BOOL:
    case ge::DT_UINT8:
      return DType::u8;
    case ge::DT_INT32:
      return DType::i32;
    case ge::DT_INT64:
      return DType::i64;
    default:
      reject("an input has a dtype that the kernels do not take.");
  }
}

template <class Context>
const char* text_of(const Context* context) {
  const char* text = context->GetAttrs()->GetStr(0);
  if (!text) reject("the attribute 'spec' is missing.");
  return text;
}
template <class Context>
Spec spec_of(const Context* context) {
  return Spec(text_of(context));
}

// Errors of the host side end here: CANN knows only success and failure, so the reason goes to stderr.
template <class F>
ge::graphStatus guarded(const char* op, F f) {
  try {
    f();
    return ge::GRAPH_SUCCESS;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "[ms_flash] %s: %s\n", op, e.what());
  }
  return ge::GRAPH_FAILED;
}

}  // namespace msf
