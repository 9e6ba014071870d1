// The part of CANN's host interface that op_impl/ascendc/op_host/cann uses, for a machine without CANN: declared after
// CANN's public API pages, and just enough behind it that an OpDef can be read back and that the functions registered
// in it can be called. No test of CANN itself.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fe {
class PlatFormInfos {};
}  // namespace fe

namespace ge {
using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0, GRAPH_FAILED = 0xFFFFFFFF;
enum DataType {
  DT_FLOAT = 0,
  DT_FLOAT16 = 1,
  DT_INT8 = 2,
  DT_INT32 = 3,
  DT_UINT8 = 4,
  DT_INT64 = 9,
  DT_BOOL = 12,
  DT_BF16 = 27,
  DT_UNDEFINED = 28
};
enum Format { FORMAT_ND = 2 };
}  // namespace ge

namespace gert {

class Shape {
 public:
  size_t GetDimNum() const { return dims_.size(); }
  void SetDimNum(size_t n) { dims_.resize(n); }
  int64_t GetDim(size_t i) const { return dims_.at(i); }
  void SetDim(size_t i, int64_t value) { dims_.at(i) = value; }

 private:
  std::vector<int64_t> dims_;
};

class StorageShape {
 public:
  const Shape& GetOriginShape() const { return shape; }
  const Shape& GetStorageShape() const { return shape; }
  Shape shape;
};

class CompileTimeTensorDesc {
 public:
  ge::DataType GetDataType() const { return dtype; }
  ge::DataType dtype = ge::DT_UNDEFINED;
};

class Tensor {
 public:
  template <class T>
  const T* GetData() const {
    return reinterpret_cast<const T*>(data);
  }
  const void* data = nullptr;
};

class RuntimeAttrs {
 public:
  const char* GetStr(size_t index) const { return strings.at(index).c_str(); }
  std::vector<std::string> strings;
};

class TilingData {
 public:
  size_t GetCapacity() const { return bytes.size(); }
  size_t GetDataSize() const { return size; }
  void SetDataSize(size_t n) { size = n; }
  void* GetData() { return bytes.data(); }
  std::vector<uint8_t> bytes;
  size_t size = 0;
};

// One call, as all three contexts see it. Inputs are counted as in the prototype; an absent one is a null pointer.
struct Call {
  struct Parameter {
    bool present = false;
    StorageShape shape;
    CompileTimeTensorDesc desc;
    Tensor tensor;
  };
  std::vector<Parameter> inputs, outputs;
  RuntimeAttrs attrs;
  TilingData tiling;
  fe::PlatFormInfos platform;
  std::vector<size_t> workspaces;
  uint32_t block_dim = 0;
  uint64_t tiling_key = ~uint64_t(0);

  const Parameter* input(size_t i) const { return inputs.at(i).present ? &inputs[i] : nullptr; }
};

class InferShapeContext {
 public:
  explicit InferShapeContext(Call* call) : call_(call) {}
  const RuntimeAttrs* GetAttrs() const { return &call_->attrs; }
  const Shape* GetRequiredInputShape(size_t i) const { return &call_->inputs.at(i).shape.shape; }
  const Shape* GetOptionalInputShape(size_t i) const {
    return call_->input(i) ? &call_->input(i)->shape.shape : nullptr;
  }
  Shape* GetOutputShape(size_t i) { return &call_->outputs.at(i).shape.shape; }

 private:
  Call* call_;
};

class InferDataTypeContext {
 public:
  explicit InferDataTypeContext(Call* call) : call_(call) {}
  ge::DataType GetRequiredInputDataType(size_t i) const { return call_->inputs.at(i).desc.dtype; }
  ge::DataType GetOptionalInputDataType(size_t i) const {
    return call_->input(i) ? call_->input(i)->desc.dtype : ge::DT_UNDEFINED;
  }
  ge::graphStatus SetOutputDataType(size_t i, ge::DataType dtype) {
    call_->outputs.at(i).desc.dtype = dtype;
    return ge::GRAPH_SUCCESS;
  }

