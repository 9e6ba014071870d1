// The twin's own machinery: fibres, flags, deadlocks, the cycle model's arithmetic, exact traffic, what a launch
// reports. Each CASE is one test of test_twin_core.py; EXPECT notes what does not hold.
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "kernel_operator.h"
#include "launch.h"

namespace {

using namespace AscendC;
using ms_twin::Fault;
using ms_twin::kFast;
using ms_twin::kSlow;
using ms_twin::Launch;
using ms_twin::Options;
using ms_twin::Report;

std::string failure;
std::map<std::string, void (*)()>& Cases() {
  static std::map<std::string, void (*)()> cases;
  return cases;
}
struct Entry {
  Entry(const char* name, void (*body)()) { Cases()[name] = body; }
};
#define CASE(name)                       \
  void name();                           \
  const Entry name##_entry(#name, name); \
  void name()
#define EXPECT(condition) \
  if (!(condition)) failure += ms_twin::Format("line %d: %s\n", __LINE__, #condition)

bool Near(double a, double b) { return std::fabs(a - b) < 1e-6 * std::max(1.0, std::fabs(b)); }
Options Vector(int blocks = 1) {
  Options options;
  options.blocks = blocks;
  options.has_aic = false;
  return options;
}
Options Mixed(int blocks) {
  Options options;
  options.blocks = blocks;
  return options;
}
int Count(const Report& report, Fault fault) {
  int n = 0;
  for (const auto& violation : report.violations) n += violation.fault == fault;
  return n;
}
LocalTensor<float> Ub(uint32_t address, uint32_t elements) { return {TPosition::VECCALC, address, elements}; }
template <class T>
GlobalTensor<T> Gm(uint8_t* p, uint64_t n) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<T*>(p), n);
  return tensor;
}

// ---- cores and their order ----

CASE(block_numbers) {
  std::vector<std::string> seen;
  Launch(Mixed(3)).Run([&] {
    seen.push_back(ms_twin::Current().name + ":" + std::to_string(GetBlockIdx()) + "/" + std::to_string(GetBlockNum()) +
                   ":" + std::to_string(GetSubBlockIdx()) + "/" + std::to_string(GetSubBlockNum()));
  });
  EXPECT(seen.size() == 9);
  EXPECT(seen[0] == "AIC 0:0/3:0/2" && seen[1] == "AIV 0:0/3:0/2" && seen[2] == "AIV 1:1/3:1/2");
  EXPECT(seen[8] == "AIV 5:5/3:1/2");
}

CASE(vector_only_and_cube_only) {
  int aiv = 0, aic = 0;
  const auto count = [&] { (ms_twin::Current().kind == ms_twin::CoreKind::aic ? aic : aiv) += 1; };
  Launch(Vector(5)).Run(count);
  EXPECT(aiv == 5 && aic == 0);
  Options cube;
  cube.blocks = 2;
  cube.aiv_per_block = 0;
  Launch(cube).Run(count);
  EXPECT(aiv == 5 && aic == 2);
}

CASE(fibres_take_turns_at_waits) {
  std::string order;
  Launch(Mixed(1)).Run([&] {
    if (ASCEND_IS_AIC) {
      for (int i = 0; i < 3; ++i) {
        CrossCoreWaitFlag(1);
        order += 'c';
        CrossCoreSetFlag<2, PIPE_FIX>(2);
      }
    } else {
      for (int i = 0; i < 3; ++i) {
        order += 'v';
        CrossCoreSetFlag<2, PIPE_MTE3>(1);
        CrossCoreWaitFlag(2);
      }
    }
  });
  EXPECT(order == "vvcvvcvvc");
}

CASE(deep_stack_in_a_fibre) {
  int64_t sum = 0;
  Launch(Mixed(2)).Run([&] {
    volatile char local[200 << 10];
    for (size_t i = 0; i < sizeof local; i += 4096) local[i] = 1;
    sum += local[4096];
    SyncAll<false>();
    sum += local[8192];
  });
  EXPECT(sum == 12);
}

