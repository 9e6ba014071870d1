// Flags between pipes, barriers within one, flags between cores, SyncAll.
#pragma once
#include "cost.h"
#include "machine.h"

namespace ms_twin {

// The pairs of pipes the hardware has a flag for (NPU arch 2201).
inline bool LegalEvent(CoreKind kind, int source, int target) {
  const auto pair = [&](int s, int t) { return s == source && t == target; };
  if (kind == CoreKind::aiv) {
    const auto on_aiv = [](int p) { return p == PIPE_S || p == PIPE_V || p == PIPE_MTE2 || p == PIPE_MTE3; };
    return source != target && on_aiv(source) && on_aiv(target);
  }
  return pair(PIPE_M, PIPE_MTE1) || pair(PIPE_MTE1, PIPE_M) || pair(PIPE_M, PIPE_MTE2) || pair(PIPE_M, PIPE_FIX) ||
         pair(PIPE_FIX, PIPE_M) || pair(PIPE_MTE1, PIPE_MTE2) || pair(PIPE_MTE2, PIPE_MTE1) ||
         pair(PIPE_MTE1, PIPE_MTE3) || pair(PIPE_MTE3, PIPE_MTE1) || pair(PIPE_MTE1, PIPE_FIX) ||
         pair(PIPE_FIX, PIPE_MTE1) || pair(PIPE_MTE2, PIPE_M) || pair(PIPE_MTE2, PIPE_MTE3) ||
         pair(PIPE_MTE3, PIPE_MTE2) ||
         // The scalar unit's own pairs exist on the AIC for GetValue and SetValue on GM.
         pair(PIPE_MTE2, PIPE_S) || pair(PIPE_S, PIPE_MTE2) || pair(PIPE_FIX, PIPE_S) || pair(PIPE_M, PIPE_S) ||
         pair(PIPE_MTE3, PIPE_S) || pair(PIPE_S, PIPE_MTE3);
}

inline bool CheckEvent(const char* name, int event, int32_t id, Site site) {
  Core& core = Current();
  const int source = event / 8, target = event % 8;
  if (!LegalEvent(core.kind, source, target)) {
    Twin().Violate(
        Fault::flag, site,
        core.name + Format(", %s: there is no flag %s_%s on this core", name, PipeName(source), PipeName(target)));
    return false;
  }
  if (id < 0 || id >= kEventIds) {
    Twin().Violate(
        Fault::parameter, site,
        core.name + Format(", %s %s_%s: id = %d is not within 0..7", name, PipeName(source), PipeName(target), id));
    return false;
  }
  return true;
}

// When all that the pipe was given so far is complete.
inline Moment WhenComplete(const Core& core, int pipe) {
  Moment time = core.issue;
  time.After(core.done[pipe]);
  time.After(core.gate[pipe]);
  return time;
}

inline void SetEvent(int event, int32_t id, Site site) {
  if (!CheckEvent("SetFlag", event, id, site)) return;
  Machine& machine = Twin();
  Core& core = Current();
  const int source = event / 8, target = event % 8;
  EventFlag& flag = core.flags[event * kEventIds + id];
  if (flag.set)
    machine.Violate(Fault::flag, site,
                    core.name + Format(", SetFlag %s_%s, id %d: the flag is set already, by %s:%d", PipeName(source),
                                       PipeName(target), id, flag.site.file, flag.site.line),
                    flag.site);
  flag.set = true;
  flag.clock = machine.CompletedBy(core, source);
  flag.site = site;
  core.issue.Spend(core.Part(PIPE_S), kIssueCycles);
  flag.time = WhenComplete(core, source);
  flag.time.Spend(core.Part(source), kFlagCycles);
}

inline void WaitEvent(int event, int32_t id, Site site) {
  if (!CheckEvent("WaitFlag", event, id, site)) return;
  Machine& machine = Twin();
  Core& core = Current();
  const int source = event / 8, target = event % 8;
  EventFlag& flag = core.flags[event * kEventIds + id];
  if (!flag.set) {
    machine.Violate(
        Fault::flag, site,
        core.name + Format(", WaitFlag %s_%s, id %d: nothing set the flag before; pipe %s would wait for it",
                           PipeName(source), PipeName(target), id, PipeName(target)));
    throw KernelAborted();
  }
  flag.set = false;
  machine.Absorb(core, target);
  machine.Learn(core, target, flag.clock);
  core.issue.Spend(core.Part(PIPE_S), kIssueCycles);
  Moment time = flag.time;
  time.Spend(core.Part(target), kFlagCycles);
  (target == PIPE_S ? core.issue : core.gate[target]).After(time);
}

inline void Barrier(int pipe, Site site) {
  Machine& machine = Twin();
  Core& core = Current();
  if (pipe == PIPE_S || (pipe != PIPE_ALL && !core.Has(pipe))) {
    machine.Violate(Fault::parameter, site,
                    core.name + Format(", PipeBarrier: there is no barrier on pipe %s here", PipeName(pipe)));
    return;
  }
  core.issue.Spend(core.Part(PIPE_S), kIssueCycles);
  if (pipe != PIPE_ALL) {
    machine.Absorb(core, pipe);
    core.known[pipe][core.index * 8 + pipe] = core.tick[pipe];
    core.gate[pipe].After(core.done[pipe]);
    return;
  }
  Clock all = core.known[PIPE_S];
  for (int p = 0; p < kPipes; ++p) Join(all, machine.CompletedBy(core, p));
  for (int p = 0; p < kPipes; ++p) core.known[p] = all;
  ++core.issue_version;
  for (int p = 0; p < kPipes; ++p) core.issue.After(core.done[p]);
}

// The cores whose set the waiting core needs, and those that get to know of a set.
inline bool InGroup(const Core& a, const Core& b, int mode) {
  switch (mode) {
    case 0:
      return a.kind == b.kind;
    case 1:
      return a.block == b.block && a.kind == CoreKind::aiv && b.kind == CoreKind::aiv;
    case 2:
      return a.block == b.block && a.kind != b.kind;
    default:
      return false;
  }
}

inline void CrossSet(int mode, pipe_t pipe, uint16_t id, Site site, const char* name = "CrossCoreSetFlag") {
  Machine& machine = Twin();
  Core& core = Current();
  const auto fail = [&](Fault fault, const std::string& what) {
    machine.Violate(fault, site, core.name + ", " + name + ": " + what);
  };
  if (mode > 2) return fail(Fault::parameter, Format("mode %d is none of 0, 1, 2", mode));
  if (mode == 1 && core.kind == CoreKind::aic) return fail(Fault::parameter, "mode 1 is between the AIVs of a core");
  if (pipe == PIPE_S || pipe == PIPE_ALL || !core.Has(pipe))
    return fail(Fault::parameter, Format("pipe %s cannot set it", PipeName(pipe)));
  if (id >= kCrossFlags) return fail(Fault::parameter, Format("flag %d is not within 0..15", id));
  const Clock clock = machine.CompletedBy(core, pipe);
  core.issue.Spend(core.Part(PIPE_S), kIssueCycles);
  Moment time = WhenComplete(core, pipe);
  time.Spend(kPathFlags, kCrossCoreCycles);
  for (auto& other : machine.cores) {
    if (!InGroup(core, *other, mode)) continue;
    CrossFlag& flag = other->cross[id];
    bool idle = true;
    for (auto& [sender, queue] : flag.from) idle = idle && queue.empty();
    if (!idle && flag.mode != mode)
      return fail(Fault::flag,
                  Format("flag %d of %s still counts sets of mode %d", id, other->name.c_str(), flag.mode));
    flag.mode = mode;
    auto& queue = flag.from[core.index];
    queue.push_back({clock, time, pipe, site});
    if (static_cast<int>(queue.size()) > kCrossFlagMax)
      return fail(Fault::flag, Format("flag %d of %s passes 15", id, other->name.c_str()));
  }
}

inline void CrossWait(uint16_t id, Site site, int expected_mode = -1) {
  Machine& machine = Twin();
  Core& core = Current();
  if (id >= kCrossFlags) {
    machine.Violate(Fault::parameter, site, core.name + Format(", CrossCoreWaitFlag: flag %d is not within 0..15", id));
    return;
  }
  CrossFlag& flag = core.cross[id];
  const auto needed = [&machine, &core, &flag, expected_mode] {
    std::vector<int> senders;
    const int mode = expected_mode >= 0 ? expected_mode : flag.mode;
    for (auto& other : machine.cores)
      if (InGroup(*other, core, mode)) senders.push_back(other->index);
    return senders;
  };
  machine.Wait(
      [&flag, needed] {
        if (flag.mode < 0) return false;
        for (int sender : needed()) {
          const auto queue = flag.from.find(sender);
          if (queue == flag.from.end() || queue->second.empty()) return false;
        }
        return true;
      },
      Format("cross-core flag %d", id), site);
  core.issue.Spend(core.Part(PIPE_S), kIssueCycles);
  for (int sender : needed()) {
    auto& queue = flag.from[sender];
    // Sets from different pipes may arrive in any order: then only what all of them knew is known.
    Clock clock = queue.front().clock;
    for (const auto& arrival : queue)
      if (arrival.pipe != queue.front().pipe)
        for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::min(clock[i], arrival.clock[i]);
    machine.Learn(core, PIPE_S, clock);
    core.issue.After(queue.front().time);
    queue.pop_front();
  }
}

}  // namespace ms_twin

