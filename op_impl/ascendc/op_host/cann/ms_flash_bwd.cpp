// Registration of the backward op.
#include "ascendc/op_host/cann/infer.h"
#include "ascendc/op_host/cann/op_def.h"
#include "ascendc/op_host/cann/tile.h"

namespace ops {

class MsFlashBwd : public OpDef {
 public:
  explicit MsFlashBwd(const char* name) : OpDef(name) {
    using msf::Kind;
    msf::attention_inputs(this);
    msf::saved_inputs(this);
    msf::output(this, "dq", Kind::data);
    msf::output(this, "dk", Kind::data);
    msf::output(this, "dv", Kind::data);
    msf::output(this, "dsinks", Kind::sinks);
    msf::spec_attribute(this);
    SetInferShape(msf::infer_shape<msf::Op::backward>).SetInferDataType(msf::infer_backward_dtype);
    AICore().SetTiling(msf::tile_backward).AddConfig("ascend910b");
  }
};
OP_ADD(MsFlashBwd);

}  // namespace ops
