#include "ascendc/twin_lib/api.h"

#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "ascendc/twin_lib/block.h"
#include "ascendc/twin_lib/decode.h"
#include "ascendc/twin_lib/launching.h"
#include "ascendc/twin_lib/run.h"
#include "cpu/address.h"
#include "cpu/call.h"
#include "cpu/infer.h"
#include "cpu/kernels.h"
#include "cpu/kvcache.h"
#include "cpu/merge.h"
#include "cpu/mha.h"

namespace msf {

namespace {

thread_local std::string last_error, last_plan, last_totals;
thread_local bool planning = false;

// Calls f(op, spec) with the op of that name and its parsed attribute.
template <class F>
void with_op(const char* name, const char* text, F f) {
  const std::pair<const char*, Op> ops[] = {{"fwd", Op::forward}, {"bwd", Op::backward}, {"bias_grad", Op::bias_grad}};
  for (auto& [op_name, op] : ops)
    if (!std::strcmp(op_name, name)) return f(op, Spec(text));
  const std::pair<const char*, MhaOp> mha_ops[] = {
      {"mha_fwd", MhaOp::forward}, {"mha_bwd", MhaOp::backward}, {"mha_bias_grad", MhaOp::bias_grad}};
  for (auto& [op_name, op] : mha_ops)
    if (!std::strcmp(op_name, name)) return f(op, MhaSpec(text));
  if (!std::strcmp(name, "kvcache")) return f(KvCacheOp::forward, KvCacheSpec(text));
  if (!std::strcmp(name, "merge")) return f(MergeOp::forward, MergeSpec(text));
  if (!std::strcmp(name, "address")) return f(AddressOp::forward, AddressSpec(text));
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

std::vector<Array> arrays_of(int nparam, void** params, int* ndims, int64_t** shapes, const char** dtypes) {
  std::vector<Array> arrays(nparam);
  for (int i = 0; i < nparam; ++i)
    arrays[i] = {params[i], std::vector<int64_t>(shapes[i], shapes[i] + ndims[i]), dtype_of(dtypes[i]), on_device()};
  return arrays;
}

void call(const char* op, const char* spec, const std::vector<Array>& arrays) {
  with_op(op, spec, [&](auto kind, const auto& s) { run(kind, s, arrays); });
}

void forward(const Problem& p) {
  if (planning)
    last_plan = describe_forward(p);
  else if (!run_pending_block(p))
    run_forward(p);
}
void backward(const Problem& p) { planning ? last_plan = describe_backward(p), void() : run_backward(p); }

void append_and_forward(const Problem& p, const std::vector<Append>& appends) {
  planning ? last_plan = describe_decode(p, appends), void() : run_decode(p, appends);
}
void merge(const Merge& m) {
  if (planning) throw std::invalid_argument("For 'merge_attention' on Ascend, there is no plan.");
  run_merge(m);
}
void bias_grad(const Problem& p) { planning ? last_plan = describe_bias_grad(p), void() : run_bias_grad(p); }

}  // namespace

// cpu/call.cpp checks a call and turns it into a Problem, whoever runs it.
const Kernels* selected_kernels() {
  static const Kernels table = [] {
    Kernels k{};
    k.isa = "ascend-twin";
    k.forward = forward, k.backward = backward, k.bias_grad = bias_grad;
    k.append = rotate_rows;  // of the query: the caches' rows go with the attention
    k.append_and_forward = append_and_forward, k.merge = merge;
    k.block = block_at_once, k.multiply = multiply_on_host;
    return k;
  }();
  return &table;
}

}  // namespace msf

using namespace msf;

int msflash_ascend_call(const char* op, const char* spec, int nparam, void** params, int* ndims, int64_t** shapes,
                        const char** dtypes) {
  return guarded([&] { call(op, spec, arrays_of(nparam, params, ndims, shapes, dtypes)); });
}

int msflash_ascend_infer(const char* op, const char* spec, int ninput, const int* ndims, const int64_t* const* shapes,
                         MsFlashOutputs* outputs) {
  return guarded(
      [&] { with_op(op, spec, [&](auto kind, const auto& s) { infer(kind, s, ninput, ndims, shapes, outputs); }); });
}

int msflash_ascend_present_inputs(const char* op, const char* spec) {
  int count = -1;
  guarded([&] { with_op(op, spec, [&](auto kind, const auto& s) { count = present_inputs(kind, s); }); });
  return count;
}

int msflash_ascend_block(const char* spec, int nparam, void** params, int* ndims, int64_t** shapes,
                         const char** dtypes) {
  return guarded([&] { call_block(spec, arrays_of(nparam, params, ndims, shapes, dtypes)); });
}

const char* msflash_ascend_plan(const char* op, const char* spec, int nparam, void** params, int* ndims,
                                int64_t** shapes, const char** dtypes) {
  planning = true;
  const int failed = guarded([&] { call(op, spec, arrays_of(nparam, params, ndims, shapes, dtypes)); });
  planning = false;
  return failed ? nullptr : last_plan.c_str();
}

const char* msflash_ascend_last_error() { return last_error.c_str(); }
const char* msflash_ascend_last_report() { return last_report().c_str(); }
const char* msflash_ascend_totals(int reset) {
  last_totals = totals(reset != 0);
  return last_totals.c_str();
}

int msflash_ascend_configure(const char* key, const char* value) {
  return guarded([&] { configure(key, value); });
}
