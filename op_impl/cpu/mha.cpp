#include "cpu/mha.h"

#include <algorithm>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/threads.h"

namespace msf {

namespace {

constexpr int kInputOf[kMhaGradients] = {kX, kContext, kContextV, kWq, kWk, kWv, kBq, kBk, kBv, kWo, kBo, kMhaSinks};
constexpr const char* kNames[kMhaInputs] = {"x",    "context",      "context_v", "w_q",  "w_k",      "w_v",
                                            "b_q",  "b_k",          "b_v",       "w_o",  "b_o",      "attn_mask",
                                            "bias", "alibi_slopes", "sinks",     "seed", "drop_mask"};

using Shape = std::vector<int64_t>;

// Memory of one call; freed at its end or by release().
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { release(); }
  Array array(Shape shape, DType dtype) {
    release();
    int64_t n = size_of(dtype);
    for (int64_t s : shape) n *= s;
    data_ = allocate_aligned(size_t(n));
    return {data_, std::move(shape), dtype};
  }
  void release() {
    free_aligned(data_);
    data_ = nullptr;
  }

 private:
  void* data_ = nullptr;
};

constexpr int64_t kWorkStep = 32;  // elements, 64 bytes of the smallest: where arrays begin
int64_t padded(int64_t n) { return (n + kWorkStep - 1) / kWorkStep * kWorkStep; }

// Elements of working memory of a backward: the gradients of q, k, v and of the attention output. q, k and v that are
// computed anew lie where their gradients go: the attention backward has read all queries of a head before it writes
// their gradients, and writes those of a block of keys when it has read the block for the last time.
int64_t work_elements(const MhaSpec& spec, const int64_t (&sizes)[3], int64_t attn) {
  int64_t n = spec.has(kWo) ? padded(attn) : 0;
  for (int64_t size : sizes) n += padded(size);
  return n;
}

// Hands out pieces of an array. Working memory is an output of the op that nobody reads: so it comes from the pool of
// MindSpore, which has it free again after the op, and adds nothing to the peak of a step.
class Work {
 public:
  explicit Work(const Array& memory) : memory_(memory) {}
  Array array(Shape shape) {
    int64_t n = 1;
    for (int64_t s : shape) n *= s;
    char* at = static_cast<char*>(memory_.data) + used_ * size_of(memory_.dtype);
    used_ += padded(n);
    if (used_ > memory_.shape[0]) fail("the working memory has ", memory_.shape[0], " elements, which is too small.");
    return {at, std::move(shape), memory_.dtype};
  }

 private:
  Array memory_;
  int64_t used_ = 0;
};

// What turns hidden states into queries, keys or values: some of the output channels of a weight.
struct Projection {
  int source, weight, bias;                // slots
  int64_t in, out;                         // channels
  int64_t first, group = 0, group_stride;  // its channels of the weight; group 0: next to each other
  bool transposed;

