// The machine: cores with their memories, pipes, flags and clocks; the list of violations; and Instruction, the one way
// by which anything happens on it.
//
// An instruction states its pipe, the regions it reads and writes, its cost and its effect. Instruction::Issue then
// does for all of them alike: checks the core, the bounds and the alignment, checks the order against every earlier
// access to the same bytes, advances the pipe's time, applies the effect, and carries the knowledge of which bytes are
// defined. Effects are applied at issue, in program order: a correctly synchronised kernel has only one outcome, and
// what is not synchronised is reported as a hazard.
#pragma once
#include <array>
#include <cstdarg>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fibre.h"
#include "hazard.h"
#include "memory.h"
#include "names.h"
#include "report.h"

namespace ms_twin {

enum class CoreKind : uint8_t { aic, aiv };

struct Options {
  int blocks = 1;           // AI cores: one AIC and two AIV each
  int aiv_per_block = 2;    // 0: cube only
  bool has_aic = true;      // false: vector only, `blocks` AIVs
  bool strict_pipe = true;  // same-pipe dependences need a PipeBarrier (automatic synchronisation off)
  bool hazards = true;
  bool effects = true;         // false: only the cycle model runs; nothing is computed, copied or checked for order
  bool whole_outputs = false;  // every byte of every output has to be written
  uint64_t tiling_key = 0;
  size_t max_violations = 200;
  // Instead of AIC 0, AIV 0, AIV 1, AIC 1, ...: cores run in the reverse order. A correct kernel gives the same result.
  bool reverse_order = false;
};

// A point in time at both ends of the published figures, and what the way to it was spent on: the critical path is that
// of the last completion.
struct Moment {
  double at[kScenarios] = {0, 0};
  float path[kScenarios][kPathParts] = {};

  void After(const Moment& other) {  // not before `other`
    for (int s = 0; s < kScenarios; ++s) {
      if (other.at[s] <= at[s]) continue;
      at[s] = other.at[s];
      std::memcpy(path[s], other.path[s], sizeof path[s]);
    }
  }
  void Spend(int part, const double (&cycles)[kScenarios]) {
    for (int s = 0; s < kScenarios; ++s) {
      at[s] += cycles[s];
      path[s][part] += static_cast<float>(cycles[s]);
    }
  }
};

// occupancy: how long the pipe can start nothing else. latency: how much later the result is complete, which only who
// waits for it pays.
struct Cost {
  double occupancy[kScenarios] = {1, 1};
  double latency[kScenarios] = {0, 0};
  double cube = 0;  // fractal products
};

struct KernelAborted {};  // unwinds a fibre after a fault nothing can follow

struct EventFlag {
  bool set = false;
  Clock clock;
  Moment time;
  Site site;
};

// A counter of CrossCoreSetFlag. What the k-th wait learns is what the k-th set knew.
struct CrossFlag {
  struct Arrival {
    Clock clock;
    Moment time;
    pipe_t pipe;
    Site site;
  };
  std::map<int, std::deque<Arrival>> from;  // by sending core
  int mode = -1;
};

struct MaskState {
  bool counter = false;
  uint64_t bits[2] = {~0ull, ~0ull};  // normal mode: lanes; counter mode: bits[0] = number of elements
};

struct Core {
  CoreKind kind;
  int index, block, sub;
  std::string name;
  Memory ub, l1, l0a, l0b, l0c, bias, fixbuf;

  uint32_t tick[8] = {};
  Clock known[8];
  uint64_t issue_version = 1, seen_version[8] = {};
  std::array<EventFlag, 64 * kEventIds> flags;
  std::array<CrossFlag, kCrossFlags> cross;

  MaskState mask;
  uint64_t compare_mask[2] = {0, 0};
  int atomic = 0;  // 0: off, else an AtomicKind
  const char* atomic_type = "";
  Site atomic_site;
  bool saturate = true;

  // L0C unit flags, one per 512 bytes: set by Mmad, cleared by Fixpipe.
  struct UnitFlag {
    bool full = false;
    uint32_t mmad = 0, fixpipe = 0;  // ticks of the last ones
    uint32_t read_out = 0;           // tick of the last Mmad whose result a Fixpipe took
    Moment begin, end;               // of the last instruction
  };
  std::vector<UnitFlag> unit;

