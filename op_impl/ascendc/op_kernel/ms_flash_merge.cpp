// Attention over all keys from attentions over parts of them, on the vector cores alone:
//
//   m = max over parts of lse_p   w_p = exp(lse_p - m)   lse = m + ln(sum w_p)   out = sum w_p out_p / sum w_p
//
// The parts are added in their order. One with an LSE of -inf had no key: its rows count for nothing, whatever they
// hold.
#include "vector.h"

namespace msf {

template <class T>
class MergeParts {
 public:
  __aicore__ inline MergeParts(const MergeTiling& t, Address outs, Address lses, Address out, Address lse)
      : t_(t), outs_(outs), lses_(lses), out_(out), lse_(lse), width_(Align(t.dv, kFractal)) {}

  __aicore__ inline void Run() {
    AscendC::Duplicate(Local<float>(TPosition::VECCALC, 0, kEnd), 0.0f, kEnd / 4);
    AscendC::PipeBarrier<PIPE_V>();
    rows_.SetUp(kRows, kTile / 2, 2, 0);
    weights_.SetUp(kWeights, kVector, 2, 2);
    result_.SetUp(kResult, kTile / 2, 1, 0);
    stats_.SetUp(kStats, kVector, 1, 1);
    const int64_t chunks = (t_.rows + t_.chunk - 1) / t_.chunk, units = t_.batch * t_.heads * chunks;
    for (int64_t unit = AscendC::GetBlockIdx(); unit < units; unit += t_.cores) {
      const int64_t row = unit % chunks * t_.chunk, h = unit / chunks % t_.heads, b = unit / chunks / t_.heads;
      Rows(b, h, row, int32_t(t_.rows - row < t_.chunk ? t_.rows - row : t_.chunk));
    }
    rows_.WaitAllEmpty();
    weights_.WaitAllEmpty();
    result_.WaitAllEmpty();
    stats_.WaitAllEmpty();
  }

 private:
  // bytes of UB; 8 KB at its end are Select's
  static constexpr int32_t kTile = 32 * 1024, kVector = kLanes * 4, kRows = 0, kResult = kRows + kTile,
                           kSum = kResult + kTile / 2, kWide = kSum + kTile, kLse = kWide + kTile, kBits = kLse + kTile,
                           kSpread = kBits + kTile / 32, kSpreadLse = kSpread + 8 * kVector,
                           kWeights = kSpreadLse + 8 * kVector, kStats = kWeights + 2 * kVector,
                           kMax = kStats + kVector, kTotal = kMax + kVector, kWeight = kTotal + kVector,
                           kEnd = kWeight + kVector;

  __aicore__ inline LocalTensor<float> At(int32_t byte, int32_t bytes) const {
    return Local<float>(TPosition::VECCALC, byte, bytes);
  }

