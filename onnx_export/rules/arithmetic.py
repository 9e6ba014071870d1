"""Element by element: arithmetic, comparisons, logic, activations, casts."""

from __future__ import annotations

import math

from ..builder import NUMBERS, Tensor, Unsupported
from ..mindir import TensorType
from . import register

_UNARY = {
    "Abs": "Abs", "Acos": "Acos", "AcosExt": "Acos", "Asin": "Asin", "AsinExt": "Asin", "Atan": "Atan",
    "AtanExt": "Atan", "Ceil": "Ceil", "Cos": "Cos", "Cosh": "Cosh", "Erf": "Erf", "Exp": "Exp", "Floor": "Floor",
    "Log": "Log", "LogicalNot": "Not", "Neg": "Neg", "ReLU": "Relu", "Reciprocal": "Reciprocal", "Sigmoid": "Sigmoid",
    "Sign": "Sign", "Sin": "Sin", "Sinh": "Sinh", "Softsign": "Softsign", "Sqrt": "Sqrt", "Tan": "Tan", "Tanh": "Tanh",
}
_BINARY = {
    "Add": "Add", "Sub": "Sub", "Mul": "Mul", "Muls": "Mul", "Div": "Div", "Divs": "Div", "RealDiv": "Div",
    "TrueDivide": "Div", "Pow": "Pow", "PowTensorScalar": "Pow", "PowScalarTensor": "Pow", "BiasAdd": "Add",
    "Maximum": "Max", "Minimum": "Min",
}
_COMPARE = {
    "Equal": "Equal", "EqualExt": "Equal", "EqScalar": "Equal", "Less": "Less", "LessScalar": "Less",
    "LessEqual": "LessOrEqual",
    "LessEqualScalar": "LessOrEqual", "Greater": "Greater", "GreaterScalar": "Greater",
    "GreaterEqual": "GreaterOrEqual", "GreaterEqualScalar": "GreaterOrEqual",
}
_LOGIC = {"LogicalAnd": "And", "LogicalOr": "Or", "LogicalXor": "Xor"}
_BITS = {"BitwiseAnd": "BitwiseAnd", "BitwiseAndTensor": "BitwiseAnd", "BitwiseAndScalar": "BitwiseAnd",
         "BitwiseOr": "BitwiseOr", "BitwiseOrTensor": "BitwiseOr", "BitwiseOrScalar": "BitwiseOr",
         "BitwiseXor": "BitwiseXor", "BitwiseXorTensor": "BitwiseXor", "BitwiseXorScalar": "BitwiseXor"}


def broadcast_shape(x, y):
    """Shape of an operation on two Tensors; -1 where it is not known."""
    rank = max(x.rank, y.rank)
    a, b = ((1,) * (rank - t.rank) + tuple(t.shape) for t in (x, y))
    return tuple(n if m == 1 else m if n == 1 else m if n < 0 else n if m < 0 else max(m, n) for m, n in zip(a, b))


def pair(b, x, y):
    """Both as Tensors of one dtype: a number takes that of the Tensor, unless it is a fraction and that is whole."""
    tensors = [t for t in (x, y) if isinstance(t, Tensor)]
    if not tensors:
        return b.tensor(x), b.tensor(y)
    dtype = tensors[0].dtype
    numbers = [n for n in (x, y) if isinstance(n, NUMBERS)]
    if numbers and isinstance(numbers[0], float) and "int" in dtype:
        dtype = "float32"
    if len(tensors) == 2 and tensors[0].dtype != tensors[1].dtype:
        dtype = wider(*(t.dtype for t in tensors))
    return b.tensor(x, dtype), b.tensor(y, dtype)


def wider(first, second):
    """The dtype in which MindSpore computes with both."""
    order = ("bool", "uint8", "int8", "int16", "int32", "int64", "bfloat16", "float16", "float32", "float64")
    if {first, second} == {"bfloat16", "float16"}:
        return "float32"
    return max(first, second, key=order.index)


def binary(b, op, x, y, dtype=None):
    """A node on two Tensors that broadcast; `dtype` is that of the result."""
    return b.op(op, x, y, dtype=dtype or x.dtype, shape=broadcast_shape(x, y))


def result_dtype(node, *fallback):
    """The dtype that MindSpore gives the node."""
    return getattr(node.type, "dtype", None) or fallback[0].dtype


def _float(b, x):
    return x if "float" in x.dtype else b.cast(x, "float32")


@register(*_UNARY)
def unary(b, node, x):
    return b.op(_UNARY[node.op], b.tensor(x, result_dtype(node, x)))


@register(*_BINARY)
def arithmetic(b, node, x, y, *rest):
    if node.op == "BiasAdd":
        return _bias_add(b, node, x, y, *rest)
    dtype = result_dtype(node, x)
    x, y = b.tensor(x, dtype), b.tensor(y, dtype)
    if dtype == "bool":
        op = {"Add": "Or", "Mul": "And", "Maximum": "Or", "Minimum": "And"}.get(node.op)
        if op is None:
            raise Unsupported("bool inputs")
        return binary(b, op, x, y)
    return binary(b, _BINARY[node.op], x, y)


