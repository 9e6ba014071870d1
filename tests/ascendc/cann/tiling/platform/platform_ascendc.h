// The chip as CANN would describe it: a 910B3, or what MS_FLASH_TEST_CORES makes of it.
#pragma once
#include <cstdint>
#include <cstdlib>

#include "register/op_def_registry.h"

namespace platform_ascendc {

enum class CoreMemType { L0_A = 0, L0_B = 1, L0_C = 2, L1 = 3, L2 = 4, UB = 5, HBM = 6, FB = 7, BT = 8, RESERVED };

class PlatformAscendC {
 public:
  explicit PlatformAscendC(fe::PlatFormInfos*) {}
  uint32_t GetCoreNumAic() const {
    const char* cores = std::getenv("MS_FLASH_TEST_CORES");
    return cores ? uint32_t(std::atoi(cores)) : 20;
  }
  uint32_t GetLibApiWorkSpaceSize() const { return 16 << 20; }
  void GetCoreMemSize(const CoreMemType& type, uint64_t& size) const {
    size = type == CoreMemType::UB     ? 192 << 10
           : type == CoreMemType::L1   ? 512 << 10
           : type == CoreMemType::L0_C ? 128 << 10
                                       : 64 << 10;
  }
};

}  // namespace platform_ascendc