  Moment issue, free[8], gate[8], done[8];
  CoreReport report;
  void* pipe = nullptr;  // the TPipe of the kernel

  std::unique_ptr<Fibre> fibre;
  std::function<bool()> ready;  // set while the core waits for another one
  std::string waits_for;
  Site waits_at;

  Memory* MemoryOf(AscendC::Hardware hardware) {
    switch (hardware) {
      case AscendC::Hardware::UB:
        return &ub;
      case AscendC::Hardware::L1:
        return &l1;
      case AscendC::Hardware::L0A:
        return &l0a;
      case AscendC::Hardware::L0B:
        return &l0b;
      case AscendC::Hardware::L0C:
        return &l0c;
      case AscendC::Hardware::BIAS:
        return &bias;
      case AscendC::Hardware::FIXBUF:
        return &fixbuf;
      default:
        return nullptr;
    }
  }
  int Part(int pipe) const { return (kind == CoreKind::aic ? 0 : kPipes) + pipe; }  // of Moment::path
  bool Has(int pipe) const {
    switch (pipe) {
      case PIPE_V:
        return kind == CoreKind::aiv;
      case PIPE_M:
      case PIPE_MTE1:
      case PIPE_FIX:
        return kind == CoreKind::aic;
      default:
        return true;
    }
  }
};

class Machine {
 public:
  Options options;
  std::vector<std::unique_ptr<Core>> cores;
  std::vector<std::unique_ptr<Memory>> global;  // GM buffers, in the order they were given
  History history;
  Report report;
  Core* current = nullptr;
  bool aborting = false;
  Site sync_all, system_flag;  // the last uses of SyncAll and of a cross-core flag that it needs for itself

  static Machine*& Active() {
    static thread_local Machine* machine = nullptr;
    return machine;
  }

  // The buffer that holds p, or ends there.
  Memory* GlobalAt(const void* p) {
    const auto* byte = static_cast<const uint8_t*>(p);
    for (auto& memory : global)
      if (byte >= memory->data && byte < memory->data + memory->bytes) return memory.get();
    for (auto& memory : global)
      if (byte == memory->data + memory->bytes) return memory.get();
    return nullptr;
  }

  void Violate(Fault fault, Site site, const std::string& text, Site other = {}) {
    ++report.violation_count;
    const auto key = std::make_tuple(static_cast<int>(fault), std::string(site.file), site.line,
                                     std::string(other.file), other.line);
    const auto found = seen_.find(key);
    if (found != seen_.end()) {
      ++report.violations[found->second].times;
      return;
    }
    if (report.violations.size() >= options.max_violations) return;
    seen_[key] = report.violations.size();
    report.violations.push_back({fault, Format("%s: %s:%d: ", FaultName(fault), site.file, site.line) + text, site.file,
                                 site.line, other.file, other.line, 1});
  }

  // Parks the running core until `ready` holds.
  void Wait(std::function<bool()> ready, std::string what, Site site) {
    Core& core = *current;
    core.ready = std::move(ready);
    core.waits_for = std::move(what);
    core.waits_at = site;
    while (!core.ready()) {
      core.fibre->Yield();
      if (aborting) throw KernelAborted();
    }
    core.ready = nullptr;
  }

  // What the pipe knows when its next instruction is issued: the scalar unit may have waited meanwhile. The scalar's
  // own accesses are not included: those need a flag.
  void Absorb(Core& core, int pipe) {
    if (pipe == PIPE_S || core.seen_version[pipe] == core.issue_version) return;
    core.seen_version[pipe] = core.issue_version;
    const size_t own_scalar = core.index * 8 + PIPE_S;
    const uint32_t kept = core.known[pipe][own_scalar];
    Join(core.known[pipe], core.known[PIPE_S]);
    core.known[pipe][own_scalar] = kept;
  }
  void Learn(Core& core, int pipe, const Clock& clock) {
    Join(core.known[pipe], clock);
    if (pipe == PIPE_S) ++core.issue_version;
  }
  // What is complete once all earlier work of the pipe is.
  Clock CompletedBy(Core& core, int pipe) {
    Absorb(core, pipe);
    Clock clock = core.known[pipe];
    clock[core.index * 8 + pipe] = core.tick[pipe];
    return clock;
  }