CASE(launches_nest_and_run_in_threads) {
  Report inner;
  const Report outer = Launch(Vector()).Run([&] {
    inner = Launch(Vector(2)).Run([&] { Duplicate(Ub(0, 64), 1.0f, 64); });
    Duplicate(Ub(0, 64), 1.0f, 64);
  });
  EXPECT(outer.ok() && inner.ok() && outer.cores.size() == 1 && inner.cores.size() == 2);
  std::vector<std::thread> threads;
  std::vector<int> good(4);
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&good, t] {
      for (int i = 0; i < 20; ++i) {
        std::vector<float> x(64, 1.0f + t), y(64);
        Launch launch(Vector());
        uint8_t *in = launch.Input(x.data(), 256, "x"), *out = launch.Output(y.data(), 256, "y");
        const bool ok = launch
                            .Run([&] {
                              DataCopy(Ub(0, 64), Gm<float>(in, 64), 64);
                              PipeBarrier<PIPE_ALL>();
                              DataCopy(Gm<float>(out, 64), Ub(0, 64), 64);
                            })
                            .ok();
        good[t] += ok && y == x;
      }
    });
  for (auto& thread : threads) thread.join();
  for (int n : good) EXPECT(n == 20);
}

// ---- waiting for ever ----

CASE(deadlock_names_everyone) {
  const Report report = Launch(Mixed(1)).Run([] {
    if (ASCEND_IS_AIC) CrossCoreWaitFlag(3);
    if (ASCEND_IS_AIV) CrossCoreWaitFlag(4);
  });
  EXPECT(Count(report, Fault::deadlock) == 2);  // one line for AIC 0, one for both AIVs
  EXPECT(report.violation_count == 3);
  EXPECT(report.Text().find("AIC 0 waits for cross-core flag 3") != std::string::npos);
  EXPECT(report.Text().find("core.cpp") != std::string::npos);
}

CASE(deadlock_of_one_missing_aiv) {
  const Report report = Launch(Mixed(1)).Run([] {
    if (ASCEND_IS_AIC) CrossCoreWaitFlag(3);
    if (ASCEND_IS_AIV) {
      if (GetSubBlockIdx() == 0) CrossCoreSetFlag<2, PIPE_MTE3>(3);
    }
  });
  EXPECT(Count(report, Fault::deadlock) == 1);
}

CASE(wait_without_set_ends_the_launch) {
  bool after = false;
  const Report report = Launch(Vector(2)).Run([&] {
    WaitFlag<HardEvent::V_MTE3>(0);
    after = true;
  });
  EXPECT(Count(report, Fault::flag) == 1 && !after);
}

CASE(destructors_run_in_an_aborted_launch) {
  int alive = 0;
  struct Guard {
    int& n;
    explicit Guard(int& count) : n(count) { ++n; }
    ~Guard() { --n; }
  };
  Launch(Mixed(2)).Run([&] {
    TPipe pipe;
    Guard guard(alive);
    if (ASCEND_IS_AIC) CrossCoreWaitFlag(1);
    if (ASCEND_IS_AIV) SyncAll<false>();
  });
  EXPECT(alive == 0);
}

CASE(unconsumed_flags_at_the_end) {
  const Report report = Launch(Mixed(1)).Run([] {
    if (ASCEND_IS_AIV) SetFlag<HardEvent::V_MTE3>(1);
    if (ASCEND_IS_AIC) CrossCoreSetFlag<2, PIPE_FIX>(5);
  });
  EXPECT(report.Text().find("V_MTE3, id 1 is still set") != std::string::npos);
  EXPECT(report.Text().find("cross-core flag 5, set by AIC 0, was not waited for") != std::string::npos);
}

CASE(counter_of_a_cross_flag_overflows) {
  const Report report = Launch(Mixed(1)).Run([] {
    if (ASCEND_IS_AIC)
      for (int i = 0; i < 16; ++i) CrossCoreSetFlag<2, PIPE_FIX>(5);
    if (ASCEND_IS_AIV)
      for (int i = 0; i < 16; ++i) CrossCoreWaitFlag(5);
  });
  EXPECT(report.Text().find("passes 15") != std::string::npos);
}

// ---- what is not defined ----

