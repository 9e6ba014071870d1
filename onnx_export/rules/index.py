"""Picking by position: slices, gathers, selects, masks, ranges, sorting."""

from __future__ import annotations

import numpy as np

from ..builder import NUMBERS, Scalar, Tensor, Unsupported
from . import register
from .arithmetic import broadcast_shape
from .shape import dims_of, fixed, full, known_axis, squeeze, unsqueeze

_END = 2**63 - 1


def slice_(b, x, axes, starts, ends, steps=None, shape=None):
    """Slice along `axes`; starts and ends are numbers or Scalars."""
    if not axes:
        return x
    steps = steps or [1] * len(axes)
    if shape is None:
        shape = tuple(-1 if i in axes else d for i, d in enumerate(x.shape))
    numbers = all(isinstance(n, NUMBERS) for n in (*starts, *ends))
    if x.fixed is not None and numbers:
        cut = [slice(None)] * x.rank
        for axis, start, end, step in zip(axes, starts, ends, steps):
            cut[axis] = slice(int(start), None if step < 0 and end <= -_END else int(end), int(step))
        array = x.fixed[tuple(cut)]
        return fixed(x, lambda _: np.ascontiguousarray(array), array.shape, ".part")
    return b.op("Slice", x, b.vector(starts), b.vector(ends), b.constant(axes, "int64"),
                None if all(s == 1 for s in steps) else b.constant(steps, "int64"), shape=shape)


@register("StridedSlice")
def strided_slice(b, node, x, begin, end, strides, begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0,
                  shrink_axis_mask=0):
    begin, end, strides = (dims_of(b, v) for v in (begin, end, strides))
    bit = lambda mask, i: bool(mask >> i & 1)
    count = len(begin)
    ellipsis = [i for i in range(count) if bit(ellipsis_mask, i)]
    consumed = sum(not bit(new_axis_mask, i) and i not in ellipsis for i in range(count))
    axes, starts, ends, steps, shrink, new = [], [], [], [], [], []
    axis, out_axis = 0, 0
    for i in range(count):
        if i in ellipsis:
            axis += x.rank - consumed
            out_axis += x.rank - consumed
            continue
        if bit(new_axis_mask, i):
            new.append(out_axis)
            out_axis += 1
            continue
        first, last, step = begin[i], end[i], strides[i]
        if not isinstance(step, int):
            raise Unsupported("a step that the graph computes")
        if bit(shrink_axis_mask, i):
            step, last = 1, _after(b, first)
            shrink.append(axis)
        else:
            if bit(begin_mask, i):
                first = 0 if step > 0 else _END
            if bit(end_mask, i):
                last = _END if step > 0 else -_END
            out_axis += 1
        whole = isinstance(first, int) and first == 0 and isinstance(last, int) and step == 1 and (
            last == _END or last == x.shape[axis])
        if not whole and not (axis in shrink and x.shape[axis] == 1):
            axes.append(axis), starts.append(first), ends.append(last), steps.append(step)
        axis += 1
    if not new and len(axes) == 1 and axes == shrink and isinstance(starts[0], int) and x.fixed is None:
        shape = x.shape[:axes[0]] + x.shape[axes[0] + 1:]
        return b.op("Gather", x, b.constant(starts[0], "int64"), axis=axes[0], shape=shape)
    x = slice_(b, x, axes, starts, ends, steps)
    x = squeeze(b, x, shrink)
    return unsqueeze(b, x, new) if new else x


def _after(b, index):
    """The end of a slice of one element."""
    if isinstance(index, int):
        return index + 1 if index != -1 else _END
    return Scalar("int64", (1,), b.op("Add", index, b.constant([1], "int64")).name)


@register("Slice")
def slice_rule(b, node, x, begin, size):
    begin, size = dims_of(b, begin), dims_of(b, size)
    axes, starts, ends = [], [], []
    for axis, (first, n) in enumerate(zip(begin, size)):
        if isinstance(n, int) and n == -1:
            last = _END
        elif isinstance(first, int) and isinstance(n, int):
            last = first + n
        else:
            last = Scalar("int64", (1,), b.op("Add", b.vector([first]), b.vector([n])).name)
        if not (isinstance(first, int) and first == 0 and isinstance(last, int) and last in (_END, x.shape[axis])):
            axes.append(axis), starts.append(first), ends.append(last)
    return slice_(b, x, axes, starts, ends, shape=node.type.shape)


@register("SliceExt", "SliceExtView")
def slice_ext(b, node, x, axis=0, start=0, end=_END, step=1):
    start = 0 if start is None else start
    end = _END if end is None else end
    return slice_(b, x, [known_axis(x, axis)], [start], [end], [step], node.type.shape)


@register("Narrow", "NarrowView")
def narrow(b, node, x, axis, start, length):
    if isinstance(start, int) and isinstance(length, int):
        end = _END if start < 0 and start + length == 0 else start + length
    else:
        end = Scalar("int64", (1,), b.op("Add", b.vector([start]), b.vector([length])).name)
    return slice_(b, x, [known_axis(x, axis)], [start], [end], None, node.type.shape)


