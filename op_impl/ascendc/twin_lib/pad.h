// Head dims that are no multiple of 16: the kernels get copies with zeros behind each row, as the caller of the op on a
// device would make them. The scale has been settled before, from the true head dim. Copies, too, of operands that lie
// where their gradients go.
#pragma once
#include <cstring>
#include <vector>

#include "common/problem.h"
#include "cpu/cache.h"

namespace msf {

class Padded {
 public:
  static bool needed(const Problem& p) { return p.d % 16 || p.dv % 16 || (p.dq && p.dq.data == p.q.data); }

  // The same for caches and the rows to append: where rows are appended, the caches are results as well.
  Padded(const Problem& p, std::vector<Append>* appends) : problem(p), outer_(p.batch) {
    problem.d = (p.d + 15) / 16 * 16, problem.dv = (p.dv + 15) / 16 * 16;
    take(&problem.q, p.heads, p.q_rows, p.d, true, false);
    take(&problem.out, p.heads, p.q_rows, p.dv, false, true);
    if (!appends->empty()) {
      take(&(*appends)[0].from, p.kv_heads, (*appends)[0].rows, p.d, true, false);
      take(&(*appends)[1].from, p.kv_heads, (*appends)[1].rows, p.dv, true, false);
    }
    if (p.pages) outer_ = p.pages.count;
    take(&problem.k, p.kv_heads, p.k_rows, p.d, true, !appends->empty());
    take(&problem.v, p.kv_heads, p.k_rows, p.dv, true, !appends->empty());
  }

  // `backward`: the output is an operand. Gradients are results where the problem has them.
  Padded(const Problem& p, bool backward) : problem(p), outer_(p.varlen ? 1 : p.batch) {
    problem.d = (p.d + 15) / 16 * 16, problem.dv = (p.dv + 15) / 16 * 16;
    problem.packed = false;
    take(&problem.q, p.heads, p.q_rows, p.d, true, false);
    take(&problem.k, p.kv_heads, p.k_rows, p.d, true, false);
    take(&problem.v, p.kv_heads, p.k_rows, p.dv, true, false);
    take(&problem.out, p.heads, p.q_rows, p.dv, backward, !backward);
    if (!backward) return;
    take(&problem.dout, p.heads, p.q_rows, p.dv, true, false);
    if (!p.dq) return;
    take(&problem.dq, p.heads, p.q_rows, p.d, false, true);
    take(&problem.dk, p.kv_heads, p.k_rows, p.d, false, true);
    take(&problem.dv_, p.kv_heads, p.k_rows, p.dv, false, true);
  }

  // Results go where the caller wants them.
  void copy_back() const {
    for (const Copy& c : copies_)
      if (c.result) copy(c, false);
  }

  Problem problem;

 private:
  struct Copy {
    Tensor4 theirs, ours;
    int64_t outer, heads, rows, channels;
    bool result;
  };

  void take(Tensor4* x, int64_t heads, int64_t rows, int64_t channels, bool operand, bool result) {
    const int64_t wide = (channels + 15) / 16 * 16;
    memory_.emplace_back(size_t(outer_ * heads * rows * wide * size_of(x->dtype)));
    Tensor4 ours{memory_.back().data(), x->dtype, problem.varlen ? 0 : heads * rows * wide, rows * wide, wide};
    copies_.push_back({*x, ours, outer_, heads, rows, channels, result});
    if (operand) copy(copies_.back(), true);
    *x = ours;
  }
  void copy(const Copy& c, bool in) const {
    const size_t bytes = size_t(c.channels * size_of(c.ours.dtype));
    for (int64_t b = 0; b < c.outer; ++b)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t s = 0; s < c.rows; ++s) {
          char *theirs = c.theirs.row(b, h, s), *ours = c.ours.row(b, h, s);
          std::memcpy(in ? ours : theirs, in ? theirs : ours, bytes);
        }
  }

  int64_t outer_;
  std::vector<std::vector<char>> memory_;
  std::vector<Copy> copies_;
};

}  // namespace msf
