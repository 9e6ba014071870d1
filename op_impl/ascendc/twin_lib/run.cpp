#include "ascendc/twin_lib/run.h"

#include <cstring>
#include <vector>

#include "ascendc/op_host/describe.h"
#include "ascendc/twin_lib/launching.h"
#include "ascendc/twin_lib/pad.h"

// The kernels, each compiled in its own unit.
extern "C" void ms_flash_fwd(uint8_t* query, uint8_t* key, uint8_t* value, uint8_t* attn_mask, uint8_t* bias,
                             uint8_t* alibi_slopes, uint8_t* sinks, uint8_t* seed, uint8_t* drop_mask,
                             uint8_t* cu_seqlens_q, uint8_t* cu_seqlens_k, uint8_t* out, uint8_t* lse, uint8_t* row_max,
                             uint8_t* row_sum, uint8_t* workspace, uint8_t* tiling);

extern "C" void ms_flash_bwd(uint8_t* query, uint8_t* key, uint8_t* value, uint8_t* attn_mask, uint8_t* bias,
                             uint8_t* alibi_slopes, uint8_t* sinks, uint8_t* seed, uint8_t* drop_mask,
                             uint8_t* cu_seqlens_q, uint8_t* cu_seqlens_k, uint8_t* out, uint8_t* row_max,
                             uint8_t* row_sum, uint8_t* dout, uint8_t* dlse, uint8_t* dq, uint8_t* dk, uint8_t* dv,
                             uint8_t* dsinks, uint8_t* workspace, uint8_t* tiling);

extern "C" void ms_flash_bias_grad(uint8_t* query, uint8_t* key, uint8_t* value, uint8_t* attn_mask, uint8_t* bias,
                                   uint8_t* alibi_slopes, uint8_t* sinks, uint8_t* seed, uint8_t* drop_mask,
                                   uint8_t* cu_seqlens_q, uint8_t* cu_seqlens_k, uint8_t* out, uint8_t* row_max,
                                   uint8_t* row_sum, uint8_t* dout, uint8_t* dlse, uint8_t* dbias, uint8_t* workspace,
                                   uint8_t* tiling);

extern "C" void ms_flash_block(uint8_t* x, uint8_t* context, uint8_t* context_v, uint8_t* w_q, uint8_t* w_k,
                               uint8_t* w_v, uint8_t* b_q, uint8_t* b_k, uint8_t* b_v, uint8_t* w_o, uint8_t* b_o,
                               uint8_t* attn_mask, uint8_t* bias, uint8_t* alibi_slopes, uint8_t* sinks, uint8_t* seed,
                               uint8_t* drop_mask, uint8_t* y, uint8_t* q, uint8_t* k, uint8_t* v, uint8_t* attn,
                               uint8_t* lse, uint8_t* row_max, uint8_t* row_sum, uint8_t* workspace, uint8_t* tiling);

namespace msf {

namespace {

// The arrays of a problem as buffers of a launch.
class Buffers {
 public:
  Buffers(const Problem& p, ms_twin::Launch* launch, bool activations = true) : p_(p), launch_(*launch) {
    outer_ = p.varlen ? 1 : p.batch;
    if (p.varlen) {
      for (int64_t b = 0; b <= p.batch; ++b) {
        const bool last = b == p.batch;
        cu_q_.push_back(!last ? p.seq[b].q_base : b ? p.seq[b - 1].q_base + p.seq[b - 1].q_len : 0);
        cu_k_.push_back(!last ? p.seq[b].k_base : b ? p.seq[b - 1].k_base + p.seq[b - 1].k_len : 0);
      }
      cu_q = launch_.Input(cu_q_.data(), int64_t(cu_q_.size() * 8), "cu_seqlens_q");
      cu_k = launch_.Input(cu_k_.data(), int64_t(cu_k_.size() * 8), "cu_seqlens_k");
    }
    if (!activations) {
      query = key = value = nullptr;
    } else if (p.packed) {
      query = key = value =
          launch_.Input(p.q.data, extent(p.q, outer_, p.heads + 2 * p.kv_heads, p.q_rows, p.d), "query");
    } else {
      query = launch_.Input(p.q.data, extent(p.q, outer_, p.heads, p.q_rows, p.d), "query");
      key = launch_.Input(p.k.data, extent(p.k, outer_, p.kv_heads, p.k_rows, p.d), "key");
      value = launch_.Input(p.v.data, extent(p.v, outer_, p.kv_heads, p.k_rows, p.dv), "value");
    }
    mask = launch_.Input(p.mask.data, extent(p.mask, p), "attn_mask");
    bias = launch_.Input(p.bias.data, extent(p.bias, p), "bias");
    drop_mask = launch_.Input(p.drop_mask.data, extent(p.drop_mask, p), "drop_mask");
    alibi = launch_.Input(p.alibi, (p.alibi_b ? p.batch : 1) * p.heads * 4, "alibi_slopes");
    sinks = launch_.Input(p.sinks, p.heads * size_of(p.sinks_dtype), "sinks");
    seed = launch_.Input(p.seed_input, 2 * 8, "seed");
  }

