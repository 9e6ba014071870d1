// A plan as JSON: the numbers of the tiling, every buffer, and which core does what.
#pragma once
#include <string>

#include "ascendc/op_host/tiling.h"

namespace msf {

std::string describe(const ForwardPlan& plan, const Problem& p);
std::string describe(const DecodePlan& plan, const Problem& p);
std::string describe(const BackwardPlan& plan, const Problem& p);
std::string describe(const BiasGradPlan& plan);

}  // namespace msf