@register("SelectExtView", "SelectExt", "SelectView")
def select_one(b, node, x, axis, index):
    return b.op("Gather", x, _index(b, index), axis=known_axis(x, axis), shape=node.type.shape)


def _index(b, index):
    index = b.tensor(index, None if isinstance(index, Tensor) else "int64")
    return index if index.dtype in ("int32", "int64") else b.cast(index, "int64")


@register("Gather", "GatherV2")
def gather(b, node, x, indices, axis=0, batch_dims=0):
    indices = _index(b, indices)
    axis = int(axis.fixed.reshape(())) if isinstance(axis, Tensor) and axis.fixed is not None else axis
    if not isinstance(axis, int):
        raise Unsupported("an axis that the graph computes")
    if batch_dims:
        if known_axis(x, axis) != batch_dims:
            raise Unsupported(f"axis {axis} with batch_dims {batch_dims}")
        indices = unsqueeze(b, b.cast(indices, "int64"), [indices.rank])
        return b.op("GatherND", x, indices, batch_dims=batch_dims, shape=node.type.shape)
    return b.op("Gather", x, indices, axis=axis, shape=node.type.shape)


@register("EmbeddingLookup")
def embedding_lookup(b, node, table, indices, offset=0):
    if offset:
        raise Unsupported(f"offset {offset}")
    return b.op("Gather", table, _index(b, indices), axis=0, shape=node.type.shape)


@register("Embedding")
def embedding(b, node, indices, table, padding_idx=None, max_norm=None, *rest):
    if max_norm is not None:
        raise Unsupported("max_norm, which changes the table")
    return b.op("Gather", table, _index(b, indices), axis=0, dtype=table.dtype, shape=node.type.shape)


@register("GatherD")
def gather_elements(b, node, x, axis, index):
    # counted from the front: ONNX's evaluator fails on a negative axis
    return b.op("GatherElements", x, _index(b, index), axis=axis % x.rank, shape=node.type.shape)


@register("GatherNd", "GatherNdExt")
def gather_nd(b, node, x, indices):
    return b.op("GatherND", x, b.cast(indices, "int64"), shape=node.type.shape)


@register("IndexSelect")
def index_select(b, node, x, axis, index):
    return b.op("Gather", x, _index(b, index), axis=axis, shape=node.type.shape)


@register("Index")
def index(b, node, x, indices):
    indices = indices if isinstance(indices, tuple) else (indices,)
    if len(indices) == 1 and isinstance(indices[0], Tensor) and "int" in indices[0].dtype:
        return b.op("Gather", x, _index(b, indices[0]), axis=0, shape=node.type.shape)
    if all(isinstance(i, Tensor) and "int" in i.dtype for i in indices):
        rank = max(i.rank for i in indices)
        shape = ()
        for i in indices:
            shape = broadcast_shape(Tensor("int64", shape), i)
        if -1 in shape:
            raise Unsupported("several index tensors of lengths that the graph does not know")
        parts = [b.op("Unsqueeze", b.op("Expand", b.cast(i, "int64"), b.constant(shape, "int64", (rank,)), shape=shape),
                      b.constant([rank], "int64"), shape=(*shape, 1)) for i in indices]
        picked = b.op("Concat", *parts, axis=rank, shape=(*shape, len(parts)))
        return b.op("GatherND", x, picked, shape=node.type.shape)
    raise Unsupported("this kind of index")


@register("TensorScatterUpdate", "ScatterNdUpdate")
def scatter_nd(b, node, x, indices, updates):
    return b.op("ScatterND", x, b.cast(indices, "int64"), updates)


@register("TensorScatterElements")
def scatter_elements(b, node, x, indices, updates, axis=None, reduction=None):
    axis = node.attrs.get("axis", 0) if axis is None else axis
    reduction = node.attrs.get("reduction", "none") if reduction is None else reduction
    kind = {"none": "none", "add": "add", 0: "none", 1: "add"}.get(reduction)
    if kind is None:
        raise Unsupported(f"reduction '{reduction}'")
    return b.op("ScatterElements", x, _index(b, indices), updates, axis=axis, reduction=kind)


@register("Select", "SelectV2", "Where")
def select(b, node, condition, x, y):
    dtype = node.type.dtype
    x, y = b.tensor(x, dtype), b.tensor(y, dtype)
    return where(b, b.tensor(condition, "bool"), x, y)


def where(b, condition, x, y):
    """Where with its broadcast shape."""
    shape = broadcast_shape(condition, Tensor(x.dtype, broadcast_shape(x, y)))
    return b.op("Where", condition, x, y, dtype=x.dtype, shape=shape)


