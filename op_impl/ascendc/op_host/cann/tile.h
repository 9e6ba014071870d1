// The tiling functions that CANN calls before every launch.
#pragma once
#include "register/op_def_registry.h"

namespace msf {

ge::graphStatus tile_forward(gert::TilingContext* context);
ge::graphStatus tile_backward(gert::TilingContext* context);
ge::graphStatus tile_bias_grad(gert::TilingContext* context);
ge::graphStatus tile_kv_cache(gert::TilingContext* context);
ge::graphStatus tile_merge(gert::TilingContext* context);

}  // namespace msf