  Axis channels(int64_t stride) const { return {stride, group, group_stride * stride}; }
};

// The whole op, checked, as products and attention.
class Mha {
 public:
  Mha(const MhaSpec& spec, const std::vector<Array>& params) : spec_(spec), params_(params) {
    for (int slot = 0; slot < kMhaInputs; ++slot)
      if (spec.has(slot) != (params[slot].dtype != DType::none))
        fail("input ", kNames[slot], " disagrees with the attribute 'inputs'.");
    source_[0] = kX;
    source_[1] = spec.has(kContext) ? int(kContext) : int(kX);
    source_[2] = spec.has(kContextV) ? int(kContextV) : source_[1];
    dtype_ = params[kX].dtype;
    for (int slot : {kX, kContext, kContextV, kWq, kWk, kWv, kWo})
      if (spec.has(slot) && params[slot].dtype != dtype_)
        fail("the dtype of '", kNames[slot], "' must be that of 'x'.");
    for (int slot : {kX, kContext, kContextV})
      if (spec.has(slot) && params[slot].shape.size() != 3)
        fail("the rank of '", kNames[slot], "' must be 3, but got the shape ", show(params[slot].shape), ".");
    for (int slot : {kWq, kWk, kWv, kWo})
      if (spec.has(slot) && params[slot].shape.size() != 2)
        fail("the rank of '", kNames[slot], "' must be 2, but got the shape ", show(params[slot].shape), ".");
    plan();
    for (int part = 0; part < 3; ++part) {
      const Shape &shape = params[source_[part]].shape, &x = params[kX].shape;
      if (shape[batch_axis()] != x[batch_axis()])
        fail("the batch size of '", kNames[source_[part]], "' must be equal to that of 'x' ", x[batch_axis()],
             ", but got ", shape[batch_axis()], ".");
      if (part == 2 && length(shape) != length(params[source_[1]].shape))
        fail("the length of '", kNames[source_[2]], "' must be equal to that of the keys ",
             length(params[source_[1]].shape), ", but got ", length(shape), ".");
    }
    if (spec.has(kWo)) {
      const Shape& w = params[kWo].shape;
      const int64_t in = w[spec.transposed[3] ? 0 : 1];
      out_channels_ = w[spec.transposed[3] ? 1 : 0];
      if (in != heads() * head_dim_v_)
        fail("the input channels of 'w_o' must be ", heads() * head_dim_v_, ", but got ", in, ".");
      check_bias(kBo, out_channels_);
    } else {
      if (spec.has(kBo)) fail("'b_o' needs a 'w_o'.");
      out_channels_ = heads() * head_dim_v_;
    }
  }

  void forward(const Array* out) {
    const Array &y = out[0], &saved_attn = out[4];
    Memory lse_memory;
    Array qkv[3];
    const auto at_once = selected_kernels()->block;
    for (int part = 0; part < 3; ++part) {
      qkv[part] = reshaped(out[1 + part], projected(part));
      if (!at_once) project(part, qkv[part]);
    }
    const Array attn = spec_.has(kWo) ? saved_attn : y;
    if (!spec_.has(kWo)) std::memset(saved_attn.data, 0, size_of(dtype_));
    const Array lse = lse_memory.array(out[5].shape, DType::f32);
    std::vector<Array> p = attention_inputs(qkv);
    p.insert(p.end(), {attn, lse, out[5], out[6]});
    if (at_once) {
      const Array none{nullptr, {}, DType::none};
      return at_once({product(0, qkv), product(1, qkv), product(2, qkv), spec_.has(kWo) ? params_[kWo] : none,
                      params_[kBo], attn, y, spec_.transposed[3]},
                     spec_.attention, p);
    }
    run(Op::forward, spec_.attention, p);
    if (!spec_.has(kWo)) return;
    Gemm g = gemm(tokens(attn), out_channels_, rows(y), spec_.has(kBo) ? &params_[kBo] : nullptr);
    g.add(rows(attn), output_weight().transposed(), attn.shape[2]);
    multiply(g);
  }

  void backward(const Array* grads) {
    if (params_[kDy].shape.size() != 3 || params_[kDy].shape[2] != out_channels_)
      fail("the shape of the gradient ", show(params_[kDy].shape), " must be that of the output, with ", out_channels_,
           " channels.");
    bool inside = spec_.wants(kDsinks), before = false;
    for (int i = 0; i < kDwo; ++i) before |= spec_.wants(i);
    inside |= before;
    if (spec_.wants(kDwo)) output_weight_gradient(grads[kDwo]);
    if (spec_.wants(kDbo)) sum_rows(params_[kDy], {1}, 0, grads[kDbo]);
    Memory sinks_memory;
    Array dqkv[3];
    Work work(grads[kMhaGradients]);
    if (inside) {
      Array qkv[3];
      restore(&work, qkv);
      std::vector<Array> p = attention_inputs(qkv);
      add_saved(dattn(&work), &p);
      for (int part = 0; part < 3; ++part)
        p.push_back(dqkv[part] = spec_.recompute ? qkv[part] : work.array(projected(part)));
      const bool sinks = spec_.has(kMhaSinks);
      p.push_back(spec_.wants(kDsinks) ? grads[kDsinks]
                                       : sinks_memory.array(sinks ? params_[kMhaSinks].shape : Shape{1},
                                                            sinks ? params_[kMhaSinks].dtype : DType::f32));
      run(Op::backward, spec_.attention, p);
    }
    for (int part = 0; before && part < 3; ++part) {
      const Projection& p = projection_[part];
      if (spec_.wants(kDwq + p.weight - kWq)) weight_gradient(part, dqkv[part], grads[kDwq + p.weight - kWq]);
      if (spec_.wants(kDbq + p.bias - kBq)) sum_rows(dqkv[part], p.channels(1), p.first, grads[kDbq + p.bias - kBq]);
    }
    for (int i : {kDx, kDcontext, kDcontextV})
      if (spec_.wants(i)) source_gradient(kInputOf[i], dqkv, grads[i]);
    for (int i = 0; i < kMhaGradients; ++i)
      if (!spec_.wants(i)) std::memset(grads[i].data, 0, size_of(grads[i].dtype));
  }

