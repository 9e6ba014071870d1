// What a kernel is asked to do: one plain struct, filled once by the host side and read by every kernel.
#pragma once
#include <cstdint>

#include "common/band.h"

namespace msf {

enum class DType : uint8_t { none, f32, f16, bf16, u8, i32, i64, keep };  // keep: a mask whose 0 masks out

MSF_ALWAYS_INLINE inline int64_t size_of(DType t) {
  return t == DType::u8 || t == DType::keep    ? 1
         : t == DType::f16 || t == DType::bf16 ? 2
         : t == DType::f32 || t == DType::i32  ? 4
         : t == DType::i64                     ? 8
                                               : 0;
}

// (batch, head, row, channel) view of any layout; strides in elements, channels contiguous.
struct Tensor4 {
  char* data = nullptr;
  DType dtype = DType::none;
  int64_t b = 0, h = 0, s = 0;

  explicit operator bool() const { return data != nullptr; }
  MSF_ALWAYS_INLINE char* row(int64_t ib, int64_t ih, int64_t is) const {
    return data + (ib * b + ih * h + is * s) * size_of(dtype);
  }
};

// (batch, head, query, key) plane that broadcasts: a stride of 0 repeats; k is 0 or 1.
struct Plane {
  char* data = nullptr;
  DType dtype = DType::none;
  int64_t b = 0, h = 0, q = 0, k = 0;
  int64_t rows = 0, cols = 0;  // extent of the stored plane (1 where it repeats)

  explicit operator bool() const { return data != nullptr; }
  MSF_ALWAYS_INLINE char* row(int64_t ib, int64_t ih, int64_t iq) const {
    return data + (ib * b + ih * h + iq * q) * size_of(dtype);
  }
};

// One sequence of the batch. Dense layouts: the base rows are 0 and the batch stride does the rest.
struct Sequence {
  int64_t q_base, k_base, q_len, k_len;
};

// Keys and values in pages of a pool that sequences share: key j of sequence b is row j % size of page
// table[b * stride + j / size]. The batches of a Tensor4 over the pool are its pages.
struct Pages {
  const int64_t* table = nullptr;
  int64_t stride = 0, size = 0;  // size 0: no pages, the keys of a sequence are rows of its own
  int64_t count = 0;             // of the pool

  explicit operator bool() const { return size != 0; }
};

// Integers as a caller gave them.
struct Integers {
  const void* data = nullptr;
  DType dtype = DType::none;
};

struct Problem {
  int64_t batch = 0, heads = 0, kv_heads = 0, d = 0, dv = 0;
  const Sequence* seq = nullptr;   // [batch]
  int64_t max_q = 0, max_k = 0;    // the longest of them
  int64_t q_rows = 0, k_rows = 0;  // rows stored per (batch, head); TND: the packed totals
  bool varlen = false, packed = false;
  bool cached = false;  // K and V are caches, of which every sequence fills as much as its k_len says

  double scale = 1;    // on q.k, before softcap
  double softcap = 0;  // 0: off
  double dropout = 0;  // probability of dropping
  double fill = 0;     // score of masked positions when has_fill; else they are excluded
  bool has_fill = false, high = false, bottom_right = true;
  int64_t left = -1, right = -1;  // window, -1: unlimited; causal is right = 0
  uint64_t seed = 0, offset = 0;  // Philox
  bool seed_from_input = false;   // they came from here, null where only shapes are known
  const int64_t* seed_input = nullptr;
  int64_t block_m = 0, block_n = 0;  // 0: the kernel's choice
  int64_t splits = 0;                // parts that the keys of a row are cut into; 0: the kernel's choice

  Tensor4 q, k, v, out, dout, dq, dk, dv_;
  Pages pages;                          // of k and v, in the forward only
  Integers cache_lengths, block_table;  // where K and V are caches: what seq and pages were made of
  Plane mask, bias, dbias, drop_mask;
  const float* alibi = nullptr;  // slope of (batch, head) at alibi[b * alibi_b + h]
  int64_t alibi_b = 0;
  const void* sinks = nullptr;  // [heads]
  void* dsinks = nullptr;
  DType sinks_dtype = DType::none;

  // Row statistics, float32, addressed b * stat_b + h * stat_h + q_base + i. row_max is in the
  // units of the kernel's scores; kept apart from row_sum because the logarithm of both loses digits near -1e4. Both
  // are for the backward, and null where there will be none.
  float *lse = nullptr, *row_max = nullptr, *row_sum = nullptr;
  const float* dlse = nullptr;
  int64_t stat_b = 0, stat_h = 0;

  MSF_ALWAYS_INLINE int64_t group() const { return heads / kv_heads; }
  MSF_ALWAYS_INLINE int64_t stat(int64_t b, int64_t h, int64_t i) const {
    return b * stat_b + h * stat_h + seq[b].q_base + i;
  }
  // Key or value j of a sequence, and the end of the keys from j on, at most `end`, that lie one row stride apart.
  MSF_ALWAYS_INLINE char* key_row(const Tensor4& x, int64_t b, int64_t h, int64_t j) const {
    return pages ? x.row(pages.table[b * pages.stride + j / pages.size], h, j % pages.size)
                 : x.row(b, h, seq[b].k_base + j);
  }
  MSF_ALWAYS_INLINE int64_t key_run(int64_t j, int64_t end) const {
    if (!pages) return end;
    const int64_t page_end = j - j % pages.size + pages.size;
    return page_end < end ? page_end : end;
  }
  MSF_ALWAYS_INLINE Band band(int64_t b) const { return Band(seq[b].q_len, seq[b].k_len, left, right, bottom_right); }
};

}  // namespace msf
