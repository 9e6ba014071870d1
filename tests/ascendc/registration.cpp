// The registered ops, read back: their prototypes as text, and their inference and tiling called.
#include <cstdio>
#include <cstring>
#include <string>

#include "ascendc/tiling_data.h"
#include "register/op_def_registry.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

thread_local std::string text;

const ops::OpDef* find(const char* type) {
  for (const ops::OpDef& op : ops::registered())
    if (op.type == type) return &op;
  return nullptr;
}

std::string list(const std::vector<ge::DataType>& dtypes) {
  std::string s = "[";
  for (size_t i = 0; i < dtypes.size(); ++i) s += (i ? ", " : "") + std::to_string(int(dtypes[i]));
  return s + "]";
}

void describe(const char* kind, const std::vector<ops::OpParamDef>& parameters) {
  text += std::string(", \"") + kind + "\": [";
  const char* comma = "";
  for (const ops::OpParamDef& p : parameters) {
    text += std::string(comma) + "{\"name\": \"" + p.name + "\", \"need\": " + std::to_string(int(p.need)) +
            ", \"dtypes\": " + list(p.dtypes) + ", \"binary\": " + list(p.binary_dtypes) +
            ", \"formats\": " + std::to_string(p.formats.size()) +
            ", \"value_depend\": " + (p.value_depend ? "true" : "false") + "}";
    comma = ", ";
  }
  text += "]";
}

thread_local gert::Call call;

}  // namespace

// All prototypes, as JSON.
EXPORT const char* msf_prototypes() {
  text = "{";
  const char* comma = "";
  for (const ops::OpDef& op : ops::registered()) {
    text += std::string(comma) + "\"" + op.type + "\": {\"socs\": [";
    for (size_t i = 0; i < op.core.socs.size(); ++i) text += (i ? ", \"" : "\"") + op.core.socs[i] + "\"";
    text += "], \"attrs\": [";
    for (size_t i = 0; i < op.attrs.size(); ++i)
      text += (i ? ", " : "") + ("{\"name\": \"" + op.attrs[i].name + "\", \"type\": \"" + op.attrs[i].type +
                                 "\", \"need\": " + std::to_string(int(op.attrs[i].need)) + "}");
    text += std::string("], \"functions\": ") + (op.infer_shape && op.infer_dtype && op.core.tiling ? "true" : "false");
    describe("inputs", op.inputs);
    describe("outputs", op.outputs);
    text += "}";
    comma = ", ";
  }
  text += "}";
  return text.c_str();
}

// Bytes of the tiling buffer that CANN would make for an op: those of the struct which its kernel registers, and 8.
EXPORT int64_t msf_capacity(const char* type) {
  return 8 + int64_t(!std::strcmp(type, "MsFlashFwd")       ? sizeof(msf::ForwardTilingBuffer)
                     : !std::strcmp(type, "MsFlashKvCache") ? sizeof(msf::DecodeTilingBuffer)
                     : !std::strcmp(type, "MsFlashMerge")   ? sizeof(msf::MergeTiling)
                                                            : sizeof(msf::BackwardTilingBuffer));
}

// A new call. rank -1: the input is absent.
EXPORT int msf_begin(const char* type, const char* spec, int64_t capacity) {
  const ops::OpDef* op = find(type);
  if (!op) return 1;
  call = gert::Call();
  call.inputs.resize(op->inputs.size());
  call.outputs.resize(op->outputs.size());
  call.attrs.strings = {spec};
  call.tiling.bytes.assign(size_t(capacity), 0xAA);
  return 0;
}
EXPORT void msf_input(int index, int rank, const int64_t* shape, int dtype, const void* data) {
  gert::Call::Parameter& p = call.inputs.at(size_t(index));
  p.present = rank >= 0;
  if (rank < 0) return;
  p.shape.shape.SetDimNum(size_t(rank));
  for (int i = 0; i < rank; ++i) p.shape.shape.SetDim(size_t(i), shape[i]);
  p.desc.dtype = ge::DataType(dtype);
  p.tensor.data = data;
}
// Inference, then tiling on what it found: 0, or the step that failed.
EXPORT int msf_infer(const char* type) {
  const ops::OpDef* op = find(type);
  gert::InferShapeContext shapes(&call);
  if (op->infer_shape(&shapes) != ge::GRAPH_SUCCESS) return 1;
  gert::InferDataTypeContext dtypes(&call);
  return op->infer_dtype(&dtypes) != ge::GRAPH_SUCCESS ? 2 : 0;
}
EXPORT int msf_tile(const char* type) {
  gert::TilingContext context(&call);
  return find(type)->core.tiling(&context) != ge::GRAPH_SUCCESS ? 3 : 0;
}
EXPORT int msf_output(int index, int64_t* shape) {
  const gert::Shape& s = call.outputs.at(size_t(index)).shape.shape;
  for (size_t i = 0; i < s.GetDimNum(); ++i) shape[i] = s.GetDim(i);
  return int(s.GetDimNum());
}
EXPORT int msf_output_dtype(int index) { return int(call.outputs.at(size_t(index)).desc.dtype); }
EXPORT int64_t msf_workspace() { return int64_t(call.workspaces.at(0)); }
EXPORT int64_t msf_block_dim() { return call.block_dim; }
EXPORT int64_t msf_tiling(uint8_t* bytes, int64_t capacity) {
  const int64_t size = int64_t(call.tiling.size);
  if (size <= capacity) std::memcpy(bytes, call.tiling.bytes.data(), size_t(size));
  return size;
}
