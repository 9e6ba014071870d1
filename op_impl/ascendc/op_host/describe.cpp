#include "ascendc/op_host/describe.h"

#include <algorithm>
#include <sstream>
#include <type_traits>
#include <utility>

#include "ascendc/schedule.h"

namespace msf {

namespace {

// Named values of one JSON object.
class Object {
 public:
  template <class T>
  Object& add(const char* name, const T& value) {
    text_ << (first_ ? "{\"" : ", \"") << name << "\": ";
    first_ = false;
    put(value);
    return *this;
  }
  std::string text() const { return text_.str() + "}"; }

 private:
  void put(const Object& inner) { text_ << inner.text(); }
  template <class T>
  void put(const T& value) {
    if constexpr (std::is_arithmetic_v<T>) {
      text_ << value;
    } else {  // a sequence
      const char* comma = "[";
      if (value.empty()) text_ << comma;
      for (const auto& element : value) {
        text_ << comma;
        put(element);
        comma = ", ";
      }
      text_ << "]";
    }
  }

  std::ostringstream text_;
  bool first_ = true;
};

// Buffers from the places where they start: each ends where the next one starts.
Object sizes(std::initializer_list<std::pair<const char*, int64_t>> starts) {
  Object buffers;
  for (auto at = starts.begin(); at + 1 != starts.end(); ++at)
    if ((at + 1)->second > at->second) buffers.add(at->first, (at + 1)->second - at->second);
  return buffers;
}

// Tells whether two tiling buffers are the same (FNV-1a, as 32 bits).
uint32_t hash_of(const std::vector<uint8_t>& bytes) {
  uint32_t hash = 2166136261u;
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 16777619u;
  return hash;
}

std::vector<int64_t> cores_of(int64_t units, int64_t cores) {
  std::vector<int64_t> core_of(units);
  for (int64_t core = 0; core < cores; ++core)
    for (int64_t turn = 0, at; (at = dealt(turn, core, cores)) < units; ++turn) core_of[at] = core;
  return core_of;
}

// What all plans have in common.
template <class Plan, class Tiling>
Object describe_any(const Plan& plan, const std::vector<uint8_t>& bytes, const Tiling& t) {
  Object plan_of;
  plan_of.add("cores", t.cores)
      .add("depth", t.depth)
      .add("ub", t.ub.end)
      .add("ub_tile", t.ub.tile)
      .add("l1", t.l1.end)
      .add("workspace", plan.workspace())
      .add("imbalance", plan.imbalance())
      .add("tiling_bytes", bytes.size())
      .add("tiling_hash", hash_of(bytes))
      .add("cost_per_core", plan.cost_per_core());
  return plan_of;
}

// What the plans of both gradients have in common.
template <class Pairs, class Sequences, class Item>
Object describe_pairs(const GradientPlan<Item>& plan, const Sequences& sequences) {
  const BackwardTiling& t = plan.tiling;
  const auto& u = t.ub;
  std::vector<std::vector<int64_t>> done;
  for (int64_t core = 0; core < t.cores; ++core) {
    Pairs pairs(t, plan.items.data(), sequences, core);
    for (Pair pair; pairs.next(&pair);)
      done.push_back({core, pair.batch, pair.head, pair.row0, pair.rows, pair.key0, pair.keys, pair.part});
  }
  Object plan_of = describe_any(plan, plan.bytes(), t);
  plan_of.add("block_q", t.block_q)
      .add("block_k", t.block_k)
      .add("parts", t.parts)
      .add("pairs", done)
      .add("core_of", cores_of(t.items, t.cores))
      .add("buffers", Object()
                          .add("UB", sizes({{"S tiles, 2 x float32", u.score},
                                            {"dP tiles, 2 x float32", u.grad},
                                            {"P tiles, 2 x 16 bit", u.prob},
                                            {"dS tiles, 2 x 16 bit", u.dscore},
                                            {"scratch", u.scratch},
                                            {"mask, bias or dropout", u.plane},
                                            {"slope of softcap or fill", u.slope},
                                            {"row statistics", u.stats},
                                            {"one value per row, spread", u.spread},
                                            {"key numbers", u.index},
                                            {"", u.end}}))
                          .add("L1", sizes({{"rows of Q or dO", t.l1.rows},
                                            {"rows of K or V", t.l1.channels},
                                            {"what streams past them", t.l1.stream},
                                            {"", t.l1.end}})));
  return plan_of;
}

}  // namespace

namespace {

// `bytes`: the whole tiling buffer, which may begin with another struct.
std::string describe_forward(const ForwardPlan& plan, const std::vector<uint8_t>& bytes, const Problem& p) {
  const ForwardTiling& t = plan.tiling;
  const auto& u = t.ub;
  std::vector<std::vector<int64_t>> items, merges;
  for (const WorkItem& w : plan.items) {
    const KeyRange keys = keys_of(t, w, p.seq[w.batch].q_len, p.seq[w.batch].k_len);
    items.push_back({w.batch, w.row0, w.rows, keys.begin, keys.end, w.slot});
  }
  for (const MergeItem& m : plan.merges) merges.push_back({m.batch, m.row0, m.rows, m.slot, m.parts});
  // a unit is an item for one group of heads; beyond this many nobody looks at them one by one
  constexpr int64_t kMostListed = 1 << 16;
  const int64_t units = t.items * t.heads_per_item;
  const int32_t depth = std::min(128, t.a.d);  // of one product Q K^T
  Object plan_of = describe_any(plan, bytes, t);
  plan_of.add("block_m", t.block_m)
      .add("stack_n", t.stack_n)
      .add("block_n", t.block_n)
      .add("pack", t.pack)
      .add("heads_per_item", t.heads_per_item)
      .add("items", items)
      .add("merges", merges)
      .add("core_of", units <= kMostListed ? cores_of(units, t.cores) : std::vector<int64_t>())
      .add("buffers",
           Object()
               .add("UB", sizes({{"S tiles, 2 x float32", u.input},
                                 {"P tiles, 2 x 16 bit", u.prob},
                                 {"O, float32", u.acc},
                                 {"scratch", u.scratch},
                                 {"mask, bias or dropout", u.plane},
                                 {"row maxima", u.row_max},
                                 {"row sums", u.row_sum},
                                 {"rescaling factors", u.alpha},
                                 {"one value per row, spread", u.spread},
                                 {"row statistics out", u.stats},
                                 {"key numbers", u.index},
                                 {"", u.end}}))
               .add("L1", sizes({{"Q, 2 slots", t.l1.q}, {"K and V", t.l1.kv}, {"P", t.l1.p}, {"", t.l1.end}}))
               .add("L0A", Object().add("Q or P, 2 x 16 bit", 4 * t.block_m * std::max(depth, t.l0_k)))
               .add("L0B", Object().add("K or V, 2 x 16 bit", 4 * std::max(t.block_n * depth, t.l0_k * t.a.dv)))
               .add("L0C", Object().add("S or O, 2 x float32", 8 * t.block_m * std::max(t.block_n, t.a.dv))))
      .add("workspaces", sizes({{"S rings, float32", t.ws.score},
                                {"P rings, 16 bit", t.ws.prob},
                                {"O rings, float32", t.ws.partial_out},
                                {"copies of K and V without NaN", t.a.guard ? t.ws.guard.flags : t.ws.slots},
                                {"partial results", t.ws.slots},
                                {"", t.ws.end}}));
  return plan_of.text();
}

}  // namespace

std::string describe(const ForwardPlan& plan, const Problem& p) { return describe_forward(plan, plan.bytes(), p); }
std::string describe(const DecodePlan& plan, const Problem& p) {
  return describe_forward(plan.forward, plan.bytes(), p);
}

std::string describe(const BackwardPlan& plan, const Problem& p) {
  const BackwardTiling& t = plan.tiling;
  std::vector<std::vector<int64_t>> items;
  for (const BackwardItem& w : plan.items) items.push_back({w.batch, w.kv_head, w.key0, w.key1, w.part});
  auto sequences = [&](int64_t b) { return p.seq[b]; };
  return describe_pairs<PairStream<const BackwardItem*, decltype(sequences)>>(plan, sequences)
      .add("items", items)
      .add("workspaces", sizes({{"S rings, float32", t.ws.score},
                                {"dP rings, float32", t.ws.grad},
                                {"P rings, 16 bit", t.ws.prob},
                                {"dS rings, 16 bit", t.ws.dscore},
                                {"delta", t.ws.delta},
                                {"dQ sums, float32", t.ws.dq},
                                {"dK sums, float32", t.ws.dk},
                                {"dV sums, float32", t.ws.dv},
                                {"copies of K and V without NaN", t.a.guard ? t.ws.guard.flags : t.ws.end},
                                {"", t.ws.end}}))
      .text();
}

std::string describe(const BiasGradPlan& plan) {
  std::vector<std::vector<int64_t>> items;
  for (const BiasItem& w : plan.items)
    items.push_back({w.batch0, w.batch1, w.head0, w.head1, w.row0, w.row1, w.key0, w.key1});
  return describe_pairs<BiasStream<const BiasItem*, int>>(plan, 0).add("items", items).text();
}

}  // namespace msf