def _bias_add(b, node, x, bias, data_format="NCHW"):
    if x.rank > 2 and str(data_format) not in ("NHWC", "1"):
        bias = b.op("Reshape", bias, b.constant([-1] + [1] * (x.rank - 2), "int64"),
                    shape=(bias.shape[0],) + (1,) * (x.rank - 2))
    return binary(b, "Add", x, bias)


@register("AddExt", "SubExt", "AddScalar", "SubScalar", "AddsExt")
def scaled(b, node, x, y, alpha=1):
    dtype = result_dtype(node, x)
    x, y = b.tensor(x, dtype), b.tensor(y, dtype)
    if alpha != 1:
        y = binary(b, "Mul", y, b.tensor(alpha, dtype))
    return binary(b, node.op[:3].capitalize(), x, y)


@register("AddN", "AccumulateNV2")
def add_all(b, node, terms, *rest):
    terms = (*terms, *rest) if isinstance(terms, tuple) else (terms, *rest)
    return b.op("Sum", *terms) if len(terms) > 1 else terms[0]


@register("Addcmul")
def addcmul(b, node, x, first, second, value=1):
    product = binary(b, "Mul", first, second)
    if value != 1:
        product = binary(b, "Mul", product, b.tensor(value, product.dtype))
    return binary(b, "Add", x, product)


@register("FloorDiv", "FloorDivScalar")
def floor_divide(b, node, x, y):
    return _divide(b, node, x, y, "floor")


@register("DivMod", "DivMods")
def divide_rounded(b, node, x, y, rounding=None):
    kind = {None: None, 0: None, 1: "trunc", 2: "floor"}.get(rounding, rounding)
    return _divide(b, node, x, y, kind)


def _divide(b, node, x, y, rounding):
    dtype = result_dtype(node, x)
    x, y = b.tensor(x, dtype), b.tensor(y, dtype)
    if "float" in dtype:
        quotient = binary(b, "Div", x, y)
        if rounding == "trunc":
            sign = b.op("Sign", quotient)
            return binary(b, "Mul", b.op("Floor", b.op("Abs", quotient)), sign)
        return b.op("Floor", quotient) if rounding == "floor" else quotient
    if rounding == "floor":     # Div cuts towards zero; Mod has the sign of the divisor
        x = binary(b, "Sub", x, binary(b, "Mod", x, y))
    return binary(b, "Div", x, y)


@register("FloorMod", "Mod", "RemainderTensorTensor", "RemainderTensorScalar", "RemainderScalarTensor", "FmodScalar",
          "FmodTensor")
def modulo(b, node, x, y):
    dtype = result_dtype(node, x)
    x, y = b.tensor(x, dtype), b.tensor(y, dtype)
    if "float" in dtype:
        if node.op == "Mod" or node.op.startswith("Fmod"):
            return b.op("Mod", x, y, fmod=1, shape=broadcast_shape(x, y))
        return binary(b, "Sub", x, binary(b, "Mul", b.op("Floor", binary(b, "Div", x, y)), y))
    return b.op("Mod", x, y, fmod=int(node.op == "Mod" or node.op.startswith("Fmod")), shape=broadcast_shape(x, y))


@register(*_COMPARE)
def compare(b, node, x, y):
    x, y = pair(b, x, y)
    if x.dtype == "bool" and node.op not in ("Equal", "EqualExt", "EqScalar"):
        x, y = b.cast(x, "int32"), b.cast(y, "int32")
    return binary(b, _COMPARE[node.op], x, y, "bool")


@register("NotEqual", "NeScalar")
def not_equal(b, node, x, y):
    return b.op("Not", binary(b, "Equal", *pair(b, x, y), "bool"))


@register(*_LOGIC)
def logic(b, node, x, y):
    return binary(b, _LOGIC[node.op], b.tensor(x, "bool"), b.tensor(y, "bool"))


@register(*_BITS)
def bits(b, node, x, y):
    dtype = result_dtype(node, x)
    x, y = b.tensor(x, dtype), b.tensor(y, dtype)
    if dtype == "bool":
        return binary(b, {"And": "And", "Or": "Or", "Xor": "Xor"}[_BITS[node.op][7:]], x, y)
    return binary(b, _BITS[node.op], x, y)


@register("Cast")
def cast(b, node, x, dtype=None):
    return b.tensor(b.tensor(x), result_dtype(node, x))


@register("Square")
def square(b, node, x):
    return b.op("Mul", x, x)


@register("Rsqrt")
def rsqrt(b, node, x):
    return b.op("Reciprocal", b.op("Sqrt", b.tensor(x, result_dtype(node, x))))


@register("Log1p")
def log1p(b, node, x):
    return b.op("Log", binary(b, "Add", x, b.constant(1, x.dtype)))


@register("Expm1")
def expm1(b, node, x):
    return binary(b, "Sub", b.op("Exp", x), b.constant(1, x.dtype))


@register("Round")
def round_(b, node, x, decimals=0):
    if decimals:
        raise Unsupported(f"decimals={decimals}")
    return b.op("Round", x)


