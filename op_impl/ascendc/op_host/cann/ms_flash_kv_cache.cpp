// Registration of attention over caches, to which it appends. CANN takes an output of an input's name for that input's
// memory, written: the aclnn function has one parameter of the two, and the kernel gets the address twice.
#include "ascendc/op_host/cann/infer.h"
#include "ascendc/op_host/cann/op_def.h"
#include "ascendc/op_host/cann/tile.h"

namespace ops {

class MsFlashKvCache : public OpDef {
 public:
  explicit MsFlashKvCache(const char* name) : OpDef(name) {
    using msf::Kind;
    msf::input(this, "query", ops::REQUIRED, Kind::data);
    msf::input(this, "k_cache", ops::REQUIRED, Kind::data);
    msf::input(this, "v_cache", ops::REQUIRED, Kind::data);
    msf::input(this, "k", ops::OPTIONAL, Kind::data);
    msf::input(this, "v", ops::OPTIONAL, Kind::data);
    msf::input(this, "cache_seqlens", ops::REQUIRED, Kind::lengths);
    msf::input(this, "block_table", ops::OPTIONAL, Kind::blocks);
    msf::input(this, "rotary_cos", ops::OPTIONAL, Kind::data);
    msf::input(this, "rotary_sin", ops::OPTIONAL, Kind::data);
    msf::input(this, "alibi_slopes", ops::OPTIONAL, Kind::f32);
    msf::input(this, "sinks", ops::OPTIONAL, Kind::sinks);
    msf::output(this, "out", Kind::data);
    msf::output(this, "lse", Kind::f32);
    msf::output(this, "k_cache", Kind::data);
    msf::output(this, "v_cache", Kind::data);
    msf::spec_attribute(this);
    SetInferShape(msf::infer_kv_cache_shape).SetInferDataType(msf::infer_kv_cache_dtype);
    AICore().SetTiling(msf::tile_kv_cache).AddConfig("ascend910b");
  }
};
OP_ADD(MsFlashKvCache);

}  // namespace ops