 private:
  std::map<std::tuple<int, std::string, int, std::string, int>, size_t> seen_;
};

inline Machine& Twin() { return *Machine::Active(); }
inline Core& Current() { return *Machine::Active()->current; }

constexpr double kIssueCycles[kScenarios] = {1, 4};  // of the scalar unit, per instruction

class Instruction {
 public:
  Instruction(const char* name, pipe_t pipe, Site site)
      : name_(name), pipe_(pipe), site_(site), machine_(Twin()), core_(*machine_.current) {
    regions_.reserve(4);
    if (!core_.Has(pipe)) Fail(Fault::core, "%s has no pipe %s", core_.name.c_str(), PipeName(pipe));
  }

  const char* name() const { return name_; }
  bool ok() const { return ok_; }

#if defined(__GNUC__)
  __attribute__((format(printf, 3, 4)))
#endif
  void Fail(Fault fault, const char* format, ...) {
    va_list args;
    va_start(args, format);
    const std::string what = ms_twin::Format(format, args);
    va_end(args);
    ok_ = false;
    machine_.Violate(fault, site_, Where() + what);
  }
#if defined(__GNUC__)
  __attribute__((format(printf, 4, 5)))
#endif
  bool Require(bool condition, Fault fault, const char* format, ...) {
    if (condition) return true;
    va_list args;
    va_start(args, format);
    const std::string what = ms_twin::Format(format, args);
    va_end(args);
    ok_ = false;
    machine_.Violate(fault, site_, Where() + what);
    return false;
  }
  // A field the hardware holds in a few bits: beyond them it would wrap.
  void Field(const char* field, int64_t value, int64_t low, int64_t high) {
    Require(value >= low && value <= high, Fault::parameter, "%s = %lld is not within %lld..%lld", field,
            static_cast<long long>(value), static_cast<long long>(low), static_cast<long long>(high));
  }
  void Align(const char* operand, const Region& region, int64_t bytes) {
    const int64_t address = region.memory && region.memory->hardware == AscendC::Hardware::GM
                                ? reinterpret_cast<int64_t>(region.memory->data) + region.offset
                                : region.offset;
    Require(address % bytes == 0, Fault::alignment, "%s is at byte %lld, which is no multiple of %lld", operand,
            static_cast<long long>(region.offset), static_cast<long long>(bytes));
  }

  // Bounds of a region whose content decides what else the instruction touches.
  void CheckRegion(const Region& region) {
    if (!region.Empty()) CheckBounds(region);
  }
  void Read(Region region) { Add(region, Touch::read); }
  void Write(Region region) { Add(region, Touch::write); }
  void Accumulate(Region region) { Add(region, Touch::accumulate); }

  // effect(): applied now. taint(): called instead of marking all written bytes, when a read byte is undefined; it sets
  // the definedness of what is written (data moves do it themselves and pass Moves{}).
  struct Moves {};
  template <class Effect>
  bool Issue(const Cost& cost, Effect&& effect, Moves) {
    if (!Start(cost)) return false;
    if (!machine_.options.effects) return true;
    CheckOutput();
    effect();
    return true;
  }
  template <class Effect>
  bool Issue(const Cost& cost, Effect&& effect) {
    return Issue(cost, effect, [this] {
      for (const Region& region : regions_)
        if (region.touch != Touch::read) MarkUndefined(region, true);
    });
  }
  template <class Effect, class Taint>
  bool Issue(const Cost& cost, Effect&& effect, Taint&& taint) {
    if (!Start(cost)) return false;
    if (!machine_.options.effects) return true;
    bool undefined = false;
    for (const Region& region : regions_)
      undefined = undefined || (region.touch == Touch::read && AnyUndefined(region));
    if (undefined) {
      taint();
    } else {
      for (const Region& region : regions_)
        if (region.touch == Touch::write) MarkUndefined(region, false);
    }
    effect();
    return true;
  }

  std::string Where() const { return Format("%s, pipe %s, %s: ", core_.name.c_str(), PipeName(pipe_), name_); }

 private:
  void Add(Region region, Touch touch) {
    if (region.Empty()) return;
    region.touch = touch;
    regions_.push_back(region);
  }

