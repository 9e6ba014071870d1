// Host tiling of what decoding needs: attention over caches, and the merge of attentions over parts of the keys.
#include "ascendc/op_host/tiling_parts.h"

namespace msf {

DecodePlan plan_decode(const Problem& given, const std::vector<Append>& appends, const Soc& soc,
                       const TilingChoice& choice) {
  // Nobody but the kernel knows the lengths: the plan is that of full caches
  Problem p = given;
  p.max_k = !p.pages ? p.k_rows : p.pages.count ? p.pages.stride * p.pages.size : 0;
  const std::vector<Sequence> full(size_t(p.batch), Sequence{0, 0, p.max_q, p.max_k});
  p.seq = full.data();
  DecodePlan plan;
  plan.forward = plan_forward(p, soc, choice);
  AttentionTiling& a = plan.forward.tiling.a;
  if (!appends.empty()) {
    a.new_len = appends[0].rows;
    plan.tiling.new_k = layout_of(appends[0].from), plan.tiling.new_v = layout_of(appends[1].from);
  }
  plan.tiling.f = plan.forward.tiling;
  return plan;
}

std::vector<uint8_t> DecodePlan::bytes() const { return with_tables(tiling, forward); }

MergeTiling plan_merge(const Merge& m, const Soc& soc) {
  constexpr int64_t kTile = 8 * 1024;  // float32 numbers of a tile in UB: that of the forward, 32 KB
  if (m.outs.dtype != DType::f16 && m.outs.dtype != DType::bf16)
    reject("the 'outs' to merge must be float16 or bfloat16.");
  const int64_t width = round_up(m.channels, kFractal);
  if (width * 8 > kTile) reject("the 'head_dim' of 'outs' must be at most ", kTile / 8, ", but got ", m.channels, ".");
  if (m.rows > INT32_MAX) reject("a length must be below 2^31.");
  MergeTiling t{};
  t.parts = m.parts, t.batch = m.batch, t.heads = m.heads, t.rows = m.rows;
  t.part_elements = m.part_elements, t.part_rows = m.batch * m.heads * m.rows;
  t.outs = layout_of(m.outs), t.out = layout_of(m.out);
  t.dv = int32_t(m.channels), t.bf16 = m.outs.dtype == DType::bf16;
  t.cores = 2 * soc.cores;
  t.chunk = int32_t(std::min<int64_t>(64, kTile / width / 8 * 8));
  return t;
}

}  // namespace msf
