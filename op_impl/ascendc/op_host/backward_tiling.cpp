// Host tiling of the backward.
#include <cstring>
#include <map>

#include "ascendc/op_host/tiling_parts.h"
#include "ascendc/schedule.h"

namespace msf {

namespace {

bool place_in_ub(BackwardTiling* t, int64_t size, int64_t tile) {
  const AttentionTiling& a = t->a;
  const bool planes = a.mask.dtype != DataType::none || a.bias.dtype != DataType::none || a.dropout;
  Budget ub("UB", size - (planes || t->clean_dout ? kSelectScratch : 0));
  t->ub.tile = int32_t(tile);
  t->ub.score = ub.take(2 * tile);
  t->ub.grad = ub.take(2 * tile);
  t->ub.prob = ub.take(tile);
  t->ub.dscore = ub.take(tile);
  t->ub.scratch = ub.take(tile);
  t->ub.plane = ub.take(planes ? tile + tile / 32 : 0);
  t->ub.slope = ub.take(a.softcap > 0 || a.has_fill ? tile : 0);
  t->ub.stats = ub.take(3 * round_up((t->block_q + 1) / 2, 64) * 4);
  t->ub.spread = ub.take(64 * 32);
  t->ub.index = ub.take(t->block_k * 4 + 32);
  t->ub.end = ub.used();
  return ub.fits();
}

void fit_ub(BackwardTiling* t, int64_t size, int64_t keys) {
  const int64_t channels = std::max(t->a.d, t->a.dv);
  for (; keys >= 64; keys /= 2) {
    t->block_k = int32_t(keys);
    for (int64_t tile = 16 * 1024; tile >= 32 * std::max<int64_t>(keys, channels); tile /= 2)
      if (place_in_ub(t, size, tile)) return;
  }
  reject("the buffers do not fit the ", size, " bytes of UB.");
}

struct Lengths {
  int64_t q_len, k_len;
};

constexpr double kPerPair = 256;  // what a pair costs beside its products

// 16 x 16 pieces of a pair's scores.
double products(const Pair& p) {
  return double(round_up(p.rows, kFractal) * round_up(p.keys, kFractal) / (kFractal * kFractal));
}

// Cost of a pair of which only the scores and their gradients are wanted, in products of 16 x 16 x 16.
double cost_of_scores(const BackwardTiling& t, const Pair& p) {
  return kPerPair + products(p) * double(t.a.d + t.a.dv) / kFractal;
}

// Cost of the pairs of one key block and one head.
double cost_of(const BackwardTiling& t, const Lengths& seq, int64_t key0, int64_t key1) {
  BackwardTiling one = t;
  one.cores = 1, one.items = 1, one.a.group = 1;
  const BackwardItem item{0, 0, int32_t(key0), int32_t(key1), 0};
  auto sequences = [&](int64_t) { return seq; };
  PairStream<const BackwardItem*, decltype(sequences)> pairs(one, &item, sequences, 0);
  double cost = 0;
  for (Pair p; pairs.next(&p);) cost += kPerPair + products(p) * double(3 * t.a.d + 2 * t.a.dv) / kFractal;
  return cost;
}

// Where to cut the keys of a sequence so that the parts cost about the same, and what they cost. Cuts fall on multiples
// of 128 keys, the width of a product.
struct Cut {
  std::vector<int64_t> at;
  std::vector<double> costs;
};
Cut cut(const BackwardTiling& t, const Lengths& seq, int64_t parts) {
  constexpr int64_t kSlice = 128;
  std::vector<double> slices;
  double total = 0;
  for (int64_t key = 0; key < seq.k_len; key += kSlice) {
    slices.push_back(cost_of(t, seq, key, std::min(seq.k_len, key + kSlice)));
    total += slices.back();
  }
  Cut c{{0}, {}};
  double sum = 0;
  for (size_t i = 0; i < slices.size(); ++i) {
    sum += slices[i];
    const bool last = i + 1 == slices.size();
    const double share = total * double(c.costs.size() + 1) / double(parts);
    // cut behind this slice if that is nearer to an even share than behind the next
    if (last || (int64_t(c.costs.size()) + 1 < parts && sum + slices[i + 1] / 2 > share)) {
      const int64_t from = c.at.back(), to = last ? seq.k_len : int64_t(i + 1) * kSlice;
      c.at.push_back(to);
      c.costs.push_back(cost_of(t, seq, from, to) * double(t.a.group));
    }
  }
  return c;
}

struct Share {
  BackwardItem item;
  double cost;
};

std::vector<Share> share_out(const Problem& p, const BackwardTiling& t, int64_t parts) {
  std::vector<Share> shares;
  std::map<std::pair<int64_t, int64_t>, Cut> cuts;  // sequences of the same lengths are cut alike
  for (int64_t b = 0; b < p.batch; ++b) {
    const std::pair<int64_t, int64_t> lengths{p.seq[b].q_len, p.seq[b].k_len};
    if (!cuts.count(lengths)) cuts[lengths] = cut(t, {lengths.first, lengths.second}, parts);
    const Cut& c = cuts[lengths];
    for (size_t part = 0; part < c.costs.size(); ++part)
      for (int64_t h = 0; c.costs[part] > 0 && h < p.kv_heads; ++h)
        shares.push_back(
            {{int32_t(b), int32_t(h), int32_t(c.at[part]), int32_t(c.at[part + 1]), int32_t(part)}, c.costs[part]});
  }
  std::stable_sort(shares.begin(), shares.end(), [](const Share& x, const Share& y) { return x.cost > y.cost; });
  return shares;
}

std::vector<double> sums(const std::vector<double>& costs, int64_t cores) {
  std::vector<double> sum(cores);
  for (int64_t core = 0; core < cores; ++core)
    for (int64_t turn = 0, at; (at = dealt(turn, core, cores)) < int64_t(costs.size()); ++turn) sum[core] += costs[at];
  return sum;
}

std::vector<double> costs_of(const std::vector<Share>& shares) {
  std::vector<double> costs;
  for (const Share& s : shares) costs.push_back(s.cost);
  return costs;
}

// As few parts as keep the cores busy: each costs a dQ accumulator and its addition at the end.
std::vector<Share> balance(const Problem& p, const BackwardTiling& t, int64_t* parts) {
  constexpr double kGoodEnough = 0.04;
  constexpr int64_t kMostParts = 32;
  std::vector<Share> best;
  double least = 1e30;
  const int64_t blocks = std::max<int64_t>(1, (p.max_k + 127) / 128);
  for (int64_t n = 1; n <= std::min(blocks, kMostParts); ++n) {
    std::vector<Share> shares = share_out(p, t, n);
    double worst = 0, busiest = 0;
    for (int64_t cores : kCoreCounts) {
      const std::vector<double> s = sums(costs_of(shares), cores);
      worst = std::max(worst, imbalance_of(s));
      busiest += *std::max_element(s.begin(), s.end()) * double(cores);
    }
    if (busiest < least * 0.99) least = busiest, best = std::move(shares), *parts = n;
    if (worst <= kGoodEnough) break;
  }
  return best;
}

// Whether some query may see no key, beside queries that see some. What a query sees moves on from one to the next, so
// that these are the first or the last.
bool may_see_nothing(const Problem& p) {
  if ((p.mask && !p.has_fill) || p.bias) return true;
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t last = p.seq[b].q_len - 1;
    const Band band = p.band(b);
    if (last >= 0 && p.seq[b].k_len && (band.begin(0) >= band.end(0) || band.begin(last) >= band.end(last)))
      return true;
  }
  return false;
}

// Block sizes, and what lies where in UB and L1.
BackwardTiling blocks_of(const Problem& p, const Soc& soc, const TilingChoice& choice) {
  BackwardTiling t{};
  t.a = attention_tiling(p);
  t.dout = layout_of(p.dout);
  t.has_dlse = p.dlse != nullptr;
  t.clean_dout = may_see_nothing(p);
  t.cores = soc.cores;
  t.depth = choice.serial ? 0 : int32_t(choice.depth ? choice.depth : 1);
  const int64_t outer = p.varlen ? 1 : p.batch;
  t.q_stats = outer * p.heads * p.q_rows, t.k_stats = outer * p.kv_heads * p.k_rows;

  auto power_of_two = [](int64_t x, int64_t most, int64_t length) {
    int64_t block = 64;
    while (block < most && block < x && block < length) block *= 2;
    return block;
  };
  t.block_q = int32_t(power_of_two(choice.block_m ? choice.block_m : p.block_m ? p.block_m : 512, 512, p.max_q));
  fit_ub(&t, soc.ub, power_of_two(choice.stack_n ? choice.stack_n : p.block_n ? p.block_n : 512, 512, p.max_k));

  Budget l1("L1", soc.l1);
  const int64_t slot = 128 * std::max<int64_t>({p.d, p.dv, 128}) * 2;
  t.l1.slot = int32_t(slot);
  t.l1.rows = l1.take(2 * slot);
  t.l1.channels = l1.take(2 * slot);
  t.l1.stream = l1.take(4 * slot);
  t.l1.end = l1.used();
  l1.check();
  return t;
}

// Elements of one of the rings in GM.
int64_t ring_of(const BackwardTiling& t) { return int64_t(t.cores) * (t.depth + 1) * t.block_q * t.block_k; }

// Of the copy of dO.
int64_t bytes_of_dout(const BackwardTiling& t) { return t.clean_dout ? round_up(t.q_stats * t.a.dv * 2, 512) : 0; }

// Items in falling order of cost.
template <class Item>
void sort_by_cost(GradientPlan<Item>* plan) {
  std::vector<int64_t> order(plan->items.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return plan->costs[x] > plan->costs[y]; });
  const GradientPlan<Item> old = *plan;
  for (size_t i = 0; i < order.size(); ++i) plan->items[i] = old.items[order[i]], plan->costs[i] = old.costs[order[i]];
}

