// The tasks of a forward, balanced by work: which rows and keys each takes, and which go together.
//
// A task owns some query rows of one (batch, kv head), all heads of its group. Where those are too few tasks, as in
// decoding, or one sequence is much longer than the others, its keys are split as well and the parts merged in fixed
// order. How many parts depends on the problem alone, so results are the same for any number of threads.
#pragma once
#include <algorithm>
#include <vector>  // of types of this file only: see simd.h on names shared between builds

#include "common/problem.h"

namespace {

struct ForwardTask {
  int64_t b, kv_head, row0, row1, key0, key1, part, parts, slot;
  double cost;
};

struct ForwardPlan {
  std::vector<ForwardTask> tasks;  // heavy ones first, so that the last to run are short
  int64_t slots = 0;               // places for parts to be merged
};

inline ForwardPlan plan_forward(const msf::Problem& p, int64_t block_m, int64_t keys_per_part) {
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
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(), [](auto& x, auto& y) { return x.cost > y.cost; });
  return plan;
}

}  // namespace