  // Rows of variable-length tensors that no sequence covers hold their zeros already.
  uint8_t* rows_out(void* data, int64_t bytes, const char* name) {
    return p_.varlen ? launch_.InOut(data, bytes, name) : launch_.Output(data, bytes, name);
  }
  int64_t outer() const { return outer_; }
  int64_t statistics() const { return outer_ * p_.heads * p_.q_rows * 4; }

  uint8_t *query, *key, *value, *mask, *bias, *drop_mask, *alibi, *sinks, *seed, *cu_q = nullptr, *cu_k = nullptr;

 private:
  const Problem& p_;
  ms_twin::Launch& launch_;
  int64_t outer_;
  std::vector<int64_t> cu_q_, cu_k_;
};

// What both gradients read beside the inputs of the forward.
struct Saved {
  Saved(const Problem& p, const Buffers& in, ms_twin::Launch* launch)
      : out(launch->Input(p.out.data, extent(p.out, in.outer(), p.heads, p.q_rows, p.dv), "out")),
        row_max(launch->Input(p.row_max, in.statistics(), "row_max")),
        row_sum(launch->Input(p.row_sum, in.statistics(), "row_sum")),
        dout(launch->Input(p.dout.data, extent(p.dout, in.outer(), p.heads, p.q_rows, p.dv), "dout")),
        dlse(launch->Input(p.dlse, in.statistics(), "dlse")) {}

  uint8_t *out, *row_max, *row_sum, *dout, *dlse;
};

// What every kernel gets from its plan.
struct Planned {
  template <class Plan>
  Planned(const Plan& plan, ms_twin::Launch* launch) : workspace(launch->Workspace(uint64_t(plan.workspace()))) {
    const std::vector<uint8_t> bytes = plan.bytes();
    tiling = launch->Tiling(bytes.data(), bytes.size());
  }