CASE(undefined_rows_of_a_product_stay_in_their_rows) {
  // Row 3 of A was never loaded: row 3 of C is undefined, the others are not.
  std::vector<half> a(16 * 16, half(1.0f));
  std::vector<float> c(16 * 16);
  for (const int bad : {-1, 3}) {
    Options options;
    options.aiv_per_block = 0;
    Launch launch(options);
    uint8_t *ga = launch.Input(a.data(), 512, "a"), *gc = launch.Output(c.data(), 1024, "c");
    const Report report = launch.Run([&] {
      const LocalTensor<half> a1(TPosition::A1, 0, 256), b1(TPosition::B1, 1024, 256);
      const LocalTensor<half> a2(TPosition::A2, 0, 256), b2(TPosition::B2, 0, 256);
      const LocalTensor<float> c1(TPosition::CO1, 0, 256);
      const auto g = Gm<half>(ga, 256);
      for (int row = 0; row < 16; ++row)
        if (row != bad) DataCopy(a1[row * 16], g[row * 16], 16);
      DataCopy(b1, g, 256);
      SetFlag<HardEvent::MTE2_MTE1>(0);
      WaitFlag<HardEvent::MTE2_MTE1>(0);
      LoadData(a2, a1, LoadData2DParams(0, 1, 1, 0, 0, false, 0));
      LoadData(b2, b1, LoadData2DParams(0, 1, 1, 0, 0, false, 0));
      SetFlag<HardEvent::MTE1_M>(0);
      WaitFlag<HardEvent::MTE1_M>(0);
      Mmad(c1, a2, b2, MmadParams(16, 16, 16, 0, false, true));
      SetFlag<HardEvent::M_FIX>(0);
      WaitFlag<HardEvent::M_FIX>(0);
      FixpipeParamsV220 p(16, 1, 16, 16, false);
      for (int row = 0; row < 16; ++row)
        if (row != 3 || bad == 3) Fixpipe<float, float, CFG_ROW_MAJOR>(Gm<float>(gc, 256)[row * 16], c1[row * 16], p);
    });
    EXPECT(Count(report, Fault::uninitialised) == (bad < 0 ? 0 : 1));
    EXPECT(report.violation_count == (bad < 0 ? 0 : 1));
  }
}

CASE(undefined_lanes_may_be_selected_away) {
  std::vector<float> x(64, 2.0f), y(64);
  for (const bool all : {false, true}) {
    Launch launch(Vector());
    uint8_t *in = launch.Input(x.data(), 256, "x"), *out = launch.Output(y.data(), 256, "y");
    const Report report = launch.Run([&] {
      DataCopy(Ub(0, 64), Gm<float>(in, 64), 32);  // lanes 32..63 are undefined
      Duplicate(LocalTensor<uint32_t>(TPosition::VECCALC, 1024, 8), all ? ~0u : 0u, 8);
      PipeBarrier<PIPE_V>();
      Duplicate(LocalTensor<uint32_t>(TPosition::VECCALC, 1024, 8), ~0u, uint64_t(1), 1, 1, 8);  // the first 32 bits
      PipeBarrier<PIPE_ALL>();
      Select(Ub(512, 64), LocalTensor<uint8_t>(TPosition::VECCALC, 1024, 32), Ub(0, 64), 0.0f,
             SELMODE::VSEL_TENSOR_SCALAR_MODE, 64);
      PipeBarrier<PIPE_ALL>();
      DataCopy(Gm<float>(out, 64), Ub(512, 64), 64);
    });
    EXPECT(Count(report, Fault::uninitialised) == (all ? 1 : 0));
    EXPECT(all || (report.ok() && y[31] == 2.0f && y[32] == 0.0f));
  }
}

