#include "cpu/call.h"

#include <locale.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "cpu/kernels.h"
#include "cpu/view.h"

namespace msf {

std::string show(const std::vector<int64_t>& shape) {
  std::string s = "(";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + (shape.size() == 1 ? ",)" : ")");
}

namespace {

double number(const std::string& key, const std::string& value) {
  static const locale_t c =
      newlocale(LC_ALL_MASK, "C", nullptr);  // the decimal point is a point whatever the user's locale
  char* end = nullptr;
  double x = strtod_l(value.c_str(), &end, c);
  if (value.empty() || *end) fail("the attribute '", key, "' must be a number, but got '", value, "'.");
  return x;
}

int64_t integer(const std::string& key, const std::string& value) {
  char* end = nullptr;
  int64_t x = std::strtoll(value.c_str(), &end, 10);
  if (value.empty() || *end) fail("the attribute '", key, "' must be an integer, but got '", value, "'.");
  return x;
}

// One of a list of words; its index.
int word(const std::string& key, const std::string& value, std::initializer_list<const char*> words) {
  int i = 0;
  for (const char* w : words) {
    if (value == w) return i;
    ++i;
  }
  fail("the attribute '", key, "' has the unknown value '", value, "'.");
}

View view(const char* name, Layout layout, const Array& a, int64_t heads) {
  return view("flash_attention", name, layout, a, heads);
}

// All heads of query, key and value in one; (B, S, 3, N, D) is (B, S, 3 N, D).
View packed_view(const char* name, const Spec& spec, const Array& a) {
  Array all = a;
  if (spec.layout == Layout::BSND && a.shape.size() == 5)
    all.shape = {a.shape[0], a.shape[1], a.shape[2] * a.shape[3], a.shape[4]};
  return view(name, spec.layout, all, spec.heads + 2 * spec.kv_heads);
}

Tensor4 from_head(const Tensor4& x, int64_t head) {
  Tensor4 y = x;
  y.data += head * x.h * size_of(x.dtype);
  return y;
}

Plane plane(const char* name, const Array& a, const Problem& p) {
  if (a.shape.size() > 4) fail("the rank of '", name, "' must be at most 4, but got the shape ", show(a.shape), ".");
  int64_t dims[4] = {1, 1, 1, 1}, stride[4];
  const int64_t full[4] = {p.batch, p.heads, p.max_q, p.max_k};
  std::copy_backward(a.shape.begin(), a.shape.end(), dims + 4);
  int64_t step = 1;
  for (int i = 3; i >= 0; step *= dims[i--]) {
    stride[i] = dims[i] == 1 ? 0 : step;
    const bool fits = dims[i] == 1 || dims[i] == full[i] || (p.varlen && i >= 2 && dims[i] >= full[i]);
    if (!fits) fail("the shape of '", name, "' ", show(a.shape), " must broadcast to ", show({full, full + 4}), ".");
  }
  return {static_cast<char*>(a.data), a.dtype, stride[0], stride[1], stride[2], stride[3], dims[2], dims[3]};
}

// Cumulative lengths, checked: they are data, so this is the first place that can.
std::vector<int64_t> cumulative(const char* name, const Array& a, int64_t total) {
  if (a.shape.size() != 1 || a.shape[0] < 1)
    fail("'", name, "' must be of shape (batch + 1,), but got ", show(a.shape), ".");
  std::vector<int64_t> c(a.shape[0]);
  for (size_t i = 0; i < c.size(); ++i)
    c[i] = a.dtype == DType::i32 ? static_cast<const int32_t*>(a.data)[i] : static_cast<const int64_t*>(a.data)[i];
  if (c[0] != 0) fail("'", name, "' must start with 0, but got ", c[0], ".");
  for (size_t i = 1; i < c.size(); ++i)
    if (c[i] < c[i - 1]) fail("'", name, "' must not decrease, but got ", c[i - 1], " followed by ", c[i], ".");
  if (c.back() > total)
    fail("the last value of '", name, "' must be at most the number of rows ", total, ", but got ", c.back(), ".");
  return c;
}

void zero_rows(const Tensor4& x, int64_t batch, int64_t heads, int64_t row0, int64_t row1, int64_t channels) {
  if (!x) return;  // only shapes are known
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t r = row0; r < row1; ++r) std::memset(x.row(b, h, r), 0, channels * size_of(x.dtype));
}

}  // namespace