  void bias_grad(const Array& dbias) {
    Memory memory;
    Work work(memory.array({work_elements()}, dtype_));
    Array qkv[3];
    restore(&work, qkv);
    std::vector<Array> p = attention_inputs(qkv);
    add_saved(dattn(&work), &p);
    p.push_back(dbias);
    run(Op::bias_grad, spec_.attention, p);
  }

 private:
  int batch_axis() const { return spec_.attention.layout == Layout::SBH ? 1 : 0; }
  int64_t length(const Shape& shape) const { return shape[1 - batch_axis()]; }
  int64_t heads() const { return spec_.attention.heads; }
  static int64_t tokens(const Array& x) { return x.shape[0] * x.shape[1]; }

  void check_bias(int slot, int64_t channels) const {
    if (spec_.has(slot) && params_[slot].shape != Shape{channels})
      fail("the shape of '", kNames[slot], "' must be ", show({channels}), ", but got ", show(params_[slot].shape),
           ".");
  }

  // Finds the channels of every projection, from which weights are there.
  void plan() {
    const int64_t kv_heads = spec_.attention.kv_heads;
    if (heads() < 1 || kv_heads < 1) fail("'num_heads' and 'num_kv_heads' must be given.");
    const int weight[3] = {kWq, spec_.has(kWk) ? int(kWk) : int(kWq),
                           spec_.has(kWv)   ? int(kWv)
                           : spec_.has(kWk) ? int(kWk)
                                            : int(kWq)};
    const int64_t part_heads[3] = {heads(), kv_heads, kv_heads};
    int64_t head_dim = 0;
    for (int part = 0, next = 0; part < 3; part = next) {
      const int slot = weight[part];
      next = part + 1;
      while (next < 3 && weight[next] == slot) ++next;
      const int index = slot - kWq, parts = next - part;
      const Shape& w = params_[slot].shape;
      const int64_t out = w[spec_.transposed[index] ? 1 : 0], in = w[spec_.transposed[index] ? 0 : 1];
      check_bias(kBq + index, out);
      int64_t all_heads = 0;
      for (int i = part; i < next; ++i) all_heads += part_heads[i];
      if (all_heads < 1 || out % all_heads != 0)
        fail("the output channels of '", kNames[slot], "' must be a multiple of its ", all_heads, " heads, but got ",
             out, ".");
      const int64_t d = out / all_heads;
      if (spec_.interleaved && parts == 3 && heads() != kv_heads)
        fail("interleaved weights need 'num_heads' equal to 'num_kv_heads'.");
      int64_t first = 0;
      for (int i = part; i < next; ++i) {
        Projection& p = projection_[i];
        p = {source_[i], slot, kBq + index, in, part_heads[i] * d, first, 0, 0, spec_.transposed[index]};
        if (spec_.interleaved && parts > 1) {
          p.first = (i - part) * d;
          p.group = d;
          p.group_stride = parts * d;
        }
        first += p.out;
        if (params_[p.source].shape[2] != in)
          fail("the input channels of '", kNames[slot], "' must be those of '", kNames[p.source], "' ",
               params_[p.source].shape[2], ", but got ", in, ".");
        if (i < 2) {
          if (i == 1 && d != head_dim)
            fail("the head_dim of the keys must be equal to that of the queries ", head_dim, ", but got ", d, ".");
          head_dim = d;
        } else {
          head_dim_v_ = d;
        }
      }
    }
  }

