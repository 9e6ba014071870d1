// Multi-head attention with its projections in one launch, forward: entry point.
//
//   cube     q, k, v = projections of x and the context    -> workspace
//   all      SyncAll; attention (forward.h) on them        -> workspace
//   cube     SyncAll; y = projection of the output
#include "forward.h"
#include "projection.h"

namespace msf {

struct BlockInputs {
  Address x, context, context_v, w_q, w_k, w_v, b_q, b_k, b_v, w_o, b_o;
};

// What a backward will need; null: it stays in the workspace.
struct BlockKept {
  Address q, k, v, attn;
};

template <class T>
__aicore__ inline void Block(const BlockTiling& t, Address tiling, const BlockInputs& in, const Inputs& pieces,
                             Address y, const BlockKept& kept, const Outputs& rows, Address workspace) {
  const Items items = reinterpret_cast<Items>(tiling + sizeof(BlockTiling));
  const Address q = kept.q ? kept.q : workspace + t.ws.q, k = kept.k ? kept.k : workspace + t.ws.k;
  const Address v = kept.v ? kept.v : workspace + t.ws.v;
  const Address merged = !t.has_output ? y : kept.attn ? kept.attn : workspace + t.ws.out;
  const Inputs attention{
      q, k, v, pieces.mask, pieces.bias, pieces.alibi, pieces.sinks, pieces.seed, pieces.drop_mask, nullptr, nullptr};
  if ASCEND_IS_AIC {
    Projection<T> projection(t.f.cores);
    projection.SetUp(0);
    projection.Run(t.q, in.x, in.w_q, in.b_q, q);
    projection.Run(t.k, in.context, in.w_k, in.b_k, k);
    projection.Run(t.v, in.context_v, in.w_v, in.b_v, v);
    projection.WaitAllEmpty();
  }
  AscendC::SyncAll<false>();
  const KeysValues kv = Guard<T>(t.f.a, t.f.ws.guard, attention, workspace, t.f.cores).Choose();
  if ASCEND_IS_AIC {
    ForwardCube<T>(t.f, items, attention, kv, workspace).Run();
  }
  if ASCEND_IS_AIV {
    ForwardVector<T>(t.f, items, attention, {merged, rows.lse, rows.row_max, rows.row_sum}, workspace).Run();
  }
  if (!t.has_output) return;
  AscendC::SyncAll<false>();
  if ASCEND_IS_AIC {
    Projection<T> projection(t.f.cores);
    projection.SetUp(0);
    projection.Run(t.o, merged, in.w_o, in.b_o, y);
    projection.WaitAllEmpty();
  }
}

}  // namespace msf

extern "C" __global__ __aicore__ void ms_flash_block(GM_ADDR x, GM_ADDR context, GM_ADDR context_v, GM_ADDR w_q,
                                                     GM_ADDR w_k, GM_ADDR w_v, GM_ADDR b_q, GM_ADDR b_k, GM_ADDR b_v,
                                                     GM_ADDR w_o, GM_ADDR b_o, GM_ADDR attn_mask, GM_ADDR bias,
                                                     GM_ADDR alibi_slopes, GM_ADDR sinks, GM_ADDR seed,
                                                     GM_ADDR drop_mask, GM_ADDR y, GM_ADDR q, GM_ADDR k, GM_ADDR v,
                                                     GM_ADDR attn, GM_ADDR lse, GM_ADDR row_max, GM_ADDR row_sum,
                                                     GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIC_1_2);
  REGISTER_TILING_DEFAULT(msf::BlockTilingBuffer);
  AscendC::InitSocState();
  AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(false);  // NaN and Inf stay what they are
  GET_TILING_DATA_WITH_STRUCT(msf::BlockTiling, t, tiling);
  const msf::BlockInputs in{x, context, context_v, w_q, w_k, w_v, b_q, b_k, b_v, w_o, b_o};
  const msf::Inputs pieces{nullptr, nullptr, nullptr,   attn_mask, bias,   alibi_slopes,
                           sinks,   seed,    drop_mask, nullptr,   nullptr};
  const msf::BlockKept kept{q, k, v, attn};
  const msf::Outputs rows{nullptr, lse, row_max, row_sum};
  const msf::Address user = AscendC::GetUserWorkspace(workspace);
  if (t.f.a.bf16)
    msf::Block<bfloat16_t>(t, tiling, in, pieces, y, kept, rows, user);
  else
    msf::Block<half>(t, tiling, in, pieces, y, kept, rows, user);
}
