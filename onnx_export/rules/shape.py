"""Shapes and places: reshape, transpose, split, join, repeat, pad, fill."""

from __future__ import annotations

import numpy as np

from ..builder import NUMBERS, Scalar, Tensor, Unsupported
from ..mindir import TensorType
from . import register


def known_axis(x, axis):
    """`axis` counted from the front."""
    return axis + x.rank if axis < 0 else axis


def axes_of(value):
    """An axis, or a tuple of them, as a list."""
    return [int(a) for a in (value if isinstance(value, (tuple, list)) else (value,))]


def permute(b, x, order):
    """Transpose; a fixed array is transposed here."""
    order = [known_axis(x, a) for a in order]
    if order == list(range(x.rank)):
        return x
    shape = tuple(x.shape[a] for a in order)
    if x.array is not None and x.name not in b.initializers:
        return fixed(x, lambda array: np.ascontiguousarray(array.transpose(order)), shape, ".T")
    return b.op("Transpose", x, perm=order, shape=shape)


def fixed(x, change, shape, suffix):
    """A fixed Tensor changed while exporting; a weight is loaded only when it is written."""
    if isinstance(x.array, np.ndarray):
        return Tensor(x.dtype, shape, x.name and x.name + suffix, change(x.array))
    load = x.array
    return Tensor(x.dtype, shape, x.name + suffix, lambda: change(load()))


def reshape(b, x, dims, shape=None):
    """Reshape to `dims`: numbers, -1, or Scalars. Written with as few computed lengths as possible."""
    dims = list(dims)
    shape = tuple(d if isinstance(d, int) else -1 for d in dims) if shape is None else shape
    if x.fixed is not None and all(isinstance(d, int) for d in dims):
        return fixed(x, lambda array: array.reshape(dims), x.fixed.reshape(dims).shape, ".reshaped")
    dims = [shape[i] if i < len(shape) and shape[i] > 0 else d for i, d in enumerate(dims)]
    for i, d in enumerate(dims):        # 0 copies the length from the input
        if isinstance(d, Scalar) and d.origin is not None and d.origin[0] is x and d.origin[1] == i:
            dims[i] = 0
    unknown = [i for i, d in enumerate(dims) if isinstance(d, Scalar)]
    if len(unknown) == 1 and -1 not in dims and 0 not in [d for d in shape if d >= 0]:
        dims[unknown[0]] = -1
    return b.op("Reshape", x, b.vector(dims), shape=shape)


def unsqueeze(b, x, axes, shape=None):
    """New axes of length 1, counted in the result."""
    axes = sorted(a + x.rank + len(axes) if a < 0 else a for a in axes)
    if shape is None:
        shape = list(x.shape)
        for axis in axes:
            shape.insert(axis, 1)
    if x.fixed is not None:
        return fixed(x, lambda array: array.reshape(tuple(shape)), tuple(shape), ".reshaped")
    return b.op("Unsqueeze", x, b.constant(axes, "int64"), shape=tuple(shape))


def squeeze(b, x, axes):
    """Removes axes of length 1."""
    axes = sorted(known_axis(x, a) for a in axes)
    if not axes:
        return x
    shape = tuple(d for i, d in enumerate(x.shape) if i not in axes)
    if x.fixed is not None:
        return fixed(x, lambda array: array.reshape(shape), shape, ".reshaped")
    return b.op("Squeeze", x, b.constant(axes, "int64"), shape=shape)


def split(b, x, axis, sizes):
    """Cuts `x` along `axis` into parts of the given sizes."""
    axis = known_axis(x, axis)
    kinds = tuple(TensorType(x.dtype, x.shape[:axis] + (size,) + x.shape[axis + 1:]) for size in sizes)
    if len(sizes) == 1:
        return (x,)
    return b.op("Split", x, b.constant(sizes, "int64"), axis=axis, outputs=kinds)


def expand(b, x, dims):
    """Broadcasts `x` to `dims` (numbers, -1 for as it is, or Scalars), right-aligned."""
    shape = tuple(d if isinstance(d, int) else -1 for d in dims)
    if list(shape) == list(x.shape) and -1 not in shape:
        return x
    dims = [1 if isinstance(d, int) and d < 0 else d for d in dims]     # Expand broadcasts both ways: 1 keeps
    offset = len(dims) - x.rank
    shape = tuple(x.shape[i - offset] if d == 1 and i >= offset else s
                  for i, (d, s) in enumerate(zip([d if isinstance(d, int) else -1 for d in dims], shape)))
    return b.op("Expand", x, b.vector(dims), shape=shape)


def dims_of(b, value):
    """A shape argument as a list of numbers and Scalars."""
    if isinstance(value, Tensor) and not isinstance(value, Scalar):
        if value.fixed is not None:
            return [int(d) for d in value.fixed.reshape(-1)]
        if value.rank == 1 and value.shape[0] >= 0:
            one = lambda i: b.op("Slice", value, *[b.constant([n], "int64") for n in (i, i + 1, 0)], shape=(1,))
            return [Scalar("int64", (1,), b.cast(one(i), "int64").name) for i in range(value.shape[0])]
        raise Unsupported("a shape whose number of axes the graph does not know")
    if not isinstance(value, (tuple, list)):
        value = (value,)
    dims = []
    for d in value:
        if isinstance(d, Tensor) and d.fixed is not None:
            d = int(d.fixed.reshape(()))
        elif isinstance(d, Tensor) and not isinstance(d, Scalar):
            d = Scalar("int64", (1,), b.vector([d]).name)
        dims.append(d if isinstance(d, Scalar) else int(d))
    return dims


