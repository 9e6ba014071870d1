#include "ort_ops/node.h"

#include <cmath>
#include <sstream>

namespace ort_ops {
namespace {

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  text << "For 'ai.msflash::FlashAttention', ";
  (void)std::initializer_list<int>{((text << parts), 0)...};
  throw Error(text.str());
}

std::string show(const std::vector<int64_t>& shape) {
  std::string s = "(";
  for (size_t i = 0; i < shape.size(); ++i) s += (i ? ", " : "") + std::to_string(shape[i]);
  return s + (shape.size() == 1 ? ",)" : ")");
}

bool succeeded(const ort::Api* api, ort::Status* status) {
  if (status) ort::ReleaseStatus(api, status);
  return !status;
}

// An attribute that is not there has its default; one of another type is an error, although the runtime answers both
// alike.
template <class T, class Get>
T attribute(const ort::Api* api, const ort::KernelInfo* info, const char* name, T fallback, Get get) {
  T value;
  if (succeeded(api, get(api, info, name, &value))) return value;
  float number;
  int64_t integer;
  size_t size = 0;
  if (succeeded(api, ort::KernelInfoGetAttribute_float(api, info, name, &number)) ||
      succeeded(api, ort::KernelInfoGetAttribute_int64(api, info, name, &integer)) ||
      succeeded(api, ort::KernelInfoGetAttribute_string(api, info, name, nullptr, &size)) ||
      succeeded(api, ort::KernelInfoGetAttributeArray_float(api, info, name, nullptr, &size)) ||
      succeeded(api, ort::KernelInfoGetAttributeArray_int64(api, info, name, nullptr, &size)))
    fail("the attribute '", name, "' must be of type ", std::is_same<T, float>::value ? "float" : "int", ".");
  return fallback;
}

Tensor tensor(const ort::Api* api, const ort::Value* value) {
  Tensor t;
  if (!value) return t;
  ort::TensorTypeAndShapeInfo* info = nullptr;
  check(api, ort::GetTensorTypeAndShape(api, value, &info));
  size_t rank = 0;
  ort::Status* status = ort::GetTensorElementType(api, info, &t.type);
  if (!status) status = ort::GetDimensionsCount(api, info, &rank);
  t.shape.resize(rank);
  if (!status) status = ort::GetDimensions(api, info, t.shape.data(), rank);
  ort::ReleaseTensorTypeAndShapeInfo(api, info);
  check(api, status);
  check(api, ort::GetTensorMutableData(api, const_cast<ort::Value*>(value), &t.data));
  return t;
}

Tensor input(const ort::Api* api, const ort::KernelContext* context, size_t index) {
  size_t count = 0;
  check(api, ort::KernelContext_GetInputCount(api, context, &count));
  const ort::Value* value = nullptr;
  if (index < count) check(api, ort::KernelContext_GetInput(api, context, index, &value));
  return tensor(api, value);
}

Tensor output(const ort::Api* api, ort::KernelContext* context, size_t index, const std::vector<int64_t>& shape) {
  size_t count = 0;
  check(api, ort::KernelContext_GetOutputCount(api, context, &count));
  ort::Value* value = nullptr;  // stays null for an output nobody asked for
  if (index < count) check(api, ort::KernelContext_GetOutput(api, context, index, shape.data(), shape.size(), &value));
  return tensor(api, value);
}

void check_shapes(const Call& c) {
  for (auto& [name, x] : {std::pair<const char*, const Tensor&>{"Q", c.q}, {"K", c.k}, {"V", c.v}}) {
    if (x.shape.size() != 4) fail("the rank of '", name, "' must be 4, but got the shape ", show(x.shape), ".");
    if (x.type != c.q.type)
      fail("'", name, "' must have the dtype of 'Q' ", name_of(c.q.type), ", but got ", name_of(x.type), ".");
    if (x.shape[0] != c.q.shape[0])
      fail("the batch size of '", name, "' must be that of 'Q' ", c.q.shape[0], ", but got ", x.shape[0], ".");
  }
  const auto &q = c.q.shape, &k = c.k.shape, &v = c.v.shape;
  if (q[3] < 1) fail("the head_dim of 'Q' must be at least 1, but got ", q[3], ".");
  if (k[3] != q[3]) fail("the head_dim of 'K' must be that of 'Q' ", q[3], ", but got ", k[3], ".");
  if (v[1] != k[1] || v[2] != k[2])
    fail("'K' and 'V' must have the same heads and length, but got the shapes ", show(k), " and ", show(v), ".");
  if (q[1] > 0 && (k[1] < 1 || q[1] % k[1] != 0))
    fail("the heads of 'Q' must be a multiple of those of 'K' ", k[1], ", but got ", q[1], ".");
  if (!c.mask) return;
  const std::vector<int64_t>& m = c.mask.shape;
  const std::vector<int64_t> full{q[0], q[1], q[2], k[2]};
  bool fits = m.size() >= 1 && m.size() <= 4;
  for (size_t i = 0; fits && i < m.size(); ++i) fits = m[i] == 1 || m[i] == full[4 - m.size() + i];
  if (!fits) fail("the shape of 'attn_mask' ", show(m), " must broadcast to ", show(full), ".");
  if (c.mask.type != ort::BOOL && c.mask.type != ort::FLOAT && c.mask.type != ort::FLOAT16 &&
      c.mask.type != ort::BFLOAT16)
    fail("the dtype of 'attn_mask' must be bool (True = keep), float, float16 or bfloat16, but got ",
         name_of(c.mask.type), ".");
}

}  // namespace

