// The chip as the tiling sees it. On a device the numbers come from PlatformAscendC; these serve where there is none.
#pragma once
#include <cstdint>
#include <string>

namespace msf {

struct Soc {
  std::string name;
  int32_t cores;  // cube cores; each has two vector cores
  double mhz;
  int32_t ub = 192 * 1024, l1 = 512 * 1024, l0_operand = 64 * 1024, l0_result = 128 * 1024;

  double cube_flops() const { return cores * 8192.0 * mhz * 1e6; }  // 16-bit operands: 16 x 16 x 16 MAC per cycle
};

// 910B1, 910B2, 910B3 or 910B4; throws std::invalid_argument.
Soc soc_by_name(const std::string& name);

}  // namespace msf
