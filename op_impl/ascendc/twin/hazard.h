// Happens-before. Every pipe of every core counts its instructions (ticks) and knows, for every other pipe, up to which
// tick that pipe's work is complete. Flags and barriers carry this knowledge. An access is in order with an earlier one
// exactly when its pipe knows the earlier tick.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "memory.h"
#include "report.h"

namespace ms_twin {

using Clock = std::vector<uint32_t>;  // [core * 8 + pipe] -> ticks known to be complete

inline void Join(Clock& into, const Clock& from) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// One access by one instruction.
struct Stamp {
  const char* file;
  const char* name;
  int32_t line;
  uint32_t tick;
  uint16_t core;
  uint8_t pipe;
  bool atomic;
};

// Cells name a stamp by its index, or a set of stamps by an index with the top bit set (several unordered readers, or
// several atomic writers). Sets are made once per distinct content of neighbouring cells, not once per cell.
class History {
 public:
  static constexpr uint32_t kSet = 0x80000000u;

  History() : stamps_(1) {}

  uint32_t Add(const Stamp& stamp) {
    stamps_.push_back(stamp);
    return static_cast<uint32_t>(stamps_.size() - 1);
  }
  const Stamp& At(uint32_t id) const { return stamps_[id]; }

  template <class F>
  void ForEach(uint32_t id, F&& f) const {
    if (id == 0) return;
    if (!(id & kSet)) return f(id);
    for (uint32_t member : sets_[id & ~kSet]) f(member);
  }

  // The set of `old` members that `keep` accepts, and `added`.
  template <class Keep>
  uint32_t With(uint32_t old, uint32_t added, Keep&& keep) {
    if (old == 0) return added;
    scratch_.clear();
    ForEach(old, [&](uint32_t id) {
      if (id != added && keep(id)) scratch_.push_back(id);
    });
    if (scratch_.empty()) return added;
    scratch_.push_back(added);
    sets_.push_back(scratch_);
    return static_cast<uint32_t>(sets_.size() - 1) | kSet;
  }

 private:
  std::vector<Stamp> stamps_;
  std::vector<std::vector<uint32_t>> sets_;
  std::vector<uint32_t> scratch_;
};

}  // namespace ms_twin
