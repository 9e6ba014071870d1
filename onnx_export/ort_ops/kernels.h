// The two kernels of the op. Both throw std::exception.
#pragma once
#include "ort_ops/node.h"

namespace ort_ops {

// Of one node of a session: what does not change from call to call is written out once.
class CpuKernel {
 public:
  explicit CpuKernel(const Attributes& a);
  void run(const Call& call, const ort::Api* api, const ort::KernelContext* context) const;

 private:
  std::string plain_, masked_, biased_;  // without a mask, with a bool one, with a float one
};

// The CUDA kernels lie in a library of their own, libms_flash_cuda.so beside this one, or at MS_FLASH_CUDA_LIB: this
// library loads where there is no CUDA. Null, or why they cannot be used.
const char* cuda_unavailable();
void run_on_cuda(const Attributes& a, const Call& call, void* stream);

}  // namespace ort_ops
