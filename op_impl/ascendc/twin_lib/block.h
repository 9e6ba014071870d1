// The block op onto the twin.
#pragma once
#include <vector>

#include "ascendc/twin_lib/run.h"
#include "cpu/matrix.h"
#include "cpu/mha.h"

namespace msf {

// The forward of the block op in one launch.
void block_at_once(const MhaForward& f, const Spec& attention, const std::vector<Array>& arrays);

// The same by the arrays of msflash_ascend_block.
void call_block(const char* spec, const std::vector<Array>& in);

// The attention of a block, once it is set up; false: no block is.
bool run_pending_block(const Problem& attention);

// Products around the gradients, on the host: they are no part of a kernel.
void multiply_on_host(const Gemm& g);

}  // namespace msf
