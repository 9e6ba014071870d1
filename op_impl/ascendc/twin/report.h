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

struct Traffic {
  int64_t read = 0, written = 0;  // bytes that crossed between GM and the cores, exact
  std::map<std::string, std::pair<int64_t, int64_t>> by_buffer;
};

struct Report {
  std::vector<Violation> violations;
  int64_t violation_count = 0;
  std::vector<CoreReport> cores;
  Traffic gm;
  double cycles[kScenarios] = {0, 0};  // the longest core
  double cube_cycles = 0;              // of the busiest AIC

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
};

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

}  // namespace ms_twin
