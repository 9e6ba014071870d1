"""Canonical views: whatever reshapes, transposes, splits and repeats a Tensor, as strides over the Tensor it began as.

Every such operation is read backwards to a base, so that two spellings of one thing are equal views of one node. A
dimension is a list of atoms (size, stride): a reshape regroups atoms, a transpose permutes dimensions, a repeated axis
is an atom of stride 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .ir import Node, Unknown

Atoms = tuple      # of (size, stride) pairs, the slowest first


@dataclass(frozen=True)
class View:
    """Elements of `base` at `offset` + the sums of index * stride, dimension by dimension."""

    base: Node
    offset: int
    dims: tuple[Atoms, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of every dimension."""
        return tuple(_size(dim) for dim in self.dims)

    @property
    def key(self):
        """Equal for views of the same elements in the same order, whatever their grouping into dimensions."""
        return self.base, self.offset, merged([atom for dim in self.dims for atom in dim])

    def swapped(self, a=-2, b=-1) -> View:
        """With two dimensions exchanged."""
        dims = list(self.dims)
        dims[a], dims[b] = dims[b], dims[a]
        return replace(self, dims=tuple(dims))

    def regrouped(self, shape) -> View | None:
        """The same elements in another shape, or ``None`` if a dimension would begin within an atom."""
        dims = regroup([atom for dim in self.dims for atom in dim], shape)
        return None if dims is None else replace(self, dims=dims)

    def broadcast(self, shape) -> View | None:
        """Right-aligned with `shape`, repeated where a dimension is 1 or missing; ``None`` if that is impossible."""
        if len(shape) < len(self.dims):
            return None
        dims = ((),) * (len(shape) - len(self.dims)) + self.dims
        wide = []
        for dim, size in zip(dims, shape):
            have = _size(dim)
            if have != size and have != 1:
                return None
            wide.append(dim if have == size else ((size, 0),))
        return replace(self, dims=tuple(wide))


def _size(atoms):
    return math.prod(size for size, _ in atoms)


def identity(node: Node) -> View:
    """`node` as a view of itself."""
    return View(node, 0, contiguous(node.shape))


def contiguous(shape) -> tuple[Atoms, ...]:
    """Row-major dimensions."""
    dims, stride = [], 1
    for size in reversed(shape):
        dims.append(((size, stride),) if size != 1 else ())
        stride *= size
    return tuple(reversed(dims))


def merged(atoms) -> Atoms:
    """Without ones, and with neighbours joined that step through memory as one."""
    out = []
    for size, stride in atoms:
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out)


def regroup(atoms, shape) -> tuple[Atoms, ...] | None:
    """Atoms divided into dimensions of these sizes; ``None`` if a boundary falls within an atom unevenly."""
    if 0 in shape or math.prod(shape) != _size(atoms):
        return None
    todo, dims = list(reversed(merged(atoms))), []
    for size in shape:
        dim = []
        while size > 1:
            have, stride = todo.pop()
            if size % have == 0:
                dim.append((have, stride))
                size //= have
            elif have % size == 0:
                rest = have // size
                dim.append((size, stride * rest))
                todo.append((rest, stride))
                size = 1
            else:
                return None
        dims.append(tuple(dim))
    return tuple(dims)


