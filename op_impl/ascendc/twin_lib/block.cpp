#include "ascendc/twin_lib/block.h"

#include <deque>

#include "ascendc/twin_lib/element.h"

namespace msf {

namespace {

constexpr int64_t kStep = 16;  // head dims are multiples of it in the kernels
int64_t wide(int64_t d) { return (d + kStep - 1) / kStep * kStep; }

thread_local const BlockArrays* pending = nullptr;

// cpu/call.cpp sets up the attention of `block`, and hands it over to run_pending_block.
void run_with(const BlockArrays& block, const Spec& attention, const std::vector<Array>& arrays) {
  pending = &block;
  try {
    run(Op::forward, attention, arrays);
  } catch (...) {
    pending = nullptr;
    throw;
  }
  pending = nullptr;
}

// Memory of one call, of elements of 16 bits.
using Memory = std::deque<std::vector<uint16_t>>;
uint16_t* zeros(Memory* memory, int64_t elements) { return memory->emplace_back(size_t(elements)).data(); }

// The weight of q, k or v: as it is where its channels are those of the kernel, else a copy, with zeros for the
// channels that a head gets to be a multiple of 16.
BlockWeight weight_of(const MhaForward::Product& p, Memory* memory) {
  const int64_t pitch = p.weight.shape[1], d = p.channels / p.heads;
  BlockWeight w;
  if (!p.group && d % kStep == 0) {
    w.data = p.weight.data, w.bytes = p.weight.shape[0] * pitch * 2;
    w.place = {p.first * (p.transposed ? 1 : pitch), pitch, p.first, p.transposed};
    if (p.bias.data) w.bias = p.bias.data, w.bias_bytes = p.bias.shape[0] * 2;
    return w;
  }
  const int64_t rows = p.heads * wide(d);
  uint16_t* copy = zeros(memory, rows * p.in);
  uint16_t* bias = p.bias.data ? zeros(memory, rows) : nullptr;
  for (int64_t c = 0; c < p.channels; ++c) {
    const int64_t from = p.first + (p.group ? c / p.group * p.group_stride + c % p.group : c);
    const int64_t to = c / d * wide(d) + c % d;
    for (int64_t i = 0; i < p.in; ++i)
      copy[to * p.in + i] =
          static_cast<const uint16_t*>(p.weight.data)[p.transposed ? i * pitch + from : from * pitch + i];
    if (bias) bias[to] = static_cast<const uint16_t*>(p.bias.data)[from];
  }
  w.data = copy, w.bytes = rows * p.in * 2, w.place.pitch = p.in;
  if (bias) w.bias = bias, w.bias_bytes = rows * 2;
  return w;
}

BlockWeight output_weight(const MhaForward& f, int64_t dv, Memory* memory) {
  BlockWeight w;
  if (!f.w_o.data) return w;
  const int64_t pitch = f.w_o.shape[1], merged = f.w_o.shape[f.w_o_transposed ? 0 : 1];
  const int64_t out = f.w_o.shape[f.w_o_transposed ? 1 : 0];
  if (f.b_o.data) w.bias = f.b_o.data, w.bias_bytes = out * 2;
  w.data = f.w_o.data, w.bytes = merged * out * 2;
  w.place.pitch = pitch, w.place.transposed = f.w_o_transposed;
  if (dv % kStep == 0) return w;
  const int64_t width = merged / dv * wide(dv);
  uint16_t* copy = zeros(memory, out * width);
  for (int64_t o = 0; o < out; ++o)
    for (int64_t c = 0; c < merged; ++c)
      copy[o * width + c / dv * wide(dv) + c % dv] =
          static_cast<const uint16_t*>(f.w_o.data)[f.w_o_transposed ? c * pitch + o : o * pitch + c];
  w.data = copy, w.bytes = out * width * 2;
  w.place.pitch = width, w.place.transposed = false;
  return w;
}

// Where the kernel writes rows of heads of `d` channels: to the result itself, or to memory with wider heads.
class Result {
 public:
  Result(const Array& array, int64_t heads, int64_t d, Memory* memory) : array_(array), heads_(heads), d_(d) {
    tokens_ = array.shape[0] * array.shape[1];
    data = d % kStep ? zeros(memory, tokens_ * heads * wide(d)) : array.data;
  }
  void copy_back() const {
    if (d_ % kStep == 0) return;
    for (int64_t i = 0; i < tokens_ * heads_; ++i)
      for (int64_t c = 0; c < d_; ++c)
        static_cast<uint16_t*>(array_.data)[i * d_ + c] = static_cast<const uint16_t*>(data)[i * wide(d_) + c];
  }
  void* data;

 private:
  Array array_;
  int64_t heads_, d_, tokens_;
};

Tensor4 widened(Tensor4 x, int64_t d) {
  x.b = x.b / d * wide(d), x.h = x.h / d * wide(d), x.s = x.s / d * wide(d);
  return x;
}

// A row-major copy of a matrix in float.
std::vector<float> floats(const Matrix& x, int64_t rows, int64_t cols) {
  std::vector<float> copy;
  copy.reserve(size_t(rows * cols));
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) copy.push_back(load(x.dtype, x.at(i, j), 0));
  return copy;
}

}  // namespace