// The pieces of the bias of at most `rows` x `keys`; what repeats is not cut.
void cut(const Problem& p, int64_t rows, int64_t keys, BiasGradPlan* plan) {
  const PlaneLayout& bias = plan->tiling.a.bias;
  auto pieces = [](int64_t n, int64_t size, int64_t stride) {
    std::vector<std::pair<int32_t, int32_t>> cuts;
    if (!stride) size = n;
    for (int64_t at = 0; at < n; at += size) cuts.emplace_back(int32_t(at), int32_t(std::min(n, at + size)));
    return cuts;
  };
  plan->items.clear(), plan->costs.clear();
  BackwardTiling one = plan->tiling;
  one.cores = 1, one.items = 1;
  auto cost = [&](BiasItem item) {
    const double times = double(item.batch1 - item.batch0) * double(item.head1 - item.head0);
    item.batch1 = item.batch0 + 1, item.head1 = item.head0 + 1;
    BiasStream<const BiasItem*, int> pairs(one, &item, 0, 0);
    double sum = 0;
    for (Pair pair; pairs.next(&pair);) sum += cost_of_scores(one, pair);
    return sum * times;
  };
  const auto batches = pieces(p.batch, 1, bias.b), heads = pieces(p.heads, 1, bias.h);
  for (const auto& [row0, row1] : pieces(p.max_q, rows, bias.q))
    for (const auto& [key0, key1] : pieces(p.max_k, keys, bias.k)) {
      BiasItem item{batches[0].first, batches[0].second, heads[0].first, heads[0].second, row0, row1, key0, key1};
      const double each = cost(item);
      for (const auto& [batch0, batch1] : batches)
        for (const auto& [head0, head1] : heads) {
          item.batch0 = batch0, item.batch1 = batch1, item.head0 = head0, item.head1 = head1;
          if (each > 0) plan->items.push_back(item), plan->costs.push_back(each);
        }
    }
  sort_by_cost(plan);
  plan->tiling.items = int64_t(plan->items.size());
}

}  // namespace