Spec::Spec(const std::string& text) {
  std::istringstream in(text);
  std::string item;
  while (std::getline(in, item, ';')) {
    if (item.empty()) continue;
    const size_t eq = item.find('=');
    if (eq == std::string::npos) fail("the attribute 'spec' has the malformed item '", item, "'.");
    const std::string key = item.substr(0, eq), value = item.substr(eq + 1);
    if (key == "layout")
      layout = Layout(word(key, value, {"BNSD", "BSND", "BSH", "SBH", "TND"}));
    else if (key == "heads")
      heads = integer(key, value);
    else if (key == "kv_heads")
      kv_heads = integer(key, value);
    else if (key == "packed")
      packed = integer(key, value) != 0;
    else if (key == "scale") {
      default_scale = value == "default";
      if (!default_scale) fixed.scale = number(key, value);
    } else if (key == "left")
      fixed.left = integer(key, value);
    else if (key == "right")
      fixed.right = integer(key, value);
    else if (key == "align")
      fixed.bottom_right = word(key, value, {"top_left", "bottom_right"});
    else if (key == "softcap")
      fixed.softcap = number(key, value);
    else if (key == "dropout")
      fixed.dropout = number(key, value);
    else if (key == "seed")
      fixed.seed = uint64_t(integer(key, value));
    else if (key == "offset")
      fixed.offset = uint64_t(integer(key, value));
    else if (key == "fill") {
      fixed.has_fill = true;
      fixed.fill = number(key, value);
    } else if (key == "precision")
      fixed.high = word(key, value, {"default", "high"});
    else if (key == "block_m")
      fixed.block_m = integer(key, value);
    else if (key == "block_n")
      fixed.block_n = integer(key, value);
    else if (key == "present")
      present = value;
    else
      fail("the attribute 'spec' has the unknown key '", key, "'.");
  }
  if (present.size() != size_t(kForwardInputs))
    fail("the attribute 'present' must have ", int(kForwardInputs), " digits.");
  if (!(fixed.dropout >= 0 && fixed.dropout < 1)) fail("'dropout_p' must be in [0, 1), but got ", fixed.dropout, ".");
}

int Spec::position(int slot) const {
  return int(std::count(present.begin(), present.begin() + std::min<int>(slot, kForwardInputs), '1')) +
         std::max(0, slot - kForwardInputs);
}

int Spec::rank() const { return layout == Layout::BNSD || layout == Layout::BSND ? 4 : 3; }

DType dtype_of(const char* name) {
  const std::pair<const char*, DType> names[] = {
      {"float32", DType::f32}, {"float16", DType::f16}, {"bfloat16", DType::bf16},
      {"bool", DType::u8},     {"uint8", DType::u8},    {"int32", DType::i32},
      {"int64", DType::i64},   {"keep", DType::keep},   {"none", DType::none}};
  for (auto& [text, dtype] : names)
    if (!std::strcmp(name, text)) return dtype;
  fail("the dtype '", name, "' is not supported.");
}

