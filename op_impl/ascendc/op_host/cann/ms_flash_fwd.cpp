// Registration of the forward op: its prototype, the shapes and dtypes of its results, its tiling.
#include "ascendc/op_host/cann/infer.h"
#include "ascendc/op_host/cann/op_def.h"
#include "ascendc/op_host/cann/tile.h"

namespace ops {

class MsFlashFwd : public OpDef {
 public:
  explicit MsFlashFwd(const char* name) : OpDef(name) {
    using msf::Kind;
    msf::attention_inputs(this);
    msf::output(this, "out", Kind::data);
    msf::output(this, "lse", Kind::f32);
    msf::output(this, "row_max", Kind::f32);
    msf::output(this, "row_sum", Kind::f32);
    msf::spec_attribute(this);
    SetInferShape(msf::infer_shape<msf::Op::forward>).SetInferDataType(msf::infer_forward_dtype);
    AICore().SetTiling(msf::tile_forward).AddConfig("ascend910b");
  }
};
OP_ADD(MsFlashFwd);

}  // namespace ops