namespace AscendC {

template <HardEvent event>
void SetFlag(int32_t id, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::SetEvent(static_cast<int>(event), id, site);
}
template <HardEvent event>
void WaitFlag(int32_t id, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::WaitEvent(static_cast<int>(event), id, site);
}
template <pipe_t pipe>
void PipeBarrier(ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::Barrier(pipe, site);
}
template <uint8_t mode, pipe_t pipe>
void CrossCoreSetFlag(uint16_t id, ms_twin::Site site = ms_twin::Site::Here()) {
  if (id >= 11 && id <= 14) ms_twin::Twin().system_flag = site;
  ms_twin::CrossSet(mode, pipe, id, site);
}
// On this hardware the template arguments have no effect: the wait holds back every pipe of the core.
template <uint8_t mode = 0, pipe_t pipe = PIPE_S>
void CrossCoreWaitFlag(uint16_t id, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::CrossWait(id, site);
}

// Vector cores only, or cube and vector: AIC waits for its AIVs, then all AICs for each other, then the AIVs for them.
// It begins with a barrier on all pipes, since everything before it has to be complete.
template <bool isAIVOnly = true>
void SyncAll(ms_twin::Site site = ms_twin::Site::Here()) {
  using namespace ms_twin;
  constexpr uint16_t kAll = 11, kCube = 12, kVectorToCube = 13, kCubeToVector = 14;
  Core& core = Current();
  Twin().sync_all = site;
  Barrier(PIPE_ALL, site);
  if (isAIVOnly) {
    if (core.kind == CoreKind::aic) {
      Twin().Violate(Fault::core, site, core.name + ", SyncAll<true>: only vector cores take part");
      return;
    }
    CrossSet(0, PIPE_MTE3, kAll, site, "SyncAll");
    CrossWait(kAll, site, 0);
  } else if (core.kind == CoreKind::aic) {
    CrossWait(kVectorToCube, site, 2);
    CrossSet(0, PIPE_FIX, kCube, site, "SyncAll");
    CrossWait(kCube, site, 0);
    CrossSet(2, PIPE_FIX, kCubeToVector, site, "SyncAll");
  } else {
    CrossSet(2, PIPE_MTE3, kVectorToCube, site, "SyncAll");
    CrossWait(kCubeToVector, site, 2);
  }
}

inline int64_t GetBlockIdx() {
  const ms_twin::Core& core = ms_twin::Current();
  const ms_twin::Options& options = ms_twin::Twin().options;
  if (core.kind == ms_twin::CoreKind::aic || !options.has_aic) return core.block;
  return core.block * options.aiv_per_block + core.sub;
}
inline int64_t GetBlockNum() { return ms_twin::Twin().options.blocks; }
inline int64_t GetSubBlockIdx() { return ms_twin::Current().sub; }
inline int64_t GetSubBlockNum() { return ms_twin::Twin().options.has_aic ? ms_twin::Twin().options.aiv_per_block : 1; }
inline int64_t GetTaskRation() { return GetSubBlockNum(); }
inline int64_t GetTaskRatio() { return GetSubBlockNum(); }
inline void InitSocState() {}

}  // namespace AscendC