def _shape(node, fallback=None):
    return getattr(node.type, "shape", fallback)


@register("Reshape", "View", "ReshapeExt")
def reshape_rule(b, node, x, shape):
    return reshape(b, b.tensor(x), dims_of(b, shape), _shape(node))


@register("Flatten")
def flatten(b, node, x):
    return reshape(b, x, [0, -1] if x.shape[0] < 0 else [x.shape[0], -1], _shape(node))


@register("FlattenExt")
def flatten_ext(b, node, x, start=0, end=-1):
    if x.rank == 0:
        return reshape(b, x, [1])
    start, end = known_axis(x, start), known_axis(x, end)
    kept = [b.length(x, i) for i in range(x.rank)]
    return reshape(b, x, kept[:start] + [-1] + kept[end + 1:], _shape(node))


@register("Transpose", "TransposeView", "Permute")
def transpose(b, node, x, order):
    return permute(b, x, axes_of(order))


@register("TransposeExt", "TransposeExtView")
def transpose_two(b, node, x, first, second):
    order = list(range(x.rank))
    order[first], order[second] = order[second], order[first]
    return permute(b, x, order)


@register("MatrixTranspose", "TExt", "T")
def transpose_last(b, node, x):
    return permute(b, x, [*range(x.rank - 2), x.rank - 1, x.rank - 2]) if x.rank > 1 else x


@register("ExpandDims", "ExpandDimsView", "Unsqueeze")
def expand_dims(b, node, x, axis):
    x = b.tensor(x)
    axes = axes_of(axis)
    return unsqueeze(b, x, axes)


@register("Squeeze", "SqueezeExt")
def squeeze_rule(b, node, x, axis=()):
    axes = axes_of(axis) if axis is not None else []
    if not axes:
        axes = [i for i, d in enumerate(x.shape) if d == 1]
        if len(_shape(node)) != x.rank - len(axes):
            raise Unsupported("axes of length 1 that the graph does not know")
    return squeeze(b, x, [a for a in axes if x.shape[a] in (1, -1)])


@register("Concat", "Cat")
def concat(b, node, tensors, axis=0):
    tensors = [b.tensor(t) for t in tensors]
    if len(tensors) == 1:
        return tensors[0]
    dtype = getattr(node.type, "dtype", tensors[0].dtype)
    return b.op("Concat", *[b.cast(t, dtype) for t in tensors], axis=axis, dtype=dtype, shape=_shape(node))


@register("Stack", "StackExt")
def stack(b, node, tensors, axis=None):
    axis = node.attrs.get("axis", 0) if axis is None else axis
    tensors = [b.tensor(t) for t in tensors]
    parts = [unsqueeze(b, t, [axis]) for t in tensors]
    return parts[0] if len(parts) == 1 else b.op("Concat", *parts, axis=axis, shape=_shape(node))


@register("Unstack", "UnstackExtView", "UnstackExt", "Unbind")
def unstack(b, node, x, axis=None):
    axis = known_axis(x, node.attrs.get("axis", 0) if axis is None else axis)
    return tuple(squeeze(b, part, [axis]) for part in split(b, x, axis, [1] * len(node.type)))


@register("Split")
def split_equal(b, node, x, axis=0, count=1):
    return split(b, x, axis, _sizes(b, node, x, axis, count))


@register("Chunk", "ChunkView")
def chunk(b, node, x, count, axis=0):
    return split(b, x, axis, _sizes(b, node, x, axis, count))


def _sizes(b, node, x, axis, count):
    sizes = [kind.shape[axis] for kind in node.type]
    if -1 in sizes:
        raise Unsupported("the split axis has a length that the graph does not know")
    return sizes


@register("SplitTensor", "SplitTensorView", "SplitWithSize", "SplitWithSizeView", "SplitV")
def split_sizes(b, node, x, sizes=None, axis=None):
    axis = node.attrs.get("split_dim", 0) if axis is None else axis
    return split(b, x, axis, _sizes(b, node, x, axis, None))


@register("BroadcastTo", "BroadcastToView", "DynamicBroadcastTo")
def broadcast_to(b, node, x, shape=None):
    return expand(b, b.tensor(x), dims_of(b, node.attrs["shape"] if shape is None else shape))


@register("ExpandAs")
def expand_as(b, node, x, other):
    return expand(b, x, [b.length(other, i) for i in range(other.rank)])


@register("Tile")
def tile(b, node, x, repeats=None):
    repeats = dims_of(b, node.attrs["multiples"] if repeats is None else repeats)
    if all(isinstance(r, int) and r == 1 for r in repeats) and len(repeats) <= x.rank:
        return x
    x = unsqueeze(b, x, list(range(len(repeats) - x.rank))) if len(repeats) > x.rank else x
    repeats = [1] * (x.rank - len(repeats)) + repeats
    return b.op("Tile", x, b.vector(repeats), shape=_shape(node))


