// The Ascend kernels on the host twin, behind a C interface like that of the CPU library (cpu/api.h).
// Every function that can fail returns 0, or 1 with the reason in msflash_ascend_last_error() of the same thread. A
// kernel that the twin finds fault with has failed.
#pragma once
#include <cstdint>

#include "cpu/api.h"

// Runs "fwd", "bwd", "bias_grad", "mha_fwd", "mha_bwd", "mha_bias_grad", "kvcache", "merge" or "address": the
// conventions of msflash_cpu_call.
MSF_EXPORT int msflash_ascend_call(const char* op, const char* spec, int nparam, void** params, int* ndims,
                                   int64_t** shapes, const char** dtypes);

// As msflash_cpu_infer and msflash_cpu_present_inputs.
MSF_EXPORT int msflash_ascend_infer(const char* op, const char* spec, int ninput, const int* ndims,
                                    const int64_t* const* shapes, MsFlashOutputs* outputs);
MSF_EXPORT int msflash_ascend_present_inputs(const char* op, const char* spec);

// Attention with its projections. `spec` is that of the attention (layout BSH, heads given); the arrays are x,
// context, context_v, w_q, w_k, w_v, b_q, b_k, b_v, w_o, b_o, then attn_mask, bias, alibi_slopes, sinks, drop_mask,
// then the outputs y, lse, row_max, row_sum.
MSF_EXPORT int msflash_ascend_block(const char* spec, int nparam, void** params, int* ndims, int64_t** shapes,
                                    const char** dtypes);

MSF_EXPORT const char* msflash_ascend_last_error();

// What the twin says of the last launch of this thread, as JSON: cycles, busy share of the pipes, GM traffic.
MSF_EXPORT const char* msflash_ascend_last_report();

// The same summed over all launches of the process, as JSON: kernel -> launches, violations, cycles, bytes; after which
// it may be forgotten.
MSF_EXPORT const char* msflash_ascend_totals(int reset);

// The plan of the host tiling for a call, as JSON; nothing runs. Data pointers may be null, except those of the
// cumulative lengths.
MSF_EXPORT const char* msflash_ascend_plan(const char* op, const char* spec, int nparam, void** params, int* ndims,
                                           int64_t** shapes, const char** dtypes);

// "soc" (910B1 to 910B4), "cores" (0: the chip's), "effects" (0: only the cycle model runs), "strict" (1: dependences
// within a pipe are checked), "reverse" (1: cores take turns in reverse order), "block_m", "stack_n", "depth",
// "on_device" (1: lengths and blocks of caches are looked at by the kernel alone, as on a device),
// "atomic" (1: the backward adds atomically from all cores). For the cycle model alone, which shows what they are
// worth: "serial" (1: the cube waits for the vectors), "single_buffer" (1: one buffer in L1 for K and V, one for P).
// For all threads.
MSF_EXPORT int msflash_ascend_configure(const char* key, const char* value);

// Cycles of `tiles` tiles of 128 rows and 256 keys, D = 128, of a step of the forward pass ("qk", "softmax", "pv",
// "rescale"), at the fast and at the slow end of the costs. Returns the number of violations, -1 for an unknown step.
MSF_EXPORT int64_t msflash_ascend_tile(const char* step, int64_t tiles, double* cycles);
