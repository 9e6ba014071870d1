#include "ascendc/op_host/tiling.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "ascendc/op_host/tiling_parts.h"
#include "ascendc/schedule.h"

namespace msf {

namespace {

PlaneLayout layout_of(const Plane& x) { return {x.b, x.h, x.q, int32_t(x.k), DataType(x.dtype)}; }

int64_t from_environment(const char* name) {
  const char* text = std::getenv(name);
  if (!text || !*text) return 0;
  char* end;
  const long long value = std::strtoll(text, &end, 10);
  if (*end || value < 0) reject("the environment variable ", name, " must be a number >= 0, but got '", text, "'.");
  return value;
}

}  // namespace

TilingChoice TilingChoice::from_environment() {
  return {msf::from_environment("MS_FLASH_BLOCK_M"), msf::from_environment("MS_FLASH_BLOCK_N"),
          msf::from_environment("MS_FLASH_DEPTH")};
}

AttentionTiling attention_tiling(const Problem& p) {
  if (p.q.dtype != DType::f16 && p.q.dtype != DType::bf16) reject("'query' must be float16 or bfloat16.");
  if (p.high) reject("precision_mode='high' is not supported: matrix products accumulate in float32.");
  for (const auto& [name, d] : {std::pair{"query", p.d}, std::pair{"value", p.dv}})
    if (d % kFractal || d < kFractal || d > 256)
      reject("the 'head_dim' of '", name, "' must be a multiple of 16 from 16 to 256, but got ", d, ".");
  if (std::max({p.q_rows, p.k_rows, p.max_k}) > INT32_MAX) reject("a length must be below 2^31.");
  AttentionTiling a{};
  a.batch = p.batch, a.heads = p.heads, a.kv_heads = p.kv_heads, a.group = p.group();
  a.q_len = p.max_q, a.k_len = p.max_k;
  a.stat_b = p.stat_b, a.stat_h = p.stat_h;
  const int64_t k_rows = p.cached ? p.max_k : p.k_rows;
  a.k_stat_b = p.varlen ? 0 : p.kv_heads * k_rows, a.k_stat_h = k_rows;
  a.cached = p.cached, a.lengths_are_int64 = !p.cached || p.cache_lengths.dtype == DType::i64;
  a.guard = (p.mask && !p.has_fill) || p.bias || ((p.left >= 0 || p.right >= 0) && !sees_all_it_loads(a));
  a.table_is_int64 = p.block_table.dtype == DType::i64;
  a.page_size = p.pages.size, a.pages = p.pages.count, a.table_pitch = p.pages.stride;
  a.d = int32_t(p.d), a.dv = int32_t(p.dv);
  a.left = p.left, a.right = p.right;
  a.bottom_right = p.bottom_right, a.varlen = p.varlen, a.bf16 = p.q.dtype == DType::bf16;
  a.scale = float(p.scale), a.softcap = float(p.softcap), a.fill = float(p.fill), a.has_fill = p.has_fill;
  a.dropout = p.drop_mask ? 2 : p.dropout > 0 ? 1 : 0;
  a.keep_scale = float(1 / (1 - p.dropout));
  a.drop_threshold = uint32_t(p.dropout * 4294967296.0);
  a.seed_from_input = p.seed_from_input;  // a device's memory, which only the kernel can read
  if (!a.seed_from_input) a.seed = p.seed, a.offset = p.offset;
  a.q = layout_of(p.q), a.k = layout_of(p.k), a.v = layout_of(p.v), a.out = layout_of(p.out);
  if (p.packed) {
    a.k.offset = (p.k.data - p.q.data) / size_of(p.q.dtype);
    a.v.offset = (p.v.data - p.q.data) / size_of(p.q.dtype);
  }
  a.mask = layout_of(p.mask), a.bias = layout_of(p.bias), a.drop_mask = layout_of(p.drop_mask);
  a.alibi = p.alibi != nullptr, a.alibi_b = p.alibi_b;
  a.sinks = p.sinks ? DataType(p.sinks_dtype) : DataType::none;
  return a;
}

namespace {

bool place_in_ub(ForwardTiling* t, int64_t size, int64_t tile) {
  const AttentionTiling& a = t->a;
  const bool planes = a.mask.dtype != DataType::none || a.bias.dtype != DataType::none || a.dropout;
  const bool full_scratch = planes || a.alibi;
  Budget ub("UB", size - (planes ? kSelectScratch : 0));
  const int64_t ring = (t->depth + 1) * 64 * 4;
  t->ub.tile = int32_t(tile);
  t->ub.input = ub.take(2 * tile);
  t->ub.prob = ub.take(tile);
  t->ub.acc = ub.take(round_up((t->block_m + 1) / 2, 8) * a.dv * 4);
  t->ub.scratch = ub.take(full_scratch ? tile : tile / 4 * 3);
  t->ub.plane = ub.take(planes ? tile + tile / 32 : 0);
  t->ub.row_max = ub.take(ring);
  t->ub.row_sum = ub.take(ring);
  t->ub.alpha = ub.take(ring);
  t->ub.spread = ub.take(64 * 32);
  t->ub.stats = ub.take(4 * 64 * 4);
  t->ub.index = ub.take(t->stack_n * 4 + 32);
  t->ub.end = ub.used();
  return ub.fits();
}

// The largest vector tile that leaves room for the rest; a tile holds 8 rows of a stack, or else the stack shrinks.
void fit_ub(ForwardTiling* t, int64_t size, int64_t stack) {
  for (; stack >= 64; stack /= 2) {
    t->stack_n = int32_t(stack);
    for (int64_t tile = 32 * 1024; tile >= 32 * std::max<int64_t>(stack, t->a.dv); tile /= 2)
      if (place_in_ub(t, size, tile)) return;
  }
  reject("the buffers do not fit the ", size, " bytes of UB.");
}

void place_in_l1(ForwardTiling* t, int64_t size, bool single) {
  const AttentionTiling& a = t->a;
  Budget l1("L1", size);
  // 8 events between MTE1 and MTE2: two buffers of Q, the others between K and V, and P
  t->kv_slots = single ? 1 : 4, t->p_slots = single ? 1 : 2;
  t->l1.q = l1.take(2 * t->block_m * a.d * 2);
  t->l1.kv = l1.take(int64_t(t->kv_slots) * t->block_n * std::max(a.d, a.dv) * 2);
  t->l1.p = l1.take(int64_t(t->p_slots) * t->block_m * t->block_n * 2);
  t->l1.end = l1.used();
  l1.check();
}

// A piece of work: how many products of 16 x 16 x 16, and what a stack and an item cost beside them. Over caches, that
// of a full one.
double cost_of(const ForwardTiling& t, const WorkItem& w) {
  constexpr double kPerStack = 64, kPerItem = 64;  // about the time the pipeline takes to turn round
  const int64_t rows = round_up(int64_t(w.rows) * t.pack, kFractal) / kFractal;
  const KeyRange all = keys_of(t, w, t.a.q_len, t.a.k_len);
  double cost = kPerItem;
  for (int64_t key = all.begin; key < all.end; key += t.stack_n) {
    const int64_t keys = round_up(std::min<int64_t>(t.stack_n, all.end - key), kFractal) / kFractal;
    cost += kPerStack + double(rows * keys * (t.a.d + t.a.dv) / kFractal);
  }
  return cost;
}

std::vector<double> share_out(const ForwardTiling& t, const std::vector<double>& costs, int64_t cores) {
  std::vector<double> sum(cores);
  const int64_t units = int64_t(costs.size()) * t.heads_per_item;
  for (int64_t core = 0; core < cores; ++core)
    for (int64_t turn = 0, at; (at = dealt(turn, core, cores)) < units; ++turn)
      sum[core] += costs[at / t.heads_per_item];
  return sum;
}

// The items with at most `most` blocks of block_n keys each, or of as many parts as the call wants, costly ones first.
void cut(const Problem& p, ForwardPlan* plan, int64_t most) {
  ForwardTiling& t = plan->tiling;
  plan->items.clear();
  plan->merges.clear();
  int32_t slots = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence& seq = p.seq[b];
    const int64_t step = t.block_m / t.pack;
    for (int64_t row0 = 0; row0 < seq.q_len; row0 += step) {
      const int64_t rows = std::min(step, seq.q_len - row0);
      const KeyRange keys = keys_of_rows(t.a, seq.q_len, seq.k_len, row0, rows);
      const int64_t blocks = keys.blocks(t.block_n);
      const int64_t parts = std::max<int64_t>(1, p.splits ? std::min(blocks, p.splits) : (blocks + most - 1) / most);
      if (parts > 1) plan->merges.push_back({int32_t(b), int32_t(row0), int32_t(rows), slots, int32_t(parts)});
      for (int64_t part = 0; part < parts; ++part) {
        const KeyRange own = t.a.cached ? KeyRange{part, parts} : part_of(keys, t.block_n, part, parts);
        plan->items.push_back(
            {int32_t(b), int32_t(row0), int32_t(rows), int32_t(own.begin), int32_t(own.end), parts > 1 ? slots++ : -1});
      }
    }
  }
  std::stable_sort(plan->items.begin(), plan->items.end(),
                   [&](const WorkItem& x, const WorkItem& y) { return cost_of(t, x) > cost_of(t, y); });
  t.items = int64_t(plan->items.size());
  t.merges = int64_t(plan->merges.size());
  t.ws.slot_bytes = round_up(t.block_m * (t.a.dv + 2) * 4, 512);
  t.ws.end = t.ws.slots + slots * t.heads_per_item * t.ws.slot_bytes;
}

// Cuts rows' keys into parts only where whole items leave cores idle.
void balance(const Problem& p, ForwardPlan* plan) {
  constexpr double kGoodEnough = 0.04;
  int64_t longest = 1;
  cut(p, plan, INT32_MAX);
  if (p.splits) return;
  for (const WorkItem& w : plan->items) {
    const KeyRange keys = keys_of(plan->tiling, w, plan->tiling.a.q_len, plan->tiling.a.k_len);
    longest = std::max(longest, keys.blocks(plan->tiling.block_n));
  }
  int64_t best = INT32_MAX;
  double least = 1e30;
  for (int64_t parts = 1; parts <= std::min<int64_t>(longest, 64); ++parts) {
    const int64_t most = (longest + parts - 1) / parts;
    cut(p, plan, most);
    std::vector<double> costs;
    for (const WorkItem& w : plan->items) costs.push_back(cost_of(plan->tiling, w));
    double worst = 0, busiest = 0;
    for (int64_t cores : kCoreCounts) {
      const std::vector<double> sums = share_out(plan->tiling, costs, cores);
      worst = std::max(worst, imbalance_of(sums));
      busiest += *std::max_element(sums.begin(), sums.end()) * double(cores);
    }
    if (busiest < least * 0.98) least = busiest, best = most;  // a finer cut has to pay
    if (worst <= kGoodEnough) break;
  }
  cut(p, plan, best);
}

}  // namespace

