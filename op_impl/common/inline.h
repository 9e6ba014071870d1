// Inlined always: kernels are compiled for several instruction sets, and a shared out-of-line copy could come from any
// of them. Device code defines it before, with the attribute its functions need.
#pragma once

#ifndef MSF_ALWAYS_INLINE
#define MSF_ALWAYS_INLINE __attribute__((always_inline))
#endif
