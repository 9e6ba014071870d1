// Vector arithmetic: unary, binary, with a scalar, Duplicate, Copy, Brcb.
//
// Every operation comes in three forms, as documented: a number of elements; a number of leading lanes per repeat; a
// bit pattern of lanes per repeat. The forms differ in nothing but the mask, so each operation is one line of a table
// below: its name, its arithmetic, its cost and the types the hardware has it for.
#pragma once
#include "lanes.h"

namespace ms_twin {

template <class T, class... Allowed>
constexpr bool kOneOf = (std::is_same_v<T, Allowed> || ...);
template <class T>
constexpr bool kFloats = kOneOf<T, half, float>;
template <class T>
constexpr bool kNumbers = kOneOf<T, half, float, int16_t, int32_t>;
template <class T>
constexpr bool kReluNumbers = kOneOf<T, half, float, int16_t>;
template <class T>
constexpr bool kSigned = kOneOf<T, half, float, int32_t>;
template <class T>
constexpr bool kShorts = kOneOf<T, int16_t, uint16_t>;
template <class T>
constexpr bool kWords = kOneOf<T, int16_t, uint16_t, int32_t, uint32_t>;

// Integers wrap around: the public pages do not say what an overflow gives, so a kernel should not meet one.
template <class T>
T Wrapped(int64_t x) {
  return static_cast<T>(static_cast<std::make_unsigned_t<T>>(x));
}
template <class T, class FloatOp, class IntOp>
T Arithmetic(T a, T b, FloatOp float_op, IntOp int_op) {
  if constexpr (kIsFloating<T>)
    return T(float_op(float(a), float(b)));
  else
    return Wrapped<T>(int_op(int64_t(a), int64_t(b)));
}

// kAccumulates: see IssueLanes.
struct AddOp {
  static constexpr bool kAccumulates = true;
  template <class T>
  static T Do(T a, T b) {
    return Arithmetic(a, b, [](float x, float y) { return x + y; }, [](int64_t x, int64_t y) { return x + y; });
  }
};
struct SubOp {
  static constexpr bool kAccumulates = true;
  template <class T>
  static T Do(T a, T b) {
    return Arithmetic(a, b, [](float x, float y) { return x - y; }, [](int64_t x, int64_t y) { return x - y; });
  }
};
struct MulOp {
  static constexpr bool kAccumulates = true;
  template <class T>
  static T Do(T a, T b) {
    return Arithmetic(a, b, [](float x, float y) { return x * y; }, [](int64_t x, int64_t y) { return x * y; });
  }
};
struct DivOp {
  static constexpr bool kAccumulates = false;
  template <class T>
  static T Do(T a, T b) {
    return T(float(a) / float(b));
  }
};
// A NaN wins, so that an error stays visible.
struct MaxOp {
  static constexpr bool kAccumulates = true;
  template <class T>
  static T Do(T a, T b) {
    return Arithmetic(
        a, b, [](float x, float y) { return x > y || x != x ? x : y; },
        [](int64_t x, int64_t y) { return x > y ? x : y; });
  }
};
struct MinOp {
  static constexpr bool kAccumulates = true;
  template <class T>
  static T Do(T a, T b) {
    return Arithmetic(
        a, b, [](float x, float y) { return x < y || x != x ? x : y; },
        [](int64_t x, int64_t y) { return x < y ? x : y; });
  }
};
struct AndOp {
  static constexpr bool kAccumulates = false;
  template <class T>
  static T Do(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct OrOp {
  static constexpr bool kAccumulates = false;
  template <class T>
  static T Do(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct AddReluOp {
  static constexpr bool kAccumulates = true;
  template <class T>
  static T Do(T a, T b) {
    return MaxOp::Do(AddOp::Do(a, b), T(0));
  }
};
struct SubReluOp {
  static constexpr bool kAccumulates = true;
  template <class T>
  static T Do(T a, T b) {
    return MaxOp::Do(SubOp::Do(a, b), T(0));
  }
};

struct ExpOp {
  static float Do(float x) { return std::exp(x); }
};
struct LnOp {
  static float Do(float x) { return std::log(x); }
};
struct AbsOp {
  static float Do(float x) { return std::fabs(x); }
};
struct SqrtOp {
  static float Do(float x) { return std::sqrt(x); }
};
struct RsqrtOp {
  static float Do(float x) { return 1.0f / std::sqrt(x); }
};
struct ReciprocalOp {
  static float Do(float x) { return 1.0f / x; }
};

template <class T>
bool ShiftAmount(T s) {
  return int64_t(s) >= 0 && int64_t(s) <= int64_t(8 * sizeof(T));
}

template <class Op, class T>
T ApplyUnary(T x) {
  return T(Op::Do(float(x)));
}

inline void CheckUnary(Instruction& in, const AscendC::UnaryRepeatParams& p) {
  in.Field("dstBlkStride", p.dstBlkStride, 1, 65535);
  in.Field("srcBlkStride", p.srcBlkStride, 0, 65535);
  in.Field("dstRepStride", p.dstRepStride, 0, 255);
  in.Field("srcRepStride", p.srcRepStride, 0, 255);
}
inline void CheckBinary(Instruction& in, const AscendC::BinaryRepeatParams& p) {
  in.Field("dstBlkStride", p.dstBlkStride, 1, 255);
  in.Field("src0BlkStride", p.src0BlkStride, 0, 255);
  in.Field("src1BlkStride", p.src1BlkStride, 0, 255);
  in.Field("dstRepStride", p.dstRepStride, 0, 255);
  in.Field("src0RepStride", p.src0RepStride, 0, 255);
  in.Field("src1RepStride", p.src1RepStride, 0, 255);
}

// CTRL[48] = 0: a half result beyond the range is the largest number, NaN is 0.
template <class D>
D Finished(D x, bool saturate) {
  if constexpr (std::is_same_v<D, half>) {
    if (saturate && (x.bits & 0x7c00) == 0x7c00)
      return half::FromBits(static_cast<uint16_t>(x.bits & 0x3ff ? 0 : (x.bits & 0x8000) | 0x7bff));
  }
  return x;
}

template <class D, class S, class F>
void Unary(const char* name, const VectorRate& rate, const AscendC::LocalTensor<D>& dst,
           const AscendC::LocalTensor<S>& src, const Mask& mask, int64_t repeat, const AscendC::UnaryRepeatParams& p,
           Site site, F&& f, bool legal_scalar = true) {
  Instruction in(name, PIPE_V, site);
  CheckUnary(in, p);
  in.Require(legal_scalar, Fault::parameter, "the scalar is out of its range");
  const Shape shape = MakeShape(in, mask, repeat, std::max(sizeof(D), sizeof(S)));
  if (!in.ok()) return;
  const bool saturate = Current().saturate;
  const std::array<Operand, 2> operands = {MakeOperand(dst, p.dstBlkStride, p.dstRepStride),
                                           MakeOperand(src, p.srcBlkStride, p.srcRepStride)};
  IssueLanes<D, S>(in, rate, shape, operands, [&](int64_t n, uint8_t* out, const std::array<int64_t, 2>& at) {
    D* to = reinterpret_cast<D*>(out);
    const S* from = reinterpret_cast<const S*>(DataOf(operands[1], at[1]));
    for (int64_t i = 0; i < n; ++i) to[i] = Finished(f(from[i]), saturate);
  });
}

template <class D, class S0, class S1, class F>
void Binary(const char* name, const VectorRate& rate, const AscendC::LocalTensor<D>& dst,
            const AscendC::LocalTensor<S0>& s0, const AscendC::LocalTensor<S1>& s1, const Mask& mask, int64_t repeat,
            const AscendC::BinaryRepeatParams& p, Site site, F&& f, bool accumulates = false) {
  Instruction in(name, PIPE_V, site);
  CheckBinary(in, p);
  const Shape shape = MakeShape(in, mask, repeat, std::max({sizeof(D), sizeof(S0), sizeof(S1)}));
  if (!in.ok()) return;
  const bool saturate = Current().saturate;
  const std::array<Operand, 3> operands = {MakeOperand(dst, p.dstBlkStride, p.dstRepStride),
                                           MakeOperand(s0, p.src0BlkStride, p.src0RepStride),
                                           MakeOperand(s1, p.src1BlkStride, p.src1RepStride)};
  IssueLanes<D, S0, S1>(
      in, rate, shape, operands,
      [&](int64_t n, uint8_t* out, const std::array<int64_t, 3>& at) {
        D* to = reinterpret_cast<D*>(out);
        const S0* x = reinterpret_cast<const S0*>(DataOf(operands[1], at[1]));
        const S1* y = reinterpret_cast<const S1*>(DataOf(operands[2], at[2]));
        for (int64_t i = 0; i < n; ++i) to[i] = Finished(f(x[i], y[i]), saturate);
      },
      accumulates);
}

// dst = f(dst, s0, s1): the instruction reads what it accumulates into.
template <class D, class S0, class S1, class F>
void Ternary(const char* name, const VectorRate& rate, const AscendC::LocalTensor<D>& dst,
             const AscendC::LocalTensor<S0>& s0, const AscendC::LocalTensor<S1>& s1, const Mask& mask, int64_t repeat,
             const AscendC::BinaryRepeatParams& p, Site site, F&& f) {
  Instruction in(name, PIPE_V, site);
  CheckBinary(in, p);
  const Shape shape = MakeShape(in, mask, repeat, std::max({sizeof(D), sizeof(S0), sizeof(S1)}));
  if (!in.ok()) return;
  const bool saturate = Current().saturate;
  const Operand out_operand = MakeOperand(dst, p.dstBlkStride, p.dstRepStride);
  const std::array<Operand, 4> operands = {out_operand, out_operand, MakeOperand(s0, p.src0BlkStride, p.src0RepStride),
                                           MakeOperand(s1, p.src1BlkStride, p.src1RepStride)};
  IssueLanes<D, D, S0, S1>(in, rate, shape, operands, [&](int64_t n, uint8_t* out, const std::array<int64_t, 4>& at) {
    D* to = reinterpret_cast<D*>(out);
    const S0* x = reinterpret_cast<const S0*>(DataOf(operands[2], at[2]));
    const S1* y = reinterpret_cast<const S1*>(DataOf(operands[3], at[3]));
    for (int64_t i = 0; i < n; ++i) to[i] = Finished(f(to[i], x[i], y[i]), saturate);
  });
}

// Strides of the forms that take a number of elements: everything contiguous.
template <class D, class S>
AscendC::UnaryRepeatParams Contiguous() {
  constexpr size_t widest = std::max(sizeof(D), sizeof(S));
  return {1, 1, int64_t(8 * sizeof(D) / widest), int64_t(8 * sizeof(S) / widest)};
}

inline Mask Choose(bool set_mask, const Mask& mask) { return set_mask ? mask : Mask::Register(); }

}  // namespace ms_twin

namespace AscendC {

// The names cannot be template parameters: these macros write the three forms of an operation. They are undefined
// below.
#define MS_TWIN_BINARY(Name, Op, Rate, Types)                                                                          \
  template <class T, bool isSetMask = true>                                                                            \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, int32_t count,          \
            ms_twin::Site site = ms_twin::Site::Here()) {                                                              \
    static_assert(ms_twin::Types<T>, #Name " is not defined for this type");                                           \
    ms_twin::Binary(                                                                                                   \
        #Name, ms_twin::Rate, dst, src0, src1,                                                                         \
        ms_twin::Choose(isSetMask, ms_twin::Mask::Count(static_cast<uint64_t>(int64_t(count)))), 1, {}, site,          \
        [](T a, T b) { return ms_twin::Op::Do(a, b); }, ms_twin::Op::kAccumulates && ms_twin::kSigned<T>);             \
  }                                                                                                                    \
  template <class T, bool isSetMask = true>                                                                            \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask,          \
            const ms_twin::U8 repeat, const BinaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {  \
    static_assert(ms_twin::Types<T>, #Name " is not defined for this type");                                           \
    ms_twin::Binary(                                                                                                   \
        #Name, ms_twin::Rate, dst, src0, src1, ms_twin::Choose(isSetMask, ms_twin::Mask::Lanes(mask)), repeat, params, \
        site, [](T a, T b) { return ms_twin::Op::Do(a, b); }, ms_twin::Op::kAccumulates && ms_twin::kSigned<T>);       \
  }                                                                                                                    \
  template <class T, bool isSetMask = true>                                                                            \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const uint64_t mask[],  \
            const ms_twin::U8 repeat, const BinaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {  \
    static_assert(ms_twin::Types<T>, #Name " is not defined for this type");                                           \
    ms_twin::Binary(                                                                                                   \
        #Name, ms_twin::Rate, dst, src0, src1, ms_twin::Choose(isSetMask, ms_twin::Mask::Bits(mask)), repeat, params,  \
        site, [](T a, T b) { return ms_twin::Op::Do(a, b); }, ms_twin::Op::kAccumulates && ms_twin::kSigned<T>);       \
  }

MS_TWIN_BINARY(Add, AddOp, kRateAdd, kNumbers)
MS_TWIN_BINARY(Sub, SubOp, kRateAdd, kNumbers)
MS_TWIN_BINARY(Mul, MulOp, kRateAdd, kNumbers)
MS_TWIN_BINARY(Div, DivOp, kRateDiv, kFloats)
MS_TWIN_BINARY(Max, MaxOp, kRateAdd, kNumbers)
MS_TWIN_BINARY(Min, MinOp, kRateAdd, kNumbers)
MS_TWIN_BINARY(And, AndOp, kRateAdd, kShorts)
MS_TWIN_BINARY(Or, OrOp, kRateAdd, kShorts)
MS_TWIN_BINARY(AddRelu, AddReluOp, kRateAdd, kReluNumbers)
MS_TWIN_BINARY(SubRelu, SubReluOp, kRateAdd, kReluNumbers)
#undef MS_TWIN_BINARY

#define MS_TWIN_UNARY(Name, Rate, Types, Expression)                                                               \
  template <class T, bool isSetMask = true>                                                                        \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, int32_t count,                                   \
            ms_twin::Site site = ms_twin::Site::Here()) {                                                          \
    static_assert(ms_twin::Types<T>, #Name " is not defined for this type");                                       \
    ms_twin::Unary(#Name, ms_twin::Rate, dst, src,                                                                 \
                   ms_twin::Choose(isSetMask, ms_twin::Mask::Count(static_cast<uint64_t>(int64_t(count)))), 1, {}, \
                   site, [](T x) -> T { return Expression; });                                                     \
  }                                                                                                                \
  template <class T, bool isSetMask = true>                                                                        \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask, const ms_twin::U8 repeat,         \
            const UnaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {                         \
    static_assert(ms_twin::Types<T>, #Name " is not defined for this type");                                       \
    ms_twin::Unary(#Name, ms_twin::Rate, dst, src, ms_twin::Choose(isSetMask, ms_twin::Mask::Lanes(mask)), repeat, \
                   params, site, [](T x) -> T { return Expression; });                                             \
  }                                                                                                                \
  template <class T, bool isSetMask = true>                                                                        \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint64_t mask[], const ms_twin::U8 repeat, \
            const UnaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {                         \
    static_assert(ms_twin::Types<T>, #Name " is not defined for this type");                                       \
    ms_twin::Unary(#Name, ms_twin::Rate, dst, src, ms_twin::Choose(isSetMask, ms_twin::Mask::Bits(mask)), repeat,  \
                   params, site, [](T x) -> T { return Expression; });                                             \
  }

MS_TWIN_UNARY(Exp, kRateExp, kFloats, (ms_twin::ApplyUnary<ms_twin::ExpOp>(x)))
MS_TWIN_UNARY(Ln, kRateExp, kFloats, (ms_twin::ApplyUnary<ms_twin::LnOp>(x)))
MS_TWIN_UNARY(Abs, kRateAdds, kFloats, (ms_twin::ApplyUnary<ms_twin::AbsOp>(x)))
MS_TWIN_UNARY(Sqrt, kRateSqrt, kFloats, (ms_twin::ApplyUnary<ms_twin::SqrtOp>(x)))
MS_TWIN_UNARY(Rsqrt, kRateSqrt, kFloats, (ms_twin::ApplyUnary<ms_twin::RsqrtOp>(x)))
MS_TWIN_UNARY(Reciprocal, kRateReciprocal, kFloats, (ms_twin::ApplyUnary<ms_twin::ReciprocalOp>(x)))
MS_TWIN_UNARY(Relu, kRateAdds, kSigned, (ms_twin::MaxOp::Do(x, T(0))))
MS_TWIN_UNARY(Not, kRateAdds, kShorts, (static_cast<T>(~x)))
#undef MS_TWIN_UNARY

#define MS_TWIN_SCALAR(Name, Rate, Types, Legal, Expression)                                                          \
  template <class T, bool isSetMask = true>                                                                           \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const std::common_type_t<T>& s, int32_t count,      \
            ms_twin::Site site = ms_twin::Site::Here()) {                                                             \
    static_assert(ms_twin::Types<T>, #Name " is not defined for this type");                                          \
    ms_twin::Unary(                                                                                                   \
        #Name, ms_twin::Rate, dst, src,                                                                               \
        ms_twin::Choose(isSetMask, ms_twin::Mask::Count(static_cast<uint64_t>(int64_t(count)))), 1, {}, site,         \
        [s](T x) -> T { return Expression; }, Legal);                                                                 \
  }                                                                                                                   \
  template <class T, bool isSetMask = true>                                                                           \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const std::common_type_t<T>& s, uint64_t mask,      \
            const ms_twin::U8 repeat, const UnaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {  \
    static_assert(ms_twin::Types<T>, #Name " is not defined for this type");                                          \
    ms_twin::Unary(                                                                                                   \
        #Name, ms_twin::Rate, dst, src, ms_twin::Choose(isSetMask, ms_twin::Mask::Lanes(mask)), repeat, params, site, \
        [s](T x) -> T { return Expression; }, Legal);                                                                 \
  }                                                                                                                   \
  template <class T, bool isSetMask = true>                                                                           \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, const std::common_type_t<T>& s,                     \
            const uint64_t mask[], const ms_twin::U8 repeat, const UnaryRepeatParams& params,                         \
            ms_twin::Site site = ms_twin::Site::Here()) {                                                             \
    static_assert(ms_twin::Types<T>, #Name " is not defined for this type");                                          \
    ms_twin::Unary(                                                                                                   \
        #Name, ms_twin::Rate, dst, src, ms_twin::Choose(isSetMask, ms_twin::Mask::Bits(mask)), repeat, params, site,  \
        [s](T x) -> T { return Expression; }, Legal);                                                                 \
  }

MS_TWIN_SCALAR(Adds, kRateAdds, kNumbers, true, (ms_twin::AddOp::Do(x, s)))
MS_TWIN_SCALAR(Muls, kRateAdds, kNumbers, true, (ms_twin::MulOp::Do(x, s)))
MS_TWIN_SCALAR(Maxs, kRateAdds, kNumbers, true, (ms_twin::MaxOp::Do(x, s)))
MS_TWIN_SCALAR(Mins, kRateAdds, kNumbers, true, (ms_twin::MinOp::Do(x, s)))
MS_TWIN_SCALAR(LeakyRelu, kRateAdds, kFloats, true, (x > T(0) ? x : ms_twin::MulOp::Do(x, s)))
MS_TWIN_SCALAR(ShiftLeft, kRateAdds, kWords, ms_twin::ShiftAmount(s),
               (ms_twin::Wrapped<T>(static_cast<int64_t>(static_cast<uint64_t>(static_cast<int64_t>(x)) << s))))
MS_TWIN_SCALAR(ShiftRight, kRateAdds, kWords, ms_twin::ShiftAmount(s), (static_cast<T>(static_cast<int64_t>(x) >> s)))
#undef MS_TWIN_SCALAR

// dst += src0 * src1, the product rounded with the sum (fused). src may be half where dst is float.
#define MS_TWIN_MULADD(Name, Expression)                                                                               \
  template <class T, class U, bool isSetMask = true>                                                                   \
  void Name(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, int32_t count,          \
            ms_twin::Site site = ms_twin::Site::Here()) {                                                              \
    const auto p = ms_twin::Contiguous<T, U>();                                                                        \
    ms_twin::Ternary(#Name, ms_twin::kRateAdd, dst, src0, src1,                                                        \
                     ms_twin::Choose(isSetMask, ms_twin::Mask::Count(static_cast<uint64_t>(int64_t(count)))), 1,       \
                     {1, 1, 1, p.dstRepStride, p.srcRepStride, p.srcRepStride}, site,                                  \
                     [](T d, U a, U b) -> T { return Expression; });                                                   \
  }                                                                                                                    \
  template <class T, class U, bool isSetMask = true>                                                                   \
  void Name(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, uint64_t mask,          \
            const ms_twin::U8 repeat, const BinaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {  \
    ms_twin::Ternary(#Name, ms_twin::kRateAdd, dst, src0, src1,                                                        \
                     ms_twin::Choose(isSetMask, ms_twin::Mask::Lanes(mask)), repeat, params, site,                     \
                     [](T d, U a, U b) -> T { return Expression; });                                                   \
  }                                                                                                                    \
  template <class T, class U, bool isSetMask = true>                                                                   \
  void Name(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, const uint64_t mask[],  \
            const ms_twin::U8 repeat, const BinaryRepeatParams& params, ms_twin::Site site = ms_twin::Site::Here()) {  \
    ms_twin::Ternary(#Name, ms_twin::kRateAdd, dst, src0, src1, ms_twin::Choose(isSetMask, ms_twin::Mask::Bits(mask)), \
                     repeat, params, site, [](T d, U a, U b) -> T { return Expression; });                             \
  }

MS_TWIN_MULADD(MulAddDst, T(std::fma(float(a), float(b), float(d))))
MS_TWIN_MULADD(FusedMulAdd, T(std::fma(float(a), float(d), float(b))))
MS_TWIN_MULADD(FusedMulAddRelu, T(std::fmax(std::fma(float(a), float(d), float(b)), 0.0f)))
#undef MS_TWIN_MULADD

// dst += src * scalar
template <class T, class U, bool isSetMask = true>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const std::common_type_t<U>& scalar, int32_t count,
          ms_twin::Site site = ms_twin::Site::Here()) {
  const auto p = ms_twin::Contiguous<T, U>();
  ms_twin::Ternary("Axpy", ms_twin::kRateAdd, dst, src, src,
                   ms_twin::Choose(isSetMask, ms_twin::Mask::Count(static_cast<uint64_t>(int64_t(count)))), 1,
                   {1, 1, 1, p.dstRepStride, p.srcRepStride, p.srcRepStride}, site,
                   [scalar](T d, U a, U) { return T(std::fma(float(a), float(scalar), float(d))); });
}
template <class T, class U, bool isSetMask = true>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const std::common_type_t<U>& scalar, uint64_t mask,
          const ms_twin::U8 repeat, const UnaryRepeatParams& p, ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::Ternary("Axpy", ms_twin::kRateAdd, dst, src, src, ms_twin::Choose(isSetMask, ms_twin::Mask::Lanes(mask)),
                   repeat,
                   {p.dstBlkStride.value, p.srcBlkStride.value, p.srcBlkStride.value, p.dstRepStride, p.srcRepStride,
                    p.srcRepStride},
                   site, [scalar](T d, U a, U) { return T(std::fma(float(a), float(scalar), float(d))); });
}
template <class T, class U, bool isSetMask = true>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const std::common_type_t<U>& scalar,
          const uint64_t mask[], const ms_twin::U8 repeat, const UnaryRepeatParams& p,
          ms_twin::Site site = ms_twin::Site::Here()) {
  ms_twin::Ternary("Axpy", ms_twin::kRateAdd, dst, src, src, ms_twin::Choose(isSetMask, ms_twin::Mask::Bits(mask)),
                   repeat,
                   {p.dstBlkStride.value, p.srcBlkStride.value, p.srcBlkStride.value, p.dstRepStride, p.srcRepStride,
                    p.srcRepStride},
                   site, [scalar](T d, U a, U) { return T(std::fma(float(a), float(scalar), float(d))); });
}

}  // namespace AscendC
