// What a launch tells: the violations it met and what the model says of its time and traffic.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "names.h"

namespace ms_twin {

inline std::string Format(const char* format, va_list args) {
  va_list copy;
  va_copy(copy, args);
  const int size = std::vsnprintf(nullptr, 0, format, copy);
  va_end(copy);
  std::string text(static_cast<size_t>(size), '\0');
  std::vsnprintf(&text[0], static_cast<size_t>(size) + 1, format, args);
  return text;
}

#if defined(__GNUC__)
__attribute__((format(printf, 1, 2)))
#endif
inline std::string Format(const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::string text = Format(format, args);
  va_end(args);
  return text;
}

// Where the kernel called an instruction. Every public function takes one as its last parameter, filled in by the
// compiler at the caller's line.
struct Site {
  const char* file = "";
  int line = 0;
  static constexpr Site Here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

enum class Fault : uint8_t {
  raw,            // reads what another access may not have written yet
  war,            // overwrites what another access may still read
  waw,            // overwrites what another access may write later
  bounds,         // outside the tensor, the buffer or the memory
  capacity,       // more than the memory holds
  alignment,      // an address or a length off its granule
  parameter,      // a field out of its range or a combination the hardware has not
  uninitialised,  // a value that nobody wrote is used
  flag,           // SetFlag and WaitFlag do not pair
  queue,          // TQue used against its rules
  atomic,         // atomic mode left on, or used where it is not
  mask,           // mask registers left in a state the next instruction does not expect
  core,           // an instruction the core does not have
  deadlock,       // cores wait for each other, or for nobody
};

inline const char* FaultName(Fault fault) {
  static const char* const names[] = {"RAW",           "WAR",  "WAW",   "bounds", "capacity", "alignment", "parameter",
                                      "uninitialised", "flag", "queue", "atomic", "mask",     "core",      "deadlock"};
  return names[static_cast<int>(fault)];
}

struct Violation {
  Fault fault;
  std::string text;  // the whole message, with file:line, core, pipe and instruction of both sides
  std::string file;
  int line;
  std::string other_file;  // the earlier access of a hazard
  int other_line;
  int64_t times;  // how often it happened
};

enum Scenario { kFast, kSlow, kScenarios };  // the two ends of the published cost figures

struct PipeReport {
  int64_t instructions = 0;
  double busy[kScenarios] = {0, 0};  // cycles
};

struct CoreReport {
  std::string name;  // "AIC 0", "AIV 1"
  PipeReport pipe[kPipes];
  double end[kScenarios] = {0, 0};  // cycles from launch to the last completion
  double cube_cycles = 0;           // fractal products: what the cube needs at its peak
};

// What a stretch of the critical path was spent on: a pipe of an AIC, a pipe of an AIV, or a flag on its way between
// cores.
constexpr int kPathParts = 2 * kPipes + 1;
constexpr int kPathFlags = 2 * kPipes;
inline std::string PathPartName(int part) {
  if (part == kPathFlags) return "cross-core flags";
  return std::string(part < kPipes ? "AIC " : "AIV ") + PipeName(part % kPipes);
}

struct Traffic {
  struct Buffer {
    int64_t read = 0, written = 0, size = 0;
  };
  int64_t read = 0, written = 0;  // bytes that crossed between GM and the cores, exact
  std::map<std::string, Buffer> by_buffer;
};

struct Report {
  std::vector<Violation> violations;
  int64_t violation_count = 0;
  std::vector<CoreReport> cores;
  Traffic gm;
  double cycles[kScenarios] = {0, 0};            // the longest core
  double cube_cycles = 0;                        // of the busiest AIC
  double critical[kScenarios][kPathParts] = {};  // cycles of the longest path, by what they were spent on

  bool ok() const { return violation_count == 0; }
  // Of the cube's peak over the whole launch: at the fast and at the slow end of the range.
  double CubeFraction(int scenario) const {
    double total = 0;
    int cubes = 0;
    for (const CoreReport& core : cores)
      if (core.name.compare(0, 3, "AIC") == 0) total += core.cube_cycles, ++cubes;
    return cubes && cycles[scenario] > 0 ? total / (cubes * cycles[scenario]) : 0;
  }
  std::string Text(size_t limit = 20) const {
    std::string out;
    for (size_t i = 0; i < violations.size() && i < limit; ++i) {
      out += violations[i].text;
      if (violations[i].times > 1) out += "  [" + std::to_string(violations[i].times) + " times]";
      out += "\n";
    }
    if (violations.size() > limit) out += "... and " + std::to_string(violations.size() - limit) + " more\n";
    return out;
  }

  // The model's figures, as text: cycles, busy share of every pipe of the cores that ran longest, critical path,
  // traffic.
  std::string Table() const {
    std::string out = Format("cycles %.0f .. %.0f, cube at %.1f %% .. %.1f %% of its peak\n", cycles[kFast],
                             cycles[kSlow], 100 * CubeFraction(kSlow), 100 * CubeFraction(kFast));
    for (const char* kind : {"AIC", "AIV"}) {
      const CoreReport* longest = nullptr;
      for (const CoreReport& core : cores)
        if (core.name.compare(0, 3, kind) == 0 && (!longest || core.end[kSlow] > longest->end[kSlow])) longest = &core;
      if (!longest) continue;
      out += longest->name + ":";
      for (int pipe = 0; pipe < kPipes; ++pipe)
        if (longest->pipe[pipe].instructions)
          out +=
              Format("  %s %.0f %% .. %.0f %%", PipeName(pipe), 100 * longest->pipe[pipe].busy[kFast] / cycles[kFast],
                     100 * longest->pipe[pipe].busy[kSlow] / cycles[kSlow]);
      out += "\n";
    }
    out += "critical path:";
    for (int part = 0; part < kPathParts; ++part)
      if (critical[kFast][part] > 0 || critical[kSlow][part] > 0)
        out += Format("  %s %.0f %% .. %.0f %%", PathPartName(part).c_str(),
                      100 * critical[kFast][part] / cycles[kFast], 100 * critical[kSlow][part] / cycles[kSlow]);
    out += Format("\nGM: %lld bytes read, %lld written\n", static_cast<long long>(gm.read),
                  static_cast<long long>(gm.written));
    return out;
  }
};

}  // namespace ms_twin
