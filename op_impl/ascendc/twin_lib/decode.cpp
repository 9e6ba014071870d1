#include "ascendc/twin_lib/decode.h"

#include "ascendc/op_host/describe.h"
#include "ascendc/twin_lib/element.h"
#include "ascendc/twin_lib/launching.h"
#include "ascendc/twin_lib/pad.h"

extern "C" void ms_flash_kv_cache(uint8_t* query, uint8_t* k_cache, uint8_t* v_cache, uint8_t* k, uint8_t* v,
                                  uint8_t* cache_seqlens, uint8_t* block_table, uint8_t* rotary_cos,
                                  uint8_t* rotary_sin, uint8_t* alibi_slopes, uint8_t* sinks, uint8_t* out,
                                  uint8_t* lse, uint8_t* k_cache_ref, uint8_t* v_cache_ref, uint8_t* workspace,
                                  uint8_t* tiling);

extern "C" void ms_flash_merge(uint8_t* outs, uint8_t* lses, uint8_t* out, uint8_t* lse, uint8_t* workspace,
                               uint8_t* tiling);

namespace msf {

namespace {

// Packed memory for rows (batch, head, row, channel) of a dtype.
class Rows {
 public:
  Rows(DType dtype, int64_t batch, int64_t heads, int64_t rows, int64_t channels)
      : data_(size_t(batch * heads * rows * channels * size_of(dtype))),
        tensor_{data_.data(), dtype, heads * rows * channels, rows * channels, channels} {}
  const Tensor4& tensor() const { return tensor_; }

 private:
  std::vector<char> data_;
  Tensor4 tensor_;
};

}  // namespace

void rotate_rows(const Append& a) {
  const Rotary& r = a.rotary;
  const int64_t step = r.interleaved ? 2 : 1, other = r.interleaved ? 1 : r.pairs;
  for (int64_t b = 0; b < a.batch; ++b)
    for (int64_t h = 0; h < a.heads; ++h)
      for (int64_t i = 0; i < a.rows; ++i) {
        const char* from = a.from.row(b, h, i);
        char* to = a.to.row(b, h, i);
        const int64_t angle = (a.position[b] + i) * r.pairs;
        for (int64_t c = 0; c < r.pairs; ++c) {
          const float cos = load(r.dtype, r.cos, angle + c), sin = load(r.dtype, r.sin, angle + c);
          const float x = load(a.from.dtype, from, c * step), y = load(a.from.dtype, from, c * step + other);
          store(a.to.dtype, to, c * step, x * cos - y * sin);
          store(a.to.dtype, to, c * step + other, y * cos + x * sin);
        }
        for (int64_t c = 2 * r.pairs; c < a.channels; ++c) store(a.to.dtype, to, c, load(a.from.dtype, from, c));
      }
}

void run_decode(const Problem& given, const std::vector<Append>& given_appends) {
  Problem p = given;
  std::vector<Append> appends = given_appends;
  // what is rotated leaves the host in the caches' dtype
  const DType dtype = p.k.dtype;
  Rows query(dtype, p.q.dtype == dtype ? 0 : p.batch, p.heads, p.q_rows, p.d);
  if (p.q.dtype != dtype) {
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t h = 0; h < p.heads; ++h)
        for (int64_t i = 0; i < p.q_rows; ++i)
          for (int64_t c = 0; c < p.d; ++c)
            store(dtype, query.tensor().row(b, h, i), c, load(p.q.dtype, p.q.row(b, h, i), c));
    p.q = query.tensor();
  }
  const bool rotated = !appends.empty() && appends[0].rotary.cos;
  Rows keys(dtype, rotated ? p.batch : 0, p.kv_heads, rotated ? appends[0].rows : 0, p.d);
  if (rotated) {
    Append turn = appends[0];
    turn.to = keys.tensor();
    rotate_rows(turn);
    appends[0].from = keys.tensor();
  }
  if (Padded::needed(p)) {
    const Padded padded(p, &appends);
    for (Append& a : appends) a.rotary = {};
    run_decode(padded.problem, appends);
    return padded.copy_back();
  }

