// The ops as MindSpore's AOT Custom primitive calls them. The only file that meets MindSpore's types, and the only one
// built with its std::string ABI: no std::string passes between this file and the others.
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

using TypeId = int;
constexpr TypeId kFloat32 = 43;
using Shapes = std::vector<std::vector<int64_t>>;

std::string spec(AotExtra* extra) { return extra->GetAttrStr("spec"); }

void check(int failed) {
  if (failed) throw std::runtime_error(msflash_cpu_last_error());
}

// MindSpore gives shapes and types of the inputs that are present, without saying how many or which: the spec knows.
MsFlashOutputs infer(const char* op, AotExtra* extra, int ninput, const int* ndims, int64_t** shapes) {
  MsFlashOutputs out;
  check(msflash_cpu_infer(op, spec(extra).c_str(), ninput, ndims, shapes, &out));
  return out;
}

Shapes infer_shapes(const char* op, int* ndims, int64_t** shapes, AotExtra* extra) {
  const int inputs = msflash_cpu_present_inputs(op, spec(extra).c_str());
  check(inputs < 0);
  const MsFlashOutputs out = infer(op, extra, inputs, ndims, shapes);
  Shapes result;
  for (int i = 0; i < out.count; ++i) result.emplace_back(out.shapes[i], out.shapes[i] + out.ndims[i]);
  return result;
}

std::vector<TypeId> infer_types(const char* op, const std::vector<TypeId>& types, AotExtra* extra) {
  int64_t unknown_rank = -2;
  std::vector<int> ndims(types.size(), 1);
  std::vector<int64_t*> shapes(types.size(), &unknown_rank);
  const MsFlashOutputs out = infer(op, extra, int(types.size()), ndims.data(), shapes.data());
  std::vector<TypeId> result;
  for (int i = 0; i < out.count; ++i)
    result.push_back(out.dtype_of_input[i] < 0 ? kFloat32 : types.at(out.dtype_of_input[i]));
  return result;
}

int launch(const char* op, int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void* extra) {
  check(msflash_cpu_call(op, spec(static_cast<AotExtra*>(extra)).c_str(), nparam, params, ndims, shapes, dtypes));
  return 0;
}

}  // namespace

#define MSF_AOT_OP(Name, op)                                                                               \
  MSF_EXPORT int Name##Init(int*, int64_t**, const char**, AotExtra*) { return 0; }                        \
  MSF_EXPORT Shapes Name##InferShape(int* ndims, int64_t** shapes, AotExtra* extra) {                      \
    return infer_shapes(op, ndims, shapes, extra);                                                         \
  }                                                                                                        \
  MSF_EXPORT std::vector<TypeId> Name##InferType(std::vector<TypeId> types, AotExtra* extra) {             \
    return infer_types(op, types, extra);                                                                  \
  }                                                                                                        \
  MSF_EXPORT int Name(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes, void*, \
                      void* extra) {                                                                       \
    return launch(op, nparam, params, ndims, shapes, dtypes, extra);                                       \
  }

MSF_AOT_OP(MsFlashFwd, "fwd")
MSF_AOT_OP(MsFlashBwd, "bwd")
MSF_AOT_OP(MsFlashBiasGrad, "bias_grad")
MSF_AOT_OP(MsFlashMhaFwd, "mha_fwd")
MSF_AOT_OP(MsFlashMhaBwd, "mha_bwd")
MSF_AOT_OP(MsFlashMhaBiasGrad, "mha_bias_grad")