@register("RepeatInterleaveInt", "RepeatInterleave")
def repeat_interleave(b, node, x, repeats, axis=None, output_size=None):
    if axis is None:
        x, axis = reshape(b, x, [-1]), 0
    axis = known_axis(x, axis)
    kept = [b.length(x, i) for i in range(x.rank)]
    wide = expand(b, unsqueeze(b, x, [axis + 1]), kept[:axis + 1] + [repeats] + kept[axis + 1:])
    return reshape(b, wide, kept[:axis] + [-1] + kept[axis + 1:], _shape(node))


@register("Repeat")
def repeat(b, node, x, repeats):
    return tile(b, node, x, repeats)


@register("ConstantPadND", "Pad", "PadV3")
def pad(b, node, x, padding=None, value=0, *rest):
    mode = node.attrs.get("mode", "constant")
    if node.op == "Pad":
        pairs = [tuple(p) for p in node.attrs["paddings"]]
        before, after = [p[0] for p in pairs], [p[1] for p in pairs]
    else:
        flat = dims_of(b, padding)
        if node.op == "PadV3" and not node.attrs.get("paddings_contiguous", True):
            raise Unsupported("paddings_contiguous=False")
        before, after = [0] * x.rank, [0] * x.rank
        for i in range(len(flat) // 2):         # from the last axis to the front
            before[x.rank - 1 - i], after[x.rank - 1 - i] = flat[2 * i], flat[2 * i + 1]
    onnx_mode = {"constant": "constant", "reflect": "reflect", "edge": "edge"}.get(mode)
    if onnx_mode is None:
        raise Unsupported(f"mode '{mode}'")
    fill = b.tensor(0 if value is None else value, x.dtype) if onnx_mode == "constant" else None
    return b.op("Pad", x, b.vector(before + after), fill, mode=onnx_mode, shape=_shape(node))


@register("Zeros", "Ones")
def zeros_ones(b, node, shape, dtype=None):
    return full(b, dims_of(b, shape), int(node.op == "Ones"), node.type.dtype)


@register("FillScalar", "FillTensor")
def fill(b, node, shape, value, dtype=None):
    return full(b, dims_of(b, shape), value, node.type.dtype)


@register("FillV2", "Fill")
def fill_v2(b, node, *args):
    shape, value = (args[-2], args[-1])
    return full(b, dims_of(b, shape), value, node.type.dtype)


def full(b, dims, value, dtype):
    """A Tensor of one value."""
    if all(isinstance(d, int) for d in dims) and isinstance(value, NUMBERS):
        return b.constant(np.full(dims, value), dtype) if np.prod(dims) <= 64 else b.op(
            "Expand", b.constant(value, dtype), b.vector(dims), shape=tuple(dims))
    return b.op("Expand", b.tensor(value, dtype), b.vector(dims), shape=tuple(
        d if isinstance(d, int) else -1 for d in dims))


@register("ZerosLike", "ZerosLikeExt", "OnesLike", "OnesLikeExt", "FullLike", "FillLike")
def like(b, node, x, *args):
    value = args[0] if node.op in ("FullLike", "FillLike") else int(node.op.startswith("Ones"))
    dims = [b.length(x, i) for i in range(x.rank)]
    return full(b, dims, value, node.type.dtype)


@register("InplaceZero", "InplaceFillScalar", "InplaceFillTensor", "InplaceCopy", "Assign")
def overwrite(b, node, x, value=0, *rest):
    dims = [b.length(x, i) for i in range(x.rank)]
    return expand(b, b.tensor(value, x.dtype), dims) if isinstance(value, Tensor) else full(b, dims, value, x.dtype)


@register("Roll")
def roll(b, node, x, shifts=None, axes=None):
    shifts = axes_of(node.attrs["shift"] if shifts is None else shifts)
    axes = node.attrs.get("axis") if axes is None else axes
    if axes is None:
        raise Unsupported("a roll over all axes at once")
    for shift, axis in zip(shifts, axes_of(axes)):
        if shift == 0:
            continue
        size = x.shape[axis]
        if size > 0:
            shift %= size
        if size > 0 and shift == 0:
            continue
        cut = [b.constant([n], "int64") for n in (-shift, 2**63 - 1, 0, axis)]
        tail = b.op("Slice", x, cut[0], cut[1], cut[3], shape=(-1,) * x.rank)
        head = b.op("Slice", x, cut[2], cut[0], cut[3], shape=(-1,) * x.rank)
        x = b.op("Concat", tail, head, axis=axis, shape=x.shape)
    return x


@register("ReverseV2", "Flip")
def flip(b, node, x, axes=None):
    axes = axes_of(node.attrs["axis"] if axes is None else axes)
    n = len(axes)
    return b.op("Slice", x, b.constant([-1] * n, "int64"), b.constant([-2**63 + 1] * n, "int64"),
                b.constant(axes, "int64"), b.constant([-1] * n, "int64"))