CASE(select_by_the_comparison_register) {
  const Report report = Launch(Vector()).Run([] {
    for (uint32_t i = 0; i < 2; ++i) CreateVecIndex(Ub(i * 256, 64), 64.0f * i, 64);
    Duplicate(Ub(512, 64), 40.0f, 64);
    Duplicate(Ub(1024, 128), -1.0f, 128);
    PipeBarrier<PIPE_V>();
    Compare(Ub(0, 64), Ub(512, 64), CMPMODE::LT, uint64_t(50), BinaryRepeatParams());
    GetCmpMask(LocalTensor<uint8_t>(TPosition::VECCALC, 2048, 32));
    const uint64_t odd[2] = {0xaaaaaaaaaaaaaaaaull, 0};
    SetVectorMask<float>(odd[1], odd[0]);
    PipeBarrier<PIPE_V>();
    Select<float, SELMODE::VSEL_CMPMASK_SPR>(Ub(1024, 128), Ub(0, 128), Ub(512, 64), 2,
                                             BinaryRepeatParams(1, 1, 1, 8, 8, 0));
    ResetMask();
    PipeBarrier<PIPE_ALL>();
    for (uint32_t i = 0; i < 128; ++i)
      EXPECT(Ub(1024, 128).GetValue(i) == (i % 2 == 0 ? -1.0f : i % 64 < 40 ? float(i) : 40.0f));
    const LocalTensor<uint64_t> bits(TPosition::VECCALC, 2048, 2);
    EXPECT(bits.GetValue(0) == (1ull << 40) - 1 && bits.GetValue(1) == 0);
  });
  EXPECT(report.ok());
}

CASE(scalar_reads_of_nothing) {
  const Report report = Launch(Vector()).Run([] { Ub(0, 8).GetValue(0); });
  EXPECT(Count(report, Fault::uninitialised) == 1);
}

CASE(whole_outputs) {
  std::vector<float> y(64);
  for (const int n : {64, 56}) {
    Options options = Vector();
    options.whole_outputs = true;
    Launch launch(options);
    uint8_t* out = launch.Output(y.data(), 256, "y");
    const Report report = launch.Run([&] {
      Duplicate(Ub(0, 64), 1.0f, 64);
      PipeBarrier<PIPE_ALL>();
      DataCopy(Gm<float>(out, 64), Ub(0, 64), n);
    });
    EXPECT(report.ok() == (n == 64));
    EXPECT(n == 64 || report.Text().find("32 of the 256 bytes of the output y") != std::string::npos);
  }
}

CASE(workspace_lies_behind_16_mib) {
  Launch launch(Vector());
  uint8_t* workspace = launch.Workspace(256);
  const Report report = launch.Run([&] {
    EXPECT(GetUserWorkspace(workspace) == workspace + (16 << 20));
    Duplicate(Ub(0, 64), 1.0f, 64);
    PipeBarrier<PIPE_ALL>();
    DataCopy(Gm<float>(GetUserWorkspace(workspace), 64), Ub(0, 64), 64);  // fits
    DataCopy(Gm<float>(workspace, 64), Ub(0, 64), 64);                    // the system's part
  });
  EXPECT(report.violation_count == 1 && Count(report, Fault::bounds) == 1);
}

struct SmallTiling {
  int32_t n;
  float scale;
};
CASE(tiling_data) {
  Options options = Vector();
  options.tiling_key = 7;
  Launch launch(options);
  uint8_t* tiling = launch.Tiling(SmallTiling{3, 0.5f});
  launch.Run([&] {
    REGISTER_TILING_DEFAULT(SmallTiling);
    GET_TILING_DATA(data, tiling);
    EXPECT(data.n == 3 && data.scale == 0.5f);
    EXPECT(TILING_KEY_IS(7) && !TILING_KEY_IS(8));
  });
}

// ---- the cycle model ----

double Busy(const Report& report, int pipe, int scenario) { return report.cores[0].pipe[pipe].busy[scenario]; }

CASE(vector_cost_is_the_published_line) {
  // k n + b for a lone instruction that something waits for, n = 64 r.
  for (const int repeats : {1, 4, 32, 128}) {
    const int n = 64 * repeats;
    Launch launch(Vector());
    const Report report = launch.Run([&] {
      Duplicate(Ub(0, 8192), 1.0f, n);
      PipeBarrier<PIPE_V>();
      Exp(Ub(65536, 8192), Ub(0, 8192), n);
    });
    EXPECT(
        Near(Busy(report, PIPE_V, kFast), ms_twin::kRateDuplicate.fast * repeats + ms_twin::kRateExp.fast * repeats));
    const double total = ms_twin::kRateDuplicate.fast * repeats + ms_twin::kRateDuplicate.fast_latency +
                         ms_twin::kRateExp.fast * repeats + ms_twin::kRateExp.fast_latency;
    EXPECT(Near(report.cycles[kFast], 1 + total));  // one cycle to issue the first, the others are issued meanwhile
    EXPECT(std::fabs(ms_twin::kRateExp.fast * repeats - .0307 * n) < .01 * repeats);
  }
}