ForwardPlan plan_forward(const Problem& p, const Soc& soc, const TilingChoice& choice) {
  ForwardPlan plan;
  ForwardTiling& t = plan.tiling;
  t.a = attention_tiling(p);
  t.cores = soc.cores;
  t.depth = choice.serial ? 0 : int32_t(choice.depth ? choice.depth : 2);
  // Heads of a group share a tile where all their rows fit: decoding. Their statistics have to be contiguous.
  const int64_t group = p.group();
  t.pack = int32_t(!p.varlen && group > 1 && p.max_q * group <= 64 ? group : 1);
  t.heads_per_item = p.heads / t.pack;

  // An L0C half holds the output of a block: 64 KB of float32; half of L0A one operand of it.
  const int64_t result_elements = soc.l0_result / 2 / 4, wide = std::max<int64_t>({p.d, p.dv, 128});
  int64_t block_m = std::min<int64_t>(128, result_elements / wide / kFractal * kFractal);
  if (p.block_m || choice.block_m) block_m = std::min(block_m, choice.block_m ? choice.block_m : p.block_m);
  block_m = std::min(round_up(block_m, kFractal), round_up(std::max<int64_t>(p.max_q, 1) * t.pack, kFractal));
  t.block_m = int32_t(std::max(block_m, round_up(t.pack, kFractal)));
  t.l0_k = int32_t(std::min<int64_t>(128, soc.l0_operand / 2 / 2 / std::max<int64_t>(p.dv, 128) / kFractal * kFractal));
  int64_t stack = choice.stack_n ? choice.stack_n : p.block_n ? p.block_n : 512;
  stack = std::min<int64_t>(1024, std::max<int64_t>(64, stack));
  while (stack & (stack - 1)) stack += stack & -stack;  // up to a power of two
  // with a given split the bits of a row may not depend on the longest sequence
  while (!p.splits && stack > 64 && stack / 2 >= p.max_k) stack /= 2;
  fit_ub(&t, soc.ub, stack);
  t.block_n = std::min(128, t.stack_n);
  place_in_l1(&t, soc.l1, choice.single_buffer);

  const int64_t ring = int64_t(t.cores) * (t.depth + 1) * t.block_m;
  t.ws.score = 0;
  t.ws.prob = t.ws.score + ring * t.stack_n * 4;
  t.ws.partial_out = t.ws.prob + ring * t.stack_n * 2;
  t.ws.guard = guard_space(p, t.a, t.cores, false, t.ws.partial_out + ring * t.a.dv * 4, &t.ws.slots);
  balance(p, &plan);
  return plan;
}

std::vector<uint8_t> ForwardPlan::bytes() const {
  std::vector<uint8_t> buffer(sizeof(ForwardTiling) + items.size() * sizeof(WorkItem) +
                              merges.size() * sizeof(MergeItem));
  uint8_t* at = buffer.data();
  std::memcpy(at, &tiling, sizeof(tiling));
  at += sizeof(tiling);
  if (!items.empty()) std::memcpy(at, items.data(), items.size() * sizeof(WorkItem));
  at += items.size() * sizeof(WorkItem);
  if (!merges.empty()) std::memcpy(at, merges.data(), merges.size() * sizeof(MergeItem));
  return buffer;
}

std::vector<double> ForwardPlan::cost_per_core() const {
  std::vector<double> costs;
  for (const WorkItem& w : items) costs.push_back(cost_of(tiling, w));
  return share_out(tiling, costs, tiling.cores);
}

double ForwardPlan::imbalance() const { return imbalance_of(cost_per_core()); }

}  // namespace msf
