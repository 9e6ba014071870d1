// Block sizes that were measured to be fast, as rules that hold for some problems: ms_flash/tuning reads them from a
// file and hands them over. Where no rule holds the kernels know sizes of their own.
#pragma once
#include "common/problem.h"

namespace msf {

struct Blocks {  // 0: not said
  int64_t rows, keys, keys_per_part;
};

// Of the first rule that holds for the problem.
Blocks tuned_blocks(const Problem& p, bool backward);

// Replaces all rules. A line per rule, fields as `Rule` in blocks.cpp lists them, separated by spaces. Throws
// std::invalid_argument, and leaves the rules as they were, on anything else.
void set_block_rules(const char* text);

}  // namespace msf