@register("Trunc")
def trunc(b, node, x):
    return b.op("Mul", b.op("Floor", b.op("Abs", x)), b.op("Sign", x))


@register("IsNan", "IsInf")
def is_special(b, node, x):
    return b.op({"IsNan": "IsNaN", "IsInf": "IsInf"}[node.op], _wide(b, x), dtype="bool")


@register("IsFinite")
def is_finite(b, node, x):
    x = _wide(b, x)
    return b.op("Not", b.op("Or", b.op("IsNaN", x, dtype="bool"), b.op("IsInf", x, dtype="bool")))


def _wide(b, x):
    """IsInf takes no bfloat16 before opset 20."""
    return b.cast(x, "float32") if x.dtype in ("bfloat16", "float16") else x


@register("ClampScalar", "ClampTensor", "ClipByValue")
def clamp(b, node, x, low=None, high=None):
    dtype = result_dtype(node, x)
    x = b.tensor(x, dtype)
    if low is not None:
        x = binary(b, "Max", x, b.tensor(low, dtype))
    return x if high is None else binary(b, "Min", x, b.tensor(high, dtype))


@register("Identity", "Copy", "Contiguous", "Clone", "StopGradient", "TensorMove")
def identity(b, node, x, *rest):
    return x


# ---- activations ---------------------------------------------------------------------------------------------------
def gelu(b, x, tanh):
    """x * Phi(x), exactly or by the tanh formula."""
    if b.opset >= 20:
        return b.op("Gelu", x, approximate="tanh" if tanh else "none")
    half, one = b.constant(0.5, x.dtype), b.constant(1, x.dtype)
    if tanh:
        cube = b.op("Mul", b.op("Mul", x, x), x)
        inner = b.op("Add", x, b.op("Mul", cube, b.constant(0.044715, x.dtype), shape=x.shape))
        inner = b.op("Tanh", b.op("Mul", inner, b.constant(math.sqrt(2 / math.pi), x.dtype), shape=x.shape))
    else:
        inner = b.op("Erf", b.op("Div", x, b.constant(math.sqrt(2), x.dtype), shape=x.shape))
    return b.op("Mul", b.op("Mul", x, b.op("Add", inner, one, shape=x.shape)), half, shape=x.shape)


@register("GeLU")
def gelu_tanh(b, node, x):
    return gelu(b, x, True)


@register("GeluExt", "GELU")
def gelu_either(b, node, x, approximate="none"):
    return gelu(b, x, approximate in ("tanh", 1))


@register("FastGeLU", "FastGelu", "QuickGelu")
def gelu_fast(b, node, x):
    return b.op("Mul", x, b.op("Sigmoid", binary(b, "Mul", x, b.constant(1.702, x.dtype))))


@register("SiLU", "Swish")
def silu(b, node, x):
    return b.op("Mul", x, b.op("Sigmoid", x))


@register("Swiglu")
def swiglu(b, node, x, dim=-1):
    gate, value = halves(b, x, dim)
    return b.op("Mul", b.op("Mul", gate, b.op("Sigmoid", gate)), value)


@register("GLU")
def glu(b, node, x, axis=-1):
    value, gate = halves(b, x, axis)
    return b.op("Mul", value, b.op("Sigmoid", gate))


def halves(b, x, axis=-1):
    """`x` cut into two along `axis`."""
    axis %= x.rank
    size = x.shape[axis]
    if size < 0:
        raise Unsupported("the split axis has a length that the graph does not know")
    kind = TensorType(x.dtype, x.shape[:axis] + (size // 2,) + x.shape[axis + 1:])
    return b.op("Split", x, b.constant([size // 2] * 2, "int64"), axis=axis, outputs=(kind, kind))


@register("ReLU6")
def relu6(b, node, x):
    return binary(b, "Min", b.op("Relu", x), b.constant(6, x.dtype))


@register("HSwish")
def hard_swish(b, node, x):
    return b.op("HardSwish", x)


@register("HSigmoid")
def hard_sigmoid(b, node, x):
    return b.op("HardSigmoid", x, alpha=1 / 6, beta=0.5)


@register("Elu", "EluExt")
def elu(b, node, x, alpha=1.0):
    return b.op("Elu", x, alpha=float(alpha))


@register("LeakyReLUExt", "LeakyReLU")
def leaky_relu(b, node, x, slope=0.01):
    return b.op("LeakyRelu", x, alpha=float(slope))


@register("PReLU")
def prelu(b, node, x, weight):
    if weight.rank == 1 and weight.shape[0] != 1 and x.rank > 2:
        weight = b.op("Reshape", weight, b.constant([-1] + [1] * (x.rank - 2), "int64"),
                      shape=(weight.shape[0],) + (1,) * (x.rank - 2))
    return b.op("PRelu", x, weight)


@register("Softplus", "SoftplusExt")
def softplus(b, node, x, beta=1, threshold=20):
    if beta != 1:
        raise Unsupported(f"beta={beta}")
    return b.op("Softplus", x)


@register("Mish", "MishExt")
def mish(b, node, x):
    return b.op("Mish", x)
