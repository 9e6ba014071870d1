// Running a kernel on the twin.
//
//   ms_twin::Options options;
//   options.blocks = 2;                               // 2 AIC, 4 AIV; aiv_per_block, has_aic for other mixtures
//   ms_twin::Launch launch(options);
//   GM_ADDR q = launch.Input(q_data, q_bytes, "q");    // the kernel may only read it
//   GM_ADDR o = launch.Output(o_data, o_bytes, "o");   // poisoned now; a value that nobody computed must not get here
//   GM_ADDR d = launch.InOut(d_data, d_bytes, "d");    // holds values already
//   GM_ADDR ws = launch.Workspace(user_bytes);         // GetUserWorkspace(ws) skips the 16 MiB in front of them
//   GM_ADDR td = launch.Tiling(tiling_struct);         // copied
//   ms_twin::Report report = launch.Run([&] { kernel(q, o, d, ws, td); });
//   if (!report.ok()) puts(report.Text().c_str());
//
// The lambda runs once per core. Buffers must outlive Run; a null pointer may be passed for an absent input, it is no
// buffer. One launch runs once. Several threads may each run a launch of their own.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "machine.h"

namespace ms_twin {

class Launch {
 public:
  explicit Launch(const Options& options) { machine_.options = options; }

  uint8_t* Input(const void* data, uint64_t bytes, const char* name) {
    return Attach(const_cast<void*>(data), bytes, name, Role::input);
  }
  uint8_t* Output(void* data, uint64_t bytes, const char* name) { return Attach(data, bytes, name, Role::output); }
  uint8_t* InOut(void* data, uint64_t bytes, const char* name) { return Attach(data, bytes, name, Role::inout); }
  uint8_t* Workspace(uint64_t user_bytes, const char* name = "workspace") {
    owned_.push_back(MakeZeroed<uint8_t>(kReservedWorkspace + user_bytes));
    uint8_t* base = owned_.back().get();
    Attach(base + kReservedWorkspace, user_bytes, name, Role::workspace);
    return base;
  }
  template <class T>
  uint8_t* Tiling(const T& tiling) {
    return Tiling(&tiling, sizeof(T));
  }
  uint8_t* Tiling(const void* data, uint64_t bytes) {
    owned_.push_back(MakeZeroed<uint8_t>(bytes));
    std::memcpy(owned_.back().get(), data, bytes);
    return Attach(owned_.back().get(), bytes, "tiling", Role::input);
  }

  Report Run(const std::function<void()>& kernel) {
    const Activation activation(&machine_);
    MakeCores();
    for (auto& core : machine_.cores)
      core->fibre = std::make_unique<Fibre>([&kernel] {
        try {
          kernel();
        } catch (const KernelAborted&) {
          Machine::Active()->aborting = true;
        }
      });
    RunCores();
    for (auto& core : machine_.cores) {
      machine_.current = core.get();
      if (!machine_.aborting) CheckEnd(*core);
    }
    if (machine_.options.whole_outputs && machine_.options.effects && !machine_.aborting)
      for (auto& memory : machine_.global) CheckWhole(*memory);
    if (machine_.sync_all.line && machine_.system_flag.line)
      machine_.Violate(Fault::flag, machine_.system_flag, "flags 11 to 14 belong to SyncAll, which this kernel uses",
                       machine_.sync_all);
    Finish();
    return std::move(machine_.report);
  }

 private:
  // This machine is the thread's while it lives; launches may nest.
  struct Activation {
    explicit Activation(Machine* machine) : outer(Machine::Active()) { Machine::Active() = machine; }
    ~Activation() { Machine::Active() = outer; }
    Machine* outer;
  };

  uint8_t* Attach(void* data, uint64_t bytes, const char* name, Role role) {
    if (!data) return nullptr;
    machine_.global.push_back(std::make_unique<Memory>());
    machine_.global.back()->AttachGlobal(data, bytes, name, role, machine_.options.effects);
    return static_cast<uint8_t*>(data);
  }

