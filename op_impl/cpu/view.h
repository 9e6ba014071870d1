// Query, key and value as tensors of (batch, head, row, channel), whatever their layout.
#pragma once
#include <cmath>

#include "cpu/call.h"

namespace msf {

// Of a paged cache, `batch` counts the blocks.
struct View {
  int64_t batch, heads, length, channels;
  Tensor4 tensor;
};

// In layouts whose last axis is the hidden size, `heads` counts its heads. Throws in the name of `function`.
inline View view(const char* function, const char* name, Layout layout, const Array& a, int64_t heads) {
  const std::vector<int64_t>& s = a.shape;
  const size_t rank = layout == Layout::BNSD || layout == Layout::BSND ? 4 : 3;
  if (s.size() != rank)
    fail_in(function, "the rank of '", name, "' must be ", rank, ", but got the shape ", show(s), ".");
  if ((layout == Layout::BSH || layout == Layout::SBH) && (heads <= 0 || s[2] % heads != 0))
    fail_in(function, "the hidden size of '", name, "' must be a multiple of its ", heads, " heads, but got ", s[2],
            ".");
  char* data = static_cast<char*>(a.data);
  switch (layout) {
    case Layout::BNSD:
      return {s[0], s[1], s[2], s[3], {data, a.dtype, s[1] * s[2] * s[3], s[2] * s[3], s[3]}};
    case Layout::BSND:
      return {s[0], s[2], s[1], s[3], {data, a.dtype, s[1] * s[2] * s[3], s[3], s[2] * s[3]}};
    case Layout::BSH:
      return {s[0], heads, s[1], s[2] / heads, {data, a.dtype, s[1] * s[2], s[2] / heads, s[2]}};
    case Layout::SBH:
      return {s[1], heads, s[0], s[2] / heads, {data, a.dtype, s[2], s[2] / heads, s[1] * s[2]}};
    case Layout::TND:
      break;
  }
  return {0, s[1], s[0], s[2], {data, a.dtype, 0, s[2], s[1] * s[2]}};
}

// What a problem takes from them; its sequences are the caller's.
inline void place(const View& q, const View& k, const View& v, bool default_scale, Problem* p) {
  p->batch = q.batch;
  p->heads = q.heads;
  p->kv_heads = k.heads;
  p->d = q.channels;
  p->dv = v.channels;
  p->q = q.tensor;
  p->k = k.tensor;
  p->v = v.tensor;
  p->q_rows = q.length;
  p->k_rows = k.length;
  p->stat_h = q.length;
  if (default_scale) p->scale = 1 / std::sqrt(double(p->d));
}

}  // namespace msf