  if (!p.batch || (!p.q_rows && appends.empty())) return;
  const DecodePlan plan = plan_decode(p, appends, soc(), chosen(p, false));
  ms_twin::Launch launch(options(plan.tiling.f.cores));
  const int64_t outer = p.pages ? p.pages.count : p.batch;
  auto cache = [&](const Tensor4& x, int64_t channels, const char* name) {
    const int64_t bytes = extent(x, outer, p.kv_heads, p.k_rows, channels);
    return appends.empty() ? launch.Input(x.data, bytes, name) : launch.InOut(x.data, bytes, name);
  };
  auto rows = [&](size_t which, int64_t channels, const char* name) -> uint8_t* {
    if (appends.empty()) return nullptr;
    const Append& x = appends[which];
    return launch.Input(x.from.data, extent(x.from, p.batch, p.kv_heads, x.rows, channels), name);
  };
  uint8_t* q = launch.Input(p.q.data, extent(p.q, p.batch, p.heads, p.q_rows, p.d), "query");
  uint8_t* k_cache = cache(p.k, p.d, "k_cache");
  uint8_t* v_cache = cache(p.v, p.dv, "v_cache");
  uint8_t* k = rows(0, p.d, "k");
  uint8_t* v = rows(1, p.dv, "v");
  uint8_t* cache_seqlens =
      launch.Input(p.cache_lengths.data, p.batch * size_of(p.cache_lengths.dtype), "cache_seqlens");
  uint8_t* block_table =
      launch.Input(p.block_table.data, p.batch * p.pages.stride * size_of(p.block_table.dtype), "block_table");
  uint8_t* alibi = launch.Input(p.alibi, (p.alibi_b ? p.batch : 1) * p.heads * 4, "alibi_slopes");
  uint8_t* sinks = launch.Input(p.sinks, p.heads * size_of(p.sinks_dtype), "sinks");
  uint8_t* out = launch.Output(p.out.data, extent(p.out, p.batch, p.heads, p.q_rows, p.dv), "out");
  uint8_t* lse = launch.Output(p.lse, p.batch * p.heads * p.q_rows * 4, "lse");
  uint8_t* workspace = launch.Workspace(uint64_t(plan.workspace()));
  const std::vector<uint8_t> bytes = plan.bytes();
  uint8_t* tiling = launch.Tiling(bytes.data(), bytes.size());
  finish("decode", launch.Run([&] {
    ms_flash_kv_cache(q, k_cache, v_cache, k, v, cache_seqlens, block_table, nullptr, nullptr, alibi, sinks, out, lse,
                      k_cache, v_cache, workspace, tiling);
  }));
}

void run_merge(const Merge& m) {
  const MergeTiling plan = plan_merge(m, soc());
  ms_twin::Options only_vectors = options(plan.cores);
  only_vectors.has_aic = false;
  ms_twin::Launch launch(only_vectors);
  const int64_t rows = m.batch * m.heads * m.rows;
  uint8_t* outs = launch.Input(m.outs.data, m.parts * m.part_elements * 2, "outs");
  uint8_t* lses = launch.Input(m.lses, m.parts * rows * 4, "lses");
  uint8_t* out = launch.Output(m.out.data, m.part_elements * 2, "out");
  uint8_t* lse = launch.Output(m.lse, rows * 4, "lse");
  uint8_t* workspace = launch.Workspace(0);
  uint8_t* tiling = launch.Tiling(plan);
  finish("merge", launch.Run([&] { ms_flash_merge(outs, lses, out, lse, workspace, tiling); }));
}

std::string describe_decode(const Problem& p, const std::vector<Append>& appends) {
  return describe(plan_decode(p, appends, soc(), chosen(p, false)), p);
}

}  // namespace msf