  Shape projected(int part) const {
    Shape shape = params_[source_[part]].shape;
    shape[2] = projection_[part].out;
    return shape;
  }

  int64_t work_elements() const {
    int64_t sizes[3];
    for (int part = 0; part < 3; ++part) sizes[part] = tokens(params_[source_[part]]) * projection_[part].out;
    return msf::work_elements(spec_, sizes, tokens(params_[kX]) * heads() * head_dim_v_);
  }

  static Array reshaped(Array x, Shape shape) {
    x.shape = std::move(shape);
    return x;
  }

  // A (B, S, E) array as one row per token
  static Matrix rows(const Array& x) { return {static_cast<char*>(x.data), x.dtype, {x.shape[2]}, {1}}; }

  // The channels of a projection in its weight, or in the gradient of that, as (out, in)
  Matrix weight_of(const Projection& p, const Array& w) const {
    const int64_t step = p.transposed ? 1 : w.shape[1];
    return {static_cast<char*>(w.data) + p.first * step * size_of(w.dtype),
            w.dtype,
            p.channels(step),
            {p.transposed ? w.shape[1] : 1}};
  }

  // w_o, or its gradient, as (out, in)
  Matrix output_matrix(const Array& w) const {
    const Matrix m{static_cast<char*>(w.data), w.dtype, {w.shape[1]}, {1}};
    return spec_.transposed[3] ? m.transposed() : m;
  }
  Matrix output_weight() const { return output_matrix(params_[kWo]); }

  static Matrix one_row(const Array& x, const Axis& channels, int64_t first) {
    return {static_cast<char*>(x.data) + first * size_of(x.dtype), x.dtype, {0}, channels};
  }

  Gemm gemm(int64_t m, int64_t n, const Matrix& c, const Array* bias = nullptr) const {
    Gemm g;
    g.m = m;
    g.n = n;
    g.c = c;
    if (bias) g.bias = one_row(*bias, {1}, 0);
    g.high = spec_.attention.fixed.high;
    return g;
  }

  static void multiply(const Gemm& g) { selected_kernels()->multiply(g); }

  void project(int part, const Array& out) const {
    const Projection& p = projection_[part];
    const Array& x = params_[p.source];
    Gemm g = gemm(tokens(x), p.out, rows(out));
    if (spec_.has(p.bias)) g.bias = one_row(params_[p.bias], p.channels(1), p.first);
    g.add(rows(x), weight_of(p, params_[p.weight]).transposed(), p.in);
    multiply(g);
  }

  MhaForward::Product product(int part, const Array* qkv) const {
    const Projection& p = projection_[part];
    return {params_[p.source],
            params_[p.weight],
            params_[p.bias],
            qkv[part],
            part ? spec_.attention.kv_heads : heads(),
            p.in,
            p.out,
            p.first,
            p.group,
            p.group_stride,
            p.transposed};
  }

  // q, k and v: those that were kept, or the same anew
  void restore(Work* work, Array* qkv) const {
    for (int part = 0; part < 3; ++part)
      if (spec_.recompute)
        project(part, qkv[part] = work->array(projected(part)));
      else
        qkv[part] = params_[kSavedQ + part];
  }

  std::vector<Array> attention_inputs(const Array* qkv) const {
    const Array none{nullptr, {}, DType::none};
    return {qkv[0],
            qkv[1],
            qkv[2],
            params_[kMhaMask],
            params_[kMhaBias],
            params_[kMhaAlibi],
            params_[kMhaSinks],
            params_[kMhaSeed],
            params_[kMhaDropMask],
            none,
            none};
  }

  // Gradient of the attention output
  Array dattn(Work* work) const {
    const Array& dy = params_[kDy];
    if (!spec_.has(kWo)) return dy;
    Shape shape = dy.shape;
    shape[2] = heads() * head_dim_v_;
    const Array out = work->array(shape);
    Gemm g = gemm(tokens(dy), shape[2], rows(out));
    g.add(rows(dy), output_weight(), dy.shape[2]);
    multiply(g);
    return out;
  }

