// Attention, gradient of the bias: entry point.
#include "backward.h"

namespace msf {

template <class T>
__aicore__ inline void BiasGrad(const BackwardTiling& t, Address tiling, const Inputs& in, const Saved& saved,
                                Address dbias, Address workspace) {
  const OfBias::Items items = reinterpret_cast<OfBias::Items>(tiling + sizeof(BackwardTiling));
  const KeysValues kv = Guard<T>(t.a, t.ws.guard, in, workspace, t.cores).Choose();
  if ASCEND_IS_AIC {
    BackwardCube<T, OfBias>(t, items, in, saved, kv, workspace).Run();
  }
  if ASCEND_IS_AIV {
    BackwardVector<T, OfBias>(t, items, in, saved, {nullptr, nullptr, nullptr, nullptr, dbias}, workspace).Run();
  }
}

}  // namespace msf

extern "C" __global__ __aicore__ void ms_flash_bias_grad(GM_ADDR query, GM_ADDR key, GM_ADDR value, GM_ADDR attn_mask,
                                                         GM_ADDR bias, GM_ADDR alibi_slopes, GM_ADDR sinks,
                                                         GM_ADDR seed, GM_ADDR drop_mask, GM_ADDR cu_seqlens_q,
                                                         GM_ADDR cu_seqlens_k, GM_ADDR attn, GM_ADDR row_max,
                                                         GM_ADDR row_sum, GM_ADDR dout, GM_ADDR dlse, GM_ADDR dbias,
                                                         GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  REGISTER_TILING_DEFAULT(msf::BackwardTilingBuffer);
  AscendC::InitSocState();
  AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(false);  // NaN and Inf stay what they are
  GET_TILING_DATA_WITH_STRUCT(msf::BackwardTiling, t, tiling);
  const msf::Inputs in{query, key,  value,     attn_mask,    bias,        alibi_slopes,
                       sinks, seed, drop_mask, cu_seqlens_q, cu_seqlens_k};
  const msf::Saved saved{attn, row_max, row_sum, dout, dlse};
  const msf::Address user = AscendC::GetUserWorkspace(workspace);
  if (t.a.bf16)
    msf::BiasGrad<bfloat16_t>(t, tiling, in, saved, dbias, user);
  else
    msf::BiasGrad<half>(t, tiling, in, saved, dbias, user);
}