CASE(independent_instructions_hide_their_latency) {
  const auto run = [](bool barrier) {
    return Launch(Vector())
        .Run([&] {
          for (uint32_t i = 0; i < 16; ++i) {
            Duplicate(Ub(i * 4096, 1024), 1.0f, 1024);
            if (barrier) PipeBarrier<PIPE_V>();
          }
        })
        .cycles[kFast];
  };
  EXPECT(Near(run(false), 1 + 16 * 16 + 17));
  EXPECT(Near(run(true), 1 + 16 * (16 + 17)));
}

CASE(cube_cost_counts_fractals) {
  for (const int k : {16, 100, 128}) {
    Options options;
    options.aiv_per_block = 0;
    const Report report = Launch(options).Run([&] {
      Fill(LocalTensor<half>(TPosition::A2, 0, 128 * 128), InitConstValueParams<half>(1, 64, 0, half(1.0f)));
      Fill(LocalTensor<half>(TPosition::B2, 0, 128 * 128), InitConstValueParams<half>(1, 64, 0, half(1.0f)));
      SetFlag<HardEvent::MTE1_M>(0);
      WaitFlag<HardEvent::MTE1_M>(0);
      Mmad(LocalTensor<float>(TPosition::CO1, 0, 128 * 128), LocalTensor<half>(TPosition::A2, 0, 128 * 128),
           LocalTensor<half>(TPosition::B2, 0, 128 * 128), MmadParams(128, 120, k, 0, false, true));
    });
    const double products = 8 * 8 * ((k + 15) / 16);
    EXPECT(report.ok());
    EXPECT(Near(Busy(report, PIPE_M, kFast), products) && Near(Busy(report, PIPE_M, kSlow), products + 6));
    EXPECT(Near(report.cube_cycles, products));
    EXPECT(Near(report.CubeFraction(kFast), products / report.cycles[kFast]));
  }
}

// A published cost model of attention on this chip, fitted to its measurements, for D = 128: Q K^T of a tile of 128 x
// 256 takes 2487 cycles and P V 1617. Both are bound by the way out of L0C (128 KB and 64 KB of float).
CASE(published_tile_costs_lie_in_the_range) {
  std::vector<float> s(128 * 256);
  const auto tile = [&](int n, int k, int chunks) {
    Options options;
    options.aiv_per_block = 0;
    Launch launch(options);
    uint8_t* out = launch.Output(s.data(), s.size() * 4, "s");
    return launch.Run([&] {
      const LocalTensor<half> a(TPosition::A2, 0, 128 * 128), b(TPosition::B2, 0, 128 * 128);
      const LocalTensor<float> c(TPosition::CO1, 0, 128 * 256);
      Fill(a, InitConstValueParams<half>(1, 64, 0, half(1.0f)));
      Fill(b, InitConstValueParams<half>(1, 64, 0, half(1.0f)));
      SetFlag<HardEvent::MTE1_M>(0);
      WaitFlag<HardEvent::MTE1_M>(0);
      for (int i = 0; i < chunks; ++i) {
        const int columns = n == 256 ? 128 : n;
        Mmad(n == 256 ? c[i * 128 * 128] : c, a, b, MmadParams(128, columns, k, 0, false, n == 256 || i == 0));
      }
      SetFlag<HardEvent::M_FIX>(0);
      WaitFlag<HardEvent::M_FIX>(0);
      Fixpipe<float, float, CFG_ROW_MAJOR>(Gm<float>(out, 128 * 256), c, FixpipeParamsV220(n, 128, 128, n, false));
    });
  };
  const Report scores = tile(256, 128, 2), output = tile(128, 128, 2);
  for (const Report* report : {&scores, &output}) EXPECT(report->ok());
  EXPECT(Busy(scores, PIPE_M, kFast) == 1024 && Busy(output, PIPE_M, kFast) == 1024);
  EXPECT(Busy(scores, PIPE_FIX, kFast) < 2487 && 2487 < Busy(scores, PIPE_FIX, kSlow));
  EXPECT(Busy(output, PIPE_FIX, kFast) < 1617 && 1617 < Busy(output, PIPE_FIX, kSlow));
}

