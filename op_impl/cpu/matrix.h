// What a matrix product is asked to do: C = sum over terms of A B, plus a bias per column.
#pragma once
#include "common/problem.h"

namespace msf {

// Where index i of an axis lies: i * stride, or in groups (heads) that are group_stride apart.
struct Axis {
  int64_t stride = 0;
  int64_t group = 0, group_stride = 0;  // group 0: no groups

  MSF_ALWAYS_INLINE int64_t at(int64_t i) const {
    return group ? i / group * group_stride + i % group * stride : i * stride;
  }
  MSF_ALWAYS_INLINE bool contiguous() const { return stride == 1 && !group; }
};

// Element (i, j) at row.at(i) + col.at(j), in elements.
struct Matrix {
  char* data = nullptr;
  DType dtype = DType::none;
  Axis row, col;

  MSF_ALWAYS_INLINE char* at(int64_t i, int64_t j) const { return data + (row.at(i) + col.at(j)) * size_of(dtype); }
  MSF_ALWAYS_INLINE Matrix transposed() const { return {data, dtype, col, row}; }
};

struct Gemm {
  struct Term {
    Matrix a, b;  // (m, k) and (k, n)
    int64_t k;
  };
  static constexpr int kMaxTerms = 3;

  int64_t m = 0, n = 0;
  int terms = 0;
  Term term[kMaxTerms];
  Matrix c;
  Matrix bias;  // one row, added to every row of C; or no data
  bool high = false;

  void add(const Matrix& a, const Matrix& b, int64_t k) { term[terms++] = {a, b, k}; }
};

}  // namespace msf
