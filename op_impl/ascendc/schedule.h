// Which core does what, and in which order: shared by the kernels, the host tiling and its tests.
#pragma once
#include "ascendc/tiling_data.h"
#include "common/band.h"

namespace msf {

// Positions are dealt out forth and back: with costs in falling order this keeps the cores' sums close.
MSF_ALWAYS_INLINE inline int64_t dealt(int64_t turn, int64_t core, int64_t cores) {
  return turn * cores + (turn & 1 ? cores - 1 - core : core);
}

// Keys [begin, end) of a sequence.
struct KeyRange {
  int64_t begin, end;
  MSF_ALWAYS_INLINE int64_t blocks(int64_t block) const { return (end - begin + block - 1) / block; }
};

// The one query of a sequence over a cache is given the keys that it sees, and no others.
MSF_ALWAYS_INLINE inline bool sees_all_it_loads(const AttentionTiling& a) { return a.cached && a.q_len == 1; }

// What rows [row0, row0 + rows) see of a sequence of that length, from a multiple of 16 on.
MSF_ALWAYS_INLINE inline KeyRange keys_of_rows(const AttentionTiling& a, int64_t q_len, int64_t k_len, int64_t row0,
                                               int64_t rows) {
  const Band band(q_len, k_len, a.left, a.right, a.bottom_right != 0);
  const int64_t begin = band.begin(row0), end = band.end(row0 + rows - 1);
  if (end <= begin) return {0, 0};
  return {sees_all_it_loads(a) ? begin : begin / 16 * 16, end};
}

// One of `parts` parts of keys, of whole blocks.
MSF_ALWAYS_INLINE inline KeyRange part_of(const KeyRange& keys, int64_t block, int64_t part, int64_t parts) {
  const int64_t blocks = keys.blocks(block), end = keys.begin + blocks * (part + 1) / parts * block;
  return {keys.begin + blocks * part / parts * block, end < keys.end ? end : keys.end};
}

// The keys of an item of a sequence of that length. Short sequences have parts without keys.
MSF_ALWAYS_INLINE inline KeyRange keys_of(const ForwardTiling& t, const WorkItem& w, int64_t q_len, int64_t k_len) {
  if (!t.a.cached) return {w.key0, w.key1};
  return part_of(keys_of_rows(t.a, q_len, k_len, w.row0, w.rows), t.block_n, w.key0, w.key1);
}

// One stack of keys of one item and head, the unit that travels through the pipeline.
struct Stack {
  WorkItem item;
  int64_t head;  // first of the tile's `pack` heads
  int64_t slot;  // of the partial result, -1: none
  int32_t key0, keys;
  bool first, last;
};

// All stacks of one core, in order. An item without keys is one stack of 0 keys: its output has to be written all the
// same. `sequences(b)` gives the lengths of a sequence, as anything with q_len and k_len.
template <class Items, class Sequences>
class Stream {
 public:
  MSF_ALWAYS_INLINE Stream(const ForwardTiling& t, Items items, const Sequences& sequences, int64_t core)
      : t_(t), items_(items), sequences_(sequences), core_(core) {}

  MSF_ALWAYS_INLINE bool next(Stack* s) {
    if (fresh_) {
      const int64_t at = dealt(turn_, core_, t_.cores);
      if (at >= t_.items * t_.heads_per_item) return false;
      const int64_t index = at / t_.heads_per_item, group = at % t_.heads_per_item;
      now_.item.batch = items_[index].batch;
      now_.item.row0 = items_[index].row0;
      now_.item.rows = items_[index].rows;
      now_.item.key0 = items_[index].key0;
      now_.item.key1 = items_[index].key1;
      now_.item.slot = items_[index].slot;
      if (t_.a.cached) {
        const auto sequence = sequences_(now_.item.batch);
        const KeyRange keys = keys_of(t_, now_.item, sequence.q_len, sequence.k_len);
        now_.item.key0 = int32_t(keys.begin);
        now_.item.key1 = int32_t(keys.end);
      }
      now_.head = group * t_.pack;
      now_.slot = now_.item.slot < 0 ? -1 : now_.item.slot * t_.heads_per_item + group;
      ++turn_;
      now_.key0 = now_.item.key0;
      now_.first = true;
    } else {
      now_.key0 += t_.stack_n;
      now_.first = false;
    }
    const int32_t left = now_.item.key1 > now_.key0 ? now_.item.key1 - now_.key0 : 0;
    now_.keys = left < t_.stack_n ? left : t_.stack_n;
    now_.last = left <= t_.stack_n;
    fresh_ = now_.last;
    *s = now_;
    return true;
  }

 private:
  const ForwardTiling& t_;
  Items items_;
  const Sequences& sequences_;
  int64_t core_, turn_ = 0;
  bool fresh_ = true;
  Stack now_{};
};

// Queries [row0, row0 + rows) of one head against keys [key0, key0 + keys): the unit of the backward's pipeline.
struct Pair {
  int32_t batch, kv_head, part;
  int64_t head;
  int32_t row0, rows, key0, keys;
};

// The next query block of a head, from `*row` on, with those of the keys [key, key_end) that it can see at all, from a
// multiple of 16 on; false if it sees none.
MSF_ALWAYS_INLINE inline bool next_block(const Band& band, int64_t block_q, int64_t row_end, int64_t key,
                                         int64_t key_end, int64_t* row, Pair* out) {
  out->row0 = int32_t(*row);
  out->rows = int32_t(row_end - *row < block_q ? row_end - *row : block_q);
  *row += out->rows;
  const BlockRange r = block_range(band, out->row0, int64_t(out->row0) + out->rows, key, key_end);
  if (r.empty()) return false;
  out->key0 = int32_t(r.lo / 16 * 16);
  if (out->key0 < key) out->key0 = int32_t(key);
  out->keys = int32_t(r.hi) - out->key0;
  return true;
}

// All pairs of one core, in order: key blocks of an item, heads of the group, query blocks.
template <class Items, class Sequences>
class PairStream {
 public:
  MSF_ALWAYS_INLINE PairStream(const BackwardTiling& t, Items items, const Sequences& sequences, int64_t core)
      : t_(t), items_(items), sequences_(sequences), core_(core) {}