 private:
  Call* call_;
};

class TilingContext {
 public:
  explicit TilingContext(Call* call) : call_(call) {}
  const char* GetNodeName() const { return "node"; }
  const RuntimeAttrs* GetAttrs() const { return &call_->attrs; }
  const StorageShape* GetOptionalInputShape(size_t i) const {
    return call_->input(i) ? &call_->input(i)->shape : nullptr;
  }
  const CompileTimeTensorDesc* GetOptionalInputDesc(size_t i) const {
    return call_->input(i) ? &call_->input(i)->desc : nullptr;
  }
  const Tensor* GetOptionalInputTensor(size_t i) const { return call_->input(i) ? &call_->input(i)->tensor : nullptr; }
  const StorageShape* GetOutputShape(size_t i) const { return &call_->outputs.at(i).shape; }
  const CompileTimeTensorDesc* GetOutputDesc(size_t i) const { return &call_->outputs.at(i).desc; }
  fe::PlatFormInfos* GetPlatformInfo() const { return &call_->platform; }
  TilingData* GetRawTilingData() { return &call_->tiling; }
  size_t* GetWorkspaceSizes(size_t count) {
    call_->workspaces.resize(count);
    return call_->workspaces.data();
  }
  ge::graphStatus SetBlockDim(uint32_t n) {
    call_->block_dim = n;
    return ge::GRAPH_SUCCESS;
  }
  ge::graphStatus SetTilingKey(uint64_t key) {
    call_->tiling_key = key;
    return ge::GRAPH_SUCCESS;
  }

 private:
  Call* call_;
};

}  // namespace gert

namespace ops {

enum Option { IGNORE = 0, OPTIONAL = 1, REQUIRED = 2, DYNAMIC = 3 };

class OpParamDef {
 public:
  explicit OpParamDef(const char* name) : name(name) {}
  OpParamDef& ParamType(Option option) { return need = option, *this; }
  OpParamDef& DataType(std::vector<ge::DataType> types) { return dtypes = types, *this; }
  OpParamDef& DataTypeForBinQuery(std::vector<ge::DataType> types) { return binary_dtypes = types, *this; }
  OpParamDef& Format(std::vector<ge::Format> list) { return formats = list, *this; }
  OpParamDef& ValueDepend(Option) { return value_depend = true, *this; }
  OpParamDef& AutoContiguous() { return contiguous = true, *this; }

  std::string name;
  Option need = IGNORE;
  std::vector<ge::DataType> dtypes, binary_dtypes;
  std::vector<ge::Format> formats;
  bool value_depend = false, contiguous = false;
};

class OpAttrDef {
 public:
  explicit OpAttrDef(const char* name) : name(name) {}
  OpAttrDef& AttrType(Option option) { return need = option, *this; }
  OpAttrDef& String() { return type = "str", *this; }

  std::string name, type;
  Option need = IGNORE;
};

class OpAICoreDef {
 public:
  using TilingFunction = ge::graphStatus (*)(gert::TilingContext*);
  OpAICoreDef& SetTiling(TilingFunction f) { return tiling = f, *this; }
  OpAICoreDef& AddConfig(const char* soc) { return socs.push_back(soc), *this; }

  TilingFunction tiling = nullptr;
  std::vector<std::string> socs;
};

class OpDef {
 public:
  using ShapeFunction = ge::graphStatus (*)(gert::InferShapeContext*);
  using DataTypeFunction = ge::graphStatus (*)(gert::InferDataTypeContext*);

  explicit OpDef(const char* type) : type(type) {}
  OpParamDef& Input(const char* name) { return parameter(&inputs, name); }
  OpParamDef& Output(const char* name) { return parameter(&outputs, name); }
  OpAttrDef& Attr(const char* name) { return attrs.emplace_back(name); }
  OpDef& SetInferShape(ShapeFunction f) { return infer_shape = f, *this; }
  OpDef& SetInferDataType(DataTypeFunction f) { return infer_dtype = f, *this; }
  OpAICoreDef& AICore() { return core; }

  std::string type;
  std::vector<OpParamDef> inputs, outputs;
  std::vector<OpAttrDef> attrs;
  ShapeFunction infer_shape = nullptr;
  DataTypeFunction infer_dtype = nullptr;
  OpAICoreDef core;

 private:
  static OpParamDef& parameter(std::vector<OpParamDef>* list, const char* name) { return list->emplace_back(name); }
};

inline std::vector<OpDef>& registered() {
  static std::vector<OpDef> ops;
  return ops;
}

}  // namespace ops

#define OP_ADD(Type) static const bool registered_##Type = (registered().push_back(Type(#Type)), true)
