// What every kernel file starts with.
#pragma once
#include "kernel_operator.h"
#define MSF_ALWAYS_INLINE __aicore__ __attribute__((always_inline))
#include "ascendc/schedule.h"

namespace msf {

using Address = GM_ADDR;  // the macro ends in a star
using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::SetFlag;
using AscendC::TPosition;
using AscendC::WaitFlag;

constexpr int32_t kFractal = 16, kBlockBytes = 32, kLanes = 64;  // lanes: float32 of one vector repeat

__aicore__ inline int32_t Align(int32_t x, int32_t to) { return (x + to - 1) / to * to; }
__aicore__ inline int32_t Min(int32_t a, int32_t b) { return a < b ? a : b; }

// The input slots of op_impl/ops.yaml, in its order. Of caches, key and value are the caches themselves, and two more
// come with them.
struct Inputs {
  Address query, key, value, mask, bias, alibi, sinks, seed, drop_mask, cu_q, cu_k;
  Address cache_seqlens = nullptr, block_table = nullptr;
};

// One sequence of the batch: where its rows start and how many there are. `lost`: it has a length that its cache has
// no room for, and so no keys.
struct Sequence {
  int64_t q_base, k_base, q_len, k_len;
  bool lost = false;
};

__aicore__ inline int64_t Cumulative(Address cu, int32_t is_int64, int64_t i) {
  if (is_int64) {
    GlobalTensor<int64_t> x;
    x.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(cu));
    return x.GetValue(i);
  }
  GlobalTensor<int32_t> x;
  x.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(cu));
  return x.GetValue(i);
}

__aicore__ inline Sequence SequenceOf(const AttentionTiling& a, const Inputs& in, int64_t b) {
  if (a.cached) {
    const int64_t before = Cumulative(in.cache_seqlens, a.lengths_are_int64, b);
    const bool lost = before < 0 || before > a.k_len - a.new_len;
    return {0, 0, a.q_len, lost ? 0 : before + a.new_len, lost};
  }
  if (!a.varlen) return {0, 0, a.q_len, a.k_len};
  const int64_t q0 = Cumulative(in.cu_q, a.lengths_are_int64, b), k0 = Cumulative(in.cu_k, a.lengths_are_int64, b);
  return {q0, k0, Cumulative(in.cu_q, a.lengths_are_int64, b + 1) - q0,
          Cumulative(in.cu_k, a.lengths_are_int64, b + 1) - k0};
}

// Rows of K or V that lie one row stride apart. `lost`: their page is none of the cache's; `at` is in another one.
struct RowRun {
  int64_t at;  // the first one's element
  int32_t rows;
  bool lost = false;
};

// The rows of a sequence's KV head from `row` on, at most n: with pages, up to the end of the page. In a graph nobody
// looks at lengths and pages before the kernel does.
__aicore__ inline RowRun RunOf(const AttentionTiling& a, const Inputs& in, const TensorLayout& x, int64_t page_size,
                               int64_t b, int64_t h, int64_t row, int32_t n) {
  if (!page_size) return {x.offset + b * x.b + h * x.h + row * x.s, n};
  const int64_t page = Cumulative(in.block_table, a.table_is_int64, b * a.table_pitch + row / page_size),
                first = row % page_size;
  const bool lost = page < 0 || page >= a.pages;
  return {(lost ? 0 : page) * x.b + h * x.h + first * x.s, int32_t(page_size - first < n ? page_size - first : n),
          lost};
}

struct Sequences {
  const AttentionTiling& a;
  const Inputs& in;
  __aicore__ inline Sequence operator()(int64_t b) const { return SequenceOf(a, in, b); }
};

// Rows of all heads of all sequences in chunks, dealt out to the vector cores in turn.
struct Chunk {
  int64_t b, head;
  int32_t first, rows;
};
class ChunkStream {
 public:
  __aicore__ inline ChunkStream(const Sequences& sequences, int64_t heads, bool keys, int32_t chunk, int64_t core,
                                int64_t cores)
      : sequences_(sequences), heads_(heads), keys_(keys), chunk_(chunk), cores_(cores), unit_(core) {}

  __aicore__ inline bool Next(Chunk* c) {
    for (; b_ < sequences_.a.batch; ++b_) {
      const Sequence seq = sequences_(b_);
      const int64_t length = keys_ ? seq.k_len : seq.q_len, chunks = (length + chunk_ - 1) / chunk_;
      if (unit_ < chunks * heads_) {
        const int64_t row = unit_ % chunks * chunk_;
        c->b = b_;
        c->head = unit_ / chunks;
        c->first = int32_t(row);
        c->rows = int32_t(length - row < chunk_ ? length - row : chunk_);
        unit_ += cores_;
        return true;
      }
      unit_ -= chunks * heads_;
    }
    return false;
  }

 private:
  const Sequences& sequences_;
  int64_t heads_;
  bool keys_;
  int32_t chunk_;
  int64_t cores_, unit_, b_ = 0;
};

// Rows of a tile: `pack` heads, one after another, with the same `rows` queries each.
struct TileRows {
  int64_t head0;
  int32_t row0, rows, count;  // count: rows * pack

  __aicore__ inline TileRows(int64_t head, int32_t first_row, int32_t n, int32_t pack)
      : head0(head), row0(first_row), rows(n), count(n * pack) {}
  __aicore__ inline TileRows(const Stack& s, int32_t pack) : TileRows(s.head, s.item.row0, s.item.rows, pack) {}
  __aicore__ inline int64_t Head(int32_t r) const { return head0 + r / rows; }
  __aicore__ inline int32_t Query(int32_t r) const { return row0 + r % rows; }
  // how many rows from r on, below `end`, belong to the same head
  __aicore__ inline int32_t Run(int32_t r, int32_t end) const { return Min(rows - r % rows, end - r); }
};

template <class T>
__aicore__ inline GlobalTensor<T> Global(Address base, int64_t element) {
  GlobalTensor<T> x;
  x.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(base) + element);
  return x;
}

template <class T>
__aicore__ inline LocalTensor<T> Local(TPosition position, int32_t byte, int32_t bytes) {
  return LocalTensor<T>(position, uint32_t(byte), uint32_t(bytes / int32_t(sizeof(T))));
}

__aicore__ inline float ScalarToFloat(half x) { return static_cast<float>(x); }
__aicore__ inline float ScalarToFloat(bfloat16_t x) { return AscendC::ToFloat(x); }

// Flags between the cube core and its two vector cores (mode 2).
enum CrossFlag : uint16_t { kScoreReady = 1, kProbReady = 2, kOutReady = 3, kGuardReady = 4 };

}  // namespace msf
