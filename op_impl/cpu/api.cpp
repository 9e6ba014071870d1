#include "cpu/api.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpu/address.h"
#include "cpu/blocks.h"
#include "cpu/call.h"
#include "cpu/infer.h"
#include "cpu/kernels.h"
#include "cpu/kvcache.h"
#include "cpu/merge.h"
#include "cpu/mha.h"
#include "cpu/threads.h"

namespace msf {
namespace {

const Kernels* find_kernels(const char* isa) {
  for (const Kernels* const* k = usable_kernels(); *k; ++k)
    if (!std::strcmp((*k)->isa, isa)) return *k;
  return nullptr;
}

const Kernels*& selection() {
  static const Kernels* chosen = [] {
    const char* wanted = std::getenv("MS_FLASH_ISA");
    const Kernels* k = wanted ? find_kernels(wanted) : nullptr;
    return k ? k : usable_kernels()[0];
  }();
  return chosen;
}

thread_local std::string last_error;

template <class F>
int guarded(F f) {
  try {
    f();
    return 0;
  } catch (const std::exception& e) {
    last_error = e.what();
  } catch (...) {
    last_error = "For 'flash_attention', an unknown error occurred.";
  }
  return 1;
}

// Calls come in runs of the same spec; parsing it takes longer than a small attention.
template <class S>
const S& parsed(const char* text) {
  thread_local std::string last;
  thread_local std::unique_ptr<S> spec;
  if (!spec || last != text) {
    spec.reset();
    spec = std::make_unique<S>(text);
    last = text;
  }
  return *spec;
}

// Calls f(op, spec) with the op of that name and its parsed attribute.
template <class F>
void with_op(const char* name, const char* text, F f) {
  const std::pair<const char*, Op> ops[] = {{"fwd", Op::forward}, {"bwd", Op::backward}, {"bias_grad", Op::bias_grad}};
  for (auto& [op_name, op] : ops)
    if (!std::strcmp(op_name, name)) return f(op, parsed<Spec>(text));
  const std::pair<const char*, MhaOp> mha_ops[] = {
      {"mha_fwd", MhaOp::forward}, {"mha_bwd", MhaOp::backward}, {"mha_bias_grad", MhaOp::bias_grad}};
  for (auto& [op_name, op] : mha_ops)
    if (!std::strcmp(op_name, name)) return f(op, parsed<MhaSpec>(text));
  if (!std::strcmp(name, "kvcache")) return f(KvCacheOp::forward, parsed<KvCacheSpec>(text));
  if (!std::strcmp(name, "merge")) return f(MergeOp::forward, parsed<MergeSpec>(text));
  if (!std::strcmp(name, "address")) return f(AddressOp::forward, parsed<AddressSpec>(text));
  fail("there is no op '", name, "'.");
}

}  // namespace

const Kernels* selected_kernels() { return selection(); }

}  // namespace msf

using namespace msf;

int msflash_cpu_call(const char* op, const char* spec, int nparam, void** params, int* ndims, int64_t** shapes,
                     const char** dtypes) {
  return guarded([&] {
    std::vector<Array> arrays(nparam);
    for (int i = 0; i < nparam; ++i)
      arrays[i] = {params[i], std::vector<int64_t>(shapes[i], shapes[i] + ndims[i]), dtype_of(dtypes[i])};
    with_op(op, spec, [&](auto kind, auto& s) { run(kind, s, arrays); });
  });
}

int msflash_cpu_infer(const char* op, const char* spec, int ninput, const int* ndims, const int64_t* const* shapes,
                      MsFlashOutputs* outputs) {
  return guarded(
      [&] { with_op(op, spec, [&](auto kind, auto& s) { infer(kind, s, ninput, ndims, shapes, outputs); }); });
}

int msflash_cpu_present_inputs(const char* op, const char* spec) {
  int count = -1;
  guarded([&] { with_op(op, spec, [&](auto kind, auto& s) { count = present_inputs(kind, s); }); });
  return count;
}

const char* msflash_cpu_last_error() { return last_error.c_str(); }

void msflash_cpu_set_num_threads(int n) { set_num_threads(n); }
int msflash_cpu_get_num_threads() { return num_threads(); }

const char* msflash_cpu_isa() { return selected_kernels()->isa; }
const char* msflash_cpu_isa_list() {
  static const std::string list = [] {
    std::string s;
    for (const Kernels* const* k = usable_kernels(); *k; ++k) s += (s.empty() ? "" : ",") + std::string((*k)->isa);
    return s;
  }();
  return list.c_str();
}
int msflash_cpu_force_isa(const char* isa) {
  return guarded([&] {
    const Kernels* k = find_kernels(isa);
    if (!k)
      throw std::invalid_argument(std::string("the instruction set '") + isa + "' must be one of " +
                                  msflash_cpu_isa_list() + ".");
    selection() = k;
  });
}

int msflash_cpu_set_block_rules(const char* rules) {
  return guarded([&] { set_block_rules(rules); });
}

double msflash_cpu_fma_peak() { return selected_kernels()->fma_peak(); }
double msflash_cpu_read_bandwidth() { return selected_kernels()->read_bandwidth(); }