  MSF_ALWAYS_INLINE bool next(Pair* out) {
    for (;;) {
      while (row_ >= row_end_) {
        if (!next_rows()) return false;
      }
      out->batch = item_.batch;
      out->kv_head = item_.kv_head;
      out->part = item_.part;
      out->head = int64_t(item_.kv_head) * t_.a.group + head_;
      if (next_block(band(), t_.block_q, row_end_, key_, key_end_, &row_, out)) return true;
    }
  }

 private:
  MSF_ALWAYS_INLINE Band band() const { return Band(q_len_, k_len_, t_.a.left, t_.a.right, t_.a.bottom_right != 0); }
  // The queries of the next head, or of the next key block, or of the next item.
  MSF_ALWAYS_INLINE bool next_rows() {
    ++head_;
    if (head_ >= t_.a.group) {
      head_ = 0;
      key_ = key_end_;
      if (key_ >= item_.key1) {
        const int64_t at = dealt(turn_++, core_, t_.cores);
        if (at >= t_.items) return false;
        item_.batch = items_[at].batch;
        item_.kv_head = items_[at].kv_head;
        item_.key0 = items_[at].key0;
        item_.key1 = items_[at].key1;
        item_.part = items_[at].part;
        const auto sequence = sequences_(item_.batch);
        q_len_ = sequence.q_len;
        k_len_ = sequence.k_len;
        key_ = item_.key0;
      }
      key_end_ = key_ + t_.block_k < item_.key1 ? key_ + t_.block_k : item_.key1;
    }
    const Band b = band();
    row_ = Band::clamp(b.first_query(key_), 0, q_len_);
    row_end_ = Band::clamp(b.last_query(key_end_ - 1) + 1, 0, q_len_);
    return true;
  }

  const BackwardTiling& t_;
  Items items_;
  const Sequences& sequences_;
  int64_t core_, turn_ = 0;
  BackwardItem item_{0, 0, 0, 0, 0};
  int64_t q_len_ = 0, k_len_ = 0, key_ = 0, key_end_ = 0, row_ = 0, row_end_ = 0, head_ = int64_t(1) << 40;
};

// The same for the gradient of the bias: batches of an item, heads, key blocks, query blocks. All that falls on one
// number of the bias falls on one core, in this order.
template <class Items, class Sequences>
class BiasStream {
 public:
  MSF_ALWAYS_INLINE BiasStream(const BackwardTiling& t, Items items, const Sequences&, int64_t core)
      : t_(t), items_(items), core_(core) {}

  MSF_ALWAYS_INLINE bool next(Pair* out) {
    for (;;) {
      while (row_ >= row_end_) {
        if (!next_rows()) return false;
      }
      out->batch = int32_t(batch_);
      out->head = head_;
      out->kv_head = int32_t(head_ / t_.a.group);
      out->part = 0;
      if (next_block(band(), t_.block_q, row_end_, key_, key_end_, &row_, out)) return true;
    }
  }

 private:
  MSF_ALWAYS_INLINE Band band() const {
    return Band(t_.a.q_len, t_.a.k_len, t_.a.left, t_.a.right, t_.a.bottom_right != 0);
  }
  // The queries of the next key block, or of the next head, batch or item.
  MSF_ALWAYS_INLINE bool next_rows() {
    key_ = key_end_;
    if (key_ >= item_.key1) {
      if (++head_ >= item_.head1) {
        if (++batch_ >= item_.batch1) {
          const int64_t at = dealt(turn_++, core_, t_.cores);
          if (at >= t_.items) return false;
          item_.batch0 = items_[at].batch0;
          item_.batch1 = items_[at].batch1;
          item_.head0 = items_[at].head0;
          item_.head1 = items_[at].head1;
          item_.row0 = items_[at].row0;
          item_.row1 = items_[at].row1;
          item_.key0 = items_[at].key0;
          item_.key1 = items_[at].key1;
          batch_ = item_.batch0;
        }
        head_ = item_.head0;
      }
      key_ = item_.key0;
    }
    key_end_ = key_ + t_.block_k < item_.key1 ? key_ + t_.block_k : item_.key1;
    const Band b = band();
    row_ = Band::clamp(b.first_query(key_), item_.row0, item_.row1);
    row_end_ = Band::clamp(b.last_query(key_end_ - 1) + 1, item_.row0, item_.row1);
    return true;
  }

  const BackwardTiling& t_;
  Items items_;
  int64_t core_, turn_ = 0;
  BiasItem item_{0, 0, 0, 0, 0, 0, 0, 0};
  int64_t batch_ = 0, head_ = 0, key_ = 0, key_end_ = 0, row_ = 0, row_end_ = 0;
};

}  // namespace msf
