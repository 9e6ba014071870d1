// The C interface of the library: for MindSpore's Custom ops, for ctypes (self-test, fuzzing), for any other host.
// Every function that can fail returns 0, or 1 with the reason in msflash_cpu_last_error() of the same thread.
#pragma once
#include <cstdint>

#define MSF_EXPORT extern "C" __attribute__((visibility("default")))

// Runs "fwd", "bwd" or "bias_grad" (slots of call.h), or the same with projections around it, "mha_fwd", "mha_bwd" or
// "mha_bias_grad" (slots of mha.h), or "kvcache" (kvcache.h), which writes into two of its inputs, "merge" (merge.h) or
// "address" (address.h). Arrays in slot order, inputs then outputs, contiguous; an absent input has the dtype "none".
// `spec` is the op's string attribute.
MSF_EXPORT int msflash_cpu_call(const char* op, const char* spec, int nparam, void** params, int* ndims,
                                int64_t** shapes, const char** dtypes);

// Output shapes from the shapes of the inputs that are present (-1: unknown length, {-2}: unknown rank), and for each
// output the present input that it takes its dtype from (-1: float32).
constexpr int kMsFlashMostOutputs = 13;
struct MsFlashOutputs {
  int count;
  int ndims[kMsFlashMostOutputs], dtype_of_input[kMsFlashMostOutputs];
  int64_t shapes[kMsFlashMostOutputs][8];
};
MSF_EXPORT int msflash_cpu_infer(const char* op, const char* spec, int ninput, const int* ndims,
                                 const int64_t* const* shapes, MsFlashOutputs* outputs);

// How many inputs are present, or -1 with the reason in msflash_cpu_last_error().
MSF_EXPORT int msflash_cpu_present_inputs(const char* op, const char* spec);

MSF_EXPORT const char* msflash_cpu_last_error();

MSF_EXPORT void msflash_cpu_set_num_threads(int n);  // n <= 0: the default
MSF_EXPORT int msflash_cpu_get_num_threads();

MSF_EXPORT const char* msflash_cpu_isa();
MSF_EXPORT const char* msflash_cpu_isa_list();  // that this machine can run, the best first, separated by commas
MSF_EXPORT int msflash_cpu_force_isa(const char* isa);

// Replaces the block sizes measured to be fast, a rule per line: see blocks.h.
MSF_EXPORT int msflash_cpu_set_block_rules(const char* rules);

// The machine's limits on the threads in use, measured now: multiplications with addition (FLOP/s), reading (B/s).
MSF_EXPORT double msflash_cpu_fma_peak();
MSF_EXPORT double msflash_cpu_read_bandwidth();
