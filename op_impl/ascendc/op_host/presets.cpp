#include "ascendc/op_host/presets.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include "ascendc/op_host/tiling_parts.h"

namespace msf {

namespace {

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r"), last = text.find_last_not_of(" \t\r");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

struct Line {
  const std::string& file;
  int number;

  template <class... Parts>
  [[noreturn]] void wrong(const Parts&... parts) const {
    reject("line ", number, " of the presets ", file, " ", parts...);
  }
};

int64_t number_of(const Line& line, const std::string& key, const std::string& value) {
  char* end;
  const long long number = std::strtoll(value.c_str(), &end, 10);
  if (value.empty() || *end || number < 1) line.wrong("must give '", key, "' a number >= 1, but got '", value, "'.");
  return number;
}

void set(const Line& line, const std::string& key, const std::string& value, Preset* preset) {
  const std::pair<const char*, std::string*> words[] = {
      {"op", &preset->op}, {"soc", &preset->soc}, {"dtype", &preset->dtype}};
  for (const auto& [name, field] : words)
    if (key == name) return void(*field = value);
  const std::pair<const char*, int64_t*> numbers[] = {
      {"max_head_dim", &preset->max_head_dim}, {"min_length", &preset->min_length},
      {"max_length", &preset->max_length},     {"block_m", &preset->choice.block_m},
      {"block_n", &preset->choice.stack_n},    {"depth", &preset->choice.depth}};
  for (const auto& [name, field] : numbers)
    if (key == name) return void(*field = number_of(line, key, value));
  line.wrong("has the unknown key '", key, "'.");
}

Preset parse(const Line& line, const std::string& text) {
  if (text.rfind("- {", 0) || text.back() != '}') line.wrong("must be of the form '- {key: value, ...}'.");
  Preset preset;
  std::istringstream items(text.substr(3, text.size() - 4));
  for (std::string item; std::getline(items, item, ',');) {
    const size_t colon = item.find(':');
    if (colon == std::string::npos) line.wrong("has '", trimmed(item), "' without a value.");
    set(line, trimmed(item.substr(0, colon)), trimmed(item.substr(colon + 1)), &preset);
  }
  if (!preset.op.empty() && preset.op != "forward" && preset.op != "backward")
    line.wrong("must name an 'op' of forward, backward, but got '", preset.op, "'.");
  if (!preset.dtype.empty() && preset.dtype != "float16" && preset.dtype != "bfloat16")
    line.wrong("must name a 'dtype' of float16, bfloat16, but got '", preset.dtype, "'.");
  if (!preset.soc.empty()) soc_by_name(preset.soc);
  return preset;
}

}  // namespace

bool Preset::holds_for(const Problem& p, const Soc& s, bool backward) const {
  return (op.empty() || (op == "backward") == backward) && (soc.empty() || soc == s.name) &&
         (dtype.empty() || (dtype == "bfloat16") == (p.q.dtype == DType::bf16)) &&
         (!max_head_dim || std::max(p.d, p.dv) <= max_head_dim) && p.max_k >= min_length &&
         (!max_length || p.max_k <= max_length);
}

std::vector<Preset> parse_presets(const std::string& text, const std::string& name) {
  std::vector<Preset> presets;
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    line = trimmed(line.substr(0, line.find('#')));
    if (!line.empty()) presets.push_back(parse({name, number}, line));
  }
  return presets;
}

std::vector<Preset> read_presets(const std::string& path) {
  std::ifstream file(path);
  if (!file) reject("the presets '", path, "', which MS_FLASH_PRESETS names, cannot be read.");
  std::ostringstream text;
  text << file.rdbuf();
  return parse_presets(text.str(), path);
}

TilingChoice choose_tiling(const Problem& p, const Soc& soc, bool backward) {
  TilingChoice choice;
  const char* path = std::getenv("MS_FLASH_PRESETS");
  if (path && *path) {
    for (const Preset& preset : read_presets(path)) {
      if (!preset.holds_for(p, soc, backward)) continue;
      choice = preset.choice;
      break;
    }
  }
  if (p.block_m) choice.block_m = p.block_m;
  if (p.block_n) choice.stack_n = p.block_n;
  const TilingChoice environment = TilingChoice::from_environment();
  if (environment.block_m) choice.block_m = environment.block_m;
  if (environment.stack_n) choice.stack_n = environment.stack_n;
  if (environment.depth) choice.depth = environment.depth;
  return choice;
}

}  // namespace msf
