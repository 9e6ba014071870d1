#include "ascendc/op_host/soc.h"

#include <stdexcept>

namespace msf {

Soc soc_by_name(const std::string& name) {
  for (const Soc& soc :
       {Soc{"910B1", 24, 1850}, Soc{"910B2", 24, 1800}, Soc{"910B3", 20, 1800}, Soc{"910B4", 20, 1500}})
    if (soc.name == name) return soc;
  throw std::invalid_argument("For 'tiling', the 'soc' must be one of ['910B1', '910B2', '910B3', '910B4'], but got '" +
                              name + "'.");
}

}  // namespace msf
