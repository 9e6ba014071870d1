// Host tiling: from a problem and a chip to block sizes, buffers, and who computes what. Needs no CANN.
#pragma once
#include <string>
#include <vector>

#include "ascendc/op_host/soc.h"
#include "ascendc/tiling_data.h"
#include "common/problem.h"
#include "cpu/cache.h"

namespace msf {

// What may be chosen from outside; 0: by the tiling.
struct TilingChoice {
  int64_t block_m = 0, stack_n = 0, depth = 0;
  bool atomic = false;  // backward: all cores add to one dQ, in whatever order
  // For the cycle model alone, which does not compute: the cube waits for the vectors after every stack; one buffer in
  // L1 where there are several.
  bool serial = false, single_buffer = false;

  // From the environment: MS_FLASH_BLOCK_M, MS_FLASH_BLOCK_N (keys per stack), MS_FLASH_DEPTH.
  static TilingChoice from_environment();
};

struct ForwardPlan {
  ForwardTiling tiling{};
  std::vector<WorkItem> items;
  std::vector<MergeItem> merges;

  std::vector<uint8_t> bytes() const;                  // the tiling buffer
  int64_t workspace() const { return tiling.ws.end; }  // without what the system reserves
  std::vector<double> cost_per_core() const;           // in products of 16 x 16 x 16
  double imbalance() const;                            // largest over mean cost, minus 1
};

template <class Item>
struct GradientPlan {
  BackwardTiling tiling{};
  std::vector<Item> items;
  std::vector<double> costs;  // of the items

  std::vector<uint8_t> bytes() const;
  int64_t workspace() const { return tiling.ws.end; }
  std::vector<double> cost_per_core() const;
  double imbalance() const;
};
using BackwardPlan = GradientPlan<BackwardItem>;
using BiasGradPlan = GradientPlan<BiasItem>;

// What surrounds the attention of a block: sizes of the activations, and where each weight lies.
struct BlockShape {
  struct Weight {
    int64_t offset = 0, pitch = 0, bias_offset = 0;  // in elements
    bool transposed = false;                         // stored (in, out)
  };
  int64_t embed = 0, k_embed = 0, v_embed = 0, out = 0;  // channels of x, of the contexts, of y; 0: no projection
  Weight q, k, v, o;
};

struct BlockPlan {
  BlockTiling tiling{};
  ForwardPlan forward;

  std::vector<uint8_t> bytes() const;
  int64_t workspace() const { return tiling.ws.end; }
};

struct DecodePlan {
  DecodeTiling tiling{};
  ForwardPlan forward;

  std::vector<uint8_t> bytes() const;
  int64_t workspace() const { return forward.workspace(); }
};

// Throw std::invalid_argument for what the kernels do not take.
ForwardPlan plan_forward(const Problem& p, const Soc& soc, const TilingChoice& choice = {});
BackwardPlan plan_backward(const Problem& p, const Soc& soc, const TilingChoice& choice = {});
BiasGradPlan plan_bias_grad(const Problem& p, const Soc& soc, const TilingChoice& choice = {});

BlockPlan plan_block(const Problem& attention, const BlockShape& shape, const Soc& soc,
                     const TilingChoice& choice = {});

// Attention over caches (Problem::cached); `appends` is empty, or the keys and the values that go there first.
DecodePlan plan_decode(const Problem& p, const std::vector<Append>& appends, const Soc& soc,
                       const TilingChoice& choice = {});

MergeTiling plan_merge(const Merge& m, const Soc& soc);

AttentionTiling attention_tiling(const Problem& p);

}  // namespace msf