  uint8_t *workspace, *tiling;
};

}  // namespace

void run_forward(const Problem& p) {
  if (Padded::needed(p)) {
    const Padded padded(p, false);
    run_forward(padded.problem);
    return padded.copy_back();
  }
  const ForwardPlan plan = plan_forward(p, soc(), chosen(p, false));
  ms_twin::Launch launch(options(plan.tiling.cores));
  Buffers in(p, &launch);
  uint8_t* out = in.rows_out(p.out.data, extent(p.out, in.outer(), p.heads, p.q_rows, p.dv), "out");
  uint8_t* lse = in.rows_out(p.lse, in.statistics(), "lse");
  uint8_t* row_max = in.rows_out(p.row_max, in.statistics(), "row_max");
  uint8_t* row_sum = in.rows_out(p.row_sum, in.statistics(), "row_sum");
  const Planned planned(plan, &launch);
  finish("fwd", launch.Run([&] {
    ms_flash_fwd(in.query, in.key, in.value, in.mask, in.bias, in.alibi, in.sinks, in.seed, in.drop_mask, in.cu_q,
                 in.cu_k, out, lse, row_max, row_sum, planned.workspace, planned.tiling);
  }));
}

void run_backward(const Problem& p) {
  if (Padded::needed(p)) {
    const Padded padded(p, true);
    run_backward(padded.problem);
    return padded.copy_back();
  }
  const BackwardPlan plan = plan_backward(p, soc(), chosen(p, true));
  ms_twin::Launch launch(options(plan.tiling.cores));
  Buffers in(p, &launch);
  const Saved saved(p, in, &launch);
  uint8_t *dq, *dk, *dv;
  if (p.packed) {
    dq = dk = dv = launch.Output(p.dq.data, extent(p.dq, in.outer(), p.heads + 2 * p.kv_heads, p.q_rows, p.d), "dq");
  } else {
    dq = in.rows_out(p.dq.data, extent(p.dq, in.outer(), p.heads, p.q_rows, p.d), "dq");
    dk = in.rows_out(p.dk.data, extent(p.dk, in.outer(), p.kv_heads, p.k_rows, p.d), "dk");
    dv = in.rows_out(p.dv_.data, extent(p.dv_, in.outer(), p.kv_heads, p.k_rows, p.dv), "dv");
  }
  uint8_t* dsinks = p.sinks ? launch.Output(p.dsinks, p.heads * size_of(p.sinks_dtype), "dsinks") : nullptr;
  const Planned planned(plan, &launch);
  finish("bwd", launch.Run([&] {
    ms_flash_bwd(in.query, in.key, in.value, in.mask, in.bias, in.alibi, in.sinks, in.seed, in.drop_mask, in.cu_q,
                 in.cu_k, saved.out, saved.row_max, saved.row_sum, saved.dout, saved.dlse, dq, dk, dv, dsinks,
                 planned.workspace, planned.tiling);
  }));
}

void run_bias_grad(const Problem& p) {
  if (Padded::needed(p)) return run_bias_grad(Padded(p, true).problem);
  const int64_t bytes_out = extent(p.dbias, p);
  if (!p.batch || !p.max_q || !p.max_k) {
    if (bytes_out) std::memset(p.dbias.data, 0, size_t(bytes_out));
    return;
  }
  const BiasGradPlan plan = plan_bias_grad(p, soc(), chosen(p, true));
  ms_twin::Launch launch(options(plan.tiling.cores));
  Buffers in(p, &launch);
  const Saved saved(p, in, &launch);
  uint8_t* dbias = launch.Output(p.dbias.data, bytes_out, "dbias");
  const Planned planned(plan, &launch);
  finish("bias_grad", launch.Run([&] {
    ms_flash_bias_grad(in.query, in.key, in.value, in.mask, in.bias, in.alibi, in.sinks, in.seed, in.drop_mask, in.cu_q,
                       in.cu_k, saved.out, saved.row_max, saved.row_sum, saved.dout, saved.dlse, dbias,
                       planned.workspace, planned.tiling);
  }));
}

void run_block(const Problem& p, const BlockArrays& a) {
  const bool has_output = a.o.data != nullptr;
  const BlockShape shape{a.embed,   a.k_embed, a.v_embed, has_output ? a.out : 0,
                         a.q.place, a.k.place, a.v.place, a.o.place};
  const BlockPlan plan = plan_block(p, shape, soc(), chosen(p, false));
  ms_twin::Launch launch(options(plan.tiling.f.cores));
  Buffers pieces(p, &launch, false);
  const int64_t q_rows = p.batch * p.max_q, k_rows = p.batch * p.max_k;
  const int64_t q_out = p.heads * p.d, k_out = p.kv_heads * p.d, v_out = p.kv_heads * p.dv, merged = p.heads * p.dv;
  uint8_t* x = launch.Input(a.x, q_rows * a.embed * 2, "x");
  uint8_t* context = a.context ? launch.Input(a.context, k_rows * a.k_embed * 2, "context") : x;
  uint8_t* context_v = a.context_v ? launch.Input(a.context_v, k_rows * a.v_embed * 2, "context_v") : context;
  uint8_t* w_q = launch.Input(a.q.data, a.q.bytes, "w_q");
  uint8_t* w_k = a.k.data == a.q.data ? w_q : launch.Input(a.k.data, a.k.bytes, "w_k");
  uint8_t* w_v = a.v.data == a.k.data ? w_k : launch.Input(a.v.data, a.v.bytes, "w_v");
  uint8_t* w_o = launch.Input(a.o.data, a.o.bytes, "w_o");
  uint8_t* b_q = launch.Input(a.q.bias, a.q.bias_bytes, "b_q");
  uint8_t* b_k = a.k.bias == a.q.bias ? b_q : launch.Input(a.k.bias, a.k.bias_bytes, "b_k");
  uint8_t* b_v = a.v.bias == a.k.bias ? b_k : launch.Input(a.v.bias, a.v.bias_bytes, "b_v");
  uint8_t* b_o = launch.Input(a.o.bias, a.o.bias_bytes, "b_o");
  uint8_t* y = launch.Output(a.y, q_rows * (has_output ? a.out : merged) * 2, "y");
  uint8_t* q = launch.Output(a.kept_q, q_rows * q_out * 2, "q");
  uint8_t* k = launch.Output(a.kept_k, k_rows * k_out * 2, "k");
  uint8_t* v = launch.Output(a.kept_v, k_rows * v_out * 2, "v");
  uint8_t* attn = launch.Output(a.kept_attn, q_rows * merged * 2, "attn");
  uint8_t* lse = launch.Output(p.lse, pieces.statistics(), "lse");
  uint8_t* row_max = launch.Output(p.row_max, pieces.statistics(), "row_max");
  uint8_t* row_sum = launch.Output(p.row_sum, pieces.statistics(), "row_sum");
  const Planned planned(plan, &launch);
  finish("block", launch.Run([&] {
    ms_flash_block(x, context, context_v, w_q, w_k, w_v, b_q, b_k, b_v, w_o, b_o, pieces.mask, pieces.bias,
                   pieces.alibi, pieces.sinks, pieces.seed, pieces.drop_mask, y, q, k, v, attn, lse, row_max, row_sum,
                   planned.workspace, planned.tiling);
  }));
}

std::string describe_forward(const Problem& p) { return describe(plan_forward(p, soc(), chosen(p, false)), p); }
std::string describe_backward(const Problem& p) { return describe(plan_backward(p, soc(), chosen(p, true)), p); }
std::string describe_bias_grad(const Problem& p) { return describe(plan_bias_grad(p, soc(), chosen(p, true))); }

}  // namespace msf
