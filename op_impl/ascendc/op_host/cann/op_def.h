// What the OpDefs of all ops share: which dtypes go together, and the declaration of a parameter.
#pragma once
#include <vector>

#include "register/op_def_registry.h"

namespace msf {

// How the dtype of a parameter may vary (the dtype sets of ops.yaml).
enum class Kind { data, mask, bias, sinks, f32, u8, i64, lengths, blocks };

// One entry per combination of dtypes: of attention, query, mask, bias and sinks vary independently of each other; over
// caches query, lengths, blocks and sinks do; of the merge there are outputs alone.
constexpr int kAttention = 16, kOutputsAlone = 2;
inline std::vector<ge::DataType> dtypes(Kind kind, int combinations) {
  std::vector<ge::DataType> column;
  for (int combination = 0; combination < combinations; ++combination) {
    const ge::DataType data = combination & 1 ? ge::DT_BF16 : ge::DT_FLOAT16;
    switch (kind) {
      case Kind::data:
        column.push_back(data);
        break;
      case Kind::mask:
        column.push_back(combination & 2 ? ge::DT_UINT8 : ge::DT_BOOL);
        break;
      case Kind::bias:
        column.push_back(combination & 4 ? ge::DT_FLOAT : data);
        break;
      case Kind::sinks:
        column.push_back(combination & 8 ? ge::DT_FLOAT : data);
        break;
      case Kind::f32:
        column.push_back(ge::DT_FLOAT);
        break;
      case Kind::u8:
        column.push_back(ge::DT_UINT8);
        break;
      case Kind::i64:
        column.push_back(ge::DT_INT64);
        break;
      case Kind::lengths:
        column.push_back(combination & 2 ? ge::DT_INT64 : ge::DT_INT32);
        break;
      case Kind::blocks:
        column.push_back(combination & 4 ? ge::DT_INT64 : ge::DT_INT32);
        break;
    }
  }
  return column;
}

inline ops::OpParamDef& declare(ops::OpParamDef& parameter, ops::Option need, Kind kind,
                                int combinations = kAttention) {
  const std::vector<ge::DataType> column = dtypes(kind, combinations);
  return parameter.ParamType(need).DataType(column).Format(std::vector<ge::Format>(column.size(), ge::FORMAT_ND));
}

// The kernels do not look at the other dtypes before they run: one binary per dtype of the query.
inline std::vector<ge::DataType> binary_dtypes(Kind kind, int combinations) {
  std::vector<ge::DataType> column = dtypes(kind, combinations);
  for (size_t i = 2; i < column.size(); ++i) column[i] = column[i % 2];
  return column;
}

inline void input(ops::OpDef* op, const char* name, ops::Option need, Kind kind, int combinations = kAttention) {
  declare(op->Input(name), need, kind, combinations)
      .DataTypeForBinQuery(binary_dtypes(kind, combinations))
      .AutoContiguous();
}
// Read by the host: the aclnn call takes an aclIntArray.
inline void host_input(ops::OpDef* op, const char* name) {
  declare(op->Input(name), ops::OPTIONAL, Kind::i64).ValueDepend(ops::OPTIONAL);
}
inline void output(ops::OpDef* op, const char* name, Kind kind, int combinations = kAttention) {
  declare(op->Output(name), ops::REQUIRED, kind, combinations).DataTypeForBinQuery(binary_dtypes(kind, combinations));
}

// The inputs that every attention op starts with (ops.yaml: inputs).
inline void attention_inputs(ops::OpDef* op) {
  input(op, "query", ops::REQUIRED, Kind::data);
  input(op, "key", ops::OPTIONAL, Kind::data);
  input(op, "value", ops::OPTIONAL, Kind::data);
  input(op, "attn_mask", ops::OPTIONAL, Kind::mask);
  input(op, "bias", ops::OPTIONAL, Kind::bias);
  input(op, "alibi_slopes", ops::OPTIONAL, Kind::f32);
  input(op, "sinks", ops::OPTIONAL, Kind::sinks);
  input(op, "seed", ops::OPTIONAL, Kind::i64);
  input(op, "drop_mask", ops::OPTIONAL, Kind::u8);
  host_input(op, "cu_seqlens_q");
  host_input(op, "cu_seqlens_k");
}

// What the forward hands to the gradients (ops.yaml: saved).
inline void saved_inputs(ops::OpDef* op) {
  input(op, "attn", ops::REQUIRED, Kind::data);
  input(op, "row_max", ops::REQUIRED, Kind::f32);
  input(op, "row_sum", ops::REQUIRED, Kind::f32);
  input(op, "dout", ops::REQUIRED, Kind::data);
  input(op, "dlse", ops::REQUIRED, Kind::f32);
}

// Everything static about a call, in one string (ops.yaml: attributes).
inline void spec_attribute(ops::OpDef* op) { op->Attr("spec").AttrType(ops::REQUIRED).String(); }

}  // namespace msf
