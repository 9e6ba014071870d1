#include "ascendc/twin_lib/api.h"

#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "ascendc/twin_lib/run.h"
#include "cpu/call.h"
#include "cpu/kernels.h"

namespace msf {

namespace {

thread_local std::string last_error, last_plan;
thread_local bool planning = false;

Op op_of(const char* name) {
  if (!std::strcmp(name, "fwd")) return Op::forward;
  if (!std::strcmp(name, "bwd")) return Op::backward;
  throw std::invalid_argument(std::string("For 'flash_attention' on Ascend, there is no op '") + name + "'.");
}

template <class F>
int guarded(F f) {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    last_error = e.what();
  } catch (...) {
    last_error = "For 'flash_attention' on Ascend, an unknown error occurred.";
  }
  return 1;
}

void call(const char* op, const char* spec, int nparam, void** params, int* ndims, int64_t** shapes,
          const char** dtypes) {
  std::vector<Array> arrays(nparam);
  for (int i = 0; i < nparam; ++i)
    arrays[i] = {params[i], std::vector<int64_t>(shapes[i], shapes[i] + ndims[i]), dtype_of(dtypes[i])};
  run(op_of(op), Spec(spec), arrays);
}

void forward(const Problem& p) { planning ? last_plan = describe_forward(p), void() : run_forward(p); }
void backward(const Problem& p) { planning ? last_plan = describe_backward(p), void() : run_backward(p); }
void bias_grad(const Problem&) {
  throw std::invalid_argument("For 'flash_attention' on Ascend, the gradient of 'bias' is not supported.");
}

}  // namespace

// cpu/call.cpp checks a call and turns it into a Problem, whoever runs it.
const Kernels* selected_kernels() {
  static const Kernels table{"ascend-twin", 0, forward, backward, bias_grad, nullptr};
  return &table;
}

}  // namespace msf

using namespace msf;

int msflash_ascend_call(const char* op, const char* spec, int nparam, void** params, int* ndims, int64_t** shapes,
                        const char** dtypes) {
  return guarded([&] { call(op, spec, nparam, params, ndims, shapes, dtypes); });
}

const char* msflash_ascend_plan(const char* op, const char* spec, int nparam, void** params, int* ndims,
                                int64_t** shapes, const char** dtypes) {
  planning = true;
  const int failed = guarded([&] { call(op, spec, nparam, params, ndims, shapes, dtypes); });
  planning = false;
  return failed ? nullptr : last_plan.c_str();
}

const char* msflash_ascend_last_error() { return last_error.c_str(); }
const char* msflash_ascend_last_report() { return last_report().c_str(); }

int msflash_ascend_configure(const char* key, const char* value) {
  return guarded([&] { configure(key, value); });
}