// Unit flags order Mmad and Fixpipe without events; without them the same kernel is a hazard, and a flag left set is
// told.
CASE(unit_flags) {
  std::vector<float> y(2 * 16 * 16);
  const auto run = [&](int mmad_flag, int fixpipe_flag, int tiles) {
    Options options;
    options.aiv_per_block = 0;
    Launch launch(options);
    uint8_t* out = launch.Output(y.data(), y.size() * 4, "y");
    return launch.Run([&] {
      const LocalTensor<half> a(TPosition::A2, 0, 256), b(TPosition::B2, 0, 256);
      const LocalTensor<float> c(TPosition::CO1, 0, 256);
      Fill(a, InitConstValueParams<half>(1, 1, 0, half(1.0f)));
      Fill(b, InitConstValueParams<half>(1, 1, 0, half(2.0f)));
      SetFlag<HardEvent::MTE1_M>(0);
      WaitFlag<HardEvent::MTE1_M>(0);
      for (int i = 0; i < tiles; ++i) {
        Mmad(c, a, b, MmadParams(16, 16, 16, mmad_flag ? 2 : 0, false, true));
        PipeBarrier<PIPE_M>();
        Mmad(c, a, b, MmadParams(16, 16, 16, mmad_flag, false, false));
        FixpipeParamsV220 p(16, 16, 16, 16, false);
        p.unitFlag = fixpipe_flag;
        Fixpipe<float, float, CFG_ROW_MAJOR>(Gm<float>(out, 512)[i * 256], c, p);
      }
    });
  };
  EXPECT(run(3, 3, 2).ok() && y[0] == 64.0f && y[511] == 64.0f);
  EXPECT(Count(run(0, 0, 2), Fault::raw) == 1 && Count(run(0, 0, 2), Fault::war) >= 1);
  EXPECT(run(3, 2, 1).Text().find("unit flag of L0C is still set") != std::string::npos);
  EXPECT(run(3, 2, 2).Text().find("Mmad would wait") != std::string::npos);
  EXPECT(run(2, 3, 1).Text().find("Fixpipe would wait") != std::string::npos);
}

// With unit flags the way out of L0C begins with the product and ends after it.
CASE(unit_flags_overlap_product_and_copy) {
  std::vector<float> y(128 * 128);
  const auto run = [&](bool unit_flag) {
    Options options;
    options.aiv_per_block = 0;
    Launch launch(options);
    uint8_t* out = launch.Output(y.data(), y.size() * 4, "y");
    const Report report = launch.Run([&] {
      const LocalTensor<half> a(TPosition::A2, 0, 128 * 128), b(TPosition::B2, 0, 128 * 128);
      const LocalTensor<float> c(TPosition::CO1, 0, 128 * 128);
      Fill(a, InitConstValueParams<half>(1, 64, 0, half(1.0f)));
      Fill(b, InitConstValueParams<half>(1, 64, 0, half(2.0f)));
      SetFlag<HardEvent::MTE1_M>(0);
      WaitFlag<HardEvent::MTE1_M>(0);
      Mmad(c, a, b, MmadParams(128, 128, 128, unit_flag ? 3 : 0, false, true));
      if (!unit_flag) {
        SetFlag<HardEvent::M_FIX>(0);
        WaitFlag<HardEvent::M_FIX>(0);
      }
      FixpipeParamsV220 p(128, 128, 128, 128, false);
      p.unitFlag = unit_flag ? 3 : 0;
      Fixpipe<float, float, CFG_ROW_MAJOR>(Gm<float>(out, 128 * 128), c, p);
    });
    EXPECT(report.ok());
    return report.cycles[kSlow];
  };
  const double saved = run(false) - run(true);
  EXPECT(saved > 500 && saved < 550);  // all of the product's 518 cycles, its latency and the flag
}

