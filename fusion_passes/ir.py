"""The graph that the bridge describes, as Python objects: nodes, constants and who uses what."""

from __future__ import annotations

import base64
import functools
import math

import ml_dtypes
import numpy as np

_NUMPY = {"bfloat16": ml_dtypes.bfloat16, "bool": np.bool_}
_INFINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
# What MindSpore's Cast and dtype arguments hold: the number of a type (mindspore/core/include/ir/dtype/type_id.h).
TYPE_IDS = {30: "bool", 32: "int8", 33: "int16", 34: "int32", 35: "int64", 37: "uint8", 42: "float16", 43: "float32",
            44: "float64", 45: "bfloat16"}
FLOATS = ("float16", "float32", "bfloat16")


class Node:
    """One operation, parameter or constant. `inputs` are nodes; `users` are (node, position) pairs."""

    __slots__ = ("attrs", "data", "dtype", "id", "inplace", "inputs", "kind", "line", "name", "op", "scope", "shape",
                 "users", "value", "weight")

    def __init__(self, described):
        get = described.get
        self.id, self.op = described["id"], described["op"]
        self.inplace = self.op.startswith("Inplace")
        if self.inplace:        # x += y, read as what it computes; Graph.rewritten sees to the rest
            self.op = self.op[len("Inplace"):]
        self.attrs, self.scope, self.line = get("attrs") or {}, get("scope") or "", get("line") or ""
        shape, dtype = get("shape"), get("dtype")
        self.shape = tuple(shape) if isinstance(shape, list) and not isinstance(dtype, list) else shape
        self.dtype = dtype
        self.name, self.weight = get("name") or "", bool(get("weight"))
        self.kind, self.value, self.data = get("type"), get("value"), get("data")
        self.inputs, self.users = (), []

    def __repr__(self):
        return f"%{self.id}={self.op}{self.shape}"

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def static(self) -> bool:
        """Whether this is one Tensor of known shape."""
        return isinstance(self.shape, tuple) and isinstance(self.dtype, str) and all(n >= 0 for n in self.shape)

    def argument(self, position, default=None):
        """The plain value of the constant at `position`, or `default` where there is none."""
        if position >= len(self.inputs):
            return default
        node = self.inputs[position]
        if node is None or node.op != "Const" or node.kind == "Tensor":
            raise Unknown
        return _plain(node.value)

    def constant(self):
        """Value of a constant: a number, a tuple, ``None``, a NumPy array for a Tensor. Raises Unknown for all else."""
        if self.op != "Const" or (self.kind == "Tensor" and self.data is None) or self.kind == "other":
            raise Unknown
        return self._array if self.kind == "Tensor" else _plain(self.value)

    @property
    def _array(self):
        raw = base64.b64decode(self.data) if isinstance(self.data, str) else self.data
        dtype = _NUMPY.get(self.dtype, self.dtype)
        return np.frombuffer(raw, dtype=dtype).reshape(self.shape)


class Unknown(Exception):
    """A value that the graph does not tell."""


def _plain(value):
    if isinstance(value, list):
        return tuple(_plain(v) for v in value)
    return _INFINITE.get(value, value) if isinstance(value, str) else value


class Graph:
    """All nodes of one graph, in topological order."""

    def __init__(self, described):
        self.name = described.get("graph", "")
        self.nodes = [Node(n) for n in described["nodes"]]
        self.by_id = {node.id: node for node in self.nodes}
        for node, text in zip(self.nodes, described["nodes"]):
            node.inputs = tuple(None if i is None else self.by_id[i] for i in text.get("inputs") or ())
            for position, source in enumerate(node.inputs):
                if source is not None:
                    source.users.append((node, position))
        self.outputs = [self.by_id[i] for i in described.get("outputs", ())]
        self.order = {node: i for i, node in enumerate(self.nodes)}

    def named(self, *ops):
        """The nodes of these operations."""
        return [node for node in self.nodes if node.op in ops]

    @functools.cached_property
    def rewritten(self) -> set:
        """Roots of the memory that some operation writes in place; what is loaded from there may change.

        Left out is memory of which the writer is the only reader: there the writer is as good as any other operation.
        """
        writers = {}
        for node in self.nodes:
            if node.attrs.get("side_effect_mem") and node.op not in VIEWS_WITH_STATE and node.inputs:
                writers.setdefault(_root(node.inputs[0]), []).append(node)
        return {root for root, nodes in writers.items() if len(nodes) > 1 or not nodes[0].inplace
                or root.op == "Parameter" or nodes[0].inputs[0] is not root
                or any(user is not nodes[0] and user.op != "UpdateState" for user, _ in root.users)}

    @functools.cached_property
    def copies(self) -> dict:
        """A number per node, equal for nodes that compute the same from the same: recomputation makes such twins."""
        numbers, seen = {}, {}
        for node in self.nodes:
            if node.op in ("Const", "Parameter", "FuncGraph"):
                key = node
            elif node.op in ("Depend", "Load"):
                numbers[node] = numbers.get(node.inputs[0])
                continue
            else:
                key = node.op, repr(sorted(node.attrs.items())), tuple(numbers.get(n) for n in node.inputs)
            numbers[node] = seen.setdefault(key, len(seen))
        return numbers

    def loads(self, node) -> bool:
        """Whether `node` only reads what its first input computed."""
        return node.op == "Load" and node.inputs[0].op != "Parameter" and _root(node.inputs[0]) not in self.rewritten

    def depends_on(self, node, targets) -> bool:
        """Whether `node` needs one of `targets` to be computed."""
        first = min(self.order[t] for t in targets)
        seen, stack = set(), [node]
        while stack:
            at = stack.pop()
            if at in targets:
                return True
            for source in at.inputs:
                if source is not None and source not in seen and self.order[source] >= first:
                    seen.add(source)
                    stack.append(source)
        return False


# Operations of mindspore.mint and of Tensor methods that make a view; they carry a monad, and a Load reads them.
VIEWS_WITH_STATE = frozenset({
    "TransposeExtView", "TransposeView", "SplitTensorView", "SplitWithSizeView", "ChunkView", "UnstackExtView",
    "ExpandDimsView", "BroadcastToView", "SliceExtView", "NarrowView", "SelectExtView", "ViewOp", "View", "SqueezeView",
    "UnsqueezeView", "ReshapeView", "AsStrided", "FlattenExtView", "ExpandAs", "ExpandAsView", "PermuteView",
    "SliceView", "DiagonalView", "MoveDimView", "TView", "UnbindView", "SelectView", "StridedSliceView"})


def orders(user: Node, position: int) -> bool:
    """Whether `user` takes its input at `position` for the order of side effects alone, not for its value."""
    if user.op == "MakeTuple":
        return bool(user.users) and all(u.op == "UpdateState" for u, _ in user.users)
    return user.op == "UpdateState" or (position > 0 and user.op in ("Depend", "Load"))


def _root(node):
    """Where the memory of a chain of views begins."""
    while node.inputs and (node.op in VIEWS_WITH_STATE or node.op in ("Load", "TupleGetItem", "Depend")):
        node = node.inputs[0]
    return node
