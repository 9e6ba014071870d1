// What launches on the twin have in common: settings, options, and what becomes of a report.
#pragma once
#include <cstdint>

#include "ascendc/op_host/tiling.h"
#include "common/problem.h"
#include "launch.h"

namespace msf {

const Soc& soc();
TilingChoice chosen(const Problem& p, bool backward);
ms_twin::Options options(int32_t cores);
bool on_device();  // the setting: values that decide where a kernel reads and writes are not looked at before it runs

// Keeps the report; throws if the twin found fault.
void finish(const char* kernel, const ms_twin::Report& report);

// Bytes from the first to the last element.
inline int64_t extent(const Tensor4& x, int64_t batch, int64_t heads, int64_t rows, int64_t channels) {
  if (!batch || !heads || !rows) return 0;
  return ((batch - 1) * x.b + (heads - 1) * x.h + (rows - 1) * x.s + channels) * size_of(x.dtype);
}
inline int64_t extent(const Plane& x, const Problem& p) {
  if (!p.batch || !p.heads || !x.rows || !x.cols) return 0;
  return ((p.batch - 1) * x.b + (p.heads - 1) * x.h + (x.rows - 1) * x.q + (x.cols - 1) * x.k + 1) * size_of(x.dtype);
}

}  // namespace msf
