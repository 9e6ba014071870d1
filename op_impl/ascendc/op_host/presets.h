// Block sizes from a configuration file, so that they can be changed without compiling anything.
//
// The environment variable MS_FLASH_PRESETS names it. It is YAML of one shape: a list of flow mappings, one per line,
//
//   - {op: forward, soc: 910B3, max_head_dim: 64, min_length: 4096, block_n: 1024}
//
// of conditions (op, soc, dtype, max_head_dim, min_length, max_length; absent ones hold) and choices (block_m, block_n,
// depth). The first line whose conditions hold counts; ../presets.yaml is the one that comes with ms_flash.
#pragma once
#include <string>
#include <vector>

#include "ascendc/op_host/tiling.h"

namespace msf {

struct Preset {
  std::string op, soc, dtype;                                // empty: any
  int64_t max_head_dim = 0, min_length = 0, max_length = 0;  // 0: any
  TilingChoice choice;

  bool holds_for(const Problem& p, const Soc& s, bool backward) const;
};

// Throw std::invalid_argument with the line that is wrong.
std::vector<Preset> parse_presets(const std::string& text, const std::string& name);
std::vector<Preset> read_presets(const std::string& path);

// What is chosen from outside for a problem: the environment's block sizes, then those of the call, then the presets'.
TilingChoice choose_tiling(const Problem& p, const Soc& soc, bool backward);

}  // namespace msf