void run(Op op, const Spec& spec, const std::vector<Array>& params) {
  const int inputs = op == Op::forward ? int(kForwardInputs) : int(kBackwardInputs);
  const size_t outputs = op == Op::bias_grad ? 1 : 4;
  if (params.size() != inputs + outputs)
    fail("the op takes ", inputs + outputs, " arrays, but got ", params.size(), ".");
  const Array* out = params.data() + inputs;
  Problem p = spec.fixed;
  p.packed = spec.packed;
  p.varlen = spec.layout == Layout::TND;
  for (int slot = 0; slot < kForwardInputs; ++slot)
    if (spec.has(slot) != (params[slot].dtype != DType::none))
      fail("input ", slot, " disagrees with the attribute 'present'.");

  // query, key, value
  const Array& query = params[kQuery];
  View q, k, v;
  if (p.packed) {
    if (spec.heads <= 0 || spec.kv_heads <= 0) fail("packed query, key and value need 'num_heads' and 'num_kv_heads'.");
    View all = packed_view("query", spec, query);
    if (all.heads != spec.heads + 2 * spec.kv_heads)
      fail("the packed heads must be num_heads + 2 * num_kv_heads = ", spec.heads + 2 * spec.kv_heads, ", but got ",
           all.heads, ".");
    q = k = v = all;
    q.heads = spec.heads;
    k.heads = v.heads = spec.kv_heads;
    k.tensor = from_head(all.tensor, spec.heads);
    v.tensor = from_head(all.tensor, spec.heads + spec.kv_heads);
  } else {
    q = view("query", spec.layout, query, spec.heads);
    k = view("key", spec.layout, params[kKey], spec.kv_heads);
    v = view("value", spec.layout, params[kValue], spec.kv_heads);
  }
  const DType dtype = query.dtype;
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16)
    fail("'query' must be float32, float16 or bfloat16.");
  if (k.tensor.dtype != dtype || v.tensor.dtype != dtype) fail("'query', 'key' and 'value' must have the same dtype.");
  if (k.batch != q.batch || v.batch != q.batch)
    fail("the batch size of 'query', 'key' and 'value' must be the same, but got ", q.batch, ", ", k.batch, " and ",
         v.batch, ".");
  if (k.channels != q.channels)
    fail("the 'head_dim' of 'key' must be equal to that of 'query' ", q.channels, ", but got ", k.channels, ".");
  if (v.heads != k.heads || v.length != k.length)
    fail("'key' and 'value' must have the same heads and length, but got the shapes ", show(params[kKey].shape),
         " and ", show(params[kValue].shape), ".");
  if (q.channels < 1) fail("the 'head_dim' of 'query' must be at least 1, but got ", q.channels, ".");
  if (q.heads > 0 && (k.heads < 1 || q.heads % k.heads != 0))
    fail("the heads of 'query' must be a multiple of those of 'key' ", k.heads, ", but got ", q.heads, ".");
  place(q, k, v, spec.default_scale, &p);

  // sequences
  std::vector<Sequence> sequences;
  if (p.varlen) {
    const std::vector<int64_t> cu_q = cumulative("cu_seqlens_q", params[kCuQ], q.length);
    const std::vector<int64_t> cu_k = cumulative("cu_seqlens_k", params[kCuK], k.length);
    if (cu_q.size() != cu_k.size())
      fail("'cu_seqlens_q' and 'cu_seqlens_k' must have the same length, but got ", cu_q.size(), " and ", cu_k.size(),
           ".");
    p.batch = int64_t(cu_q.size()) - 1;
    for (int64_t b = 0; b < p.batch; ++b)
      sequences.push_back({cu_q[b], cu_k[b], cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]});
  } else {
    sequences.assign(p.batch, {0, 0, q.length, k.length});
  }
  p.seq = sequences.data();
  if (!p.varlen) p.max_q = q.length, p.max_k = k.length;
  for (const Sequence& s : sequences) p.max_q = std::max(p.max_q, s.q_len), p.max_k = std::max(p.max_k, s.k_len);
  p.stat_b = p.varlen ? 0 : p.heads * q.length;

  // the optional pieces
  if (spec.has(kMask)) p.mask = plane("attn_mask", params[kMask], p);
  if (spec.has(kBias)) p.bias = plane("bias", params[kBias], p);
  if (spec.has(kDropMask)) p.drop_mask = plane("drop_mask", params[kDropMask], p);
  if (spec.has(kAlibi)) {
    const Array& a = params[kAlibi];
    const bool per_batch = a.shape.size() == 2;
    if (a.shape.empty() || a.shape.size() > 2 || a.shape.back() != p.heads || (per_batch && a.shape[0] != p.batch))
      fail("the shape of 'alibi_slopes' must be (num_heads,) or (batch, num_heads), but got ", show(a.shape), ".");
    p.alibi = static_cast<const float*>(a.data);
    p.alibi_b = per_batch ? p.heads : 0;
  }
  if (spec.has(kSinks)) {
    if (params[kSinks].shape != std::vector<int64_t>{p.heads})
      fail("the shape of 'sinks' must be (num_heads,) = ", show({p.heads}), ", but got ", show(params[kSinks].shape),
           ".");
    p.sinks = params[kSinks].data;
    p.sinks_dtype = params[kSinks].dtype;
  }
  if (spec.has(kSeed)) {
    if (params[kSeed].shape != std::vector<int64_t>{2})
      fail("the shape of 'seed' must be (2,), but got ", show(params[kSeed].shape), ".");
    p.seed_input = static_cast<const int64_t*>(params[kSeed].data);
    p.seed_from_input = true;
    if (p.seed_input) p.seed = uint64_t(p.seed_input[0]), p.offset = uint64_t(p.seed_input[1]);
  }

  const std::vector<Sequence>& seq = sequences;
  const int64_t used_q = p.varlen && !seq.empty() ? seq.back().q_base + seq.back().q_len : p.varlen ? 0 : q.length;
  const int64_t used_k = p.varlen && !seq.empty() ? seq.back().k_base + seq.back().k_len : p.varlen ? 0 : k.length;
  const int64_t outer = p.varlen ? 1 : p.batch;  // TND keeps all sequences in one
  const Layout layout = spec.layout;
  const Kernels* kernels = selected_kernels();
  if (op == Op::forward) {
    p.out = view("out", layout, out[0], p.heads).tensor;
    p.lse = static_cast<float*>(out[1].data);
    p.row_max = static_cast<float*>(out[2].data);
    p.row_sum = static_cast<float*>(out[3].data);
    zero_rows(p.out, outer, p.heads, used_q, q.length, p.dv);
    for (int64_t h = 0; h < (used_q < q.length && p.lse ? p.heads : 0); ++h)
      for (int64_t i = used_q; i < q.length; ++i) {
        p.lse[h * p.stat_h + i] = p.row_max[h * p.stat_h + i] = -INFINITY;
        p.row_sum[h * p.stat_h + i] = 0;
      }
    kernels->forward(p);
    return;
  }
  p.out = view("out", layout, params[kOut], p.heads).tensor;
  p.dout = view("dout", layout, params[kDout], p.heads).tensor;
  p.row_max = static_cast<float*>(params[kRowMax].data);
  p.row_sum = static_cast<float*>(params[kRowSum].data);
  p.dlse = static_cast<const float*>(params[kDlse].data);
  if (op == Op::bias_grad) {
    if (!p.bias) fail("the gradient of 'bias' needs a 'bias'.");
    p.dbias = p.bias;
    p.dbias.data = static_cast<char*>(out[0].data);
    kernels->bias_grad(p);
    return;
  }
  if (p.packed) {
    const Tensor4 all = packed_view("dq", spec, out[0]).tensor;
    p.dq = all;
    p.dk = from_head(all, p.heads);
    p.dv_ = from_head(all, p.heads + p.kv_heads);
    for (int i : {1, 2})
      if (out[i].data) std::memset(out[i].data, 0, size_of(out[i].dtype));
  } else {
    p.dq = view("dq", layout, out[0], p.heads).tensor;
    p.dk = view("dk", layout, out[1], p.kv_heads).tensor;
    p.dv_ = view("dv", layout, out[2], p.kv_heads).tensor;
  }
  zero_rows(p.dq, outer, p.heads, used_q, q.length, p.d);
  zero_rows(p.dk, outer, p.kv_heads, used_k, k.length, p.d);
  zero_rows(p.dv_, outer, p.kv_heads, used_k, k.length, p.dv);
  p.dsinks = out[3].data;
  if (!p.sinks && out[3].data) std::memset(out[3].data, 0, sizeof(float));
  kernels->backward(p);
}