  void MakeCores() {
    const Options& options = machine_.options;
    const int aiv = options.has_aic ? options.aiv_per_block : 1;
    for (int block = 0; block < options.blocks; ++block) {
      if (options.has_aic) AddCore(CoreKind::aic, block, 0, Format("AIC %d", block));
      for (int sub = 0; sub < aiv; ++sub) AddCore(CoreKind::aiv, block, sub, Format("AIV %d", block * aiv + sub));
    }
    const size_t clock = machine_.cores.size() * 8;
    for (auto& core : machine_.cores)
      for (Clock& known : core->known) known.assign(clock, 0);
  }
  void AddCore(CoreKind kind, int block, int sub, const std::string& name) {
    machine_.cores.push_back(std::make_unique<Core>());
    Core& core = *machine_.cores.back();
    core.kind = kind;
    core.index = static_cast<int>(machine_.cores.size()) - 1;
    core.block = block;
    core.sub = sub;
    core.name = core.report.name = name;
    const bool shadow = machine_.options.effects;
    using AscendC::Hardware;
    if (kind == CoreKind::aiv) {
      core.ub.AllocateLocal(Hardware::UB, "UB", 192 << 10, 2, shadow);
    } else {
      core.l1.AllocateLocal(Hardware::L1, "L1", 512 << 10, kBlock, shadow);
      core.l0a.AllocateLocal(Hardware::L0A, "L0A", 64 << 10, kBlock, shadow);
      core.l0b.AllocateLocal(Hardware::L0B, "L0B", 64 << 10, kBlock, shadow);
      core.l0c.AllocateLocal(Hardware::L0C, "L0C", 128 << 10, kBlock, shadow);
      core.bias.AllocateLocal(Hardware::BIAS, "BT", 1 << 10, kBlock, shadow);
      core.fixbuf.AllocateLocal(Hardware::FIXBUF, "FB", 2 << 10, kBlock, shadow);
      core.unit.resize((128 << 10) / kFractal);
    }
  }

  void RunCores() {
    std::vector<Core*> order;
    for (auto& core : machine_.cores) order.push_back(core.get());
    if (machine_.options.reverse_order) std::vector<Core*>(order.rbegin(), order.rend()).swap(order);
    for (bool running = true; running && !machine_.aborting;) {
      running = false;
      bool moved = false;
      for (Core* core : order) {
        if (core->fibre->done()) continue;
        running = true;
        if (core->ready && !core->ready()) continue;
        moved = true;
        machine_.current = core;
        core->fibre->Resume();
        if (machine_.aborting) break;
      }
      if (running && !moved) {
        ReportDeadlock();
        machine_.aborting = true;
      }
    }
    // Unwind what still stands on a fibre's stack.
    for (Core* core : order) {
      if (!core->fibre->done() && core->ready) {
        machine_.current = core;
        core->fibre->Resume();
      }
    }
  }
  void ReportDeadlock() {
    for (auto& core : machine_.cores)
      if (!core->fibre->done())
        machine_.Violate(Fault::deadlock, core->waits_at, core->name + " waits for " + core->waits_for + ", for ever");
  }

  void CheckEnd(Core& core) {
    for (size_t i = 0; i < core.flags.size(); ++i)
      if (core.flags[i].set)
        machine_.Violate(
            Fault::flag, core.flags[i].site,
            core.name + Format(": the flag %s_%s, id %d is still set at the end of the kernel",
                               PipeName(static_cast<int>(i) / kEventIds / 8),
                               PipeName(static_cast<int>(i) / kEventIds % 8), static_cast<int>(i) % kEventIds));
    for (int id = 0; id < kCrossFlags; ++id)
      for (auto& [sender, arrivals] : core.cross[id].from)
        if (!arrivals.empty())
          machine_.Violate(Fault::flag, arrivals.back().site,
                           core.name + Format(": cross-core flag %d, set by %s, was not waited for", id,
                                              machine_.cores[sender]->name.c_str()));
    if (core.atomic)
      machine_.Violate(Fault::atomic, core.atomic_site,
                       core.name + ": atomic mode is still on at the end of the kernel");
    for (const auto& unit : core.unit)
      if (unit.full) {
        machine_.Violate(Fault::flag, {}, core.name + ": a unit flag of L0C is still set at the end of the kernel");
        break;
      }
  }

  void CheckWhole(const Memory& memory) {
    if (memory.role != Role::output) return;
    const uint8_t *begin = memory.undefined, *end = begin + memory.bytes;
    const auto missing = std::count_if(begin, end, [](uint8_t flag) { return flag != 0; });
    const auto first = std::find_if(begin, end, [](uint8_t flag) { return flag != 0; }) - begin;
    if (missing)
      machine_.Violate(Fault::uninitialised, {memory.name.c_str(), 0},
                       Format("%lld of the %lld bytes of the output %s were not written, the first is %lld",
                              static_cast<long long>(missing), static_cast<long long>(memory.bytes),
                              memory.name.c_str(), static_cast<long long>(first)));
  }

  void Finish() {
    Report& report = machine_.report;
    for (auto& core : machine_.cores) {
      Moment end = core->issue;
      for (const Moment& done : core->done) end.After(done);
      for (int s = 0; s < kScenarios; ++s) {
        core->report.end[s] = end.at[s];
        if (end.at[s] <= report.cycles[s]) continue;
        report.cycles[s] = end.at[s];
        for (int part = 0; part < kPathParts; ++part) report.critical[s][part] = end.path[s][part];
      }
      report.cube_cycles = std::max(report.cube_cycles, core->report.cube_cycles);
      report.cores.push_back(core->report);
    }
  }

  Machine machine_;
  std::vector<Zeroed<uint8_t>> owned_;
};

}  // namespace ms_twin
