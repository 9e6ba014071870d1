"""What a graph is made of besides Tensors: tuples, lengths, numbers, branches, the order of side effects."""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

from ..builder import NUMBERS, Scalar, Tensor, Unsupported
from ..mindir import Monad, SubGraph
from . import register


class Unavailable(NamedTuple):
    """An output that the rule does not give; fine as long as nobody reads it."""

    what: str


class Choice(NamedTuple):
    """Which of two graphs a call runs."""

    condition: Tensor
    branches: tuple


@register("MakeTuple", "make_list", "MakeList", "RealMakeTuple")
def make_tuple(b, node, *items):
    return tuple(items)


@register("TupleGetItem", "list_getitem", "ListGetItem", "RealTupleGetItem", "tuple_getitem")
def get_item(b, node, items, index):
    if not isinstance(index, int):
        raise Unsupported("an index that the graph computes")
    if not isinstance(items, tuple) or isinstance(items, (Choice, SubGraph)):
        return items
    return items[index]


@register("Depend", "Load", "Return", "return")
def first(b, node, x, *rest):
    return x


@register("UpdateState")
def update_state(b, node, *rest):
    return Monad()


@register("Shape", "TensorShape", "DynamicShape")
def shape(b, node, x):
    lengths = tuple(b.length(x, i) for i in range(x.rank))
    if node.op == "Shape":
        return lengths
    return b.vector(lengths) if lengths else b.constant([], "int64")


@register("Rank")
def rank(b, node, x):
    return x.rank


@register("Size")
def size(b, node, x):
    lengths = [b.length(x, i) for i in range(x.rank)]
    total, fixed = None, 1
    for n in lengths:
        if isinstance(n, int):
            fixed *= n
        else:
            total = n if total is None else _scalar(b, "Mul", total, n)
    return fixed if total is None else total if fixed == 1 else _scalar(b, "Mul", total, fixed)


_ARITHMETIC = {"ScalarAdd": ("Add", operator.add), "ScalarSub": ("Sub", operator.sub),
               "ScalarMul": ("Mul", operator.mul), "ScalarMax": ("Max", max), "ScalarMin": ("Min", min)}
_COMPARISON = {"ScalarEq": ("Equal", operator.eq), "ScalarNe": ("", operator.ne), "ScalarLt": ("Less", operator.lt),
               "ScalarGt": ("Greater", operator.gt), "ScalarLe": ("LessOrEqual", operator.le),
               "ScalarGe": ("GreaterOrEqual", operator.ge)}


def _scalar(b, op, x, y, dtype=None):
    """A node on two numbers of the graph."""
    kinds = [v.dtype for v in (x, y) if isinstance(v, Tensor)]
    kind = "float32" if "float32" in kinds or any(isinstance(v, float) for v in (x, y)) else kinds[0]
    x, y = (_one(b, v, kind) for v in (x, y))
    return Scalar(dtype or kind, (1,), b.op(op, x, y, dtype=dtype or kind).name)


def _one(b, value, dtype):
    """A number as an ONNX tensor of shape (1,)."""
    if isinstance(value, NUMBERS):
        return b.constant([value], dtype)
    if not isinstance(value, Scalar):
        value = b.op("Reshape", value, b.constant([1], "int64"), shape=(1,))
    return b.cast(value, dtype)


@register(*_ARITHMETIC)
def scalar_arithmetic(b, node, x, y):
    op, direct = _ARITHMETIC[node.op]
    return direct(x, y) if isinstance(x, NUMBERS) and isinstance(y, NUMBERS) else _scalar(b, op, x, y)


@register("ScalarDiv", "ScalarFloorDiv", "ScalarMod")
def scalar_divide(b, node, x, y):
    direct = {"ScalarDiv": operator.truediv, "ScalarFloorDiv": operator.floordiv, "ScalarMod": operator.mod}[node.op]
    if isinstance(x, NUMBERS) and isinstance(y, NUMBERS):
        return direct(x, y)
    if node.op == "ScalarDiv":
        return _scalar(b, "Div", *(v if isinstance(v, float) else _as_float(b, v) for v in (x, y)))
    rest = _scalar(b, "Mod", x, y)
    return rest if node.op == "ScalarMod" else _scalar(b, "Div", _scalar(b, "Sub", x, rest), y)


def _as_float(b, value):
    return float(value) if isinstance(value, NUMBERS) else b.cast(value, "float32")


@register(*_COMPARISON)
def scalar_comparison(b, node, x, y):
    op, direct = _COMPARISON[node.op]
    if isinstance(x, NUMBERS) and isinstance(y, NUMBERS):
        return direct(x, y)
    if op:
        return _scalar(b, op, x, y, "bool")
    return _not(b, _scalar(b, "Equal", x, y, "bool"))


def _not(b, x):
    return Scalar("bool", (1,), b.op("Not", x).name)


@register("BoolNot", "bool_not", "ScalarNot")
def scalar_not(b, node, x):
    return not x if isinstance(x, NUMBERS) else _not(b, _one(b, x, "bool"))