  bool Start(const Cost& cost) {
    for (const Region& region : regions_) CheckBounds(region);
    if (!ok_) return false;
    machine_.Absorb(core_, pipe_);
    const uint32_t tick = ++core_.tick[pipe_];
    if (machine_.options.effects && machine_.options.hazards) CheckOrder(tick);
    Advance(cost);
    return true;
  }

  // Undefined bytes may be moved about and computed with (the lanes of a tail), but not reach a result.
  void CheckOutput() {
    bool output = false, undefined = false;
    for (const Region& region : regions_) {
      output = output || (region.touch != Touch::read && region.memory->hardware == AscendC::Hardware::GM &&
                          region.memory->role != Role::workspace);
      undefined = undefined || (region.touch == Touch::read && AnyUndefined(region));
    }
    if (output && undefined)
      machine_.Violate(Fault::uninitialised, site_, Where() + "writes bytes to a result that nobody computed");
  }

  void CheckBounds(const Region& region) {
    if (!region.memory) {
      Fail(Fault::bounds, "the address is in no buffer this launch was given");
      return;
    }
    const int64_t low = region.Lowest(), high = region.Highest();
    const char* verb = region.touch == Touch::read ? "reads" : "writes";
    if (low < 0 || high > static_cast<int64_t>(region.memory->bytes)) {
      Fail(Fault::bounds, "%s bytes %lld..%lld of %s, which has %lld", verb, static_cast<long long>(low),
           static_cast<long long>(high), region.memory->name.c_str(), static_cast<long long>(region.memory->bytes));
    } else if (low < region.begin || high > region.end) {
      Fail(Fault::bounds, "%s bytes %lld..%lld of %s, but the tensor is bytes %lld..%lld", verb,
           static_cast<long long>(low), static_cast<long long>(high), region.memory->name.c_str(),
           static_cast<long long>(region.begin), static_cast<long long>(region.end));
    }
    if (region.touch != Touch::read && region.memory->role == Role::input)
      Fail(Fault::bounds, "writes to the input %s", region.memory->name.c_str());
  }

  bool Ordered(uint32_t id, bool trusts_pipe_order) const {
    const Stamp& earlier = machine_.history.At(id);
    if (earlier.tick <= core_.known[pipe_][earlier.core * 8 + earlier.pipe]) return true;
    if (earlier.core != core_.index || earlier.pipe != pipe_) return false;
    return pipe_ == PIPE_S || trusts_pipe_order || !machine_.options.strict_pipe || earlier.tick == core_.tick[pipe_];
  }

  void Hazard(Fault fault, uint32_t id, const Region& region, int64_t offset) {
    const Stamp& e = machine_.history.At(id);
    const char* verb = fault == Fault::raw ? "reads" : "writes";
    const char* earlier = fault == Fault::war ? "read" : "write";
    const Core& other = *machine_.cores[e.core];
    std::string text = Where() + Format("%s %s byte %lld while the %s by %s:%d (%s, pipe %s, %s) may not be complete",
                                        verb, region.memory->name.c_str(), static_cast<long long>(offset), earlier,
                                        e.file, e.line, other.name.c_str(), PipeName(e.pipe), e.name);
    machine_.Violate(fault, site_, text, {e.file, e.line});
  }

  void CheckOrder(uint32_t tick) {
    const bool atomic = core_.atomic != 0;
    const uint32_t me = machine_.history.Add(
        {site_.file, name_, site_.line, tick, static_cast<uint16_t>(core_.index), static_cast<uint8_t>(pipe_), atomic});
    for (const Region& region : regions_)
      if (region.memory->cells) CheckCells(region, me);
    for (const Region& read : regions_)
      for (const Region& write : regions_)
        if (read.touch == Touch::read && write.touch == Touch::write && !read.in_place && read.memory == write.memory &&
            read.Lowest() < write.Highest() && write.Lowest() < read.Highest())
          CheckOverlap(read, me);
  }

  // A source may be the destination itself, but not overlap it in another way.
  void CheckOverlap(const Region& read, uint32_t me) {
    const int64_t granule = read.memory->granule;
    bool found = false;
    read.ForEachRun([&](int64_t offset, int64_t bytes) {
      for (int64_t i = offset / granule; !found && i < (offset + bytes + granule - 1) / granule; ++i)
        if (read.memory->cells[i].writer == me) {
          found = true;
          Report(Fault::parameter, Format("dst and src overlap without being the same, at byte %lld of %s",
                                          static_cast<long long>(i * granule), read.memory->name.c_str()));
        }
    });
  }
  void Report(Fault fault, const std::string& what) { machine_.Violate(fault, site_, Where() + what); }

