// The C interface of the CUDA kernels (flash_attention.cu). Tensors lie on the device, contiguous, (batch, head, row,
// channel). Both functions return null, or why they did not run; work is queued on `stream` and not waited for.
#pragma once
#include <cstdint>

enum MsFlashType : int32_t { MSF_NONE, MSF_FLOAT32, MSF_FLOAT16, MSF_BFLOAT16, MSF_BOOL };

struct MsFlashCudaCall {
  int64_t batch, heads, kv_heads, q_len, k_len, d, dv;
  MsFlashType type;  // of q, k, v, out and their gradients
  const void *q, *k, *v;

  // broadcasts by strides of 0, in elements; bool: True = keep, float: added to the scores
  MsFlashType mask_type;
  const void* mask;
  int64_t mask_strides[4];

  double scale, softcap;
  int64_t left, right;  // -1: no limit; causal is right = 0
  int32_t bottom_right;
  double dropout;         // probability of dropping
  uint64_t seed, offset;  // of the dropout mask

  // Results of the forward, inputs of the backward. Each of lse, row_max, row_sum may be null in the forward; lse is
  // not read by the backward. float32 (batch, head, row).
  void* out;
  float *lse, *row_max, *row_sum;

  // The backward alone. dlse may be null; delta is scratch, like row_sum.
  const void* dout;
  const float* dlse;
  float* delta;
  void *dq, *dk, *dv_;
};

extern "C" {
__attribute__((visibility("default"))) const char* msflash_cuda_forward(const MsFlashCudaCall* call, void* stream);
__attribute__((visibility("default"))) const char* msflash_cuda_backward(const MsFlashCudaCall* call, void* stream);
}
