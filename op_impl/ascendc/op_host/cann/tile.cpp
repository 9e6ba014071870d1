#include "ascendc/op_host/cann/tile.h"

#include <algorithm>
#include <cstring>

#include "ascendc/op_host/cann/context.h"
#include "ascendc/op_host/presets.h"
#include "ascendc/op_host/tiling.h"
#include "cpu/kernels.h"
#include "cpu/kvcache.h"
#include "cpu/merge.h"
#include "tiling/platform/platform_ascendc.h"

namespace msf {

namespace {

// cpu/call.cpp checks a call, turns it into a Problem and hands it to "kernels": here to the tiling.
struct Planning {
  Soc soc;
  std::vector<uint8_t> bytes;
  int64_t workspace = 0;
  int32_t blocks = 0;  // of the launch: cube cores, of a kernel on vector cores alone these
};
thread_local Planning* planning = nullptr;

template <class Plan>
void keep(const Plan& plan) {
  planning->bytes = plan.bytes();
  planning->workspace = plan.workspace();
  planning->blocks = planning->soc.cores;
}
void forward(const Problem& p) { keep(plan_forward(p, planning->soc, choose_tiling(p, planning->soc, false))); }
void backward(const Problem& p) { keep(plan_backward(p, planning->soc, choose_tiling(p, planning->soc, true))); }
void bias_grad(const Problem& p) { keep(plan_bias_grad(p, planning->soc, choose_tiling(p, planning->soc, true))); }

void kv_cache(const Problem& p, const std::vector<Append>& appends) {
  keep(plan_decode(p, appends, planning->soc, choose_tiling(p, planning->soc, false)));
}

void merge(const Merge& m) {
  const MergeTiling t = plan_merge(m, planning->soc);
  planning->bytes.resize(sizeof t);
  std::memcpy(planning->bytes.data(), &t, sizeof t);
  planning->blocks = t.cores;
}

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
char on_device[2];

// The slots in which the host would look for values, of the op that takes an input, or none: it finds none there.
Array array_of(gert::TilingContext* context, int slot, const std::vector<int>& unknown = {}) {
  const gert::StorageShape* shape = context->GetOptionalInputShape(slot);
  const gert::CompileTimeTensorDesc* desc = context->GetOptionalInputDesc(slot);
  const bool known = std::find(unknown.begin(), unknown.end(), slot) == unknown.end();
  return {known ? on_device : nullptr, to_vector(shape->GetStorageShape()), to_dtype(desc->GetDataType())};
}

// Of an attention op.
Array attention_array(gert::TilingContext* context, int slot) {
  Array array = array_of(context, slot, {kSeed});
  if (slot == kCuQ || slot == kCuK) {
    const gert::Tensor* lengths = context->GetOptionalInputTensor(slot);
    if (!lengths || !lengths->GetData<int64_t>()) reject("the cumulative lengths must be known to the host.");
    array.data = const_cast<int64_t*>(lengths->GetData<int64_t>());
  }
  return array;
}

// Results, as far as a Problem is concerned.
void add_outputs(gert::TilingContext* context, size_t count, std::vector<Array>* arrays) {
  for (size_t i = 0; i < count; ++i)
    arrays->push_back({nullptr, to_vector(context->GetOutputShape(i)->GetStorageShape()),
                       to_dtype(context->GetOutputDesc(i)->GetDataType())});
}

// Runs `call`, which ends in one of the functions above, and hands what it planned over to CANN.
template <class F>
void plan_launch(gert::TilingContext* context, F call) {
  const platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
  Planning plan{soc_of(platform), {}, 0, 0};
  planning = &plan;
  try {
    call();
  } catch (...) {
    planning = nullptr;
    throw;
  }
  planning = nullptr;

  gert::TilingData* tiling = context->GetRawTilingData();
  if (plan.bytes.size() > tiling->GetCapacity())
    reject("the table of work takes ", plan.bytes.size(), " bytes, but the tiling buffer holds ", tiling->GetCapacity(),
           ". Hint: a larger block_m, or fewer sequences in a call.");
  std::memcpy(tiling->GetData(), plan.bytes.data(), plan.bytes.size());
  tiling->SetDataSize(plan.bytes.size());
  context->SetBlockDim(uint32_t(plan.blocks));
  context->SetTilingKey(0);
  context->GetWorkspaceSizes(1)[0] = size_t(plan.workspace) + platform.GetLibApiWorkSpaceSize();
}

template <Op OP>
ge::graphStatus tile(gert::TilingContext* context) {
  return guarded(context->GetNodeName(), [&] {
    const Spec spec = spec_of(context);
    const int inputs = OP == Op::forward ? int(kForwardInputs) : int(kBackwardInputs);
    std::vector<Array> arrays;
    for (int slot = 0; slot < inputs; ++slot)
      arrays.push_back(spec.has(slot) ? attention_array(context, slot) : Array{nullptr, {}, DType::none});
    add_outputs(context, OP == Op::bias_grad ? 1 : 4, &arrays);
    plan_launch(context, [&] { run(OP, spec, arrays); });
  });
}

}  // namespace

const Kernels* selected_kernels() {
  static const Kernels table{"ascend", 0, forward, backward, bias_grad, {}, {}, {}, {}, merge, kv_cache};
  return &table;
}

ge::graphStatus tile_forward(gert::TilingContext* context) { return tile<Op::forward>(context); }
ge::graphStatus tile_backward(gert::TilingContext* context) { return tile<Op::backward>(context); }
ge::graphStatus tile_bias_grad(gert::TilingContext* context) { return tile<Op::bias_grad>(context); }

ge::graphStatus tile_kv_cache(gert::TilingContext* context) {
  return guarded(context->GetNodeName(), [&] {
    const KvCacheSpec spec(text_of(context));
    std::vector<Array> arrays;
    for (int slot = 0; slot < kKvCacheInputs; ++slot)
      arrays.push_back(spec.has(slot) ? array_of(context, slot, {kCacheLengths, kBlockTable})
                                      : Array{nullptr, {}, DType::none});
    // two tensors, wherever they are
    arrays[kValueCache].data = static_cast<char*>(arrays[kValueCache].data) + 1;
    add_outputs(context, 2, &arrays);
    plan_launch(context, [&] { run(KvCacheOp::forward, spec, arrays); });
  });
}

ge::graphStatus tile_merge(gert::TilingContext* context) {
  return guarded(context->GetNodeName(), [&] {
    const MergeSpec spec(text_of(context));
    std::vector<Array> arrays{array_of(context, 0), array_of(context, 1)};
    add_outputs(context, 2, &arrays);
    plan_launch(context, [&] { run(MergeOp::forward, spec, arrays); });
  });
}

}  // namespace msf
