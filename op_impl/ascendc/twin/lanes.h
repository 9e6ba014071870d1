// Which lanes a vector instruction touches. In normal mode a repeat is 8 blocks of 32 bytes and a mask says which of
// its lanes take part; in counter mode a number says how many elements, over all repeats. Operands step by block
// strides within a repeat and by repeat strides between repeats.
#pragma once
#include <algorithm>
#include <array>
#include <vector>

#include "cost.h"
#include "params.h"
#include "tensor.h"
#include "types.h"

namespace ms_twin {

// The mask argument of an instruction.
struct Mask {
  enum Kind { kLanes, kBits, kCount, kRegister } kind;
  uint64_t bits[2];
  static Mask Lanes(uint64_t n) { return {kLanes, {n, 0}}; }
  static Mask Bits(const uint64_t* mask) { return {kBits, {mask[0], mask[1]}}; }
  static Mask Count(uint64_t n) { return {kCount, {n, 0}}; }  // the form that takes a number of elements
  static Mask Register() { return {kRegister, {0, 0}}; }      // isSetMask = false: what SetVectorMask left
};

// Repeats with one set of lanes.
struct LanePart {
  int64_t first = 0, repeats = 0;                 // repeat numbers
  std::vector<std::pair<int64_t, int64_t>> runs;  // [begin, end) of the lanes that take part
};

struct Shape {
  int64_t lanes = 0;  // per repeat
  std::vector<LanePart> parts;
  int64_t repeats = 0;
  int64_t elements = 0;
};

inline void AddPart(Shape& shape, int64_t first, int64_t repeats, const uint64_t bits[2]) {
  LanePart part;
  part.first = first;
  part.repeats = repeats;
  for (int64_t lane = 0; lane < shape.lanes;) {
    if (!(bits[lane / 64] >> (lane % 64) & 1)) {
      ++lane;
      continue;
    }
    const int64_t begin = lane;
    while (lane < shape.lanes && (bits[lane / 64] >> (lane % 64) & 1)) ++lane;
    part.runs.emplace_back(begin, lane);
    shape.elements += (lane - begin) * repeats;
  }
  if (!part.runs.empty()) shape.parts.push_back(part);
}

inline void LeadingBits(uint64_t n, uint64_t bits[2]) {
  bits[0] = n >= 64 ? ~0ull : (1ull << n) - 1;
  bits[1] = n >= 128 ? ~0ull : n > 64 ? (1ull << (n - 64)) - 1 : 0;
}

inline Shape CountShape(int64_t count, int64_t lanes) {
  Shape shape;
  shape.lanes = lanes;
  shape.repeats = (count + lanes - 1) / lanes;
  uint64_t bits[2];
  LeadingBits(lanes, bits);
  if (count / lanes) AddPart(shape, 0, count / lanes, bits);
  LeadingBits(count % lanes, bits);
  if (count % lanes) AddPart(shape, count / lanes, 1, bits);
  return shape;
}

// Reads the mask argument and the mask registers as the hardware would, and leaves the registers as it would.
inline Shape MakeShape(Instruction& in, const Mask& mask, int64_t repeat, int64_t widest_bytes) {
  Core& core = Current();
  MaskState& state = core.mask;
  const int64_t lanes = kRepeat / std::max<int64_t>(widest_bytes, 2);
  if (mask.kind == Mask::kCount) {
    state = MaskState();
    in.Require(static_cast<int64_t>(mask.bits[0]) >= 0, Fault::parameter, "count is negative");
    return CountShape(static_cast<int64_t>(mask.bits[0]), lanes);
  }
  if (mask.kind == Mask::kBits) {
    state.bits[0] = mask.bits[0];
    state.bits[1] = mask.bits[1];
  } else if (mask.kind == Mask::kLanes) {
    if (state.counter) {
      state.bits[0] = mask.bits[0];
      state.bits[1] = 0;
    } else {
      in.Require(mask.bits[0] <= static_cast<uint64_t>(lanes), Fault::mask, "mask = %llu is more than the %lld lanes",
                 static_cast<unsigned long long>(mask.bits[0]), static_cast<long long>(lanes));
      LeadingBits(mask.bits[0], state.bits);
    }
  }
  if (state.counter) return CountShape(static_cast<int64_t>(state.bits[0]), lanes);
  in.Field("repeatTime", repeat, 0, 255);
  if (lanes == 64 && mask.kind == Mask::kBits)
    in.Require(state.bits[1] == 0, Fault::mask, "mask[1] must be 0 for 32-bit types");
  Shape shape;
  shape.lanes = lanes;
  shape.repeats = repeat;
  AddPart(shape, 0, repeat, state.bits);
  return shape;
}

struct Operand {
  Region base;                              // of the whole tensor from its start; memory, offset and extent
  int64_t size = 0, block = 1, repeat = 8;  // element bytes, strides in blocks
  // Of lane `lane` in repeat `r`, relative to base.offset.
  int64_t Offset(int64_t r, int64_t lane) const {
    const int64_t byte = lane * size;
    return (r * repeat + byte / kBlock * block) * kBlock + byte % kBlock;
  }
};

template <class T>
Operand MakeOperand(const AscendC::LocalTensor<T>& tensor, int64_t block, int64_t repeat) {
  return {tensor.Bytes(0), static_cast<int64_t>(sizeof(T)), block, repeat};
}

// Checks common to all operands and the regions they touch.
inline void AddOperand(Instruction& in, const char* name, const Operand& operand, const Shape& shape, bool write) {
  in.Require(!operand.base.memory || operand.base.memory->hardware == AscendC::Hardware::UB, Fault::parameter,
             "%s is in %s, not in UB", name,
             HardwareName(operand.base.memory ? operand.base.memory->hardware : AscendC::Hardware::MAX));
  in.Align(name, operand.base, kBlock);
  const int64_t block_lanes = kBlock / operand.size;
  const int64_t used_blocks = shape.lanes * operand.size / kBlock;
  const auto add = [&](const Region& region) { write ? in.Write(region) : in.Read(region); };
  for (const LanePart& part : shape.parts)
    for (const auto& [begin, end] : part.runs) {
      Region region = operand.base;
      const int64_t repeat_step = operand.repeat * kBlock;
      region.offset += operand.Offset(part.first, 0);
      if (operand.block == 1 || used_blocks <= 1) {
        region.offset += begin * operand.size;
        add(region.Run((end - begin) * operand.size).Dim(part.repeats, repeat_step));
        continue;
      }
      // Whole blocks in one pattern, then the pieces at both ends.
      const auto piece = [&](int64_t from, int64_t to) {
        if (from >= to) return;
        Region part_region = region;
        part_region.offset += operand.Offset(0, from);
        add(part_region.Run((to - from) * operand.size).Dim(part.repeats, repeat_step));
      };
      const int64_t first_whole = (begin + block_lanes - 1) / block_lanes, last_whole = end / block_lanes;
      if (first_whole >= last_whole) {
        for (int64_t lane = begin; lane < end;) {
          const int64_t next = std::min(end, (lane / block_lanes + 1) * block_lanes);
          piece(lane, next);
          lane = next;
        }
        continue;
      }
      piece(begin, first_whole * block_lanes);
      Region whole = region;
      whole.offset += operand.Offset(0, first_whole * block_lanes);
      add(whole.Run(kBlock).Dim(part.repeats, repeat_step).Dim(last_whole - first_whole, operand.block * kBlock));
      piece(last_whole * block_lanes, end);
    }
}

// Calls f(n, offsets) for stretches of n lanes that lie next to each other in every operand; offsets are in bytes,
// relative to each operand's start.
template <size_t N, class F>
void ForEachSpan(const Shape& shape, const std::array<Operand, N>& operands, F&& f) {
  bool packed = true, unit = true;
  int64_t block_lanes = shape.lanes;
  for (const Operand& o : operands) {
    unit = unit && o.block == 1;
    packed = packed && o.block == 1 && o.repeat * int64_t(kBlock) == shape.lanes * o.size;
    block_lanes = std::min<int64_t>(block_lanes, kBlock / o.size);
  }
  std::array<int64_t, N> at;
  const auto emit = [&](int64_t repeat, int64_t begin, int64_t n) {
    for (size_t i = 0; i < N; ++i) at[i] = operands[i].Offset(repeat, begin);
    f(n, at);
  };
  for (const LanePart& part : shape.parts) {
    const bool all = part.runs.size() == 1 && part.runs[0].first == 0 && part.runs[0].second == shape.lanes;
    if (packed && all) {
      emit(part.first, 0, part.repeats * shape.lanes);
      continue;
    }
    for (int64_t r = part.first; r < part.first + part.repeats; ++r)
      for (const auto& [begin, end] : part.runs) {
        if (unit) {
          emit(r, begin, end - begin);
          continue;
        }
        for (int64_t lane = begin; lane < end;) {
          const int64_t next = std::min(end, (lane / block_lanes + 1) * block_lanes);
          emit(r, lane, next - lane);
          lane = next;
        }
      }
  }
}

inline uint8_t* DataOf(const Operand& o, int64_t at) { return o.base.memory->data + o.base.offset + at; }
inline uint8_t* FlagsOf(const Operand& o, int64_t at) { return o.base.memory->undefined + o.base.offset + at; }

// The result of a lane is undefined where a byte of one of its operands is. operands[0] is the result.
template <size_t N>
void TaintLanes(const Shape& shape, const std::array<Operand, N>& operands) {
  ForEachSpan(shape, operands, [&](int64_t n, const std::array<int64_t, N>& at) {
    for (int64_t x = 0; x < n; ++x) {
      uint8_t any = 0;
      for (size_t i = 1; i < N; ++i) {
        const uint8_t* flags = FlagsOf(operands[i], at[i]) + x * operands[i].size;
        for (int64_t b = 0; b < operands[i].size; ++b) any |= flags[b];
      }
      std::memset(FlagsOf(operands[0], at[0]) + x * operands[0].size, any, operands[0].size);
    }
  });
}

inline double Repeats(const Shape& shape) { return static_cast<double>(shape.repeats); }

inline bool SamePlace(const Operand& a, const Operand& b) {
  return a.base.memory == b.base.memory && a.base.offset == b.base.offset && a.size == b.size && a.block == b.block;
}

// An instruction that works lane by lane: result = f(operands...). `accumulates`: the documented exception by which Add
// and its like may take the last repeat's result as the second source of the next one (a repeat stride of 0).
template <class D, class... S, class F>
void IssueLanes(Instruction& in, const VectorRate& rate, const Shape& shape,
                std::array<Operand, 1 + sizeof...(S)> operands, F&& f, bool accumulates = false) {
  static const char* const names[] = {"dst", "src0", "src1", "src2"};
  constexpr size_t kOperands = 1 + sizeof...(S);
  Operand& dst = operands[0];
  for (size_t i = 1; i < kOperands; ++i) {
    Operand& src = operands[i];
    if (!SamePlace(src, dst)) continue;
    src.base.in_place = src.repeat == dst.repeat;
    if (accumulates && i == 2 && (src.repeat == 0 || dst.repeat == 0)) src.base.in_place = dst.base.in_place = true;
  }
  for (size_t i = 1; i < kOperands; ++i) AddOperand(in, kOperands == 2 ? "src" : names[i], operands[i], shape, false);
  in.Require(dst.block != 0, Fault::parameter, "dstBlkStride is 0");
  AddOperand(in, "dst", dst, shape, true);
  in.Issue(
      VectorCost(rate, Repeats(shape)),
      [&] {
        ForEachSpan(shape, operands,
                    [&](int64_t n, const std::array<int64_t, kOperands>& at) { f(n, DataOf(operands[0], at[0]), at); });
      },
      [&] { TaintLanes(shape, operands); });
}

}  // namespace ms_twin

namespace AscendC {

constexpr uint64_t MASK_PLACEHOLDER = 0;
constexpr uint64_t MASK_PLACEHOLDER_LIST[2] = {0, 0};

inline void SetMaskCount() { ms_twin::Current().mask.counter = true; }
inline void SetMaskNorm() { ms_twin::Current().mask.counter = false; }
inline void ResetMask() {
  auto& mask = ms_twin::Current().mask;
  mask.bits[0] = mask.bits[1] = ~0ull;
}
template <class T, MaskMode mode = MaskMode::NORMAL>
void SetVectorMask(uint64_t high, uint64_t low) {
  auto& mask = ms_twin::Current().mask;
  mask.bits[0] = low;
  mask.bits[1] = high;
}
template <class T, MaskMode mode = MaskMode::NORMAL>
void SetVectorMask(int32_t n) {
  auto& mask = ms_twin::Current().mask;
  if (mode == MaskMode::COUNTER) {
    mask.bits[0] = static_cast<uint64_t>(n);
    mask.bits[1] = 0;
  } else {
    ms_twin::LeadingBits(static_cast<uint64_t>(n), mask.bits);
  }
}

}  // namespace AscendC
