// The host twin's kernel_operator.h: compiles Ascend C kernels with g++ and runs them on the machine of machine.h.
//
// Written from the public documentation of the API. It covers what attention kernels use on NPU arch 2201 (910B); what
// it does not have does not compile, what it has is checked (report.h lists the kinds of faults). launch.h runs a
// kernel.
#pragma once

#include "cast.h"
#include "copy.h"
#include "cube.h"
#include "fill.h"
#include "gather.h"
#include "kernel_macros.h"
#include "queue.h"
#include "reduce.h"
#include "select.h"
#include "sync.h"
#include "tensor.h"
#include "types.h"
#include "vector.h"