CASE(channel_split_of_an_odd_number_of_strips) {
  alignas(32) float y[3 * 16 * 8 + 8];
  std::fill(std::begin(y), std::end(y), -1.0f);
  Options options;
  options.aiv_per_block = 0;
  Launch launch(options);
  uint8_t* out = launch.InOut(y, sizeof y, "y");
  const Report report = launch.Run([&] {
    const LocalTensor<half> a(TPosition::A2, 0, 256), b(TPosition::B2, 0, 512);
    const LocalTensor<float> c(TPosition::CO1, 0, 512);
    Fill(a, InitConstValueParams<half>(1, 1, 0, half(1.0f)));
    Fill(b, InitConstValueParams<half>(1, 2, 0, half(2.0f)));
    PipeBarrier<PIPE_ALL>();
    Mmad(c, a, b, MmadParams(16, 32, 16, 0, false, true));
    PipeBarrier<PIPE_ALL>();
    FixpipeParamsV220 p(24, 16, 16, 16, false);
    p.isChannelSplit = true;
    Fixpipe<float, float, CFG_NZ>(Gm<float>(out, 392), c, p);
  });
  EXPECT(report.ok() && y[0] == 32.0f && y[3 * 128 - 1] == 32.0f && y[3 * 128] == -1.0f);
}

CASE(traffic_is_exact) {
  std::vector<uint8_t> x(4096), y(4096);
  Launch launch(Vector());
  uint8_t *in = launch.Input(x.data(), x.size(), "x"), *out = launch.Output(y.data(), y.size(), "y");
  const Report report = launch.Run([&] {
    const LocalTensor<half> t(TPosition::VECCALC, 0, 4096);
    DataCopyPad(t, Gm<half>(in, 2048), DataCopyExtParams(7, 38, 10, 0, 0),
                DataCopyPadExtParams<half>(true, 0, 1, half(0.0f)));
    PipeBarrier<PIPE_ALL>();
    DataCopyPad(Gm<half>(out, 2048), t, DataCopyExtParams(5, 34, 1, 2, 0));
  });
  EXPECT(report.gm.read == 7 * 38 && report.gm.written == 5 * 34);
  EXPECT(report.gm.by_buffer.at("x").read == 7 * 38 && report.gm.by_buffer.at("y").written == 5 * 34);
  EXPECT(report.gm.by_buffer.at("x").size == 4096);
}

CASE(model_alone_gives_the_same_cycles) {
  std::vector<float> x(1 << 14, 1.0f), y(1 << 14);
  double cycles[2];
  for (const bool effects : {true, false}) {
    Options options = Mixed(2);
    options.effects = effects;
    Launch launch(options);
    uint8_t *in = launch.Input(x.data(), x.size() * 4, "x"), *out = launch.Output(y.data(), y.size() * 4, "y");
    const Report report = launch.Run([&] {
      if (ASCEND_IS_AIC) {
        CrossCoreWaitFlag(1);
        return;
      }
      const int64_t n = 1024, at = GetBlockIdx() * n;
      DataCopy(Ub(0, n), Gm<float>(in, 1 << 14)[at], n);
      SetFlag<HardEvent::MTE2_V>(0);
      WaitFlag<HardEvent::MTE2_V>(0);
      WholeReduceMax(Ub(8192, 64), Ub(0, n), 64, 16, 1, 1, 8, ReduceOrder::ORDER_ONLY_VALUE);
      Exp(Ub(4096, n), Ub(0, n), n);
      SetFlag<HardEvent::V_MTE3>(0);
      WaitFlag<HardEvent::V_MTE3>(0);
      DataCopy(Gm<float>(out, 1 << 14)[at], Ub(4096, n), n);
      CrossCoreSetFlag<2, PIPE_MTE3>(1);
    });
    EXPECT(report.ok());
    EXPECT(report.gm.read == 4 * 4096 && report.gm.written == 4 * 4096);
    double path = 0;
    for (double part : report.critical[kSlow]) path += part;
    EXPECT(std::fabs(path - report.cycles[kSlow]) < 1e-3 * report.cycles[kSlow]);  // the path accounts for all of it
    cycles[effects] = report.cycles[kSlow];
  }
  EXPECT(cycles[0] == cycles[1]);
}