void block_at_once(const MhaForward& f, const Spec& attention, const std::vector<Array>& arrays) {
  for (const Array* bias : {&f.q.bias, &f.k.bias, &f.v.bias, &f.b_o})
    if (bias->data && bias->dtype != f.q.x.dtype)
      fail("the biases of projections must have the dtype of 'x' on Ascend.");
  Memory memory;
  const int64_t d = f.q.channels / f.q.heads, dv = f.v.channels / f.v.heads;
  const Result q(f.q.out, f.q.heads, d, &memory), k(f.k.out, f.k.heads, d, &memory), v(f.v.out, f.v.heads, dv, &memory);
  const Result attn(f.attn, f.q.heads, dv, &memory);
  BlockArrays a;
  a.x = f.q.x.data, a.context = f.k.x.data, a.context_v = f.v.x.data;
  if (a.context_v == a.context) a.context_v = nullptr;
  if (a.context == a.x) a.context = nullptr;
  a.embed = f.q.in, a.k_embed = f.k.in, a.v_embed = f.v.in;
  a.q = weight_of(f.q, &memory), a.k = weight_of(f.k, &memory), a.v = weight_of(f.v, &memory);
  a.o = output_weight(f, dv, &memory);
  a.kept_q = q.data, a.kept_k = k.data, a.kept_v = v.data;
  if (f.w_o.data)
    a.y = f.y.data, a.out = f.y.shape[2], a.kept_attn = attn.data;
  else
    a.y = attn.data;
  run_with(a, attention, arrays);
  for (const Result* result : {&q, &k, &v, &attn}) result->copy_back();
}

bool run_pending_block(const Problem& attention) {
  if (!pending) return false;
  Problem p = attention;
  p.q = widened(p.q, p.d), p.k = widened(p.k, p.d), p.v = widened(p.v, p.dv), p.out = widened(p.out, p.dv);
  p.d = wide(p.d), p.dv = wide(p.dv);
  run_block(p, *pending);
  return true;
}

// The attention has no arrays of its own for query, key, value and output: shapes are enough to set it up.
void call_block(const char* spec, const std::vector<Array>& in) {
  constexpr int kBlockArrays = 11, kPieces = 5, kOutputs = 4;
  if (in.size() != kBlockArrays + kPieces + kOutputs) throw std::invalid_argument("a block takes 20 arrays.");
  const Array &x = in[0], &context = in[1].data ? in[1] : x, &context_v = in[2].data ? in[2] : context;
  for (int i = 0; i < kBlockArrays; ++i)
    if (in[i].data && in[i].dtype != x.dtype) throw std::invalid_argument("the arrays of a block must have one dtype.");
  const Array &mask = in[11], &bias = in[12], &alibi = in[13], &sinks = in[14], &drop_mask = in[15], &y = in[16];
  const Array none{nullptr, {}, DType::none};
  auto activation = [&](const Array& like, const Array& weight) {
    return Array{like.data, {like.shape.at(0), like.shape.at(1), weight.shape.at(0)}, x.dtype};
  };
  const Array q = activation(x, in[3]), k = activation(context, in[4]), v = activation(context_v, in[5]);
  const Spec parsed(spec);
  const int64_t dv = v.shape[2] / (parsed.kv_heads ? parsed.kv_heads : 1);
  const Array out{y.data, {x.shape[0], x.shape[1], parsed.heads * dv}, x.dtype};
  auto weight = [&](int slot) {
    BlockWeight w;
    if (!in[slot].data) return w;
    w.data = in[slot].data, w.bytes = in[slot].shape.at(0) * in[slot].shape.at(1) * 2;
    w.place.pitch = in[slot].shape.at(1);
    const Array& b = in[slot == 9 ? 10 : slot + 3];
    if (b.data) w.bias = b.data, w.bias_bytes = b.shape.at(0) * 2;
    return w;
  };
  BlockArrays arrays;
  arrays.x = x.data, arrays.context = in[1].data, arrays.context_v = in[2].data, arrays.y = y.data;
  arrays.embed = x.shape[2], arrays.k_embed = context.shape[2], arrays.v_embed = context_v.shape[2];
  arrays.out = y.shape.at(2);
  arrays.q = weight(3), arrays.k = weight(4), arrays.v = weight(5), arrays.o = weight(9);
  run_with(arrays, parsed,
           {q, k, v, mask, bias, alibi, sinks, none, drop_mask, none, none, out, in[17], in[18], in[19]});
}

void multiply_on_host(const Gemm& g) {
  std::vector<float> sum(size_t(g.m * g.n));
  if (g.bias.data)
    for (int64_t i = 0; i < g.m; ++i)
      for (int64_t j = 0; j < g.n; ++j) sum[size_t(i * g.n + j)] = load(g.bias.dtype, g.bias.at(0, j), 0);
  for (int t = 0; t < g.terms; ++t) {
    const int64_t depth = g.term[t].k;
    const std::vector<float> a = floats(g.term[t].a, g.m, depth), b = floats(g.term[t].b, depth, g.n);
    for (int64_t i = 0; i < g.m; ++i)
      for (int64_t k = 0; k < depth; ++k) {
        const float factor = a[size_t(i * depth + k)];
        for (int64_t j = 0; j < g.n; ++j) sum[size_t(i * g.n + j)] += factor * b[size_t(k * g.n + j)];
      }
  }
  for (int64_t i = 0; i < g.m; ++i)
    for (int64_t j = 0; j < g.n; ++j) store(g.c.dtype, g.c.at(i, j), 0, sum[size_t(i * g.n + j)]);
}

}  // namespace msf
