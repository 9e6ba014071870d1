#include "cpu/kvcache.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <sstream>

#include "cpu/kernels.h"
#include "cpu/threads.h"
#include "cpu/view.h"

namespace msf {

namespace {

constexpr const char* kFunction = "flash_attention_with_kvcache";
constexpr const char* kNames[kKvCacheInputs] = {"query",      "k_cache",       "v_cache",     "k",
                                                "v",          "cache_seqlens", "block_table", "rotary_cos",
                                                "rotary_sin", "alibi_slopes",  "sinks"};

using Shape = std::vector<int64_t>;

template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  fail_in(kFunction, parts...);
}

std::vector<int64_t> integers(const Array& a) {
  int64_t n = 1;
  for (int64_t s : a.shape) n *= s;
  std::vector<int64_t> values(n);
  if (a.dtype == DType::i64)
    std::copy_n(static_cast<const int64_t*>(a.data), n, values.begin());
  else
    std::copy_n(static_cast<const int32_t*>(a.data), n, values.begin());
  return values;
}

struct FreeAligned {
  void operator()(void* p) const { free_aligned(p); }
};

// The whole op, checked before anything is written.
class KvCache {
 public:
  KvCache(const KvCacheSpec& spec, const std::vector<Array>& params) : spec_(spec), params_(params) {
    for (int slot = 0; slot < kKvCacheInputs; ++slot)
      if (spec.has(slot) != (params[slot].dtype != DType::none))
        refuse("input ", kNames[slot], " disagrees with the attribute 'inputs'.");
    check_shapes();
    check_values();
  }

  void forward(const Array* outputs) {
    std::vector<Append> appends;
    if (spec_.has(kNewKey))
      appends = {rows(input(kNewKey), k_.tensor, first_, pages_, spec_.has(kCos) ? &first_ : nullptr),
                 rows(input(kNewValue), v_.tensor, first_, pages_, nullptr)};
    Problem p = spec_.attention.fixed;
    place(q_, k_, v_, spec_.attention.default_scale, &p);
    p.splits = spec_.splits;
    p.cached = true;
    std::unique_ptr<void, FreeAligned> rotated;
    if (spec_.has(kCos)) p.q = rotate_query(&rotated);
    p.pages = pages_;
    p.cache_lengths = {params_[kCacheLengths].data, params_[kCacheLengths].dtype};
    p.block_table = {params_[kBlockTable].data, params_[kBlockTable].dtype};
    std::vector<Sequence> sequences;
    for (int64_t b = 0; b < p.batch; ++b) sequences.push_back({0, 0, q_.length, total_[b]});
    p.seq = sequences.data();
    p.max_q = q_.length;
    for (int64_t total : total_) p.max_k = std::max(p.max_k, total);
    p.stat_b = p.heads * q_.length;
    if (spec_.has(kKvAlibi)) {
      p.alibi = static_cast<const float*>(params_[kKvAlibi].data);
      p.alibi_b = params_[kKvAlibi].shape.size() == 2 ? p.heads : 0;
    }
    if (spec_.has(kKvSinks)) {
      p.sinks = params_[kKvSinks].data;
      p.sinks_dtype = params_[kKvSinks].dtype;
    }
    p.out = view(kFunction, "out", spec_.attention.layout, outputs[0], p.heads).tensor;
    p.lse = static_cast<float*>(outputs[1].data);
    const Kernels* kernels = selected_kernels();
    if (kernels->append_and_forward) return kernels->append_and_forward(p, appends);
    for (const Append& a : appends) kernels->append(a);
    kernels->forward(p);
  }

 private:
  View input(int slot) const { return view(kFunction, kNames[slot], spec_.attention.layout, params_[slot], 0); }

  static void equal(const char* what, int64_t got, int64_t expected) {
    if (got != expected) refuse("the ", what, " must be ", expected, ", but got ", got, ".");
  }

  void shape(int slot, const Shape& expected) const {
    if (spec_.has(slot) && params_[slot].shape != expected)
      refuse("the shape of '", kNames[slot], "' must be ", show(expected), ", but got ", show(params_[slot].shape),
             ".");
  }

