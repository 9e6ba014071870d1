// Reductions within a repeat, a block or a pair; ReduceMax, ReduceMin, ReduceSum over a tensor.
#pragma once
#include "vector.h"

namespace AscendC {
enum class ReduceType : uint8_t { SUM, MAX, MIN };
}

namespace ms_twin {

using AscendC::ReduceOrder;
using AscendC::ReduceType;

// Sums as the hardware does: neighbours first, then their sums, and so on; a lane that the mask leaves out counts as 0.
template <class T>
T TreeSum(const T* values, int64_t n) {
  T level[128];
  std::copy(values, values + n, level);
  for (; n > 1; n = (n + 1) / 2)
    for (int64_t i = 0; i < n; i += 2) level[i / 2] = i + 1 < n ? AddOp::Do(level[i], level[i + 1]) : level[i];
  return level[0];
}

// The lanes of one repeat: their values, whether they take part, whether they are undefined.
template <class T>
struct RepeatLanes {
  T value[128];
  bool in[128];
  bool undefined[128];
};

template <class T, class F>
void ForEachRepeat(const Shape& shape, const Operand& operand, bool flags, F&& f) {
  RepeatLanes<T> lanes;
  for (const LanePart& part : shape.parts)
    for (int64_t r = part.first; r < part.first + part.repeats; ++r) {
      std::fill(lanes.in, lanes.in + shape.lanes, false);
      std::fill(lanes.undefined, lanes.undefined + shape.lanes, false);
      for (const auto& [begin, end] : part.runs)
        for (int64_t l = begin; l < end; ++l) {
          const int64_t at = operand.Offset(r, l);
          std::memcpy(&lanes.value[l], DataOf(operand, at), sizeof(T));
          lanes.in[l] = true;
          if (flags)
            for (size_t b = 0; b < sizeof(T); ++b) lanes.undefined[l] |= FlagsOf(operand, at)[b] != 0;
        }
      f(r, lanes);
    }
}

// Reduces lanes [begin, end) of a repeat; index is the lane of the first extreme value.
template <class T>
T Reduced(ReduceType type, const RepeatLanes<T>& lanes, int64_t begin, int64_t end, int64_t* index, bool* undefined) {
  T sum[128], best = T(0);
  bool any = false;
  *undefined = false;
  *index = 0;
  for (int64_t l = begin; l < end; ++l) {
    sum[l - begin] = lanes.in[l] ? lanes.value[l] : T(0);
    if (!lanes.in[l]) continue;
    *undefined = *undefined || lanes.undefined[l];
    const T x = lanes.value[l];
    const bool better = type == ReduceType::MAX ? float(x) > float(best) : float(x) < float(best);
    const bool nan = float(x) != float(x) && float(best) == float(best);
    if (!any || better || nan) {
      best = x;
      *index = l;
    }
    any = true;
  }
  return type == ReduceType::SUM ? TreeSum(sum, end - begin) : best;
}

template <class T>
struct Reduction {
  const char* name;
  ReduceType type;
  const VectorRate* rate;
  AscendC::LocalTensor<T> dst, src;
  Mask mask;
  int64_t repeat, dst_step, src_block, src_repeat;
  Site site;
};

// One result for every `slot_lanes` lanes of a repeat, `result_bytes` apart; a slot none of whose lanes takes part
// keeps its old value. result_of(lanes, slot, data) fills in the bytes and tells whether they are undefined.
template <class T, class F>
void Reduce(const Reduction<T>& r, int64_t dst_align, int64_t dst_unit, int64_t slot_lanes, int64_t result_bytes,
            F&& result_of) {
  static_assert(kFloats<T>, "reductions take half and float");
  Instruction in(r.name, PIPE_V, r.site);
  in.Field("dstRepStride", r.dst_step, 0, 65535);
  in.Field("srcBlkStride", r.src_block, 0, 65535);
  in.Field("srcRepStride", r.src_repeat, 0, 65535);
  const Shape shape = MakeShape(in, r.mask, r.repeat, sizeof(T));
  if (!in.ok()) return;
  const Operand source = MakeOperand(r.src, r.src_block, r.src_repeat);
  AddOperand(in, "src", source, shape, false);
  in.Require(!r.dst.Bytes(0).memory || r.dst.GetHardware() == AscendC::Hardware::UB, Fault::parameter,
             "dst is not in UB");
  in.Align("dst", r.dst.Bytes(1), dst_align);
  const int64_t step = r.dst_step * dst_unit;
  std::vector<std::vector<int64_t>> slots;  // with a result, per part
  for (const LanePart& part : shape.parts) {
    slots.emplace_back();
    for (const auto& [begin, end] : part.runs)
      for (int64_t s = begin / slot_lanes; s <= (end - 1) / slot_lanes; ++s)
        if (slots.back().empty() || slots.back().back() != s) slots.back().push_back(s);
    const std::vector<int64_t>& all = slots.back();
    for (size_t first = 0, i = 1; i <= all.size(); ++i) {
      if (i < all.size() && all[i] == all[i - 1] + 1) continue;
      Region target = r.dst.Bytes(static_cast<int64_t>(i - first) * result_bytes);
      in.Write(target.At(part.first * step + all[first] * result_bytes).Dim(part.repeats, step));
      first = i;
    }
  }
  const auto run = [&](bool flags) {
    size_t number = 0;
    ForEachRepeat<T>(shape, source, flags, [&](int64_t repeat, const RepeatLanes<T>& lanes) {
      while (repeat >= shape.parts[number].first + shape.parts[number].repeats) ++number;
      for (int64_t slot : slots[number]) {
        uint8_t data[8] = {};
        const bool undefined = result_of(lanes, slot, data);
        const int64_t at = repeat * step + slot * result_bytes;
        std::memcpy(r.dst.Data() + at, data, static_cast<size_t>(result_bytes));
        if (flags) std::memset(r.dst.Undefined() + at, undefined, static_cast<size_t>(result_bytes));
      }
    });
  };
  bool tainted = false;
  in.Issue(VectorCost(*r.rate, Repeats(shape)), [&] { run(tainted); }, [&] { tainted = true; });
}

template <class T>
void WholeReduce(const Reduction<T>& r, ReduceOrder order) {
  const bool both =
      r.type != ReduceType::SUM && (order == ReduceOrder::ORDER_VALUE_INDEX || order == ReduceOrder::ORDER_INDEX_VALUE);
  const bool only_index = r.type != ReduceType::SUM && order == ReduceOrder::ORDER_ONLY_INDEX;
  const int64_t bytes = both ? 2 * sizeof(T) : only_index ? 4 : sizeof(T);
  constexpr int64_t lanes_per_repeat = kRepeat / int64_t(sizeof(T));
  Reduce(r, bytes, bytes, lanes_per_repeat, bytes, [&](const RepeatLanes<T>& lanes, int64_t, uint8_t* data) {
    int64_t index;
    bool undefined;
    const T value = Reduced(r.type, lanes, 0, lanes_per_repeat, &index, &undefined);
    const uint32_t place = static_cast<uint32_t>(index);
    const int64_t value_at = order == ReduceOrder::ORDER_INDEX_VALUE && both ? sizeof(T) : 0;
    const int64_t index_at = both && order == ReduceOrder::ORDER_VALUE_INDEX ? sizeof(T) : 0;
    if (!only_index) std::memcpy(data + value_at, &value, sizeof(T));
    if (both || only_index) std::memcpy(data + index_at, &place, only_index ? 4 : sizeof(T));
    return undefined;
  });
}

template <class T>
void SlotReduce(const Reduction<T>& r, int64_t slot_lanes, int64_t dst_align) {
  constexpr int64_t size = sizeof(T);
  const int64_t results = kRepeat / size / slot_lanes;
  Reduce(r, dst_align, results * size, slot_lanes, size, [&](const RepeatLanes<T>& lanes, int64_t slot, uint8_t* data) {
    int64_t index;
    bool undefined;
    const T value = Reduced(r.type, lanes, slot * slot_lanes, (slot + 1) * slot_lanes, &index, &undefined);
    std::memcpy(data, &value, size);
    return undefined;
  });
}
template <class T>
void BlockReduce(const Reduction<T>& r) {
  SlotReduce(r, kBlock / int64_t(sizeof(T)), 8 * int64_t(sizeof(T)));
}
template <class T>
void PairReduce(const Reduction<T>& r) {
  SlotReduce(r, 2, kBlock);
}

}  // namespace ms_twin

