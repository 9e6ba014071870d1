// Registration of the gradient of the bias.
#include "ascendc/op_host/cann/infer.h"
#include "ascendc/op_host/cann/op_def.h"
#include "ascendc/op_host/cann/tile.h"

namespace ops {

class MsFlashBiasGrad : public OpDef {
 public:
  explicit MsFlashBiasGrad(const char* name) : OpDef(name) {
    using msf::Kind;
    msf::attention_inputs(this);
    msf::saved_inputs(this);
    msf::output(this, "dbias", Kind::bias);
    msf::spec_attribute(this);
    SetInferShape(msf::infer_shape<msf::Op::bias_grad>).SetInferDataType(msf::infer_bias_grad_dtype);
    AICore().SetTiling(msf::tile_bias_grad).AddConfig("ascend910b");
  }
};
OP_ADD(MsFlashBiasGrad);

}  // namespace ops
