// The kernels as the rest of the library sees them: one table per instruction set.
#pragma once
#include <vector>

#include "common/problem.h"
#include "cpu/cache.h"
#include "cpu/matrix.h"

namespace msf {

struct Array;
struct Spec;
struct MhaForward;

struct Kernels {
  const char* isa;
  int vector_bytes;
  void (*forward)(const Problem&);
  void (*backward)(const Problem&);
  void (*bias_grad)(const Problem&);
  void (*multiply)(const Gemm&);
  double (*fma_peak)();        // FLOP/s
  double (*read_bandwidth)();  // B/s
  void (*append)(const Append&);
  void (*merge)(const Merge&);
  // Rows into the caches and attention over them at once; null: the one after the other.
  void (*append_and_forward)(const Problem&, const std::vector<Append>&) = nullptr;
  // The block op's forward at once, with the arrays of the attention inside; null: products and attention in turn.
  void (*block)(const MhaForward&, const Spec&, const std::vector<Array>&) = nullptr;
};

// The table in use: the best one, or the one MS_FLASH_ISA names.
const Kernels* selected_kernels();

// The tables compiled into this library that this machine can run, the best one first; ended by a null pointer.
const Kernels* const* usable_kernels();

}  // namespace msf
