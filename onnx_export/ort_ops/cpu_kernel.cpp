// The node on the CPU: the library's own kernels.
#include <algorithm>
#include <locale>
#include <memory>
#include <sstream>

#include "cpu/api.h"
#include "cpu/call.h"
#include "ort_ops/kernels.h"
#include "ort_ops/threads.h"

namespace ort_ops {
namespace {

// In a bool mask of the node 0 masks out, which the library calls "keep".
const char* dtype_name(const Tensor& t) {
  switch (t.type) {
    case ort::FLOAT:
      return "float32";
    case ort::FLOAT16:
      return "float16";
    case ort::BFLOAT16:
      return "bfloat16";
    case ort::BOOL:
      return "keep";
    default:
      return "none";
  }
}

// What the library has to know beside the arrays. `slot` is that of the mask among its inputs, -1 for none.
std::string spec_text(const Attributes& a, int slot) {
  std::ostringstream text;
  text.imbue(std::locale::classic());  // a host program may have set a locale with a decimal comma
  text << std::hexfloat << "layout=BNSD;scale=";
  if (a.scale == 0)
    text << "default";
  else
    text << a.scale;
  text << ";left=" << a.left << ";right=" << a.right << ";align=" << (a.bottom_right ? "bottom_right" : "top_left")
       << ";softcap=" << a.softcap << ";present=";
  for (int i = 0; i < msf::kForwardInputs; ++i) text << (i <= msf::kValue || i == slot);
  return text.str();
}

}  // namespace

CpuKernel::CpuKernel(const Attributes& a)
    : plain_(spec_text(a, -1)), masked_(spec_text(a, msf::kMask)), biased_(spec_text(a, msf::kBias)) {}

void CpuKernel::run(const Call& call, const ort::Api* api, const ort::KernelContext* context) const {
  const SessionThreads threads(api, context);
  // what the backward of a training step would need; also the LSE where the node does not ask for it
  const int64_t rows = call.batch * call.heads * call.q_len;
  const std::unique_ptr<float[]> statistics(new float[(call.lse ? 2 : 3) * rows]);
  Tensor row_max = call.lse, row_sum, lse = call.lse;
  row_max.shape = row_sum.shape = lse.shape = {call.batch, call.heads, call.q_len};
  row_max.type = row_sum.type = lse.type = ort::FLOAT;
  row_max.data = statistics.get();
  row_sum.data = statistics.get() + rows;
  if (!call.lse) lse.data = statistics.get() + 2 * rows;

  constexpr int kCount = msf::kForwardInputs + 4;
  const Tensor none;
  const Tensor* arrays[kCount];
  std::fill(arrays, arrays + msf::kForwardInputs, &none);
  arrays[msf::kQuery] = &call.q;
  arrays[msf::kKey] = &call.k;
  arrays[msf::kValue] = &call.v;
  const std::string* spec = &plain_;
  if (call.mask) {
    const bool keep = call.mask.type == ort::BOOL;
    arrays[keep ? msf::kMask : msf::kBias] = &call.mask;
    spec = keep ? &masked_ : &biased_;
  }
  const Tensor* results[] = {&call.y, &lse, &row_max, &row_sum};
  std::copy(results, results + 4, arrays + msf::kForwardInputs);

  void* data[kCount];
  int ranks[kCount];
  int64_t* shapes[kCount];
  const char* dtypes[kCount];
  for (int i = 0; i < kCount; ++i) {
    data[i] = arrays[i]->data;
    ranks[i] = int(arrays[i]->shape.size());
    shapes[i] = const_cast<int64_t*>(arrays[i]->shape.data());
    dtypes[i] = dtype_name(*arrays[i]);
  }
  if (msflash_cpu_call("fwd", spec->c_str(), kCount, data, ranks, shapes, dtypes))
    throw Error(msflash_cpu_last_error());
}

}  // namespace ort_ops
