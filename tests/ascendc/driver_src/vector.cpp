// Arithmetic on vectors.
#include "call.h"

namespace driver {

#define UNARY_OP(NAME)                                                                      \
  if (op == #NAME) {                                                                        \
    Masked<T>([&](auto count) { NAME(dst, src, count); },                                   \
              [&](auto mask, auto repeat) { NAME(dst, src, mask, repeat, p); },             \
              [&](auto repeat) { NAME<T, false>(dst, src, MASK_PLACEHOLDER, repeat, p); }); \
    return;                                                                                 \
  }
#define SCALAR_OP(NAME)                                                                             \
  if (op == #NAME) {                                                                                \
    Masked<T>([&](auto count) { NAME(dst, src, scalar, count); },                                   \
              [&](auto mask, auto repeat) { NAME(dst, src, scalar, mask, repeat, p); },             \
              [&](auto repeat) { NAME<T, false>(dst, src, scalar, MASK_PLACEHOLDER, repeat, p); }); \
    return;                                                                                         \
  }
#define BINARY_OP(NAME)                                                                            \
  if (op == #NAME) {                                                                               \
    Masked<T>([&](auto count) { NAME(dst, src0, src1, count); },                                   \
              [&](auto mask, auto repeat) { NAME(dst, src0, src1, mask, repeat, p); },             \
              [&](auto repeat) { NAME<T, false>(dst, src0, src1, MASK_PLACEHOLDER, repeat, p); }); \
    return;                                                                                        \
  }

bool Call::Vector(const std::string& op) const {
  if (S("family") == "unary") {
    const auto run = [&](auto type) {
      using T = typename decltype(type)::type;
      const auto dst = Local<T>("dst"), src = Local<T>("src");
      const auto p = Unary();
      if constexpr (std::is_same_v<T, half> || std::is_same_v<T, float>) {
        UNARY_OP(Exp) UNARY_OP(Ln) UNARY_OP(Abs) UNARY_OP(Reciprocal) UNARY_OP(Rsqrt) UNARY_OP(Sqrt)
      }
      if constexpr (std::is_same_v<T, int16_t> || std::is_same_v<T, uint16_t>) {
        UNARY_OP(Not)
      } else {
        UNARY_OP(Relu)
      }
      throw std::invalid_argument("driver: no such overload of " + op);
    };
    ForType<half, float, int16_t, uint16_t, int32_t>(S("dtype"), run);
    return true;
  }
  if (S("family") == "scalar") {
    const auto run = [&](auto type) {
      using T = typename decltype(type)::type;
      const auto dst = Local<T>("dst"), src = Local<T>("src");
      const T scalar = Scalar<T>();
      const auto p = Unary();
      if constexpr (!std::is_unsigned_v<T>) {
        SCALAR_OP(Adds) SCALAR_OP(Muls) SCALAR_OP(Maxs) SCALAR_OP(Mins)
      }
      if constexpr (std::is_same_v<T, half> || std::is_same_v<T, float>) {
        SCALAR_OP(LeakyRelu)
      } else {
        SCALAR_OP(ShiftLeft) SCALAR_OP(ShiftRight)
      }
      throw std::invalid_argument("driver: no such overload of " + op);
    };
    ForType<half, float, int16_t, uint16_t, int32_t, uint32_t>(S("dtype"), run);
    return true;
  }
  if (S("family") == "binary") {
    const auto run = [&](auto type) {
      using T = typename decltype(type)::type;
      const auto dst = Local<T>("dst"), src0 = Local<T>("src0"), src1 = Local<T>("src1");
      const auto p = Binary();
      if constexpr (!std::is_unsigned_v<T>) {
        BINARY_OP(Add) BINARY_OP(Sub) BINARY_OP(Mul) BINARY_OP(Max) BINARY_OP(Min)
      }
      if constexpr (std::is_same_v<T, half> || std::is_same_v<T, float>) {
        BINARY_OP(Div)
      } else if constexpr (sizeof(T) == 2) {
        BINARY_OP(And) BINARY_OP(Or)
      }
      throw std::invalid_argument("driver: no such overload of " + op);
    };
    ForType<half, float, int16_t, uint16_t, int32_t>(S("dtype"), run);
    return true;
  }
  if (op == "Axpy" || op == "MulAddDst") {
    const auto run = [&](auto to, auto from) {
      using T = typename decltype(to)::type;
      using U = typename decltype(from)::type;
      const auto dst = Local<T>("dst");
      const auto src0 = Local<U>("src0");
      if (op == "Axpy") {
        const U scalar = Scalar<U>();
        const auto p = Unary("src0");
        return Masked<T>([&](auto count) { Axpy(dst, src0, scalar, count); },
                         [&](auto mask, auto repeat) { Axpy(dst, src0, scalar, mask, repeat, p); },
                         [&](auto repeat) { Axpy<T, U, false>(dst, src0, scalar, MASK_PLACEHOLDER, repeat, p); });
      }
      const auto src1 = Local<U>("src1");
      const auto p = Binary();
      Masked<T>([&](auto count) { MulAddDst(dst, src0, src1, count); },
                [&](auto mask, auto repeat) { MulAddDst(dst, src0, src1, mask, repeat, p); },
                [&](auto repeat) { MulAddDst<T, U, false>(dst, src0, src1, MASK_PLACEHOLDER, repeat, p); });
    };
    if (S("dst_type") == "half") {
      run(Type<half>{}, Type<half>{});
    } else if (S("dtype") == "half") {
      run(Type<float>{}, Type<half>{});
    } else {
      run(Type<float>{}, Type<float>{});
    }
    return true;
  }
  return false;
}

}  // namespace driver
