// Tiles of a forward pass, each repeated, for the cycle model alone: what the published figures of one tile are
// compared with. The cost of a tile is what one more of it takes once the pipes are filled.
#include <map>
#include <string>

#include "ascendc/twin_lib/api.h"
#include "kernel_operator.h"
#include "launch.h"

namespace {

using namespace AscendC;

constexpr uint32_t kRows = 128, kKeys = 256, kDepth = 128;  // of a tile; a vector core has half of the rows

template <class T>
GlobalTensor<T> Gm(uint8_t* p) {
  GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(p));
  return tensor;
}
LocalTensor<half> L1(uint32_t kilobytes, uint32_t elements) {
  return LocalTensor<half>(TPosition::A1, kilobytes << 10, elements);
}
LocalTensor<half> A(uint32_t which) { return LocalTensor<half>(TPosition::A2, which << 15, 1 << 14); }
LocalTensor<half> B(uint32_t which) { return LocalTensor<half>(TPosition::B2, which << 15, 1 << 14); }
LocalTensor<float> C(uint32_t which) { return LocalTensor<float>(TPosition::CO1, which << 16, 1 << 14); }
LocalTensor<float> Ub(uint32_t kilobytes, uint32_t elements) {
  return LocalTensor<float>(TPosition::VECCALC, kilobytes << 10, elements);
}

Nd2NzParams Matrix(uint32_t rows, uint32_t cols) { return Nd2NzParams(1, rows, cols, 0, cols, rows, 1, 0); }

void Begin() {
  for (int i = 0; i < 2; ++i) {
    SetFlag<HardEvent::MTE1_MTE2>(i);
    SetFlag<HardEvent::M_MTE1>(i);
    SetFlag<HardEvent::FIX_M>(i);
  }
}
void End() {
  for (int i = 0; i < 2; ++i) {
    WaitFlag<HardEvent::MTE1_MTE2>(i);
    WaitFlag<HardEvent::M_MTE1>(i);
    WaitFlag<HardEvent::FIX_M>(i);
  }
}
// One product of 128 x 128 x 128 out of L1 into the half `part` of L0.
void Product(uint32_t part, LocalTensor<half> left, LocalTensor<half> right, bool start) {
  WaitFlag<HardEvent::M_MTE1>(part);
  for (uint32_t i = 0; i < 8; ++i) {
    LoadData(A(part)[i * 2048], left[i * 256], LoadData2DParams(0, 8, 8, 0, 0, false, 0));
    LoadData(B(part)[i * 2048], right[i * 2048], LoadData2DParams(0, 8, 1, 0, 0, false, 0));
  }
  SetFlag<HardEvent::MTE1_M>(part);
  WaitFlag<HardEvent::MTE1_M>(part);
  Mmad(C(part), A(part), B(part), MmadParams(128, 128, 128, 0, false, start));
  SetFlag<HardEvent::M_MTE1>(part);
}
void Out(uint32_t part, GlobalTensor<float> to, uint32_t pitch) {
  SetFlag<HardEvent::M_FIX>(part);
  WaitFlag<HardEvent::M_FIX>(part);
  FixpipeParamsV220 p(128, 128, 128, pitch, false);
  p.quantPre = NoQuant;
  Fixpipe<float, float, CFG_ROW_MAJOR>(to, C(part), p);
  SetFlag<HardEvent::FIX_M>(part);
}

// S = Q K^T: K from GM, S to GM in float32.
void Scores(uint8_t* gm, int tiles) {
  Begin();
  for (int t = 0; t < tiles; ++t) {
    const int buffer = t % 2;
    WaitFlag<HardEvent::MTE1_MTE2>(buffer);
    DataCopy(L1(128 + 64 * buffer, kKeys * kDepth), Gm<half>(gm), Matrix(kKeys, kDepth));
    SetFlag<HardEvent::MTE2_MTE1>(buffer);
    WaitFlag<HardEvent::MTE2_MTE1>(buffer);
    for (uint32_t part = 0; part < 2; ++part) {
      WaitFlag<HardEvent::FIX_M>(part);
      Product(part, L1(0, kRows * kDepth), L1(128 + 64 * buffer, kKeys * kDepth)[part * 2048], true);
      Out(part, Gm<float>(gm)[part * 128], kKeys);
    }
    SetFlag<HardEvent::MTE1_MTE2>(buffer);
  }
  End();
}

