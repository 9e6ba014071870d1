#include "ascendc/op_host/cann/tile.h"

#include <cstring>

#include "ascendc/op_host/cann/context.h"
#include "ascendc/op_host/presets.h"
#include "ascendc/op_host/tiling.h"
#include "cpu/kernels.h"
#include "tiling/platform/platform_ascendc.h"

namespace msf {

namespace {

// cpu/call.cpp checks a call, turns it into a Problem and hands it to "kernels": here to the tiling.
struct Planning {
  Soc soc;
  std::vector<uint8_t> bytes;
  int64_t workspace = 0;
};
thread_local Planning* planning = nullptr;

template <class Plan>
void keep(const Plan& plan) {
  planning->bytes = plan.bytes();
  planning->workspace = plan.workspace();
}
void forward(const Problem& p) { keep(plan_forward(p, planning->soc, choose_tiling(p, planning->soc, false))); }
void backward(const Problem& p) { keep(plan_backward(p, planning->soc, choose_tiling(p, planning->soc, true))); }
void bias_grad(const Problem& p) { keep(plan_bias_grad(p, planning->soc, choose_tiling(p, planning->soc, true))); }

Soc soc_of(const platform_ascendc::PlatformAscendC& platform) {
  using platform_ascendc::CoreMemType;
  Soc soc{"", int32_t(platform.GetCoreNumAic()), 0};
  for (const auto& [type, size] :
       {std::pair{CoreMemType::UB, &soc.ub}, std::pair{CoreMemType::L1, &soc.l1},
        std::pair{CoreMemType::L0_A, &soc.l0_operand}, std::pair{CoreMemType::L0_C, &soc.l0_result}}) {
    uint64_t bytes = 0;
    platform.GetCoreMemSize(type, bytes);
    *size = int32_t(bytes);
  }
  return soc;
}

// What is not null is there, as far as a Problem is concerned; nobody looks at data of a device.
char on_device[1];

Array array_of(gert::TilingContext* context, int slot) {
  const gert::StorageShape* shape = context->GetOptionalInputShape(slot);
  const gert::CompileTimeTensorDesc* desc = context->GetOptionalInputDesc(slot);
  Array array{slot == kSeed ? nullptr : on_device, to_vector(shape->GetStorageShape()), to_dtype(desc->GetDataType())};
  if (slot == kCuQ || slot == kCuK) {
    const gert::Tensor* lengths = context->GetOptionalInputTensor(slot);
    if (!lengths || !lengths->GetData<int64_t>()) reject("the cumulative lengths must be known to the host.");
    array.data = const_cast<int64_t*>(lengths->GetData<int64_t>());
  }
  return array;
}

template <Op OP>
ge::graphStatus tile(gert::TilingContext* context) {
  return guarded(context->GetNodeName(), [&] {
    const platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
    const Spec spec = spec_of(context);
    Planning plan{soc_of(platform), {}, 0};
    const int inputs = OP == Op::forward ? int(kForwardInputs) : int(kBackwardInputs);
    std::vector<Array> arrays;
    for (int slot = 0; slot < inputs; ++slot)
      arrays.push_back(spec.has(slot) ? array_of(context, slot) : Array{nullptr, {}, DType::none});
    const size_t outputs = OP == Op::bias_grad ? 1 : 4;
    for (size_t i = 0; i < outputs; ++i)
      arrays.push_back({nullptr, to_vector(context->GetOutputShape(i)->GetStorageShape()),
                        to_dtype(context->GetOutputDesc(i)->GetDataType())});
    planning = &plan;
    try {
      run(OP, spec, arrays);
    } catch (...) {
      planning = nullptr;
      throw;
    }
    planning = nullptr;

    gert::TilingData* tiling = context->GetRawTilingData();
    if (plan.bytes.size() > tiling->GetCapacity())
      reject("the table of work takes ", plan.bytes.size(), " bytes, but the tiling buffer holds ",
             tiling->GetCapacity(), ". Hint: a larger block_m, or fewer sequences in a call.");
    std::memcpy(tiling->GetData(), plan.bytes.data(), plan.bytes.size());
    tiling->SetDataSize(plan.bytes.size());
    context->SetBlockDim(uint32_t(plan.soc.cores));
    context->SetTilingKey(0);
    context->GetWorkspaceSizes(1)[0] = size_t(plan.workspace) + platform.GetLibApiWorkSpaceSize();
  });
}

}  // namespace

const Kernels* selected_kernels() {
  static const Kernels table{"ascend", 0, forward, backward, bias_grad, {}, {}, {}, {}, {}};
  return &table;
}

ge::graphStatus tile_forward(gert::TilingContext* context) { return tile<Op::forward>(context); }
ge::graphStatus tile_backward(gert::TilingContext* context) { return tile<Op::backward>(context); }
ge::graphStatus tile_bias_grad(gert::TilingContext* context) { return tile<Op::bias_grad>(context); }

}  // namespace msf
