// Attention, forward: entry point.
#include "forward.h"

namespace msf {

template <class T>
__aicore__ inline void Forward(const ForwardTiling& t, Address tiling, const Inputs& in, const Outputs& out,
                               Address workspace) {
  const Items items = reinterpret_cast<Items>(tiling + sizeof(ForwardTiling));
  const KeysValues kv = Guard<T>(t.a, t.ws.guard, in, workspace, t.cores).Choose();
  if ASCEND_IS_AIC {
    ForwardCube<T>(t, items, in, kv, workspace).Run();
  }
  if ASCEND_IS_AIV {
    ForwardVector<T>(t, items, in, out, workspace).Run();
  }
}

}  // namespace msf

extern "C" __global__ __aicore__ void ms_flash_fwd(GM_ADDR query, GM_ADDR key, GM_ADDR value, GM_ADDR attn_mask,
                                                   GM_ADDR bias, GM_ADDR alibi_slopes, GM_ADDR sinks, GM_ADDR seed,
                                                   GM_ADDR drop_mask, GM_ADDR cu_seqlens_q, GM_ADDR cu_seqlens_k,
                                                   GM_ADDR out, GM_ADDR lse, GM_ADDR row_max, GM_ADDR row_sum,
                                                   GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  REGISTER_TILING_DEFAULT(msf::ForwardTilingBuffer);
  AscendC::InitSocState();
  AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(false);  // NaN and Inf stay what they are
  GET_TILING_DATA_WITH_STRUCT(msf::ForwardTiling, t, tiling);
  const msf::Inputs in{query, key,  value,     attn_mask,    bias,        alibi_slopes,
                       sinks, seed, drop_mask, cu_seqlens_q, cu_seqlens_k};
  const msf::Outputs results{out, lse, row_max, row_sum};
  const msf::Address user = AscendC::GetUserWorkspace(workspace);
  if (t.a.bf16)
    msf::Forward<bfloat16_t>(t, tiling, in, results, user);
  else
    msf::Forward<half>(t, tiling, in, results, user);
}
