"""Reductions over axes."""

from __future__ import annotations

from ..builder import Tensor, Unsupported
from . import register
from .arithmetic import binary
from .shape import axes_of, squeeze

_REDUCE = {"ReduceMean": "ReduceMean", "MeanExt": "ReduceMean", "ReduceSum": "ReduceSum", "SumExt": "ReduceSum",
           "ReduceMax": "ReduceMax", "ReduceMin": "ReduceMin", "ReduceProd": "ReduceProd", "ProdExt": "ReduceProd",
           "Max": "ReduceMax", "Min": "ReduceMin"}


def _axes(b, axis):
    """The axes input of a reduction; None is all axes."""
    if isinstance(axis, Tensor):
        axis = axis.fixed
        if axis is None:
            raise Unsupported("axes that the graph computes")
        axis = tuple(int(a) for a in axis.reshape(-1))
    if axis is None or axis == ():
        return None
    return b.constant(axes_of(axis), "int64")


def reduce(b, op, x, axis, keep, shape):
    """One reduction."""
    axes = _axes(b, axis)
    if axes is None and x.rank == 0:
        return x
    return b.op(op, x, axes, keepdims=int(bool(keep)), shape=shape)


@register(*_REDUCE)
def reduce_rule(b, node, x, axis=None, keep=False, *rest):
    x = b.tensor(x, node.type.dtype)
    if node.op in ("Max", "Min"):
        axis, keep = None, False
    if x.dtype == "bool":
        return b.cast(reduce(b, _REDUCE[node.op], b.cast(x, "int32"), axis, keep, node.type.shape), "bool")
    return reduce(b, _REDUCE[node.op], x, axis, keep, node.type.shape)


@register("ReduceAll", "ReduceAny")
def reduce_bool(b, node, x, axis=None, keep=False):
    op = "ReduceMin" if node.op == "ReduceAll" else "ReduceMax"
    return b.cast(reduce(b, op, b.cast(b.tensor(x, "bool"), "int32"), axis, keep, node.type.shape), "bool")


@register("Argmax", "ArgMaxExt", "Argmin", "ArgMinExt")
def arg(b, node, x, axis=-1, *rest):
    keep = bool(rest[0]) if node.op.endswith("Ext") and rest else False
    op = "ArgMax" if "ax" in node.op else "ArgMin"
    if axis is None:
        x, axis, keep = b.op("Reshape", x, b.constant([-1], "int64"), shape=(-1,)), 0, False
    return b.cast(b.op(op, x, axis=axis, keepdims=int(keep), dtype="int64", shape=node.type.shape), node.type.dtype)


@register("ArgMaxWithValue", "ArgMinWithValue", "MaxDim", "MinDim")
def arg_with_value(b, node, x, axis=0, keep=False):
    first = node.op.startswith("Arg")
    index_type, value_type = node.type if first else node.type[::-1]
    kind = "Max" if "Max" in node.op else "Min"
    index = b.cast(b.op("Arg" + kind, x, axis=axis, keepdims=int(bool(keep)), dtype="int64", shape=index_type.shape),
                   index_type.dtype)
    value = reduce(b, "Reduce" + kind, x, axis, keep, value_type.shape)
    return (index, value) if first else (value, index)


def _kept(x, axis):
    """Shape of `x` with its reduced axes kept."""
    axes = range(x.rank) if axis is None or axis == () else [a % x.rank for a in axes_of(axis)]
    return tuple(1 if i in axes else d for i, d in enumerate(x.shape))


def variance(b, x, axis, correction, keep, shape):
    """Mean square distance from the mean; `correction` is taken off the number of elements."""
    mean = reduce(b, "ReduceMean", x, axis, True, _kept(x, axis))
    centred = binary(b, "Sub", x, mean)
    squares = b.op("Mul", centred, centred)
    if not correction:
        return reduce(b, "ReduceMean", squares, axis, keep, shape), mean
    axes = range(x.rank) if axis is None or axis == () else axes_of(axis)
    count = 1
    for a in axes:
        if x.shape[a] < 0:
            raise Unsupported("a corrected variance over a length that the graph does not know")
        count *= x.shape[a]
    total = reduce(b, "ReduceSum", squares, axis, keep, shape)
    return binary(b, "Div", total, b.constant(count - correction, x.dtype)), mean


@register("Var", "Std")
def var_std(b, node, x, axis=None, correction=1, keep=False):
    out, _ = variance(b, x, axis, int(correction), keep, node.type.shape)
    return out if node.op == "Var" else b.op("Sqrt", out)


@register("VarMean", "StdMean")
def var_mean(b, node, x, axis=None, correction=1, keep=False):
    out, mean = variance(b, x, axis, int(correction), keep, node.type[0].shape)
    if not keep:
        mean = reduce(b, "ReduceMean", x, axis, False, node.type[1].shape)
    return (out if node.op == "VarMean" else b.op("Sqrt", out)), mean


@register("ReduceStd")
def reduce_std(b, node, x, axis=(), unbiased=True, keep=False):
    out, mean = variance(b, x, axis, int(bool(unbiased)), keep, node.type[0].shape)
    if not keep:
        mean = squeeze(b, mean, [i for i, d in enumerate(_kept(x, axis)) if d == 1 and i < x.rank])
        mean = reduce(b, "ReduceMean", x, axis, False, node.type[1].shape)
    return b.op("Sqrt", out), mean


@register("Norm", "LpNormV2")
def norm(b, node, x, p=2.0, axis=None, keep=False, *rest):
    p = p if isinstance(p, (int, float)) else 2.0
    if p not in (1, 2):
        raise Unsupported(f"a norm of order {p}")
    return reduce(b, f"ReduceL{int(p)}", b.tensor(x, node.type.dtype), axis, keep, node.type.shape)


@register("L2Normalize")
def l2_normalize(b, node, x):
    axis, epsilon = node.attrs.get("axis", 0), node.attrs.get("epsilon", 1e-4)
    squares = reduce(b, "ReduceSum", b.op("Mul", x, x), axis, True, _kept(x, axis))
    return binary(b, "Div", x, b.op("Sqrt", binary(b, "Max", squares, b.constant(epsilon, x.dtype))))