namespace AscendC {

// Each reduction in its two forms: leading lanes or a bit pattern.
#define MS_TWIN_REDUCE(Name, Type, Rate, Kind, Order, OrderArgument)                                                  \
  template <class T, bool isSetMask = true>                                                                           \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t mask, const int32_t repeat,           \
            const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride Order,                 \
            ms_twin::Site site = ms_twin::Site::Here()) {                                                             \
    ms_twin::Kind<T>({#Name, ReduceType::Type, &ms_twin::Rate, dst, src,                                              \
                      ms_twin::Choose(isSetMask, ms_twin::Mask::Lanes(static_cast<uint64_t>(int64_t(mask)))), repeat, \
                      dstRepStride, srcBlkStride, srcRepStride, site} OrderArgument);                                 \
  }                                                                                                                   \
  template <class T, bool isSetMask = true>                                                                           \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[], const int32_t repeat,        \
            const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride Order,                 \
            ms_twin::Site site = ms_twin::Site::Here()) {                                                             \
    ms_twin::Kind<T>({#Name, ReduceType::Type, &ms_twin::Rate, dst, src,                                              \
                      ms_twin::Choose(isSetMask, ms_twin::Mask::Bits(mask)), repeat, dstRepStride, srcBlkStride,      \
                      srcRepStride, site} OrderArgument);                                                             \
  }
