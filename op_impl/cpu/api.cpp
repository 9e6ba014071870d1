#include "cpu/api.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpu/call.h"
#include "cpu/kernels.h"
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

Op op_of(const char* name) {
  const std::pair<const char*, Op> ops[] = {{"fwd", Op::forward}, {"bwd", Op::backward}, {"bias_grad", Op::bias_grad}};
  for (auto& [text, op] : ops)
    if (!std::strcmp(text, name)) return op;
  throw std::invalid_argument(std::string("For 'flash_attention', there is no op '") + name + "'.");
}

// Calls come in runs of the same spec; parsing it takes longer than a small attention.
const Spec& parsed(const char* text) {
  thread_local std::string last;
  thread_local std::unique_ptr<Spec> spec;
  if (!spec || last != text) {
    spec.reset();
    spec = std::make_unique<Spec>(text);
    last = text;
  }
  return *spec;
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
    run(op_of(op), parsed(spec), arrays);
  });
}

int msflash_cpu_infer(const char* op, const char* spec, int ninput, const int* ndims, const int64_t* const* shapes,
                      MsFlashOutputs* outputs) {
  return guarded([&] {
    const Op kind = op_of(op);
    const Spec& s = parsed(spec);
    std::vector<std::vector<int64_t>> in(ninput);
    for (int i = 0; i < ninput; ++i) in[i].assign(shapes[i], shapes[i] + ndims[i]);
    const std::vector<std::vector<int64_t>> out = infer_shapes(kind, s, in);
    outputs->count = int(out.size());
    for (size_t i = 0; i < out.size(); ++i) {
      outputs->ndims[i] = int(out[i].size());
      std::copy(out[i].begin(), out[i].end(), outputs->shapes[i]);
      const bool statistics = kind == Op::forward && i > 0, sinks = kind == Op::backward && i == 3;
      outputs->dtype_of_input[i] = kind == Op::bias_grad ? s.position(kBias)
                                   : statistics          ? -1
                                   : !sinks              ? s.position(kQuery)
                                   : s.has(kSinks)       ? s.position(kSinks)
                                                         : -1;
    }
  });
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