void check(const ort::Api* api, ort::Status* status) {
  if (!status) return;
  const std::string text = ort::GetErrorMessage(api, status);
  ort::ReleaseStatus(api, status);
  throw Error(text);
}

int64_t Tensor::count() const {
  int64_t n = 1;
  for (int64_t dim : shape) n *= dim;
  return n;
}

const char* name_of(ort::ElementType type) {
  switch (type) {
    case ort::FLOAT:
      return "float";
    case ort::FLOAT16:
      return "float16";
    case ort::BFLOAT16:
      return "bfloat16";
    case ort::DOUBLE:
      return "double";
    case ort::BOOL:
      return "bool";
    case ort::UINT8:
      return "uint8";
    case ort::INT32:
      return "int32";
    case ort::INT64:
      return "int64";
    default:
      return "another dtype";
  }
}

Attributes read_attributes(const ort::Api* api, const ort::KernelInfo* info) {
  auto integer = [&](const char* name, int64_t fallback) {
    return attribute<int64_t>(api, info, name, fallback, ort::KernelInfoGetAttribute_int64);
  };
  auto number = [&](const char* name) {
    return attribute<float>(api, info, name, 0, ort::KernelInfoGetAttribute_float);
  };
  auto flag = [&](const char* name, int64_t fallback) {
    const int64_t value = integer(name, fallback);
    if (value != 0 && value != 1) fail("the attribute '", name, "' must be 0 or 1, but got ", value, ".");
    return value == 1;
  };
  auto window = [&](const char* name) {
    const int64_t value = integer(name, -1);
    if (value < -1) fail("the attribute '", name, "' must be -1 (no limit) or more, but got ", value, ".");
    return value;
  };
  Attributes a{number("scale"), number("softcap"), window("left_window_size"), window("right_window_size"),
               flag("causal_alignment", 1)};
  if (!std::isfinite(a.scale)) fail("the attribute 'scale' must be finite, but got ", a.scale, ".");
  if (!(a.softcap >= 0 && std::isfinite(a.softcap)))
    fail("the attribute 'softcap' must be 0 (none) or more and finite, but got ", a.softcap, ".");
  if (flag("is_causal", 0)) a.right = 0;
  return a;
}

Call read_call(const ort::Api* api, ort::KernelContext* context) {
  Call c{input(api, context, 0),
         input(api, context, 1),
         input(api, context, 2),
         input(api, context, 3),
         {},
         {},
         0,
         0,
         0,
         0,
         0,
         0,
         0};
  check_shapes(c);
  const auto &q = c.q.shape, &k = c.k.shape;
  c.batch = q[0], c.heads = q[1], c.q_len = q[2], c.d = q[3];
  c.kv_heads = k[1], c.k_len = k[2], c.dv = c.v.shape[3];
  c.y = output(api, context, 0, {c.batch, c.heads, c.q_len, c.dv});
  c.lse = output(api, context, 1, {c.batch, c.heads, c.q_len});
  return c;
}

}  // namespace ort_ops