  void check_shapes() {
    const DType dtype = params_[kKvQuery].dtype;
    if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16)
      refuse("'query' must be float32, float16 or bfloat16.");
    for (int slot : {kKeyCache, kValueCache, kNewKey, kNewValue})
      if (spec_.has(slot) && params_[slot].dtype != dtype)
        refuse("the dtype of '", kNames[slot], "' must be that of 'query'.");
    for (int slot : {kCacheLengths, kBlockTable})
      if (spec_.has(slot) && params_[slot].dtype != DType::i32 && params_[slot].dtype != DType::i64)
        refuse("the dtype of '", kNames[slot], "' must be int32 or int64.");
    for (int slot : {kCos, kSin, kKvSinks})
      if (spec_.has(slot) && params_[slot].dtype != dtype && params_[slot].dtype != DType::f32)
        refuse("the dtype of '", kNames[slot], "' must be that of 'query' or float32.");
    if (spec_.has(kKvAlibi) && params_[kKvAlibi].dtype != DType::f32) refuse("'alibi_slopes' must be float32.");

    q_ = input(kKvQuery);
    k_ = input(kKeyCache);
    v_ = input(kValueCache);
    for (const View* x : {&q_, &k_, &v_})
      if (x->heads < 1 || x->channels < 1 || (x != &q_ && x->length < 1))
        refuse("every axis but those of the batch and of the queries must be 1 or greater.");
    equal("'head_dim' of 'k_cache'", k_.channels, q_.channels);
    equal("number of heads of 'v_cache'", v_.heads, k_.heads);
    equal("length of 'v_cache'", v_.length, k_.length);
    equal("first axis of 'v_cache'", v_.batch, k_.batch);
    if (q_.heads % k_.heads)
      refuse("the heads of 'query' must be a multiple of those of 'k_cache' ", k_.heads, ", but got ", q_.heads, ".");
    shape(kCacheLengths, {q_.batch});
    if (spec_.has(kBlockTable)) {
      const Shape& table = params_[kBlockTable].shape;
      if (table.size() != 2 || table[0] != q_.batch)
        refuse("the shape of 'block_table' must be (", q_.batch, ", blocks), but got ", show(table), ".");
    } else {
      equal("batch size of 'k_cache'", k_.batch, q_.batch);
    }
    if (spec_.has(kNewKey)) {
      const View k = input(kNewKey), v = input(kNewValue);
      new_ = k.length;
      equal("batch size of 'k'", k.batch, q_.batch);
      equal("batch size of 'v'", v.batch, q_.batch);
      equal("number of heads of 'k'", k.heads, k_.heads);
      equal("number of heads of 'v'", v.heads, k_.heads);
      equal("'head_dim' of 'k'", k.channels, k_.channels);
      equal("'head_dim' of 'v'", v.channels, v_.channels);
      equal("length of 'v'", v.length, new_);
      if (params_[kKeyCache].data == params_[kValueCache].data)
        refuse("'k_cache' and 'v_cache' must be two tensors, but got the same memory twice.");
    }
    if (spec_.has(kCos)) {
      const Shape& cos = params_[kCos].shape;
      if (cos.size() != 2 || cos[1] < 1 || 2 * cos[1] > q_.channels)
        refuse("the shape of 'rotary_cos' must be (positions, at most ", q_.channels / 2, "), but got ", show(cos),
               ".");
      shape(kSin, cos);
    }
    if (spec_.has(kKvAlibi) && params_[kKvAlibi].shape != Shape{q_.heads}) shape(kKvAlibi, {q_.batch, q_.heads});
    shape(kKvSinks, {q_.heads});
  }

