// Attention over caches, and the merge of parts, onto the twin.
#pragma once
#include <string>
#include <vector>

#include "cpu/cache.h"

namespace msf {

// Rotates rows on the host: the part of the op that is no kernel.
void rotate_rows(const Append& a);

void run_decode(const Problem& p, const std::vector<Append>& appends);
void run_merge(const Merge& m);
std::string describe_decode(const Problem& p, const std::vector<Append>& appends);

}  // namespace msf
