// The ops of a library as MindSpore's AOT Custom primitive calls them. Only files built with MindSpore's std::string
// ABI may include it: no std::string passes between them and the others.
#pragma once
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/api.h"

// Layout of mindspore::AotExtra (include/mindspore/ccsrc/utils/custom_aot_extra.h of the 2.10 wheel) up to what is
// used; the header itself pulls in internals of MindSpore. Not in an unnamed namespace: the compiler would conclude
// that nobody implements it.
class AotExtra {
 public:
  virtual ~AotExtra() = default;
  virtual bool HasAttr(std::string name) = 0;
  virtual bool GetAttrBool(std::string name) = 0;
  virtual int64_t GetAttrInt(std::string name) = 0;
  virtual float GetAttrFloat(std::string name) = 0;
  virtual std::string GetAttrStr(std::string name) = 0;
};

namespace {

// A library's C interface: cpu/api.h says what the functions do.
struct Library {
  decltype(&msflash_cpu_call) call;
  decltype(&msflash_cpu_infer) infer;
  decltype(&msflash_cpu_present_inputs) present_inputs;
  decltype(&msflash_cpu_last_error) last_error;
};

using TypeId = int;
constexpr TypeId kFloat32 = 43;
using Shapes = std::vector<std::vector<int64_t>>;

class AotOp {
 public:
  AotOp(const Library& library, const char* op, void* extra)
      : library_(library), op_(op), spec_(static_cast<AotExtra*>(extra)->GetAttrStr("spec")) {}

  Shapes infer_shapes(int* ndims, int64_t** shapes) const {
    const int inputs = library_.present_inputs(op_, spec_.c_str());
    check(inputs < 0);
    const MsFlashOutputs out = infer(inputs, ndims, shapes);
    Shapes result;
    for (int i = 0; i < out.count; ++i) result.emplace_back(out.shapes[i], out.shapes[i] + out.ndims[i]);
    return result;
  }

  std::vector<TypeId> infer_types(const std::vector<TypeId>& types) const {
    int64_t unknown_rank = -2;
    std::vector<int> ndims(types.size(), 1);
    std::vector<int64_t*> shapes(types.size(), &unknown_rank);
    const MsFlashOutputs out = infer(int(types.size()), ndims.data(), shapes.data());
    std::vector<TypeId> result;
    for (int i = 0; i < out.count; ++i)
      result.push_back(out.dtype_of_input[i] < 0 ? kFloat32 : types.at(out.dtype_of_input[i]));
    return result;
  }

  int launch(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes) const {
    check(library_.call(op_, spec_.c_str(), nparam, params, ndims, shapes, dtypes));
    return 0;
  }

 private:
  // MindSpore gives shapes and types of the inputs that are present, without saying how many or which: the spec knows.
  MsFlashOutputs infer(int ninput, const int* ndims, int64_t** shapes) const {
    MsFlashOutputs out;
    check(library_.infer(op_, spec_.c_str(), ninput, ndims, shapes, &out));
    return out;
  }
  void check(int failed) const {
    if (failed) throw std::runtime_error(library_.last_error());
  }

  const Library& library_;
  const char* op_;
  const std::string spec_;
};

}  // namespace

#define MSF_AOT_OP(library, Name, op)                                                                      \
  MSF_EXPORT int Name##Init(int*, int64_t**, const char**, AotExtra*) { return 0; }                        \
  MSF_EXPORT Shapes Name##InferShape(int* ndims, int64_t** shapes, AotExtra* extra) {                      \
    return AotOp(library, op, extra).infer_shapes(ndims, shapes);                                          \
  }                                                                                                        \
  MSF_EXPORT std::vector<TypeId> Name##InferType(std::vector<TypeId> types, AotExtra* extra) {             \
    return AotOp(library, op, extra).infer_types(types);                                                   \
  }                                                                                                        \
  MSF_EXPORT int Name(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void*, \
                      void* extra) {                                                                       \
    return AotOp(library, op, extra).launch(nparam, params, ndims, shapes, dtypes);                        \
  }
