// Attention over caches of keys and values, to which it appends: entry point.
//
//   vectors  new rows of K and V -> caches
//   all      SyncAll; attention (forward.h) over what each sequence has, its keys cut into parts and merged
#include "append.h"
#include "forward.h"

namespace msf {

template <class T>
__aicore__ inline void Decode(const DecodeTiling& t, Address tiling, const Inputs& in, Address k, Address v,
                              const Outputs& out, Address workspace) {
  const Items items = reinterpret_cast<Items>(tiling + sizeof(DecodeTiling));
  if (t.f.a.new_len) {
    if ASCEND_IS_AIV {
      CacheAppend<T>(t.f.a, in, t.f.cores * AscendC::GetSubBlockNum()).Run(k, t.new_k, v, t.new_v);
    }
    AscendC::SyncAll<false>();  // begins with a barrier on all pipes: what follows lays out UB anew
  }
  const KeysValues kv = Guard<T>(t.f.a, t.f.ws.guard, in, workspace, t.f.cores).Choose();
  if ASCEND_IS_AIC {
    ForwardCube<T>(t.f, items, in, kv, workspace).Run();
  }
  if ASCEND_IS_AIV {
    ForwardVector<T>(t.f, items, in, out, workspace).Run();
  }
}

}  // namespace msf

// The caches come as inputs and as outputs (`_ref`): the same memory. `query` and `k` come rotated, so there is no
// rotary_cos and rotary_sin; the tiling refuses them.
extern "C" __global__ __aicore__ void ms_flash_kv_cache(GM_ADDR query, GM_ADDR k_cache, GM_ADDR v_cache, GM_ADDR k,
                                                        GM_ADDR v, GM_ADDR cache_seqlens, GM_ADDR block_table,
                                                        GM_ADDR rotary_cos, GM_ADDR rotary_sin, GM_ADDR alibi_slopes,
                                                        GM_ADDR sinks, GM_ADDR out, GM_ADDR lse, GM_ADDR k_cache_ref,
                                                        GM_ADDR v_cache_ref, GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  REGISTER_TILING_DEFAULT(msf::DecodeTilingBuffer);
  AscendC::InitSocState();
  AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(false);  // NaN and Inf stay what they are
  GET_TILING_DATA_WITH_STRUCT(msf::DecodeTiling, t, tiling);
  (void)rotary_cos, (void)rotary_sin, (void)k_cache_ref, (void)v_cache_ref;
  const msf::Inputs in{query,   k_cache, v_cache, nullptr, nullptr,       alibi_slopes, sinks,
                       nullptr, nullptr, nullptr, nullptr, cache_seqlens, block_table};
  const msf::Outputs rows{out, lse, nullptr, nullptr};
  const msf::Address user = AscendC::GetUserWorkspace(workspace);
  if (t.f.a.bf16)
    msf::Decode<bfloat16_t>(t, tiling, in, k, v, rows, user);
  else
    msf::Decode<half>(t, tiling, in, k, v, rows, user);
}
