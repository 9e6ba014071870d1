// The cycle model's figures. Each has a fast and a slow end, because the public sources disagree: the 910B runtime
// description (bytes per cycle of each path), a fitted per-API table (cycles = k * elements + b) and per-intrinsic
// figures (start + rate * repeats + completion). Claimed accuracy: 30 %, good for ranking designs.
#pragma once
#include <cstdint>

#include "machine.h"

namespace ms_twin {

inline Cost MakeCost(double fast, double slow, double fast_latency, double slow_latency) {
  Cost cost;
  cost.occupancy[kFast] = fast;
  cost.occupancy[kSlow] = slow;
  cost.latency[kFast] = fast_latency;
  cost.latency[kSlow] = slow_latency;
  return cost;
}

// Vector unit, cycles per repeat of 256 bytes, and the start and completion time that a dependent instruction waits
// for. The fitted k (per fp32 element) times 64 gives the fast rate, the per-intrinsic figure the slow one.
struct VectorRate {
  double fast, slow, fast_latency, slow_latency;
};
constexpr VectorRate kRateAdds = {0.91, 1.0, 22.1, 31};         // .0141 n + 22.1 | 13 + r + 18
constexpr VectorRate kRateAdd = {1.32, 2.11, 23.2, 24};         // .0206 n + 23.2 | 24 + 2.11 r
constexpr VectorRate kRateDiv = {2.91, 4.03, 29.1, 31};         // .0454 n + 29.1 | 31 + 4.03 r
constexpr VectorRate kRateExp = {1.96, 2.0, 28, 32};            // .0307 n + 28
constexpr VectorRate kRateSqrt = {2.0, 2.0, 29, 32};            // .0313 n + 29
constexpr VectorRate kRateReciprocal = {0.93, 1.0, 21.1, 31};   // .0146 n + 21.1
constexpr VectorRate kRateCastUp = {0.94, 2.0, 20.1, 32};       // f16 -> f32, .0147 n + 20.1 | 14 + 2 r + 18
constexpr VectorRate kRateCastDown = {0.56, 2.0, 20.4, 32};     // f32 -> f16, .0087 n + 20.4
constexpr VectorRate kRateDuplicate = {1.0, 1.0, 17, 24};       // .0156 n + 17
constexpr VectorRate kRateBrcb = {0.93, 1.0, 13.1, 18};         // .0146 n + 13.1, per 256 bytes written
constexpr VectorRate kRateCopy = {1.0, 1.0, 13, 24};            // .0157 n + 13 | 11 + r + 13
constexpr VectorRate kRateSelect = {1.47, 2.0, 44, 44};         // .0229 n + 44
constexpr VectorRate kRateCompareScalar = {1.02, 1.1, 22, 24};  // .016 n + 22
constexpr VectorRate kRateCompare = {1.98, 2.0, 21, 24};        // .031 n + 21
constexpr VectorRate kRateWholeReduce = {7.0, 7.0, 20, 46};     // .1094 n + 20..32 | 14 + 7 r + 32
constexpr VectorRate kRateBlockReduce = {1.0, 1.27, 16.7, 31};  // .0198 n + 16.7 | 14 + r + 17
constexpr VectorRate kRateGather = {8, 16, 30, 40};             // no public figure: one lane block per cycle at best

inline Cost VectorCost(const VectorRate& rate, double repeats) {
  return MakeCost(rate.fast * repeats, rate.slow * repeats, rate.fast_latency, rate.slow_latency);
}

// Data paths, bytes per cycle and core: L2 hit of the runtime description | fitted flat rate.
struct PathRate {
  double fast, slow, fast_start, slow_start, fast_latency, slow_latency;
};
constexpr PathRate kGmToUb = {110, 58.6, 27, 60, 300, 882};
constexpr PathRate kGmToL1 = {110, 78.4, 27, 60, 300, 882};
constexpr PathRate kNd2Nz = {110, 78.4, 27, 210, 300, 882};  // 210 per instruction in the fitted table
constexpr PathRate kUbToGm = {109, 64, 12, 30, 200, 497};
constexpr PathRate kL1ToGm = {109, 64, 12, 30, 200, 497};
constexpr PathRate kL0cToGm = {86, 40.6, 10, 30, 200, 497};
constexpr PathRate kL0cToL1 = {128, 74, 10, 30, 50, 100};
constexpr PathRate kL1ToL0a = {512, 256, 1, 4, 26, 26};
constexpr PathRate kL1ToL0b = {256, 128, 1, 4, 26, 26};
constexpr PathRate kL1ToBias = {128, 64, 1, 4, 26, 26};
constexpr PathRate kUbToUb = {256, 128, 0, 0, 24, 24};

inline Cost PathCost(const PathRate& rate, double bytes) {
  return MakeCost(rate.fast_start + bytes / rate.fast, rate.slow_start + bytes / rate.slow, rate.fast_latency,
                  rate.slow_latency);
}

// Cube: one 16x16x16 product of 16-bit types per cycle (int8 twice that, fp32 a quarter), 6 cycles to start.
inline Cost CubeCost(double products) {
  Cost cost = MakeCost(products, products + 6, 6, 16);
  cost.cube = products;
  return cost;
}

constexpr double kFlagCycles[kScenarios] = {1, 1};
constexpr double kCrossCoreCycles[kScenarios] = {200, 500};  // set on one core until seen by another

}  // namespace ms_twin
