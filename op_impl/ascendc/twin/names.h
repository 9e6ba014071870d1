// The names a kernel uses for pipes, events, positions and modes, and the hardware's sizes (NPU arch 2201).
#pragma once
#include <cstdint>

enum pipe_t : uint8_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };
enum event_t : int32_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };
using TEventID = int8_t;

namespace ms_twin {
constexpr int kPipes = 7;          // without PIPE_ALL
constexpr int kEventIds = 8;       // per pair of pipes
constexpr int kCrossFlags = 16;    // per core
constexpr int kCrossFlagMax = 15;  // a counter has four bits
constexpr uint32_t kBlock = 32;    // bytes of a data block
constexpr uint32_t kRepeat = 256;  // bytes a vector instruction works on in one repeat
constexpr uint32_t kFractal = 512;
constexpr uint64_t kReservedWorkspace = 16ull << 20;  // GetUserWorkspace skips it, as the device's does

inline const char* PipeName(int pipe) {
  static const char* const names[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX", "ALL"};
  return names[pipe];
}
constexpr int EventOf(pipe_t source, pipe_t target) { return source * 8 + target; }
}  // namespace ms_twin

namespace AscendC {

enum class TPosition : uint8_t {
  GM,
  A1,
  A2,
  B1,
  B2,
  C1,
  C2,
  CO1,
  CO2,
  VECIN,
  VECOUT,
  VECCALC,
  LCM = VECCALC,
  C2PIPE2GM,
  TSCM,
  MAX
};
using QuePosition = TPosition;

enum class Hardware : uint8_t { GM, UB, L1, L0A, L0B, L0C, BIAS, FIXBUF, MAX };

#define MS_TWIN_EVENT(source, target) source##_##target = ms_twin::EventOf(PIPE_##source, PIPE_##target)
enum class HardEvent : uint8_t {
  MS_TWIN_EVENT(MTE2, MTE1),
  MS_TWIN_EVENT(MTE1, MTE2),
  MS_TWIN_EVENT(MTE1, MTE3),
  MS_TWIN_EVENT(MTE1, FIX),
  MS_TWIN_EVENT(MTE1, M),
  MS_TWIN_EVENT(MTE1, V),
  MS_TWIN_EVENT(M, MTE1),
  MS_TWIN_EVENT(M, MTE2),
  MS_TWIN_EVENT(M, FIX),
  MS_TWIN_EVENT(M, V),
  MS_TWIN_EVENT(M, S),
  MS_TWIN_EVENT(FIX, M),
  MS_TWIN_EVENT(FIX, MTE1),
  MS_TWIN_EVENT(FIX, MTE2),
  MS_TWIN_EVENT(FIX, MTE3),
  MS_TWIN_EVENT(FIX, S),
  MS_TWIN_EVENT(FIX, V),
  MS_TWIN_EVENT(MTE2, V),
  MS_TWIN_EVENT(MTE2, M),
  MS_TWIN_EVENT(MTE2, MTE3),
  MS_TWIN_EVENT(MTE2, FIX),
  MS_TWIN_EVENT(MTE2, S),
  MS_TWIN_EVENT(MTE3, MTE1),
  MS_TWIN_EVENT(MTE3, MTE2),
  MS_TWIN_EVENT(MTE3, V),
  MS_TWIN_EVENT(MTE3, S),
  MS_TWIN_EVENT(V, MTE2),
  MS_TWIN_EVENT(V, MTE3),
  MS_TWIN_EVENT(V, MTE1),
  MS_TWIN_EVENT(V, M),
  MS_TWIN_EVENT(V, S),
  MS_TWIN_EVENT(S, V),
  MS_TWIN_EVENT(S, MTE1),
  MS_TWIN_EVENT(S, MTE2),
  MS_TWIN_EVENT(S, MTE3),
  MS_TWIN_EVENT(S, M),
  MS_TWIN_EVENT(S, FIX),
};
#undef MS_TWIN_EVENT

enum class RoundMode : uint8_t {
  CAST_NONE,
  CAST_RINT,
  CAST_FLOOR,
  CAST_CEIL,
  CAST_ROUND,
  CAST_TRUNC,
  CAST_ODD,
};
enum class CMPMODE : uint8_t { LT, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
enum class MaskMode : uint8_t { NORMAL, COUNTER };
enum class ReduceOrder : uint8_t { ORDER_VALUE_INDEX, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };
enum class CacheMode : uint8_t { CACHE_MODE_DISABLE, CACHE_MODE_NORMAL, CACHE_MODE_LAST, CACHE_MODE_PERSISTENT };
enum class CacheRwMode : uint8_t { READ = 1, WRITE = 2, RW = 3 };
enum class CO2Layout : uint8_t { NZ, ROW_MAJOR, COLUMN_MAJOR };

}  // namespace AscendC

enum QuantMode_t : uint8_t { NoQuant, F322F16, F322BF16, DEQF16, VDEQF16, QF322B8_PRE, VQF322B8_PRE, REQ8, VREQ8 };
