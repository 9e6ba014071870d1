// Host tiling of the attention with its projections.
#include "ascendc/op_host/tiling_parts.h"

namespace msf {

BlockPlan plan_block(const Problem& attention, const BlockShape& s, const Soc& soc, const TilingChoice& choice) {
  BlockPlan plan;
  plan.forward = plan_forward(attention, soc, choice);
  BlockTiling& t = plan.tiling;
  const int64_t q_rows = attention.batch * attention.max_q, k_rows = attention.batch * attention.max_k;
  const int64_t q_out = attention.heads * attention.d, k_out = attention.kv_heads * attention.d;
  const int64_t v_out = attention.kv_heads * attention.dv, merged = attention.heads * attention.dv;
  auto projection = [](int64_t rows, int64_t in, int64_t out, const BlockShape::Weight& w) {
    return ProjectionTiling{rows, in, out, 0, w.offset, w.pitch, w.bias_offset, w.transposed};
  };
  t.q = projection(q_rows, s.embed, q_out, s.q);
  t.k = projection(k_rows, s.k_embed, k_out, s.k);
  t.v = projection(k_rows, s.v_embed, v_out, s.v);
  t.o = projection(q_rows, merged, s.out, s.o);
  t.has_output = s.out > 0;
  int64_t at = round_up(plan.forward.workspace(), 512);
  auto take = [&](int64_t elements) {
    const int64_t here = at;
    at += round_up(elements * 2, 512);
    return here;
  };
  t.ws.q = take(q_rows * q_out);
  t.ws.k = take(k_rows * k_out);
  t.ws.v = take(k_rows * v_out);
  t.ws.out = take(t.has_output ? q_rows * merged : 0);
  t.ws.end = at;
  t.f = plan.forward.tiling;
  return plan;
}

std::vector<uint8_t> BlockPlan::bytes() const { return with_tables(tiling, forward); }

}  // namespace msf