  // Rows [row, row + n) of one head.
  __aicore__ inline void Rows(int64_t b, int64_t h, int64_t row, int32_t n) {
    const int64_t at = (b * t_.heads + h) * t_.rows + row;
    const int32_t padded = Align(n, 8), elements = padded * width_;
    const LocalTensor<float> top = At(kMax, kVector), total = At(kTotal, kVector), sum = At(kSum, kTile);
    AscendC::Duplicate(top, kLowest, kLanes);  // no part has a key: exp(-inf - lowest) is 0
    AscendC::Duplicate(total, 0.0f, kLanes);
    AscendC::Duplicate(sum, 0.0f, elements);
    AscendC::PipeBarrier<PIPE_V>();
    for (int64_t part = 0; part < t_.parts; ++part) {
      const LocalTensor<float> lse = FetchLse(part, at, n);
      AscendC::Max(top, top, lse, n);
      AscendC::PipeBarrier<PIPE_V>();
      weights_.SignalEmpty();
    }
    for (int64_t part = 0; part < t_.parts; ++part) AddPart(part, b, h, row, at, n, top, total, sum);

    const LocalTensor<float> stats = stats_.WaitEmpty<float>(), spread = At(kSpread, 8 * kVector);
    AscendC::Ln(stats, total, kLanes);
    AscendC::Maxs(total, total, 1e-30f, kLanes);  // a row without keys has the sum 0
    AscendC::Duplicate(spread, 1.0f, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(stats, stats, top, kLanes);
    AscendC::Div(total, spread, total, kLanes);
    AscendC::PipeBarrier<PIPE_V>();
    stats_.SignalFull();
    CopyOut(Global<float>(lse_, at), stats, n, 1, n, kLanes);
    stats_.SignalEmpty();
    Spread(spread, total, padded);
    AscendC::PipeBarrier<PIPE_V>();
    WithRow<MultiplyRow>(sum, sum, spread, padded, width_);
    AscendC::PipeBarrier<PIPE_V>();
    const LocalTensor<T> out = result_.WaitEmpty<T>();
    AscendC::Cast(out, sum, AscendC::RoundMode::CAST_RINT, uint32_t(elements));
    result_.SignalFull();
    AscendC::PipeBarrier<PIPE_V>();  // the next rows start to write where these were read
    const TensorLayout& x = t_.out;
    CopyOut(Global<T>(out_, b * x.b + h * x.h + row * x.s), out, x.s, n, t_.dv, width_);
    result_.SignalEmpty();
  }

  __aicore__ inline LocalTensor<float> FetchLse(int64_t part, int64_t at, int32_t n) {
    const LocalTensor<float> lse = weights_.WaitEmpty<float>();
    CopyIn(lse, Global<float>(lses_, part * t_.part_rows + at), n, 1, n, kLanes);
    weights_.SignalFull();
    return lse;
  }

  __aicore__ inline void AddPart(int64_t part, int64_t b, int64_t h, int64_t row, int64_t at, int32_t n,
                                 const LocalTensor<float>& top, const LocalTensor<float>& total,
                                 const LocalTensor<float>& sum) {
    const TensorLayout& x = t_.outs;
    const int32_t padded = Align(n, 8), elements = padded * width_;
    const LocalTensor<float> weight = At(kWeight, kVector), spread = At(kSpread, 8 * kVector),
                             spread_lse = At(kSpreadLse, 8 * kVector), wide = At(kWide, kTile),
                             of_row = At(kLse, kTile);
    const LocalTensor<uint8_t> bits = Local<uint8_t>(TPosition::VECCALC, kBits, kTile / 32);
    const LocalTensor<T> narrow = rows_.WaitEmpty<T>();
    CopyIn(narrow, Global<T>(outs_, part * t_.part_elements + b * x.b + h * x.h + row * x.s), x.s, n, t_.dv, width_);
    rows_.SignalFull();
    AscendC::Cast(wide, narrow, AscendC::RoundMode::CAST_NONE, uint32_t(elements));
    const LocalTensor<float> lse = FetchLse(part, at, n);
    AscendC::Sub(weight, lse, top, n);
    Spread(spread_lse, lse, padded);
    AscendC::Duplicate(of_row, 0.0f, elements);
    AscendC::PipeBarrier<PIPE_V>();
    rows_.SignalEmpty();
    weights_.SignalEmpty();
    AscendC::Exp(weight, weight, n);
    WithRow<AddRow>(of_row, of_row, spread_lse, padded, width_);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(total, total, weight, n);
    Spread(spread, weight, padded);
    AscendC::CompareScalar(bits, of_row, kMinusInf, AscendC::CMPMODE::NE, uint32_t(elements));
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Select(wide, bits, wide, 0.0f, AscendC::SELMODE::VSEL_TENSOR_SCALAR_MODE, uint32_t(elements));
    AscendC::PipeBarrier<PIPE_V>();
    WithRow<MultiplyRow>(wide, wide, spread, padded, width_);
    AscendC::PipeBarrier<PIPE_V>();
    AscendC::Add(sum, sum, wide, elements);
    AscendC::PipeBarrier<PIPE_V>();
  }

  const MergeTiling& t_;
  Address outs_, lses_, out_, lse_;
  int32_t width_;
  InputRing rows_, weights_;
  OutputRing result_, stats_;
};

}  // namespace msf

extern "C" __global__ __aicore__ void ms_flash_merge(GM_ADDR outs, GM_ADDR lses, GM_ADDR out, GM_ADDR lse,
                                                     GM_ADDR workspace, GM_ADDR tiling) {
  KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
  REGISTER_TILING_DEFAULT(msf::MergeTiling);
  AscendC::InitSocState();
  AscendC::SetSaturationFlag<AscendC::SaturationMode::FLOAT>(false);  // NaN and Inf stay what they are
  GET_TILING_DATA_WITH_STRUCT(msf::MergeTiling, t, tiling);
  (void)workspace;
  if (t.bf16)
    msf::MergeParts<bfloat16_t>(t, outs, lses, out, lse).Run();
  else
    msf::MergeParts<half>(t, outs, lses, out, lse).Run();
}