// O = P V: P and V from GM, O to GM in float32.
void Values(uint8_t* gm, int tiles) {
  Begin();
  for (int t = 0; t < tiles; ++t) {
    const int buffer = t % 2;
    WaitFlag<HardEvent::MTE1_MTE2>(buffer);
    DataCopy(L1(128 * buffer, kRows * kKeys), Gm<half>(gm), Matrix(kRows, kKeys));
    DataCopy(L1(256 + 64 * buffer, kKeys * kDepth), Gm<half>(gm), Matrix(kKeys, kDepth));
    SetFlag<HardEvent::MTE2_MTE1>(buffer);
    WaitFlag<HardEvent::MTE2_MTE1>(buffer);
    const uint32_t out = t % 2;
    WaitFlag<HardEvent::FIX_M>(out);
    for (uint32_t part = 0; part < 2; ++part) {
      WaitFlag<HardEvent::M_MTE1>(part);
      for (uint32_t i = 0; i < 8; ++i) {
        LoadData(A(part)[i * 2048], L1(128 * buffer, kRows * kKeys)[part * 16384 + i * 256],
                 LoadData2DParams(0, 8, 8, 0, 0, false, 0));
        LoadData(B(part)[i * 2048], L1(256 + 64 * buffer, kKeys * kDepth)[part * 2048 + i * 256],
                 LoadData2DParams(0, 8, 16, 0, 0, true, 0));
      }
      SetFlag<HardEvent::MTE1_M>(part);
      WaitFlag<HardEvent::MTE1_M>(part);
      Mmad(C(out), A(part), B(part), MmadParams(128, 128, 128, 0, false, part == 0));
      SetFlag<HardEvent::M_MTE1>(part);
    }
    SetFlag<HardEvent::MTE1_MTE2>(buffer);
    Out(out, Gm<float>(gm), kDepth);
  }
  End();
}

// Row maxima, P = exp(S - m), row sums, P to 16 bits: 64 rows of 256 on each vector core, S from GM and P to it.
void Softmax(uint8_t* gm, int tiles) {
  constexpr uint32_t rows = 64, n = rows * kKeys;
  const auto scratch = Ub(160, n / 4), spread = Ub(176, 512), row = Ub(178, 256);
  const BinaryRepeatParams fold(1, 1, 1, 8, 16, 16), by_row(1, 1, 0, 32, 32, 1);
  for (int i = 0; i < 2; ++i) SetFlag<HardEvent::V_MTE2>(i);
  SetFlag<HardEvent::MTE3_V>(0);
  for (int t = 0; t < tiles; ++t) {
    const int buffer = t % 2;
    const auto s = Ub(64 * buffer, n);
    const LocalTensor<half> p(TPosition::VECCALC, 128 << 10, n);
    WaitFlag<HardEvent::V_MTE2>(buffer);
    DataCopy(s, Gm<float>(gm), n);
    SetFlag<HardEvent::MTE2_V>(buffer);
    WaitFlag<HardEvent::MTE2_V>(buffer);
    Muls(s, s, 0.088f, n);
    PipeBarrier<PIPE_V>();
    for (int pass = 0; pass < 2; ++pass) {  // maxima, later the sums
      for (uint32_t half_rows = 0; half_rows < 2; ++half_rows) {
        Max(scratch, s[half_rows * n / 2], s[half_rows * n / 2 + 64], 64, 64, fold);
        PipeBarrier<PIPE_V>();
        Max(scratch, scratch, scratch[64], 64, 32, fold);
        PipeBarrier<PIPE_V>();
        BlockReduceMax(scratch, scratch, 32, 64, 1, 1, 8);
        PipeBarrier<PIPE_V>();
        BlockReduceMax(row[pass * 128 + half_rows * 32], scratch, 4, 64, 1, 1, 8);
        PipeBarrier<PIPE_V>();
      }
      if (pass == 1) break;
      Max(row, row, row[64], rows);
      PipeBarrier<PIPE_V>();
      Brcb(spread, row, 8, BrcbRepeatParams(1, 8));
      PipeBarrier<PIPE_V>();
      for (uint32_t c = 0; c < kKeys; c += 64) Sub(s[c], s[c], spread, 64, rows, by_row);
      PipeBarrier<PIPE_V>();
      Exp(s, s, n);
      PipeBarrier<PIPE_V>();
      WaitFlag<HardEvent::MTE3_V>(0);
      Cast(p, s, RoundMode::CAST_RINT, n);
      SetFlag<HardEvent::V_MTE3>(0);
      WaitFlag<HardEvent::V_MTE3>(0);
      DataCopy(Gm<half>(gm), p, n);
      SetFlag<HardEvent::MTE3_V>(0);
    }
    Add(row[128], row[128], row[64], rows);
    PipeBarrier<PIPE_V>();
    SetFlag<HardEvent::V_MTE2>(buffer);
  }
  for (int i = 0; i < 2; ++i) WaitFlag<HardEvent::V_MTE2>(i);
  WaitFlag<HardEvent::MTE3_V>(0);
}