CASE(overlap_of_copies_and_arithmetic_shows) {
  // Two buffers: the copies of tile i+1 run under the arithmetic of tile i. One buffer: they cannot.
  std::vector<float> x(1 << 16, 1.0f);
  const auto run = [&](int buffers) {
    Launch launch(Vector());
    uint8_t* in = launch.Input(x.data(), x.size() * 4, "x");
    const Report report = launch.Run([&] {
      const int n = 4096;
      for (int b = 0; b < buffers; ++b) SetFlag<HardEvent::V_MTE2>(b);
      for (int tile = 0; tile < 16; ++tile) {
        const int b = tile % buffers;
        WaitFlag<HardEvent::V_MTE2>(b);
        DataCopy(Ub(b * n * 4, n), Gm<float>(in, 1 << 16)[tile * n], n);
        SetFlag<HardEvent::MTE2_V>(b);
        WaitFlag<HardEvent::MTE2_V>(b);
        for (int i = 0; i < 4; ++i) {
          Exp(Ub(b * n * 4, n), Ub(b * n * 4, n), n);
          PipeBarrier<PIPE_V>();
        }
        SetFlag<HardEvent::V_MTE2>(b);
      }
      for (int b = 0; b < buffers; ++b) WaitFlag<HardEvent::V_MTE2>(b);
    });
    EXPECT(report.ok());
    return report.cycles[kSlow];
  };
  EXPECT(run(2) < 0.7 * run(1));
}

// ---- numbers ----

// The conversions without F16C's instructions, from the definition of the format.
float HalfValue(uint16_t h) {
  const int exponent = (h >> 10) & 31, fraction = h & 1023;
  const double magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return static_cast<float>(h & 0x8000 ? -magnitude : magnitude);
}

CASE(all_halves) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const float x = HalfValue(static_cast<uint16_t>(h));
    const float y = ms_twin::HalfToFloat(static_cast<uint16_t>(h));
    EXPECT(x != x ? y != y : x == y);
    if (x == x) EXPECT(ms_twin::FloatToHalf(y) == h || (h & 0x7fff) == 0);
    if (x != x || std::isinf(x) || (h & 0x7fff) == 0x7bff) continue;
    const float up = HalfValue(static_cast<uint16_t>(h + 1));  // away from 0
    const float middle = (x + up) / 2;
    EXPECT(ms_twin::FloatToHalf(middle) == (h & 1 ? h + 1 : h));
    EXPECT(ms_twin::FloatToHalf(std::nextafter(middle, up)) == h + 1);
    EXPECT(ms_twin::FloatToHalf(std::nextafter(middle, x)) == h);
    const bool negative = h & 0x8000;
    using ms_twin::RoundToHalf;
    EXPECT(RoundToHalf(middle, RoundMode::CAST_FLOOR, true) == (negative ? h + 1 : h));
    EXPECT(RoundToHalf(middle, RoundMode::CAST_CEIL, true) == (negative ? h : h + 1));
    EXPECT(RoundToHalf(middle, RoundMode::CAST_TRUNC, true) == h);
    EXPECT(RoundToHalf(middle, RoundMode::CAST_ROUND, true) == h + 1);
    EXPECT(RoundToHalf(middle, RoundMode::CAST_ODD, true) == (h & 1 ? h : h + 1));
    EXPECT(RoundToHalf(middle, RoundMode::CAST_RINT, true) == (h & 1 ? h + 1 : h));
    if (!failure.empty()) return;
  }
  EXPECT(ms_twin::FloatToHalf(65520.0f) == 0x7c00 && ms_twin::FloatToHalf(65519.0f) == 0x7bff);
  EXPECT(ms_twin::RoundToHalf(1e9f, RoundMode::CAST_RINT, true) == 0x7bff);
  EXPECT(ms_twin::RoundToHalf(-INFINITY, RoundMode::CAST_RINT, true) == 0xfbff);
  EXPECT(ms_twin::RoundToHalf(NAN, RoundMode::CAST_RINT, true) == 0);
  EXPECT(ms_twin::RoundToHalf(INFINITY, RoundMode::CAST_RINT, false) == 0x7c00);
}

}  // namespace

extern "C" const char* CaseNames() {
  static std::string names;
  names.clear();
  for (const auto& [name, body] : Cases()) names += name + "\n";
  return names.c_str();
}
// What does not hold, a line each.
extern "C" const char* RunCase(const char* name) {
  failure.clear();
  Cases().at(name)();
  return failure.c_str();
}