#define MS_TWIN_NOTHING
#define MS_TWIN_ORDER , ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX
#define MS_TWIN_ORDER_ARGUMENT , order
#define MS_TWIN_VALUE , ReduceOrder::ORDER_ONLY_VALUE
MS_TWIN_REDUCE(WholeReduceMax, MAX, kRateWholeReduce, WholeReduce, MS_TWIN_ORDER, MS_TWIN_ORDER_ARGUMENT)
MS_TWIN_REDUCE(WholeReduceMin, MIN, kRateWholeReduce, WholeReduce, MS_TWIN_ORDER, MS_TWIN_ORDER_ARGUMENT)
MS_TWIN_REDUCE(WholeReduceSum, SUM, kRateWholeReduce, WholeReduce, MS_TWIN_NOTHING, MS_TWIN_VALUE)
#undef MS_TWIN_REDUCE
#undef MS_TWIN_NOTHING
#undef MS_TWIN_ORDER
#undef MS_TWIN_ORDER_ARGUMENT
#undef MS_TWIN_VALUE

// The block and pair reductions take the number of repeats before the mask.
#define MS_TWIN_BLOCK_REDUCE(Name, Type, Rate, Kind)                                                                  \
  template <class T, bool isSetMask = true>                                                                           \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeat, const int32_t mask,           \
            const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,                       \
            ms_twin::Site site = ms_twin::Site::Here()) {                                                             \
    ms_twin::Kind<T>({#Name, ReduceType::Type, &ms_twin::Rate, dst, src,                                              \
                      ms_twin::Choose(isSetMask, ms_twin::Mask::Lanes(static_cast<uint64_t>(int64_t(mask)))), repeat, \
                      dstRepStride, srcBlkStride, srcRepStride, site});                                               \
  }                                                                                                                   \
  template <class T, bool isSetMask = true>                                                                           \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t repeat, const uint64_t mask[],        \
            const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,                       \
            ms_twin::Site site = ms_twin::Site::Here()) {                                                             \
    ms_twin::Kind<T>({#Name, ReduceType::Type, &ms_twin::Rate, dst, src,                                              \
                      ms_twin::Choose(isSetMask, ms_twin::Mask::Bits(mask)), repeat, dstRepStride, srcBlkStride,      \
                      srcRepStride, site});                                                                           \
  }
MS_TWIN_BLOCK_REDUCE(BlockReduceMax, MAX, kRateBlockReduce, BlockReduce)
MS_TWIN_BLOCK_REDUCE(BlockReduceMin, MIN, kRateBlockReduce, BlockReduce)
MS_TWIN_BLOCK_REDUCE(BlockReduceSum, SUM, kRateBlockReduce, BlockReduce)
MS_TWIN_BLOCK_REDUCE(PairReduceSum, SUM, kRateWholeReduce, PairReduce)
#undef MS_TWIN_BLOCK_REDUCE

// The newer names, with the kind of reduction as a template argument.
template <ReduceType type, class T, class U, bool isSetMask = true, class M>
void ReduceRepeat(const LocalTensor<T>& dst, const LocalTensor<U>& src, const M mask, const int32_t repeat,
                  const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                  ReduceOrder order = ReduceOrder::ORDER_VALUE_INDEX, ms_twin::Site site = ms_twin::Site::Here()) {
  if constexpr (type == ReduceType::MAX)
    WholeReduceMax<T, isSetMask>(dst, src, mask, repeat, dstRepStride, srcBlkStride, srcRepStride, order, site);
  else if constexpr (type == ReduceType::MIN)
    WholeReduceMin<T, isSetMask>(dst, src, mask, repeat, dstRepStride, srcBlkStride, srcRepStride, order, site);
  else
    WholeReduceSum<T, isSetMask>(dst, src, mask, repeat, dstRepStride, srcBlkStride, srcRepStride, site);
}
template <ReduceType type, class T, class U, bool isSetMask = true, class M>
void ReduceDataBlock(const LocalTensor<T>& dst, const LocalTensor<U>& src, const M mask, const int32_t repeat,
                     const int32_t dstRepStride, const int32_t srcBlkStride, const int32_t srcRepStride,
                     ms_twin::Site site = ms_twin::Site::Here()) {
  if constexpr (type == ReduceType::MAX)
    BlockReduceMax<T, isSetMask>(dst, src, repeat, mask, dstRepStride, srcBlkStride, srcRepStride, site);
  else if constexpr (type == ReduceType::MIN)
    BlockReduceMin<T, isSetMask>(dst, src, repeat, mask, dstRepStride, srcBlkStride, srcRepStride, site);
  else
    BlockReduceSum<T, isSetMask>(dst, src, repeat, mask, dstRepStride, srcBlkStride, srcRepStride, site);
}

}  // namespace AscendC
