// The two kernels of the op. Both throw std::exception.
#pragma once
#include "ort_ops/node.h"

namespace ort_ops {

void run_on_cpu(const Attributes& a, const Call& call, const ort::Api* api, const ort::KernelContext* context);

// The CUDA kernels lie in a library of their own, libms_flash_cuda.so beside this one, or at MS_FLASH_CUDA_LIB: this
// library loads where there is no CUDA. Null, or why they cannot be used.
const char* cuda_unavailable();
void run_on_cuda(const Attributes& a, const Call& call, void* stream);

}  // namespace ort_ops
