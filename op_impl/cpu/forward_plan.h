// The tasks of a forward, balanced by work: which rows and keys each takes, and which go together.
//
// A task owns some query rows of one (batch, kv head), all heads of its group. Where those are too few tasks, as in
// decoding, or one sequence is much longer than the others, its keys are split as well and the parts merged in fixed
// order. How many parts depends on the problem alone, so results are the same for any number of threads.
#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>  // of types of this file only: see simd.h on names shared between builds

#include "common/problem.h"

namespace {

struct ForwardTask {
  int64_t b, kv_head, row0, row1, key0, key1, part, parts, slot;
  double cost;
};

struct ForwardPlan {
  std::vector<ForwardTask> tasks;  // in the order in which they start
  int64_t slots = 0;               // places for parts to be merged
};

// Tasks of the same keys and values follow each other, on a thread of their own while all take the same time, and find
// them in its cache. The last ones, as much work as it takes to level what the threads have had by then, go by weight,
// so that the last to run are short.
inline void order_tasks(std::vector<ForwardTask>* tasks, int64_t threads) {
  threads = std::max<int64_t>(threads, 1);
  struct Group {
    size_t first, count;
    double cost;
  };
  std::stable_sort(tasks->begin(), tasks->end(), [](auto& x, auto& y) {
    return x.b != y.b ? x.b < y.b : x.kv_head != y.kv_head ? x.kv_head < y.kv_head : x.cost > y.cost;
  });
  std::vector<Group> groups;
  double heaviest = 0;
  for (size_t i = 0; i < tasks->size(); ++i) {
    const ForwardTask& t = (*tasks)[i];
    if (!i || t.b != (*tasks)[i - 1].b || t.kv_head != (*tasks)[i - 1].kv_head) groups.push_back({i, 0, 0});
    ++groups.back().count;
    groups.back().cost += t.cost;
    heaviest = std::max(heaviest, t.cost);
  }
  std::stable_sort(groups.begin(), groups.end(), [](auto& x, auto& y) { return x.cost > y.cost; });
  size_t last = groups.size();
  for (double level = 2 * double(threads) * heaviest; last && level > 0; level -= groups[last].cost) --last;

  std::vector<ForwardTask> ordered;
  for (size_t g = 0; g < last; g += size_t(threads)) {
    const size_t end = std::min(last, g + size_t(threads));
    size_t most = 0;
    for (size_t i = g; i < end; ++i) most = std::max(most, groups[i].count);
    for (size_t turn = 0; turn < most; ++turn)
      for (size_t i = g; i < end; ++i)
        if (turn < groups[i].count) ordered.push_back((*tasks)[groups[i].first + turn]);
  }
  const size_t by_weight = ordered.size();
  for (size_t g = last; g < groups.size(); ++g)
    ordered.insert(ordered.end(), tasks->begin() + ptrdiff_t(groups[g].first),
                   tasks->begin() + ptrdiff_t(groups[g].first + groups[g].count));
  std::stable_sort(ordered.begin() + ptrdiff_t(by_weight), ordered.end(),
                   [](auto& x, auto& y) { return x.cost > y.cost; });
  tasks->swap(ordered);
}

inline ForwardPlan plan_forward(const msf::Problem& p, int64_t block_m, int64_t keys_per_part, int64_t threads) {
  // Rows are cut into as many parts as they have thirty-seconds of all work, so no part is two of them, unless it is
  // shorter than two times keys_per_part. Counting blocks instead left a sequence of 16384 among 63 of 40 in one task:
  // 1.7 times an equal share with two threads.
  constexpr int64_t kEnoughTasks = 32;
  auto each_block = [&](auto f) {
    for (int64_t b = 0; b < p.batch; ++b) {
      const msf::Band band = p.band(b);
      const int64_t rows = p.seq[b].q_len * p.group();
      for (int64_t row0 = 0; row0 < rows; row0 += block_m) {
        const int64_t row1 = std::min(rows, row0 + block_m);
        const int64_t lo = band.begin(row0 / p.group()), hi = band.end((row1 - 1) / p.group());
        f(b, row0, row1, lo, std::max<int64_t>(hi - lo, 0));
      }
    }
  };
  double total = 0;
  each_block([&](int64_t, int64_t row0, int64_t row1, int64_t, int64_t keys) {
    total += double(keys) * double(row1 - row0) * double(p.kv_heads);
  });
  ForwardPlan plan;
  each_block([&](int64_t b, int64_t row0, int64_t row1, int64_t lo, int64_t keys) {
    const double cost = double(keys) * double(row1 - row0);
    const int64_t shares = total > 0 ? int64_t(cost * kEnoughTasks / total) : 0;
    const int64_t parts =
        std::max<int64_t>(1, p.splits ? std::min(p.splits, keys) : std::min(shares, keys / keys_per_part));
    for (int64_t h = 0; h < p.kv_heads; ++h) {
      for (int64_t part = 0; part < parts; ++part)
        plan.tasks.push_back({b, h, row0, row1, lo + keys * part / parts, lo + keys * (part + 1) / parts, part, parts,
                              plan.slots + part, cost / double(parts)});
      if (parts > 1) plan.slots += parts;
    }
  });
  order_tasks(&plan.tasks, threads);
  return plan;
}

}  // namespace