  void add_saved(const Array& dattn, std::vector<Array>* p) const {
    p->insert(p->end(),
              {params_[kSavedAttn], params_[kSavedMax], params_[kSavedSum], dattn, Array{nullptr, {}, DType::none}});
  }

  void output_weight_gradient(const Array& out) const {
    const Array &dy = params_[kDy], &attn = params_[kSavedAttn];
    outer(rows(dy), rows(attn), tokens(dy), dy.shape[2], attn.shape[2], output_matrix(out));
  }

  void weight_gradient(int part, const Array& dpart, const Array& out) const {
    const Projection& p = projection_[part];
    const Array& x = params_[p.source];
    outer(rows(dpart), rows(x), tokens(x), p.out, p.in, weight_of(p, out));
  }

  // (out, in) = sum over tokens of dy x; stored along whichever of the two lies together in memory
  void outer(const Matrix& dy, const Matrix& x, int64_t n_tokens, int64_t out, int64_t in, const Matrix& c) const {
    const bool transposed = c.col.stride != 1;
    Gemm g = transposed ? gemm(in, out, c.transposed()) : gemm(out, in, c);
    if (transposed)
      g.add(x.transposed(), dy, n_tokens);
    else
      g.add(dy.transposed(), x, n_tokens);
    multiply(g);
  }

  void sum_rows(const Array& x, const Axis& channels, int64_t first, const Array& out) const {
    static const float one = 1;
    Gemm g = gemm(1, x.shape[2], one_row(out, channels, first));
    g.add({reinterpret_cast<char*>(const_cast<float*>(&one)), DType::f32, {0}, {0}}, rows(x), tokens(x));
    multiply(g);
  }

  void source_gradient(int source, const Array* dqkv, const Array& out) const {
    Gemm g = gemm(tokens(out), out.shape[2], rows(out));
    for (int part = 0; part < 3; ++part)
      if (source_[part] == source) {
        const Projection& p = projection_[part];
        g.add(rows(dqkv[part]), weight_of(p, params_[p.weight]), p.out);
      }
    multiply(g);
  }

  const MhaSpec& spec_;
  const std::vector<Array>& params_;
  int source_[3];
  Projection projection_[3];
  DType dtype_;
  int64_t head_dim_v_ = 0, out_channels_ = 0;
};

}  // namespace

int input_of(MhaGradient gradient) { return kInputOf[gradient]; }

MhaSpec::MhaSpec(const std::string& text) : attention(text.substr(std::min(text.size(), text.find('|') + 1))) {
  std::istringstream in(text.substr(0, text.find('|')));
  std::string item;
  while (std::getline(in, item, ';')) {
    if (item.empty()) continue;
    const size_t eq = item.find('=');
    if (eq == std::string::npos) fail("the attribute 'spec' has the malformed item '", item, "'.");
    const std::string key = item.substr(0, eq), value = item.substr(eq + 1);
    if (key == "inputs")
      inputs = value;
    else if (key == "grads")
      grads = value;
    else if (key == "recompute")
      recompute = value == "1";
    else if (key == "interleaved")
      interleaved = value == "1";
    else if (key == "transposed" && value.size() == 4)
      for (int i = 0; i < 4; ++i) transposed[i] = value[i] == '1';
    else
      fail("the attribute 'spec' has the unknown item '", item, "'.");
  }
  if (inputs.size() != size_t(kMhaInputs)) fail("the attribute 'inputs' must have ", int(kMhaInputs), " digits.");
  if (grads.size() != size_t(kMhaGradients)) fail("the attribute 'grads' must have ", int(kMhaGradients), " digits.");
  if (!has(kX) || !has(kWq)) fail("'x' and 'w_q' must be given.");
  if (has(kWv) && !has(kWk)) fail("'w_v' needs a 'w_k'.");
  if ((has(kBk) && !has(kWk)) || (has(kBv) && !has(kWv))) fail("a packed weight has a packed bias.");
  if (attention.layout != Layout::BSH && attention.layout != Layout::SBH) fail("'layout' must be BSH or SBH.");
}