  void check_values() {
    const bool paged = spec_.has(kBlockTable);
    const int64_t blocks = paged ? params_[kBlockTable].shape[1] : 1, room = blocks * k_.length;
    if (paged) pages_.stride = blocks, pages_.size = k_.length, pages_.count = k_.batch;
    if (q_.batch && (!params_[kCacheLengths].data || params_[kCacheLengths].on_device)) return plan_for(room);
    const std::vector<int64_t> lengths = integers(params_[kCacheLengths]);
    for (int64_t b = 0; b < q_.batch; ++b) {
      const int64_t n = lengths[b];
      if (n < 0) refuse("'cache_seqlens' must be 0 or greater, but got ", n, " for sequence ", b, ".");
      if (n > room - new_) {
        if (new_)
          refuse("the cache of sequence ", b, " has room for ", room, " tokens, but got 'cache_seqlens' ", n, " and ",
                 new_, " more to append.");
        refuse("the cache of sequence ", b, " has room for ", room, " tokens, but got 'cache_seqlens' ", n, ".");
      }
      total_.push_back(n + new_);
      if (spec_.has(kCos)) {
        const int64_t positions = params_[kCos].shape[0];
        if (total_[b] > positions)
          refuse("'rotary_cos' has ", positions, " positions, but sequence ", b, " has ", total_[b], " tokens.");
        if (total_[b] < q_.length)
          refuse("with 'rotary_cos' a sequence must have as many tokens as queries ", q_.length, ", but sequence ", b,
                 " has ", total_[b], ".");
      }
    }
    first_ = lengths;
    if (!paged) return;
    table_ = integers(params_[kBlockTable]);
    pages_.table = table_.data();
    check_table();
  }

  // Lengths and blocks are where this host cannot look: in the memory of a device, for which it only plans.
  void plan_for(int64_t room) {
    if (spec_.has(kCos)) refuse("'query' and 'k' must come rotated to a device, but got 'rotary_cos'.");
    if (room < new_) refuse("the cache has room for ", room, " tokens, but got ", new_, " to append.");
    first_.assign(q_.batch, 0);
    total_.assign(q_.batch, room);
  }

  // Entries in use name blocks of the cache, and what a sequence appends to is in no other place of the table: it would
  // overwrite what is read there, or both would write the same rows.
  void check_table() const {
    auto used = [&](int64_t tokens) { return (tokens + pages_.size - 1) / pages_.size; };
    for (int64_t b = 0; b < q_.batch; ++b)
      for (int64_t i = 0; i < used(total_[b]); ++i) {
        const int64_t block = table_[b * pages_.stride + i];
        if (block < 0 || block >= k_.batch)
          refuse("'block_table' must hold blocks in the range [0, ", k_.batch, "), but got ", block, " for sequence ",
                 b, ", block ", i, ".");
      }
    if (!new_) return;
    std::vector<uint8_t> written(k_.batch);
    auto taken_twice = [&](int64_t block) {
      refuse("a block that a sequence appends to must be used once in 'block_table', but got block ", block,
             " twice. Hint: copy a shared block before appending to it.");
    };
    for (int64_t b = 0; b < q_.batch; ++b)
      for (int64_t i = first_[b] / pages_.size; i < used(total_[b]); ++i)
        if (written[table_[b * pages_.stride + i]]++) taken_twice(table_[b * pages_.stride + i]);
    for (int64_t b = 0; b < q_.batch; ++b)
      for (int64_t i = 0; i < first_[b] / pages_.size; ++i)
        if (written[table_[b * pages_.stride + i]]) taken_twice(table_[b * pages_.stride + i]);
  }

  Rotary rotary() const {
    return {params_[kCos].data, params_[kSin].data, params_[kCos].dtype, params_[kCos].shape[1], spec_.interleaved};
  }

  // Rows to the places `first` of `to`, in the pages if it has some; rotated, row 0 is at `position`.
  Append rows(const View& from, const Tensor4& to, const std::vector<int64_t>& first, const Pages& pages,
              const std::vector<int64_t>* position) const {
    Append a;
    a.from = from.tensor;
    a.to = to;
    a.batch = from.batch;
    a.heads = from.heads;
    a.rows = from.length;
    a.channels = from.channels;
    a.first = first.data();
    a.pages = pages;
    if (position) a.position = position->data(), a.rotary = rotary();
    a.high = spec_.attention.fixed.high;
    return a;
  }

