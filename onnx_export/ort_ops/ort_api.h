// The part of ONNX Runtime's C interface that a custom op needs, so that no SDK is needed to build one: the runtime
// hands over a table of functions that only ever grows at its end, hence a position means the same in every version
// that has it. Names and signatures are ONNX Runtime's, without the Ort prefix; what is not used is left out.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ort {

// ONNX Runtime 1.17, the first with shape inference and a thread pool for custom ops.
constexpr uint32_t kApiVersion = 17;

struct Status;
struct Value;
struct TypeInfo;
struct TensorTypeAndShapeInfo;
struct SessionOptions;
struct CustomOpDomain;
struct KernelInfo;
struct KernelContext;
struct ShapeInferContext;

enum ErrorCode : int { FAIL = 1, INVALID_ARGUMENT = 2, RUNTIME_EXCEPTION = 6, NOT_IMPLEMENTED = 9 };

enum ElementType : int {
  UNDEFINED = 0,
  FLOAT = 1,
  UINT8 = 2,
  INT32 = 6,
  INT64 = 7,
  BOOL = 9,
  FLOAT16 = 10,
  DOUBLE = 11,
  BFLOAT16 = 16
};

enum Characteristic : int { REQUIRED = 0, OPTIONAL = 1 };
enum MemType : int { MEM_DEFAULT = 0 };

struct Api {
  void* slots[276];  // those of version 17
};

struct ApiBase {
  const Api* (*GetApi)(uint32_t version);  // null: the runtime is older than that
  const char* (*GetVersionString)();
};

// A function of the table, called as function(api, arguments...).
template <int kSlot, class Result, class... Arguments>
struct Function {
  Result operator()(const Api* api, Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(api->slots[kSlot])(arguments...);
  }
};

constexpr Function<0, Status*, ErrorCode, const char*> CreateStatus;
constexpr Function<2, const char*, const Status*> GetErrorMessage;
constexpr Function<26, Status*, const char*, CustomOpDomain**> CreateCustomOpDomain;
constexpr Function<27, Status*, CustomOpDomain*, const struct CustomOp*> CustomOpDomain_Add;
constexpr Function<28, Status*, SessionOptions*, CustomOpDomain*> AddCustomOpDomain;
constexpr Function<51, Status*, Value*, void**> GetTensorMutableData;
constexpr Function<57, Status*, TensorTypeAndShapeInfo**> CreateTensorTypeAndShapeInfo;
constexpr Function<58, Status*, TensorTypeAndShapeInfo*, ElementType> SetTensorElementType;
constexpr Function<59, Status*, TensorTypeAndShapeInfo*, const int64_t*, size_t> SetDimensions;
constexpr Function<60, Status*, const TensorTypeAndShapeInfo*, ElementType*> GetTensorElementType;
constexpr Function<61, Status*, const TensorTypeAndShapeInfo*, size_t*> GetDimensionsCount;
constexpr Function<62, Status*, const TensorTypeAndShapeInfo*, int64_t*, size_t> GetDimensions;
constexpr Function<63, Status*, const TensorTypeAndShapeInfo*, const char**, size_t> GetSymbolicDimensions;
constexpr Function<65, Status*, const Value*, TensorTypeAndShapeInfo**> GetTensorTypeAndShape;
constexpr Function<85, Status*, const KernelInfo*, const char*, float*> KernelInfoGetAttribute_float;
constexpr Function<86, Status*, const KernelInfo*, const char*, int64_t*> KernelInfoGetAttribute_int64;
constexpr Function<87, Status*, const KernelInfo*, const char*, char*, size_t*> KernelInfoGetAttribute_string;
constexpr Function<88, Status*, const KernelContext*, size_t*> KernelContext_GetInputCount;
constexpr Function<89, Status*, const KernelContext*, size_t*> KernelContext_GetOutputCount;
constexpr Function<90, Status*, const KernelContext*, size_t, const Value**> KernelContext_GetInput;
constexpr Function<91, Status*, KernelContext*, size_t, const int64_t*, size_t, Value**> KernelContext_GetOutput;
constexpr Function<93, void, Status*> ReleaseStatus;
constexpr Function<99, void, TensorTypeAndShapeInfo*> ReleaseTensorTypeAndShapeInfo;
constexpr Function<101, void, CustomOpDomain*> ReleaseCustomOpDomain;
constexpr Function<162, Status*, const KernelInfo*, const char*, float*, size_t*> KernelInfoGetAttributeArray_float;
constexpr Function<163, Status*, const KernelInfo*, const char*, int64_t*, size_t*> KernelInfoGetAttributeArray_int64;
constexpr Function<193, Status*, const KernelContext*, void**> KernelContext_GetGPUComputeStream;
constexpr Function<267, Status*, const ShapeInferContext*, size_t*> ShapeInferContext_GetInputCount;
constexpr Function<268, Status*, const ShapeInferContext*, size_t, TensorTypeAndShapeInfo**>
    ShapeInferContext_GetInputTypeShape;
constexpr Function<270, Status*, const ShapeInferContext*, size_t, const TensorTypeAndShapeInfo*>
    ShapeInferContext_SetOutputTypeShape;
constexpr Function<271, Status*, TensorTypeAndShapeInfo*, const char**, size_t> SetSymbolicDimensions;
constexpr Function<274, Status*, const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*>
    KernelContext_ParallelFor;

// What the runtime asks of an op: members in its order, up to what version 17 reads.
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const Api*, const KernelInfo*);  // replaced by CreateKernelV2
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  ElementType (*GetInputType)(const CustomOp*, size_t);
  size_t (*GetInputTypeCount)(const CustomOp*);
  ElementType (*GetOutputType)(const CustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void*, KernelContext*);  // replaced by KernelComputeV2
  void (*KernelDestroy)(void*);
  Characteristic (*GetInputCharacteristic)(const CustomOp*, size_t);
  Characteristic (*GetOutputCharacteristic)(const CustomOp*, size_t);
  MemType (*GetInputMemoryType)(const CustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const Api*, const KernelInfo*, void**);
  Status* (*KernelComputeV2)(void*, KernelContext*);
  Status* (*InferOutputShapeFn)(const CustomOp*, ShapeInferContext*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};

}  // namespace ort