@register("MaskedFill", "MaskedFillScalar", "MaskedFillTensor")
def masked_fill(b, node, x, mask, value):
    return where(b, b.tensor(mask, "bool"), b.tensor(value, x.dtype), x)


@register("Tril", "TrilExt", "Triu")
def triangle(b, node, x, diagonal=None):
    diagonal = node.attrs.get("diagonal", 0) if diagonal is None else diagonal
    k = b.cast(b.tensor(diagonal, "int64"), "int64")
    upper = int(node.op == "Triu")
    if x.dtype == "bfloat16":       # runtimes know Trilu for the other dtypes
        return b.cast(b.op("Trilu", b.cast(x, "float32"), k, upper=upper), "bfloat16")
    return b.op("Trilu", x, k, upper=upper)


@register("Arange", "Range")
def arange(b, node, start, end=None, step=1, *rest):
    dtype = node.type.dtype
    numbers = all(isinstance(n, NUMBERS) for n in (start, end, step))
    if numbers:
        array = np.arange(start, end, step)
        if array.size <= 4096:
            return b.constant(array, dtype)
    wide = dtype if dtype in ("int32", "int64", "float32") else "float32" if "float" in dtype else "int64"
    out = b.op("Range", *[b.tensor(n, wide) for n in (start, end, step)], dtype=wide, shape=node.type.shape)
    return b.cast(out, dtype)


@register("LinSpace", "LinSpaceExt")
def linspace(b, node, start, end, steps, *rest):
    values = [float(v.fixed.reshape(())) if isinstance(v, Tensor) and v.fixed is not None else v for v in (start, end)]
    if not all(isinstance(v, NUMBERS) for v in (*values, steps)):
        raise Unsupported("ends that the graph computes")
    return b.constant(np.linspace(*values, int(steps)), node.type.dtype)


@register("Eye")
def eye(b, node, rows, columns=None, dtype=None):
    columns = rows if columns is None else columns
    if not isinstance(rows, int) or not isinstance(columns, int):
        ones = full(b, [rows, columns], 1.0, "float32")
        return b.cast(b.op("EyeLike", ones), node.type.dtype)
    return b.constant(np.eye(rows, columns), node.type.dtype)


@register("OneHot", "OneHotExt")
def one_hot(b, node, indices, depth, on, off, axis=-1):
    dtype = node.type.dtype
    on, off = (b.tensor(v, dtype) for v in (on, off))
    values = b.op("Concat", *[b.op("Reshape", v, b.constant([1], "int64"), shape=(1,)) for v in (off, on)], axis=0,
                  shape=(2,))
    return b.op("OneHot", b.cast(indices, "int64"), b.tensor(depth, "int64"), values, axis=axis, dtype=dtype,
                shape=node.type.shape)


@register("TopkExt", "TopK")
def topk(b, node, x, k, axis=-1, largest=True, is_sorted=True):
    if node.op == "TopK":
        axis, largest, is_sorted = -1, True, True
    values, indices = b.op("TopK", x, b.vector([k]), axis=axis, largest=int(largest), sorted=int(is_sorted),
                           outputs=(node.type[0], node.type[1]._replace(dtype="int64")))
    return values, b.cast(indices, node.type[1].dtype)


@register("CumSum", "CumsumExt")
def cumsum(b, node, x, axis=0, exclusive=False, reverse=False):
    if node.op == "CumsumExt":
        exclusive = reverse = False
    dtype = node.type.dtype
    axis = int(axis.fixed.reshape(())) if isinstance(axis, Tensor) and axis.fixed is not None else axis
    wide = dtype if dtype in ("int32", "int64", "float32", "float64") else "float32" if "float" in dtype else "int32"
    out = b.op("CumSum", b.tensor(x, wide), b.tensor(axis, "int64"), exclusive=int(bool(exclusive)),
               reverse=int(bool(reverse)), dtype=wide, shape=node.type.shape)
    return b.cast(out, dtype)


@register("Meshgrid")
def meshgrid(b, node, tensors, indexing="ij"):
    if indexing in ("xy", 1) and len(tensors) > 1:
        raise Unsupported("indexing 'xy'")
    n = len(tensors)
    lengths = [b.length(t, 0) for t in tensors]
    out = []
    for i, t in enumerate(tensors):
        t = unsqueeze(b, t, [a for a in range(n) if a != i])
        out.append(b.op("Expand", t, b.vector(lengths), shape=node.type[i].shape))
    return tuple(out)


@register("NonZero")
def nonzero(b, node, x):
    found = b.op("NonZero", x, dtype="int64", shape=(x.rank, -1))
    return b.op("Transpose", found, perm=[1, 0], shape=(-1, x.rank))


@register("ScalarToTensor", "TupleToTensor", "ListToTensor")
def to_tensor(b, node, value, dtype=None):
    dtype = node.type.dtype
    if isinstance(value, tuple):
        return b.cast(b.vector(value), dtype) if "int" in dtype else b.tensor(value, dtype)
    return b.tensor(value, dtype)