  // The queries, rotated, in float32, so that they are rounded no more than the others.
  Tensor4 rotate_query(std::unique_ptr<void, FreeAligned>* memory) const {
    const int64_t s = q_.channels, h = q_.length * s, b = q_.heads * h;
    memory->reset(allocate_aligned(size_t(q_.batch * b) * sizeof(float)));
    std::vector<int64_t> first(q_.batch), position(q_.batch);
    for (int64_t i = 0; i < q_.batch; ++i) position[i] = total_[i] - q_.length;
    const Tensor4 rotated{static_cast<char*>(memory->get()), DType::f32, b, h, s};
    selected_kernels()->append(rows(q_, rotated, first, Pages(), &position));
    return rotated;
  }

  const KvCacheSpec& spec_;
  const std::vector<Array>& params_;
  View q_, k_, v_;
  int64_t new_ = 0;                             // tokens to append
  std::vector<int64_t> first_, total_, table_;  // tokens of each sequence before and after; blocks
  Pages pages_;
};

}  // namespace

KvCacheSpec::KvCacheSpec(const std::string& text) : attention(text.substr(std::min(text.size(), text.find('|') + 1))) {
  std::istringstream in(text.substr(0, text.find('|')));
  std::string item;
  while (std::getline(in, item, ';')) {
    const size_t eq = item.find('=');
    const std::string key = item.substr(0, eq), value = eq == std::string::npos ? "" : item.substr(eq + 1);
    if (key == "inputs")
      inputs = value;
    else if (key == "interleaved")
      interleaved = value == "1";
    else if (key == "splits")
      splits = std::strtoll(value.c_str(), nullptr, 10);
    else
      refuse("the attribute 'spec' has the unknown item '", item, "'.");
  }
  if (inputs.size() != size_t(kKvCacheInputs))
    refuse("the attribute 'inputs' must have ", int(kKvCacheInputs), " digits.");
  for (int slot : {kKvQuery, kKeyCache, kValueCache, kCacheLengths})
    if (!has(slot)) refuse("'", kNames[slot], "' must be given.");
  if (has(kNewKey) != has(kNewValue)) refuse("'k' and 'v' must be given both, or neither.");
  if (has(kCos) != has(kSin)) refuse("'rotary_cos' and 'rotary_sin' must be given both, or neither.");
  if (attention.layout != Layout::BNSD && attention.layout != Layout::BSND) refuse("'layout' must be BNSD or BSND.");
  if (attention.fixed.dropout > 0 || attention.fixed.has_fill) refuse("there is no dropout and no 'fill'.");
}

int KvCacheSpec::position(int slot) const { return int(std::count(inputs.begin(), inputs.begin() + slot, '1')); }

void run(KvCacheOp, const KvCacheSpec& spec, const std::vector<Array>& params) {
  if (params.size() != kKvCacheInputs + 2)
    refuse("the op takes ", kKvCacheInputs + 2, " arrays, but got ", params.size(), ".");
  KvCache(spec, params).forward(params.data() + kKvCacheInputs);
}

std::vector<Shape> infer_shapes(KvCacheOp, const KvCacheSpec& spec, const std::vector<Shape>& inputs) {
  auto known = [&](int slot) {
    const Shape& s = inputs.at(spec.position(slot));
    return s.size() == 4 ? s : Shape(4, -1);
  };
  const Shape q = known(kKvQuery), v = known(kValueCache);
  const bool bnsd = spec.attention.layout == Layout::BNSD;
  return {{q[0], q[1], q[2], v[3]}, {q[0], q[bnsd ? 1 : 2], q[bnsd ? 2 : 1]}};
}

int dtype_source(KvCacheOp, const KvCacheSpec&, int output) { return output == 0 ? 0 : -1; }
int saved_inputs(KvCacheOp) { return 0; }
const std::string& present(const KvCacheSpec& spec) { return spec.inputs; }

}  // namespace msf
