// Compiled once per instruction set, with MSF_ISA naming it.
#include "cpu/kernels.h"

#include "cpu/append.h"
#include "cpu/backward.h"
#include "cpu/bias_grad.h"
#include "cpu/forward.h"
#include "cpu/gemm.h"
#include "cpu/limits.h"
#include "cpu/merge_parts.h"

#define MSF_JOIN_(a, b) a##b
#define MSF_JOIN(a, b) MSF_JOIN_(a, b)
#define MSF_STRING_(a) #a
#define MSF_STRING(a) MSF_STRING_(a)

namespace {

template <template <class> class Kernel, class Request>
void run(const Request& p) {
  if (p.high)
    Kernel<double>(p).run();
  else
    Kernel<float>(p).run();
}

}  // namespace

namespace msf {

extern const Kernels MSF_JOIN(kernels_, MSF_ISA);
const Kernels MSF_JOIN(kernels_, MSF_ISA){
    MSF_STRING(MSF_ISA), MSF_VECTOR_BYTES, run<Forward, Problem>, run<Backward, Problem>,  run<BiasGrad, Problem>,
    run<Multiply, Gemm>, fma_peak,         read_bandwidth,        run<AppendRows, Append>, run<MergeParts, Merge>};

}  // namespace msf
