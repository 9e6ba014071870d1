// The library's one entry point, and the op in the form ONNX Runtime asks for: once per provider and dtype.
#include <cstdio>
#include <map>
#include <mutex>

#include "ort_ops/kernels.h"

namespace ort_ops {
namespace {

constexpr const char* kDomain = "ai.msflash";

// Runs f and turns an exception into a status; nothing may be thrown into the runtime.
template <class F>
ort::Status* guarded(const ort::Api* api, F f) {
  try {
    f();
    return nullptr;
  } catch (const Error& e) {
    return ort::CreateStatus(api, ort::INVALID_ARGUMENT, e.what());
  } catch (const std::exception& e) {
    return ort::CreateStatus(api, ort::RUNTIME_EXCEPTION, e.what());
  } catch (...) {
    return ort::CreateStatus(api, ort::FAIL, "For 'ai.msflash::FlashAttention', an unknown error occurred.");
  }
}

enum class Provider { cpu, cuda };

struct Kernel {
  const ort::Api* api;
  Provider provider;
  Attributes attributes;
  CpuKernel cpu;

  ort::Status* run(ort::KernelContext* context) const {
    return guarded(api, [&] {
      const Call call = read_call(api, context);
      if (provider == Provider::cpu) return cpu.run(call, api, context);
      void* stream = nullptr;
      check(api, ort::KernelContext_GetGPUComputeStream(api, context, &stream));
      run_on_cuda(attributes, call, stream);
    });
  }
};

struct Op : ort::CustomOp {
  const ort::Api* api;
  Provider provider;
  ort::ElementType type;

