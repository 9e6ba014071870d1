// Registration of the merge of attentions over parts of the keys.
#include "ascendc/op_host/cann/infer.h"
#include "ascendc/op_host/cann/op_def.h"
#include "ascendc/op_host/cann/tile.h"

namespace ops {

class MsFlashMerge : public OpDef {
 public:
  explicit MsFlashMerge(const char* name) : OpDef(name) {
    using msf::Kind;
    msf::input(this, "outs", ops::REQUIRED, Kind::data, msf::kOutputsAlone);
    msf::input(this, "lses", ops::REQUIRED, Kind::f32, msf::kOutputsAlone);
    msf::output(this, "out", Kind::data, msf::kOutputsAlone);
    msf::output(this, "lse", Kind::f32, msf::kOutputsAlone);
    msf::spec_attribute(this);
    SetInferShape(msf::infer_merge_shape).SetInferDataType(msf::infer_merge_dtype);
    AICore().SetTiling(msf::tile_merge).AddConfig("ascend910b");
  }
};
OP_ADD(MsFlashMerge);

}  // namespace ops