// O = O alpha + O_t: 64 rows of 128 on each vector core, O_t from GM.
void Rescale(uint8_t* gm, int tiles) {
  constexpr uint32_t rows = 64, n = rows * kDepth;
  const auto o = Ub(128, n), alpha = Ub(176, 512), row = Ub(178, 64);
  const BinaryRepeatParams by_row(1, 1, 0, 16, 16, 1);
  for (int i = 0; i < 2; ++i) SetFlag<HardEvent::V_MTE2>(i);
  for (int t = 0; t < tiles; ++t) {
    const int buffer = t % 2;
    WaitFlag<HardEvent::V_MTE2>(buffer);
    DataCopy(Ub(64 * buffer, n), Gm<float>(gm), n);
    Exp(row, row, rows);
    PipeBarrier<PIPE_V>();
    Brcb(alpha, row, 8, BrcbRepeatParams(1, 8));
    PipeBarrier<PIPE_V>();
    for (uint32_t c = 0; c < kDepth; c += 64) Mul(o[c], o[c], alpha, 64, rows, by_row);
    PipeBarrier<PIPE_V>();
    SetFlag<HardEvent::MTE2_V>(buffer);
    WaitFlag<HardEvent::MTE2_V>(buffer);
    Add(o, o, Ub(64 * buffer, n), n);
    PipeBarrier<PIPE_V>();
    SetFlag<HardEvent::V_MTE2>(buffer);
  }
  for (int i = 0; i < 2; ++i) WaitFlag<HardEvent::V_MTE2>(i);
}

}  // namespace

int64_t msflash_ascend_tile(const char* step, int64_t tiles, double* cycles) {
  static const std::map<std::string, void (*)(uint8_t*, int)> known = {
      {"qk", Scores}, {"pv", Values}, {"softmax", Softmax}, {"rescale", Rescale}};
  const auto found = known.find(step);
  if (found == known.end()) return -1;
  ms_twin::Options options;
  options.has_aic = found->first == "qk" || found->first == "pv";
  options.aiv_per_block = 0;
  options.hazards = false;  // tiles write to one place of GM again and again
  options.effects = false;
  std::string memory(1 << 18, '\0');
  ms_twin::Launch launch(options);
  auto* gm = launch.InOut(&memory[0], memory.size(), "gm");
  const ms_twin::Report report = launch.Run([&] { found->second(gm, static_cast<int>(tiles)); });
  for (int s = 0; s < ms_twin::kScenarios; ++s) cycles[s] = report.cycles[s];
  return report.violation_count;
}