  Op(const ort::Api* api, Provider provider, ort::ElementType type, bool infer_shapes);
};

const Op& self(const ort::CustomOp* op) { return *static_cast<const Op*>(op); }

// Types and shapes while a model is loaded, so that what follows the node can be planned: unknown lengths keep their
// names.
ort::Status* infer(const ort::CustomOp* op, ort::ShapeInferContext* context) {
  const ort::Api* api = self(op).api;
  return guarded(api, [&] {
    struct Axis {
      int64_t length;
      const char* name;
    };
    ort::TensorTypeAndShapeInfo* in[3] = {};
    auto axis = [&](int input, size_t index) {
      size_t rank = 0;
      check(api, ort::GetDimensionsCount(api, in[input], &rank));
      if (rank != 4)
        throw Error(std::string("For 'ai.msflash::FlashAttention', the rank of '") + "QKV"[input] +
                    "' must be 4, but got " + std::to_string(rank) + ".");
      int64_t lengths[4];
      const char* names[4];
      check(api, ort::GetDimensions(api, in[input], lengths, 4));
      check(api, ort::GetSymbolicDimensions(api, in[input], names, 4));
      return Axis{lengths[index], names[index]};
    };
    auto set = [&](size_t output, ort::ElementType type, const std::vector<Axis>& axes) {
      std::vector<int64_t> lengths;
      std::vector<const char*> names;
      for (const Axis& a : axes) {
        // An axis with neither length nor name cannot be said to the runtime, which would take -1 for a length.
        if (a.length < 0 && !*a.name) return;
        lengths.push_back(a.length);
        names.push_back(a.name);
      }
      ort::TensorTypeAndShapeInfo* info = nullptr;
      check(api, ort::CreateTensorTypeAndShapeInfo(api, &info));
      ort::Status* status = ort::SetTensorElementType(api, info, type);
      if (!status) status = ort::SetDimensions(api, info, lengths.data(), lengths.size());
      if (!status) status = ort::SetSymbolicDimensions(api, info, names.data(), names.size());
      if (!status) status = ort::ShapeInferContext_SetOutputTypeShape(api, context, output, info);
      ort::ReleaseTensorTypeAndShapeInfo(api, info);
      check(api, status);
    };
    for (size_t i = 0; i < 3; ++i) check(api, ort::ShapeInferContext_GetInputTypeShape(api, context, i, &in[i]));
    ort::ElementType type;  // this function serves the ops of all dtypes, `op` is one of them
    check(api, ort::GetTensorElementType(api, in[0], &type));
    set(0, type, {axis(0, 0), axis(0, 1), axis(0, 2), axis(2, 3)});
    set(1, ort::FLOAT, {axis(0, 0), axis(0, 1), axis(0, 2)});
  });
}

Op::Op(const ort::Api* api_, Provider provider_, ort::ElementType type_, bool infer_shapes)
    : ort::CustomOp{}, api(api_), provider(provider_), type(type_) {
  version = ort::kApiVersion;
  GetName = [](const ort::CustomOp*) { return "FlashAttention"; };
  GetExecutionProviderType = [](const ort::CustomOp* op) {
    return self(op).provider == Provider::cpu ? "CPUExecutionProvider" : "CUDAExecutionProvider";
  };
  GetInputTypeCount = [](const ort::CustomOp*) { return size_t(4); };
  GetInputType = [](const ort::CustomOp* op, size_t i) { return i < 3 ? self(op).type : ort::UNDEFINED; };
  GetInputCharacteristic = [](const ort::CustomOp*, size_t i) { return i < 3 ? ort::REQUIRED : ort::OPTIONAL; };
  GetInputMemoryType = [](const ort::CustomOp*, size_t) { return ort::MEM_DEFAULT; };
  GetOutputTypeCount = [](const ort::CustomOp*) { return size_t(2); };
  GetOutputType = [](const ort::CustomOp* op, size_t i) { return i == 0 ? self(op).type : ort::FLOAT; };
  GetOutputCharacteristic = [](const ort::CustomOp*, size_t i) { return i == 0 ? ort::REQUIRED : ort::OPTIONAL; };
  GetVariadicInputMinArity = GetVariadicOutputMinArity = [](const ort::CustomOp*) { return 0; };
  GetVariadicInputHomogeneity = GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 0; };
  GetStartVersion = GetEndVersion = [](const ort::CustomOp*) { return 1; };
  InferOutputShapeFn = infer_shapes ? infer : nullptr;
  CreateKernelV2 = [](const ort::CustomOp* op, const ort::Api* api, const ort::KernelInfo* info, void** kernel) {
    return guarded(api, [&] {
      const Attributes attributes = read_attributes(api, info);
      *kernel = new Kernel{api, self(op).provider, attributes, CpuKernel(attributes)};
    });
  };
  KernelComputeV2 = [](void* kernel, ort::KernelContext* context) {
    return static_cast<const Kernel*>(kernel)->run(context);
  };
  KernelDestroy = [](void* kernel) { delete static_cast<const Kernel*>(kernel); };
}

// Before 1.25 the runtime crashes where a node with this function has an input left out by the name "".
bool may_infer_shapes(const char* version) {
  int major = 0, minor = 0;
  return std::sscanf(version, "%d.%d", &major, &minor) == 2 && (major > 1 || minor >= 25);
}

// One domain per runtime in this process, for all its sessions; sessions refer to it for as long as they live.
ort::CustomOpDomain* domain_of(const ort::Api* api, const char* version) {
  static std::mutex lock;
  static auto* domains = new std::map<const ort::Api*, ort::CustomOpDomain*>;
  std::lock_guard<std::mutex> hold(lock);
  ort::CustomOpDomain*& domain = (*domains)[api];
  if (domain) return domain;
  ort::CustomOpDomain* fresh = nullptr;
  check(api, ort::CreateCustomOpDomain(api, kDomain, &fresh));
  for (Provider provider : {Provider::cpu, Provider::cuda}) {
    if (provider == Provider::cuda && cuda_unavailable()) continue;
    for (ort::ElementType type : {ort::FLOAT, ort::FLOAT16, ort::BFLOAT16})
      check(api, ort::CustomOpDomain_Add(api, fresh, new Op(api, provider, type, may_infer_shapes(version))));
  }
  return domain = fresh;
}

}  // namespace
}  // namespace ort_ops

// Called by SessionOptions.register_custom_ops_library.
extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                 const ort::ApiBase* base) {
  const ort::Api* api = base->GetApi(ort::kApiVersion);
  if (!api) {
    const std::string text =
        std::string("For 'ai.msflash::FlashAttention', ONNX Runtime must be 1.17 or newer, but got ") +
        base->GetVersionString() + ".";
    return ort::CreateStatus(base->GetApi(1), ort::NOT_IMPLEMENTED, text.c_str());
  }
  return ort_ops::guarded(api, [&] {
    ort_ops::check(api, ort::AddCustomOpDomain(api, options, ort_ops::domain_of(api, base->GetVersionString())));
  });
}
