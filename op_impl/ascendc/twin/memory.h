// Memories and regions: the bytes of UB, L1, L0 and GM, who touched each granule last, and which bytes nobody wrote.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "names.h"

namespace ms_twin {

// Freed with free(), zero pages come from the system for nothing: GM shadows are large and mostly never touched.
struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Zeroed = std::unique_ptr<T[], FreeDeleter>;
template <class T>
Zeroed<T> MakeZeroed(size_t n) {
  void* p = std::calloc(n ? n : 1, sizeof(T));
  if (!p) throw std::bad_alloc();
  return Zeroed<T>(static_cast<T*>(p));
}

// Last writers and readers of one granule: a stamp, a set of stamps, or 0 for nobody (hazard.h).
struct Cell {
  uint32_t writer = 0, reader = 0;
};

enum class Role : uint8_t { local, input, output, inout, workspace };

struct Memory {
  AscendC::Hardware hardware = AscendC::Hardware::MAX;
  Role role = Role::local;
  std::string name;
  uint8_t* data = nullptr;
  uint64_t bytes = 0;
  uint32_t granule = 1;          // bytes per cell
  uint8_t* undefined = nullptr;  // one byte per byte, 0 = defined; null where everything is (inputs)
  Cell* cells = nullptr;

  Zeroed<uint8_t> own_data, own_undefined;
  Zeroed<Cell> own_cells;

  // poison: 0x7f.. is NaN in half (0x7fff), bfloat16 (0x7fff) and float (0x7fff7fff), and far out of range as an index.
  void AllocateLocal(AscendC::Hardware kind, const char* label, uint64_t size, uint32_t cell_bytes, bool shadow) {
    hardware = kind;
    name = label;
    bytes = size;
    granule = cell_bytes;
    own_data = MakeZeroed<uint8_t>(size);
    data = own_data.get();
    if (!shadow) return;
    Poison();
    own_cells = MakeZeroed<Cell>(size / granule);
    cells = own_cells.get();
    own_undefined = MakeZeroed<uint8_t>(size);
    undefined = own_undefined.get();
    std::memset(undefined, 1, size);
  }
  void AttachGlobal(void* pointer, uint64_t size, const char* label, Role r, bool shadow) {
    hardware = AscendC::Hardware::GM;
    role = r;
    name = label;
    data = static_cast<uint8_t*>(pointer);
    bytes = size;
    granule = 2;
    if (!shadow) return;
    own_cells = MakeZeroed<Cell>(size / granule + 1);
    cells = own_cells.get();
    if (r == Role::input) return;
    own_undefined = MakeZeroed<uint8_t>(size);
    undefined = own_undefined.get();
    if (r == Role::inout) return;
    Poison();
    std::memset(undefined, 1, size);
  }
  void Poison() {
    static const uint8_t pattern[2] = {0xff, 0x7f};
    for (uint64_t i = 0; i + 1 < bytes; i += 2) std::memcpy(data + i, pattern, 2);
    if (bytes % 2) data[bytes - 1] = 0xff;
  }
};

enum class Touch : uint8_t { read, write, accumulate };

// A pattern of bytes: runs of `run` bytes, repeated along up to three dimensions (the last one varies fastest).
struct Region {
  Memory* memory = nullptr;
  int64_t offset = 0;  // of the first run, in bytes
  int64_t run = 0;
  int64_t count[3] = {1, 1, 1};
  int64_t stride[3] = {0, 0, 0};
  int dims = 0;
  int64_t begin = 0, end = 0;  // the tensor it was taken from: nothing may lie outside
  Touch touch = Touch::read;
  bool trusts_pipe_order = false;  // the hardware orders it against its own pipe (large accumulating Mmad)
  bool in_place = false;           // may lie on what the same instruction writes, or is written more than once

  Region& Run(int64_t bytes) {
    run = bytes;
    return *this;
  }
  Region& At(int64_t bytes) {
    offset += bytes;
    return *this;
  }
  Region& Dim(int64_t n, int64_t byte_stride) {
    count[dims] = n;
    stride[dims] = byte_stride;
    ++dims;
    return *this;
  }
  bool Empty() const { return run == 0 || count[0] == 0 || count[1] == 0 || count[2] == 0; }
  int64_t Bytes() const { return run * count[0] * count[1] * count[2]; }
  int64_t Lowest() const {
    int64_t low = offset;
    for (int d = 0; d < dims; ++d)
      if (stride[d] < 0) low += (count[d] - 1) * stride[d];
    return low;
  }
  int64_t Highest() const {  // one past the last byte
    int64_t high = offset + run;
    for (int d = 0; d < dims; ++d)
      if (stride[d] > 0) high += (count[d] - 1) * stride[d];
    return high;
  }

  // Calls f(offset, bytes) for every run; runs that follow each other are given as one.
  template <class F>
  void ForEachRun(F&& f) const {
    if (Empty()) return;
    int64_t n[3] = {1, 1, 1}, step[3] = {0, 0, 0}, length = run;
    int used = 3;
    for (int d = dims - 1; d >= 0; --d) {
      if (count[d] == 1) continue;
      if (used == 3 && stride[d] == length) {
        length *= count[d];
        continue;
      }
      --used;
      n[used] = count[d];
      step[used] = stride[d];
    }
    for (int64_t i = 0; i < n[0]; ++i)
      for (int64_t j = 0; j < n[1]; ++j)
        for (int64_t k = 0; k < n[2]; ++k) f(offset + i * step[0] + j * step[1] + k * step[2], length);
  }
};

inline bool AnyUndefined(const Region& region) {
  const uint8_t* flags = region.memory->undefined;
  if (!flags) return false;
  bool any = false;
  region.ForEachRun([&](int64_t offset, int64_t bytes) {
    if (any) return;
    const uint8_t* p = flags + offset;
    uint64_t all = 0;
    int64_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
      uint64_t word;
      std::memcpy(&word, p + i, 8);
      all |= word;
    }
    for (; i < bytes; ++i) all |= p[i];
    any = all != 0;
  });
  return any;
}

inline void MarkUndefined(const Region& region, bool undefined) {
  uint8_t* flags = region.memory->undefined;
  if (!flags) return;
  region.ForEachRun([&](int64_t offset, int64_t bytes) { std::memset(flags + offset, undefined, bytes); });
}

// Copies run by run; both regions have the same shape. Definedness moves with the bytes.
inline void MoveBytes(const Region& target, const Region& source, bool track) {
  uint8_t *to = target.memory->data, *to_flags = track ? target.memory->undefined : nullptr;
  const uint8_t *from = source.memory->data, *from_flags = source.memory->undefined;
  const int64_t run = target.run;
  for (int64_t i = 0; i < target.count[0]; ++i)
    for (int64_t j = 0; j < target.count[1]; ++j)
      for (int64_t k = 0; k < target.count[2]; ++k) {
        const int64_t t = target.offset + i * target.stride[0] + j * target.stride[1] + k * target.stride[2];
        const int64_t s = source.offset + i * source.stride[0] + j * source.stride[1] + k * source.stride[2];
        std::memmove(to + t, from + s, run);
        if (!to_flags) continue;
        if (from_flags)
          std::memmove(to_flags + t, from_flags + s, run);
        else
          std::memset(to_flags + t, 0, run);
      }
}

}  // namespace ms_twin
