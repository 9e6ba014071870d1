// Which core does what, and in which order: shared by the kernels, the host tiling and its tests.
#pragma once
#include "ascendc/tiling_data.h"
#include "common/band.h"

namespace msf {

// Positions are dealt out forth and back: with costs in falling order this keeps the cores' sums close.
MSF_ALWAYS_INLINE inline int64_t dealt(int64_t turn, int64_t core, int64_t cores) {
  return turn * cores + (turn & 1 ? cores - 1 - core : core);
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
// same.
template <class Items>
class Stream {
 public:
  MSF_ALWAYS_INLINE Stream(const ForwardTiling& t, Items items, int64_t core) : t_(t), items_(items), core_(core) {}

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
  int64_t core_, turn_ = 0;
  bool fresh_ = true;
  Stack now_{};
};

}  // namespace msf