bool MhaSpec::wants(int gradient) const { return grads[gradient] == '1' && has(kInputOf[gradient]); }

int MhaSpec::position(int slot) const {
  return int(std::count(inputs.begin(), inputs.begin() + std::min<int>(slot, kMhaInputs), '1')) +
         std::max(0, slot - kMhaInputs);
}

void run(MhaOp op, const MhaSpec& spec, const std::vector<Array>& params) {
  const int inputs = op == MhaOp::forward ? int(kMhaInputs) : int(kMhaBackwardInputs);
  const size_t outputs = op == MhaOp::forward ? 7 : op == MhaOp::backward ? kMhaGradients + 1 : 1;
  if (params.size() != inputs + outputs)
    fail("the op takes ", inputs + outputs, " arrays, but got ", params.size(), ".");
  Mha mha(spec, params);
  if (op == MhaOp::forward)
    mha.forward(params.data() + inputs);
  else if (op == MhaOp::backward)
    mha.backward(params.data() + inputs);
  else
    mha.bias_grad(params[inputs]);
}

std::vector<std::vector<int64_t>> infer_shapes(MhaOp op, const MhaSpec& spec,
                                               const std::vector<std::vector<int64_t>>& inputs) {
  auto shape = [&](int slot) { return inputs.at(spec.position(slot)); };
  const Shape one{1};
  if (op == MhaOp::bias_grad) return {shape(kMhaBias)};
  auto known = [&](int slot) {
    const Shape s = shape(slot);
    return s.size() == 3 ? s : Shape{-1, -1, -1};
  };
  auto out_of = [&](int slot) {
    const Shape w = shape(slot);
    return w.size() == 2 ? w[spec.transposed[slot == kWo ? 3 : slot - kWq] ? 1 : 0] : -1;
  };
  const int64_t heads = spec.attention.heads, kv_heads = spec.attention.kv_heads;
  auto times = [](int64_t n, int64_t size, int64_t of) {
    return size < 0 ? -1 : n * (size / std::max<int64_t>(of, 1));
  };
  int64_t channels[3];
  if (!spec.has(kWk)) {
    const int64_t w = out_of(kWq), all = heads + 2 * kv_heads;
    channels[0] = times(heads, w, all);
    channels[1] = channels[2] = times(kv_heads, w, all);
  } else {
    channels[0] = out_of(kWq);
    channels[1] = spec.has(kWv) ? out_of(kWk) : times(1, out_of(kWk), 2);
    channels[2] = spec.has(kWv) ? out_of(kWv) : channels[1];
  }
  const int64_t merged = times(heads, channels[2], kv_heads);
  const Shape x = known(kX), keys = spec.has(kContext) ? known(kContext) : x;
  auto with = [](Shape s, int64_t last) { return s[2] = last, s; };
  const bool sbh = spec.attention.layout == Layout::SBH;
  const Shape rows{x[sbh ? 1 : 0], heads, x[sbh ? 0 : 1]};
  if (op == MhaOp::backward) {
    std::vector<Shape> result;
    for (int i = 0; i < kMhaGradients; ++i) result.push_back(spec.wants(i) ? shape(kInputOf[i]) : one);
    auto size = [](const Shape& s, int64_t n) { return s[0] < 0 || s[1] < 0 || n < 0 ? -1 : s[0] * s[1] * n; };
    const int64_t sizes[3] = {size(x, channels[0]), size(keys, channels[1]), size(keys, channels[2])};
    const bool unknown = std::min({sizes[0], sizes[1], sizes[2]}) < 0 || merged < 0;
    result.push_back({unknown ? -1 : work_elements(spec, sizes, size(x, merged))});
    return result;
  }
  return {with(x, spec.has(kWo) ? out_of(kWo) : merged),
          with(x, channels[0]),
          with(keys, channels[1]),
          with(keys, channels[2]),
          spec.has(kWo) ? with(x, merged) : one,
          rows,
          rows};
}

}  // namespace msf
