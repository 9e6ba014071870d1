// The plan of a forward as plain numbers, for test_forward_plan.py.
#include "cpu/forward_plan.h"

// Nine numbers per task into `fields`, a cost into `costs`; returns how many tasks there are, of which the first `room`
// are written.
extern "C" int64_t plan(int64_t batch, const int64_t* q_lens, const int64_t* k_lens, int64_t heads, int64_t kv_heads,
                        int64_t right, int64_t splits, int64_t block_m, int64_t keys_per_part, int64_t threads,
                        int64_t room, int64_t* fields, double* costs) {
  std::vector<msf::Sequence> sequences;
  for (int64_t b = 0; b < batch; ++b) sequences.push_back({0, 0, q_lens[b], k_lens[b]});
  msf::Problem p;
  p.batch = batch;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.seq = sequences.data();
  p.right = right;
  p.splits = splits;
  const ForwardPlan plan = plan_forward(p, block_m, keys_per_part, threads);
  for (int64_t i = 0; i < std::min<int64_t>(room, plan.tasks.size()); ++i) {
    const ForwardTask& t = plan.tasks[i];
    const int64_t all[] = {t.b, t.kv_head, t.row0, t.row1, t.key0, t.key1, t.part, t.parts, t.slot};
    std::copy(std::begin(all), std::end(all), fields + i * 9);
    costs[i] = t.cost;
  }
  return int64_t(plan.tasks.size());
}