BackwardPlan plan_backward(const Problem& p, const Soc& soc, const TilingChoice& choice) {
  BackwardPlan plan;
  BackwardTiling& t = plan.tiling = blocks_of(p, soc, choice);
  t.dq = layout_of(p.dq), t.dk = layout_of(p.dk), t.dv = layout_of(p.dv_);
  if (p.packed) {
    t.dk.offset = (p.dk.data - p.dq.data) / size_of(p.dq.dtype);
    t.dv.offset = (p.dv_.data - p.dq.data) / size_of(p.dq.dtype);
  }

  int64_t parts = 1;
  const std::vector<Share> shares = balance(p, t, &parts);
  for (const Share& s : shares) plan.items.push_back(s.item);
  plan.costs = costs_of(shares);
  t.items = int64_t(plan.items.size());
  t.parts = choice.atomic ? 1 : parts;
  t.whole_rows = parts == 1 && p.max_k <= t.block_k;

  const int64_t ring = ring_of(t);
  t.ws.score = 0;
  t.ws.grad = t.ws.score + ring * 4;
  t.ws.prob = t.ws.grad + ring * 4;
  t.ws.dscore = t.ws.prob + ring * 2;
  t.ws.delta = t.ws.dscore + ring * 2;
  t.ws.dout = t.ws.delta + round_up(t.q_stats * 4, 512);
  t.ws.dq = t.ws.dout + bytes_of_dout(t);
  t.ws.dq_part = t.q_stats * p.d * 4;
  t.ws.dk = t.ws.dq + t.parts * t.ws.dq_part;
  t.ws.dv = t.ws.dk + t.k_stats * p.d * 4;
  t.ws.guard = guard_space(p, t.a, t.cores, true, round_up(t.ws.dv + t.k_stats * p.dv * 4, 512), &t.ws.end);
  return plan;
}