@register("BoolAnd", "bool_and", "BoolOr", "bool_or")
def scalar_logic(b, node, x, y):
    both = "nd" in node.op
    if isinstance(x, NUMBERS) and isinstance(y, NUMBERS):
        return (x and y) if both else (x or y)
    return Scalar("bool", (1,), b.op("And" if both else "Or", _one(b, x, "bool"), _one(b, y, "bool")).name)


@register("ScalarUadd")
def scalar_positive(b, node, x):
    return x


@register("ScalarUsub")
def scalar_negative(b, node, x):
    return -x if isinstance(x, NUMBERS) else Scalar(x.dtype, (1,), b.op("Neg", x).name)


@register("ScalarPow", "ScalarFloor", "ScalarLog", "ScalarTrunc")
def scalar_function(b, node, x, y=None):
    if not isinstance(x, NUMBERS) or not isinstance(y, (*NUMBERS, type(None))):
        raise Unsupported("a number that the graph computes")
    return {"ScalarPow": lambda: x ** y, "ScalarFloor": lambda: math.floor(x), "ScalarLog": lambda: math.log(x),
            "ScalarTrunc": lambda: math.trunc(x)}[node.op]()


@register("ScalarCast", "ScalarBool")
def scalar_cast(b, node, x, dtype=None):
    kind = "bool" if node.op == "ScalarBool" else node.type.dtype
    if isinstance(x, NUMBERS):
        return {"b": bool, "i": int, "u": int, "f": float}[kind[0]](x)
    return b.cast(x, kind)


@register("TensorToScalar", "TensorToTuple")
def tensor_to_number(b, node, x):
    if isinstance(x, Scalar):
        return x
    if node.op == "TensorToTuple":
        from .shape import dims_of

        return tuple(dims_of(b, x))
    if x.fixed is not None:
        return x.fixed.reshape(()).item()
    return Scalar(x.dtype, (1,), b.op("Reshape", x, b.constant([1], "int64"), shape=(1,)).name)


@register("Partial")
def partial(b, node, graph, *bound):
    return SubGraph(graph.name, (*graph.bound, *bound))


@register("Switch")
def switch(b, node, condition, when_true, when_false):
    if isinstance(condition, Tensor) and condition.fixed is not None:
        condition = bool(condition.fixed.reshape(()))
    if isinstance(condition, NUMBERS):
        return when_true if condition else when_false
    return Choice(condition, (when_true, when_false))


@register("call", "Call")
def call(b, node, callee, *inputs):
    if isinstance(callee, SubGraph):
        return b.call(callee, inputs)
    if not isinstance(callee, Choice):
        raise Unsupported("a call of something that is no graph")
    blocks, values = [], []
    for branch in callee.branches:
        with b.branch() as block:
            value = b.call(branch, inputs) if isinstance(branch, SubGraph) else branch
            flat = _leaves(value)
            block.outputs = [_plain(b, x) for x in flat]
        blocks.append(block), values.append(value)
    if not blocks[0].outputs:
        return values[0]
    kinds = tuple(_common(*outputs) for outputs in zip(*(block.outputs for block in blocks)))
    if len(blocks[0].outputs) != len(blocks[1].outputs):
        raise Unsupported("two branches that return different things")
    condition = b.tensor(callee.condition, "bool")
    results = b.op("If", condition, then_branch=blocks[0], else_branch=blocks[1], outputs=kinds)
    if any(isinstance(x, (Scalar, *NUMBERS)) for x in _leaves(values[0])):
        results = tuple(Scalar(r.dtype, (1,), r.name) if isinstance(x, (Scalar, *NUMBERS)) else r
                        for r, x in zip(results, _leaves(values[0])))
    return _rebuilt(values[0], iter(results))


def _leaves(value):
    if type(value) is tuple:
        return [leaf for x in value for leaf in _leaves(x)]
    return [] if value is None or isinstance(value, Monad) else [value]


def _rebuilt(value, leaves):
    if type(value) is tuple:
        return tuple(_rebuilt(x, leaves) for x in value)
    return value if value is None or isinstance(value, Monad) else next(leaves)


def _plain(b, x):
    """A result of a branch, made by a node of that branch: ONNX does not take values from outside as results."""
    if isinstance(x, NUMBERS):
        x = b.constant([x], "bool" if isinstance(x, bool) else "int64" if isinstance(x, int) else "float32")
    if not isinstance(x, Tensor):
        raise Unsupported("a branch that does not return Tensors")
    return b.op("Identity", x)


def _common(first, second):
    from ..mindir import TensorType

    if first.dtype != second.dtype:
        raise Unsupported(f"branches of dtype {first.dtype} and {second.dtype}")
    if first.rank != second.rank:
        raise Unsupported("branches of different ranks")
    return TensorType(first.dtype, tuple(m if m == n else -1 for m, n in zip(first.shape, second.shape)))