def refine(*lists) -> list[Atoms] | None:
    """Every list of atoms cut where any of them begins or ends, so that equal memory has equal atoms."""
    cuts = {edge for atoms in lists for size, stride in atoms if stride for edge in (stride, size * stride)}
    out = []
    for atoms in lists:
        fine = []
        for size, stride in atoms:
            if not stride:
                fine.append((size, 0))
                continue
            top = size * stride
            for cut in sorted((c for c in cuts if stride < c < top), reverse=True):
                if top % cut or cut % stride:
                    return None
                fine.append((top // cut, cut))
                top = cut
            fine.append((top // stride, stride))
        out.append(tuple(atom for atom in fine if atom[0] != 1))
    return out


class Views:
    """Views of the nodes of one graph."""

    def __init__(self, graph):
        self.graph = graph
        self._known = {}

    def of(self, node: Node) -> View:
        """The view of the earliest node from which `node` can be had without computing."""
        for at in reversed(self.chain(node)):
            if at not in self._known:
                self._known[at] = self.after(at, self._known.get(self.source(at))) or identity(at)
        return self._known[node]

    def chain(self, node: Node) -> list[Node]:
        """`node` and the nodes that it is a view of, the nearest first."""
        found = [node]
        while (source := self.source(found[-1])) is not None:
            found.append(source)
        return found

    def relative(self, node: Node, base: Node) -> View | None:
        """`node` as a view of `base`, one of its chain."""
        steps = []
        while node is not base:
            steps.append(node)
            node = self.source(node)
        view = identity(base)
        for at in reversed(steps):
            view = self.after(at, view)
            if view is None:
                return None
        return view

    def source(self, node: Node) -> Node | None:
        """What `node` is a view of, or ``None``."""
        if not node.static or not node.inputs:
            return None
        source = node.inputs[0]
        if node.op == "TupleGetItem":
            source = source.inputs[0] if source is not None and source.op in _PARTS and source.inputs else None
        elif node.op == "Load":
            source = source if self.graph.loads(node) else None
        elif node.op not in _STEPS:
            source = None
        return source if source is not None and source.static else None

    def after(self, node: Node, view: View | None) -> View | None:
        """`view`, of the source of `node`, after what `node` does; ``None`` if that is no view."""
        if view is None:
            return None
        try:
            if node.op == "TupleGetItem":
                after = _part(node, view)
            elif node.op in ("Load", "Depend"):
                after = view
            else:
                after = _STEPS[node.op](node, view)
        except (Unknown, IndexError, TypeError, KeyError):
            return None
        return after if after is not None and after.shape == node.shape else None


def _reshape(node, view):
    return view.regrouped(node.shape)


def _permute(node, view):
    perm = node.argument(1)
    return replace(view, dims=tuple(view.dims[axis] for axis in perm))


def _transpose(node, view):
    return view.swapped(node.argument(1), node.argument(2))


def _broadcast(node, view):
    return view.broadcast(node.shape)


def _tile(node, view):
    multiples = node.argument(1)
    dims = ((),) * (len(multiples) - len(view.dims)) + view.dims
    multiples = (1,) * (len(dims) - len(multiples)) + tuple(multiples)
    return replace(view, dims=tuple(((m, 0),) + dim if m > 1 else dim for m, dim in zip(multiples, dims)))


def _repeat_interleave(node, view):
    repeats, axis = node.argument(1), node.argument(2)
    if not isinstance(repeats, int) or axis is None:
        return None
    dims = list(view.dims)
    dims[axis] = dims[axis] + ((repeats, 0),)
    return replace(view, dims=tuple(dims))


def cut(view, axis, start, length, step=1) -> View | None:
    """`length` elements of dimension `axis` from `start` on."""
    dim = merged(view.dims[axis])
    size = _size(dim)
    if start < 0 or length < 1 or start + (length - 1) * step >= size:
        return None
    if length == size:
        return view
    if len(dim) < 2:
        (_, stride), = dim
        piece = ((length, stride * step),)
    else:               # only whole steps of the slowest atom
        (_, stride), rest = dim[0], dim[1:]
        inner = _size(rest)
        if step != 1 or start % inner or length % inner:
            return None
        start //= inner
        piece = ((length // inner, stride),) + rest
    dims = list(view.dims)
    dims[axis] = tuple(atom for atom in piece if atom[0] != 1)
    return replace(view, offset=view.offset + start * stride, dims=tuple(dims))


_SLICE_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def _strided_slice(node, view):
    masks = [node.argument(i, 0) if len(node.inputs) > i else node.attrs.get(name, 0)
             for i, name in enumerate(_SLICE_MASKS, 4)]
    return strided(view, *(node.argument(i) for i in (1, 2, 3)), masks, node.shape)


def strided(view: View, begin, end, steps, masks, shape) -> View | None:
    """What a StridedSlice takes of `view`, as `shape`; masks in the order of its arguments."""
    if masks[2] or masks[3]:
        return None
    for axis, (first, last, step) in enumerate(zip(begin, end, steps)):
        size = view.shape[axis]
        if step <= 0:
            return None
        first = 0 if masks[0] >> axis & 1 else first
        last = size if masks[1] >> axis & 1 else last
        first, last = (max(0, min(size, x + size if x < 0 else x)) for x in (first, last))
        if masks[4] >> axis & 1:
            last, step = first + 1, 1
        length = max(0, -(-(last - first) // step))
        view = cut(view, axis, first, length, step) if length else None
        if view is None:
            return None
    return view.regrouped(shape)


def scattered(node: Node) -> View | None:
    """The part of its result into which a StridedSliceGrad puts its input."""
    masks = [node.attrs.get(name, 0) for name in _SLICE_MASKS]
    try:
        begin, end, steps = (node.argument(i) for i in (2, 3, 4))
    except Unknown:
        return None
    return strided(identity(node), begin, end, steps, masks, node.inputs[0].shape)


def paired(a, b) -> list | None:
    """Two lists of atoms over the same elements in the same order, cut alike: pairs of atoms."""
    a, b, pairs = list(a), list(b), []
    while a and b:
        (m, s), (n, t) = a.pop(), b.pop()
        if 1 in (m, n):
            a += [(m, s)] * (m > 1)
            b += [(n, t)] * (n > 1)
            continue
        small = min(m, n)
        if m % small or n % small:
            return None
        pairs.append(((small, s), (small, t)))
        a += [(m // small, s * small)] * (m > small)
        b += [(n // small, t * small)] * (n > small)
    if any(size > 1 for size, _ in a + b):
        return None
    return pairs[::-1]


def _slice(node, view):
    for axis, (first, length) in enumerate(zip(node.argument(1), node.argument(2))):
        view = cut(view, axis, first, view.shape[axis] - first if length == -1 else length)
        if view is None:
            return None
    return view


def _slice_axis(node, view):
    axis, first, last, step = (node.argument(i) for i in (1, 2, 3, 4))
    size = view.shape[axis]
    first, last = (max(0, min(size, x + size if x < 0 else x)) for x in (first, last))
    return cut(view, axis, first, max(0, -(-(last - first) // step)), step)


def _narrow(node, view):
    axis, first, length = (node.argument(i) for i in (1, 2, 3))
    return cut(view, axis, first, length)


def _select(node, view):
    axis, index = node.argument(1), node.argument(2)
    axis %= len(view.dims)
    view = cut(view, axis, index % view.shape[axis], 1)
    return None if view is None else replace(view, dims=view.dims[:axis] + view.dims[axis + 1:])


def _part(node, view):
    """One of the parts that a tensor was split into along an axis; a part of an unstacked one has no such axis."""
    source, index = node.inputs[0], node.argument(1)
    axis = _PARTS[source.op](source)
    axis %= len(view.dims)
    sizes = [shape[axis] if len(shape) == len(view.dims) else 1 for shape in source.shape]
    view = cut(view, axis, sum(sizes[:index]), sizes[index])
    if view is None or len(node.shape) == len(view.dims):
        return view
    return replace(view, dims=view.dims[:axis] + view.dims[axis + 1:])


def _axis(position, attribute="axis", default=0):
    def read(node):
        if attribute in node.attrs:
            return node.attrs[attribute]
        return node.argument(position, default)
    return read


_PARTS = {
    "Split": _axis(1), "SplitTensor": _axis(2), "SplitTensorView": _axis(2), "SplitWithSize": _axis(2),
    "SplitWithSizeView": _axis(2), "SplitV": _axis(1, "split_dim"), "Chunk": _axis(2), "ChunkView": _axis(2),
    "Unstack": _axis(1), "UnstackExt": _axis(1), "UnstackExtView": _axis(1), "UnbindView": _axis(1)}
_STEPS = {
    **dict.fromkeys(("Reshape", "ReshapeView", "View", "ViewOp", "ExpandDims", "ExpandDimsView", "Squeeze",
                     "SqueezeView", "Unsqueeze", "UnsqueezeView", "FlattenExt", "FlattenExtView", "Flatten",
                     "Contiguous", "Copy", "Clone"), _reshape),
    **dict.fromkeys(("Transpose", "TransposeView", "Permute", "PermuteView"), _permute),
    **dict.fromkeys(("TransposeExt", "TransposeExtView", "SwapAxes"), _transpose),
    **dict.fromkeys(("BroadcastTo", "BroadcastToView", "ExpandAs", "ExpandAsView"), _broadcast),
    **dict.fromkeys(("SliceExt", "SliceExtView"), _slice_axis), **dict.fromkeys(("Narrow", "NarrowView"), _narrow),
    **dict.fromkeys(("SelectExt", "SelectExtView", "SelectView"), _select),
    "Tile": _tile, "RepeatInterleaveInt": _repeat_interleave, "StridedSlice": _strided_slice, "Slice": _slice,
    "Depend": None,
}
