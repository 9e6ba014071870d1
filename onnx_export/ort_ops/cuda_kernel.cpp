// The node on a GPU: loads the CUDA kernels when a session first registers the op.
#include <dlfcn.h>

#include <cmath>
#include <cstdlib>

#include "gpu/flash_attention.h"
#include "ort_ops/kernels.h"

namespace ort_ops {
namespace {

struct Library {
  decltype(&msflash_cuda_forward) forward = nullptr;
  std::string reason;

  Library() {
    void* handle = dlopen(path().c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle) forward = reinterpret_cast<decltype(forward)>(dlsym(handle, "msflash_cuda_forward"));
    if (!forward) reason = dlerror();
  }

  static std::string path() {
    if (const char* wanted = std::getenv("MS_FLASH_CUDA_LIB")) return wanted;
    Dl_info here{};
    dladdr(reinterpret_cast<void*>(&cuda_unavailable), &here);
    const std::string self = here.dli_fname ? here.dli_fname : "";
    return self.substr(0, self.rfind('/') + 1) + "libms_flash_cuda.so";
  }
};

const Library& library() {
  static const Library* loaded = new Library;
  return *loaded;
}

MsFlashType type_of(ort::ElementType type) {
  switch (type) {
    case ort::FLOAT:
      return MSF_FLOAT32;
    case ort::FLOAT16:
      return MSF_FLOAT16;
    case ort::BFLOAT16:
      return MSF_BFLOAT16;
    case ort::BOOL:
      return MSF_BOOL;
    default:
      return MSF_NONE;
  }
}

}  // namespace

const char* cuda_unavailable() { return library().forward ? nullptr : library().reason.c_str(); }

void run_on_cuda(const Attributes& a, const Call& call, void* stream) {
  MsFlashCudaCall c{};
  c.batch = call.batch, c.heads = call.heads, c.kv_heads = call.kv_heads;
  c.q_len = call.q_len, c.k_len = call.k_len, c.d = call.d, c.dv = call.dv;
  c.type = type_of(call.q.type);
  c.q = call.q.data, c.k = call.k.data, c.v = call.v.data;
  c.mask_type = type_of(call.mask.type);
  c.mask = call.mask.data;
  int64_t step = 1;
  for (size_t i = call.mask.shape.size(), axis = 3; i-- > 0; --axis) {
    c.mask_strides[axis] = call.mask.shape[i] == 1 ? 0 : step;
    step *= call.mask.shape[i];
  }
  c.scale = a.scale == 0 ? 1 / std::sqrt(double(call.d)) : a.scale;
  c.softcap = a.softcap;
  c.left = a.left, c.right = a.right, c.bottom_right = a.bottom_right;
  c.out = call.y.data;
  c.lse = static_cast<float*>(call.lse.data);
  if (const char* reason = library().forward(&c, stream)) throw std::runtime_error(reason);
}

}  // namespace ort_ops
