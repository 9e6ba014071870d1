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
T Reduced(ReduceType type, const RepeatLanes<T>& lanes, int64_t begin, int64_t end, int64_t* index, bool* undefined,
          bool* any) {
  T sum[128], best = T(0);
  *any = *undefined = false;
  *index = 0;
  for (int64_t l = begin; l < end; ++l) {
    sum[l - begin] = lanes.in[l] ? lanes.value[l] : T(0);
    if (!lanes.in[l]) continue;
    *undefined = *undefined || lanes.undefined[l];
    const T x = lanes.value[l];
    const bool better = type == ReduceType::MAX ? float(x) > float(best) : float(x) < float(best);
    const bool nan = float(x) != float(x) && float(best) == float(best);
    if (!*any || better || nan) {
      best = x;
      *index = l;
    }
    *any = true;
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

// Stores what `results` tells for each repeat: a list of (byte offset in dst, bytes, data, undefined).
struct Store {
  int64_t offset;
  int64_t bytes;
  uint8_t data[8];
  bool undefined;
};

template <class T, class F>
void Reduce(const Reduction<T>& r, int64_t dst_align, int64_t dst_unit, int64_t results, int64_t result_bytes,
            F&& results_of) {
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
  const Region target =
      r.dst.Bytes(results * result_bytes).Dim(shape.parts.empty() ? 0 : shape.repeats, r.dst_step * dst_unit);
  in.Align("dst", target, dst_align);
  in.Write(target);
  const auto run = [&](bool flags) {
    ForEachRepeat<T>(shape, source, flags, [&](int64_t repeat, const RepeatLanes<T>& lanes) {
      results_of(lanes, shape.lanes, [&](int64_t slot, const void* data, int64_t bytes, bool undefined) {
        const int64_t at = target.offset + repeat * r.dst_step * dst_unit + slot * result_bytes;
        std::memcpy(target.memory->data + at, data, static_cast<size_t>(bytes));
        std::memset(target.memory->undefined + at, undefined, static_cast<size_t>(bytes));
      });
    });
  };
  // The results overwrite sources only if they overlap, which is not allowed; values and flags are stored together.
  in.Issue(VectorCost(*r.rate, Repeats(shape)), [] {}, [] {});
  if (in.ok() && Twin().options.effects) run(true);
}

template <class T>
void WholeReduce(const Reduction<T>& r, ReduceOrder order) {
  const bool both =
      r.type != ReduceType::SUM && (order == ReduceOrder::ORDER_VALUE_INDEX || order == ReduceOrder::ORDER_INDEX_VALUE);
  const bool only_index = r.type != ReduceType::SUM && order == ReduceOrder::ORDER_ONLY_INDEX;
  const int64_t bytes = both ? 2 * sizeof(T) : only_index ? 4 : sizeof(T);
  Reduce(r, bytes, bytes, 1, bytes, [&](const RepeatLanes<T>& lanes, int64_t n, auto&& store) {
    int64_t index;
    bool undefined, any;
    const T value = Reduced(r.type, lanes, 0, n, &index, &undefined, &any);
    uint8_t data[8] = {};
    const uint32_t place = static_cast<uint32_t>(index);
    const int64_t value_at = order == ReduceOrder::ORDER_INDEX_VALUE && both ? sizeof(T) : 0;
    const int64_t index_at = both && order == ReduceOrder::ORDER_VALUE_INDEX ? sizeof(T) : 0;
    if (!only_index) std::memcpy(data + value_at, &value, sizeof(T));
    if (both || only_index) std::memcpy(data + index_at, &place, only_index ? 4 : sizeof(T));
    store(0, data, bytes, undefined);
  });
}

template <class T>
void BlockReduce(const Reduction<T>& r) {
  constexpr int64_t size = sizeof(T), lanes_per_block = kBlock / size;
  Reduce(r, 8 * size, 8 * size, 8, size, [&](const RepeatLanes<T>& lanes, int64_t, auto&& store) {
    for (int64_t block = 0; block < 8; ++block) {
      int64_t index;
      bool undefined, any;
      const T value =
          Reduced(r.type, lanes, block * lanes_per_block, (block + 1) * lanes_per_block, &index, &undefined, &any);
      store(block, &value, size, undefined || !any);  // a block without lanes has no result to rely on
    }
  });
}

template <class T>
void PairReduce(const Reduction<T>& r) {
  constexpr int64_t size = sizeof(T), pairs = kRepeat / size / 2;
  Reduce(r, kBlock, pairs * size, pairs, size, [&](const RepeatLanes<T>& lanes, int64_t, auto&& store) {
    for (int64_t pair = 0; pair < pairs; ++pair) {
      int64_t index;
      bool undefined, any;
      const T value = Reduced(r.type, lanes, 2 * pair, 2 * pair + 2, &index, &undefined, &any);
      store(pair, &value, size, undefined || !any);
    }
  });
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
