#include "ascendc/twin_lib/launching.h"

#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "ascendc/op_host/presets.h"
#include "ascendc/twin_lib/run.h"

namespace msf {

namespace {

struct Settings {
  Soc soc = soc_by_name("910B3");
  bool effects = true, strict = true, reverse = false, on_device = false;
  TilingChoice choice;
};
Settings settings;

thread_local std::string report_text;

int64_t number(const std::string& key, const std::string& value) {
  size_t used = 0;
  const int64_t n = std::stoll(value, &used);
  if (used != value.size() || n < 0)
    throw std::invalid_argument("'" + key + "' must be a number >= 0, but got '" + value + "'.");
  return n;
}

std::string to_json(const ms_twin::Report& r) {
  std::ostringstream s;
  s << "{\"cycles\": [" << r.cycles[0] << ", " << r.cycles[1] << "], \"cube_cycles\": " << r.cube_cycles
    << ", \"cube_fraction\": [" << r.CubeFraction(0) << ", " << r.CubeFraction(1) << "], \"read\": " << r.gm.read
    << ", \"written\": " << r.gm.written << ", \"violations\": " << r.violation_count << ", \"buffers\": {";
  const char* between = "";
  for (const auto& [name, buffer] : r.gm.by_buffer) {
    s << between << "\"" << name << "\": [" << buffer.read << ", " << buffer.written << "]";
    between = ", ";
  }
  s << "}, \"cores\": [";
  between = "";
  for (const ms_twin::CoreReport& core : r.cores) {
    s << between << "{\"name\": \"" << core.name << "\", \"end\": [" << core.end[0] << ", " << core.end[1]
      << "], \"pipes\": {";
    const char* comma = "";
    for (int pipe = 0; pipe < ms_twin::kPipes; ++pipe) {
      if (!core.pipe[pipe].instructions) continue;
      s << comma << "\"" << ms_twin::PipeName(pipe) << "\": [" << core.pipe[pipe].busy[0] << ", "
        << core.pipe[pipe].busy[1] << ", " << core.pipe[pipe].instructions << "]";
      comma = ", ";
    }
    s << "}}";
    between = ", ";
  }
  s << "]}";
  return s.str();
}

// Sums over the launches of one kernel.
struct Total {
  int64_t launches = 0, read = 0, written = 0, violations = 0;
  double cycles[2] = {0, 0};
};
std::map<std::string, Total> totals_by_kernel;
std::mutex totals_mutex;

}  // namespace

const Soc& soc() { return settings.soc; }

TilingChoice chosen(const Problem& p, bool backward) {
  TilingChoice choice = choose_tiling(p, settings.soc, backward);
  if (settings.choice.block_m) choice.block_m = settings.choice.block_m;
  if (settings.choice.stack_n) choice.stack_n = settings.choice.stack_n;
  if (settings.choice.depth) choice.depth = settings.choice.depth;
  choice.atomic = settings.choice.atomic;
  choice.serial = settings.choice.serial, choice.single_buffer = settings.choice.single_buffer;
  return choice;
}

ms_twin::Options options(int32_t cores) {
  ms_twin::Options o;
  o.blocks = cores;
  o.strict_pipe = settings.strict;
  o.effects = o.hazards = settings.effects;
  o.reverse_order = settings.reverse;
  o.whole_outputs = settings.effects;
  return o;
}

void finish(const char* kernel, const ms_twin::Report& report) {
  report_text = to_json(report);
  {
    const std::lock_guard<std::mutex> lock(totals_mutex);
    Total& total = totals_by_kernel[kernel];
    ++total.launches;
    total.read += report.gm.read, total.written += report.gm.written, total.violations += report.violation_count;
    for (int i : {0, 1}) total.cycles[i] += report.cycles[i];
  }
  if (!report.ok()) throw std::runtime_error("the twin reports\n" + report.Text());
}

void configure(const std::string& key, const std::string& value) {
  TilingChoice& c = settings.choice;
  if (key == "soc")
    settings.soc = soc_by_name(value);
  else if (key == "cores")
    settings.soc.cores = number(key, value) ? int32_t(number(key, value)) : soc_by_name(settings.soc.name).cores;
  else if (key == "effects")
    settings.effects = number(key, value) != 0;
  else if (key == "strict")
    settings.strict = number(key, value) != 0;
  else if (key == "reverse")
    settings.reverse = number(key, value) != 0;
  else if (key == "on_device")
    settings.on_device = number(key, value) != 0;
  else if (key == "atomic")
    c.atomic = number(key, value) != 0;
  else if (key == "serial")
    c.serial = number(key, value) != 0;
  else if (key == "single_buffer")
    c.single_buffer = number(key, value) != 0;
  else if (key == "block_m")
    c.block_m = number(key, value);
  else if (key == "stack_n")
    c.stack_n = number(key, value);
  else if (key == "depth")
    c.depth = number(key, value);
  else
    throw std::invalid_argument("there is no setting '" + key + "'.");
}

bool on_device() { return settings.on_device; }

const std::string& last_report() { return report_text; }

std::string totals(bool reset) {
  const std::lock_guard<std::mutex> lock(totals_mutex);
  std::ostringstream s;
  const char* comma = "";
  s << "{";
  for (const auto& [kernel, t] : totals_by_kernel) {
    s << comma << "\"" << kernel << "\": {\"launches\": " << t.launches << ", \"violations\": " << t.violations
      << ", \"cycles\": [" << t.cycles[0] << ", " << t.cycles[1] << "], \"read\": " << t.read
      << ", \"written\": " << t.written << "}";
    comma = ", ";
  }
  s << "}";
  if (reset) totals_by_kernel.clear();
  return s.str();
}

}  // namespace msf