BiasGradPlan plan_bias_grad(const Problem& p, const Soc& soc, const TilingChoice& choice) {
  constexpr double kGoodEnough = 0.04;
  BiasGradPlan plan;
  BackwardTiling& t = plan.tiling = blocks_of(p, soc, choice);
  t.parts = 1;
  t.whole_rows = p.max_k <= t.block_k;
  // Whole rows of blocks where they are enough to keep the cores busy, else single blocks.
  for (const int64_t keys : {round_up(std::max<int64_t>(p.max_k, 1), t.block_k), int64_t(t.block_k)}) {
    cut(p, t.block_q, keys, &plan);
    double worst = 0;
    for (const int64_t cores : kCoreCounts) worst = std::max(worst, imbalance_of(sums(plan.costs, cores)));
    if (worst <= kGoodEnough) break;
  }
  auto stored = [](int64_t stride, int64_t n) { return stride ? n : 1; };
  const Plane& bias = p.bias;
  t.bias_elements =
      stored(bias.b, p.batch) * stored(bias.h, p.heads) * stored(bias.q, p.max_q) * stored(bias.k, p.max_k);
  t.bias_parts = bias.q ? 1 : 2;
  t.bias_part_elements = round_up(t.bias_elements, kFractal);
  const int64_t ring = ring_of(t);
  t.ws.score = 0;
  t.ws.grad = t.ws.score + ring * 4;
  t.ws.delta = t.ws.grad + ring * 4;
  t.ws.dout = t.ws.delta + round_up(t.q_stats * 4, 512);
  t.ws.dbias = t.ws.dout + bytes_of_dout(t);
  const int64_t end = round_up(t.ws.dbias + t.bias_parts * t.bias_part_elements * 4, 512);
  t.ws.guard = guard_space(p, t.a, t.cores, false, end, &t.ws.end);
  return plan;
}

template <class Item>
std::vector<uint8_t> GradientPlan<Item>::bytes() const {
  std::vector<uint8_t> buffer(sizeof(BackwardTiling) + items.size() * sizeof(Item));
  std::memcpy(buffer.data(), &tiling, sizeof(tiling));
  if (!items.empty()) std::memcpy(buffer.data() + sizeof(tiling), items.data(), items.size() * sizeof(Item));
  return buffer;
}

template <class Item>
std::vector<double> GradientPlan<Item>::cost_per_core() const {
  return sums(costs, tiling.cores);
}

template <class Item>
double GradientPlan<Item>::imbalance() const {
  return imbalance_of(cost_per_core());
}

template struct GradientPlan<BackwardItem>;
template struct GradientPlan<BiasItem>;

}  // namespace msf