std::vector<std::vector<int64_t>> infer_shapes(Op op, const Spec& spec,
                                               const std::vector<std::vector<int64_t>>& inputs) {
  using Shape = std::vector<int64_t>;
  auto shape = [&](int slot) { return inputs.at(spec.position(slot)); };
  auto unknown = [](const Shape& s) { return s.size() == 1 && s[0] == -2; };
  auto known = [&](const Shape& s) { return unknown(s) ? Shape(spec.rank(), -1) : s; };
  if (op == Op::bias_grad) return {shape(kBias)};
  if (op == Op::backward) {
    const Shape one{1}, q = shape(kQuery);
    return {q, spec.packed ? one : shape(kKey), spec.packed ? one : shape(kValue),
            spec.has(kSinks) ? shape(kSinks) : one};
  }
  Shape q = known(shape(kQuery));
  if (spec.layout == Layout::BSND && q.size() == 5) q = {q[0], q[1], q[2] < 0 || q[3] < 0 ? -1 : q[2] * q[3], q[4]};
  const Shape v = spec.packed ? q : known(shape(kValue));
  // heads, length and channels of a shape in this layout, by axis
  Shape out = q;
  int64_t heads = spec.heads, length = -1;
  auto hidden = [](int64_t size, int64_t have, int64_t want) {
    return size < 0 || have <= 0 ? -1 : size / have * want;
  };
  switch (spec.layout) {
    case Layout::BNSD:
      heads = spec.packed ? spec.heads : q[1];
      length = q[2];
      out = {q[0], heads, q[2], v[3]};
      break;
    case Layout::BSND:
      heads = spec.packed ? spec.heads : q[2];
      length = q[1];
      out = {q[0], q[1], heads, v[3]};
      break;
    case Layout::TND:
      return {{q[0], q[1], v[2]}, {q[1], q[0]}, {q[1], q[0]}, {q[1], q[0]}};
    case Layout::BSH:
    case Layout::SBH:
      length = q[spec.layout == Layout::BSH ? 1 : 0];
      out[2] = spec.packed ? hidden(q[2], spec.heads + 2 * spec.kv_heads, heads) : hidden(v[2], spec.kv_heads, heads);
      break;
  }
  const Shape rows{q[spec.layout == Layout::SBH ? 1 : 0], heads, length};
  return {out, rows, rows, rows};
}

}  // namespace msf