  void CheckCells(const Region& region, uint32_t me) {
    Cell* cells = region.memory->cells;
    const int64_t granule = region.memory->granule;
    History& history = machine_.history;
    const auto unordered = [&](uint32_t id) { return !Ordered(id, region.trusts_pipe_order); };
    const auto report = [&](uint32_t ids, Fault fault, int64_t cell) {
      history.ForEach(ids, [&](uint32_t id) {
        if (unordered(id)) Hazard(fault, id, region, cell * granule);
      });
    };
    // Cells next to each other mostly have the same history: what was decided for the last one holds for the next.
    Cell last, next;
    bool fresh = true;
    region.ForEachRun([&](int64_t offset, int64_t bytes) {
      const int64_t first = offset / granule, past = (offset + bytes + granule - 1) / granule;
      for (int64_t i = first; i < past; ++i) {
        Cell& cell = cells[i];
        if (!fresh && cell.writer == last.writer && cell.reader == last.reader) {
          cell = next;
          continue;
        }
        fresh = false;
        last = next = cell;
        if (region.touch == Touch::write && cell.writer == me && !region.in_place) {
          Report(Fault::parameter, Format("parts of dst overlap: byte %lld of %s is written twice",
                                          static_cast<long long>(i * granule), region.memory->name.c_str()));
          return;
        }
        switch (region.touch) {
          case Touch::read:
            report(cell.writer, Fault::raw, i);
            // A reader that is ordered before this one need not be kept: who is ordered after this one is after both.
            next.reader = history.With(cell.reader, me, [&](uint32_t id) { return KeepReader(id); });
            break;
          case Touch::write:
            report(cell.writer, Fault::waw, i);
            report(cell.reader, Fault::war, i);
            next = {me, 0};
            break;
          case Touch::accumulate:  // atomics commute with each other
            history.ForEach(cell.writer, [&](uint32_t id) {
              if (!history.At(id).atomic && unordered(id)) Hazard(Fault::waw, id, region, i * granule);
            });
            report(cell.reader, Fault::war, i);
            next = {history.With(cell.writer, me, [&](uint32_t id) { return unordered(id); }), 0};
            break;
        }
        cell = next;
      }
    });
  }
  bool KeepReader(uint32_t id) const {
    const Stamp& e = machine_.history.At(id);
    return e.tick > core_.known[pipe_][e.core * 8 + e.pipe] && !(e.core == core_.index && e.pipe == pipe_);
  }

  void Advance(const Cost& cost) {
    PipeReport& pipe = core_.report.pipe[pipe_];
    ++pipe.instructions;
    core_.report.cube_cycles += cost.cube;
    for (int s = 0; s < kScenarios; ++s) pipe.busy[s] += cost.occupancy[s];
    core_.issue.Spend(core_.Part(PIPE_S), kIssueCycles);
    Moment time = core_.issue;
    time.After(core_.gate[pipe_]);
    if (pipe_ != PIPE_S) time.After(core_.free[pipe_]);
    time.Spend(core_.Part(pipe_), cost.occupancy);
    (pipe_ == PIPE_S ? core_.issue : core_.free[pipe_]) = time;
    time.Spend(core_.Part(pipe_), cost.latency);
    core_.done[pipe_].After(time);
    for (const Region& region : regions_)
      if (region.memory->hardware == AscendC::Hardware::GM) CountTraffic(region);
  }
  void CountTraffic(const Region& region) {
    if (pipe_ == PIPE_S) return;
    Traffic& gm = machine_.report.gm;
    Traffic::Buffer& buffer = gm.by_buffer[region.memory->name];
    buffer.size = static_cast<int64_t>(region.memory->bytes);
    (region.touch == Touch::read ? gm.read : gm.written) += region.Bytes();
    (region.touch == Touch::read ? buffer.read : buffer.written) += region.Bytes();
  }

  const char* name_;
  pipe_t pipe_;
  Site site_;
  Machine& machine_;
  Core& core_;
  std::vector<Region> regions_;
  bool ok_ = true;
};

}  // namespace ms_twin
