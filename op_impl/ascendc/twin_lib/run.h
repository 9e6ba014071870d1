// A Problem, through the host tiling and onto the twin.
#pragma once
#include <string>

#include "common/problem.h"

namespace msf {

void run_forward(const Problem& p);
void run_backward(const Problem& p);

std::string describe_forward(const Problem& p);
std::string describe_backward(const Problem& p);

void configure(const std::string& key, const std::string& value);
const std::string& last_report();  // of this thread

}  // namespace msf
