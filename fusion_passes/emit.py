"""New nodes for the plan: the fused ops, and the reshapes, transposes and small helpers that feed them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .ir import TYPE_IDS, Node
from .views import merged, refine

_NUMBERS = {name: number for number, name in TYPE_IDS.items()}


@dataclass(frozen=True)
class Ref:
    """A Tensor of the old graph or of the plan."""

    operand: object         # as the bridge takes it: an id, a name, {"item": [...]}, ...
    shape: tuple[int, ...]
    dtype: str


class Emitter:
    """Collects the new nodes of one site."""

    def __init__(self, prefix: str, like: Node, handle):
        self.prefix, self.like, self.handle = prefix, like.id, handle
        self.new, self.nodes = [], {}
        self.transposes = 0         # copies, by which layouts are compared

    def finish(self) -> list[dict]:
        """The new nodes, for the bridge."""
        for node in self.new:
            if callable(node.get("prim")):
                node["prim"] = self.handle(node["prim"]())
        return self.new

    def ref(self, node: Node) -> Ref:
        """A node of the old graph."""
        self.nodes[node.id] = node
        return Ref(node.id, node.shape, node.dtype)

    def _add(self, inputs, shape, dtype, **what):
        name = f"{self.prefix}{len(self.new)}"
        self.new.append({"id": name, "inputs": inputs, "shape": shape, "dtype": dtype, "like": self.like, **what})
        return name

    def op(self, op: str, inputs, shape, dtype, **attrs) -> Ref:
        """An op of MindSpore with one result."""
        inputs = [x.operand if isinstance(x, Ref) else {"const": list(x) if isinstance(x, tuple) else x}
                  for x in inputs]
        extra = {"attrs": attrs} if attrs else {}
        return Ref(self._add(inputs, list(shape), dtype, op=op, **extra), tuple(shape), dtype)

    def custom(self, make, inputs, results) -> list[Ref]:
        """An op whose Python primitive `make` returns when the plan is settled, with results of (shape, dtype)."""
        inputs = [{"none": True} if x is None else x.operand for x in inputs]
        shapes, dtypes = [list(s) for s, _ in results], [d for _, d in results]
        if len(results) == 1:
            name = self._add(inputs, shapes[0], dtypes[0], prim=make)
            return [Ref(name, tuple(shapes[0]), dtypes[0])]
        name = self._add(inputs, shapes, dtypes, prim=make)
        return [Ref({"item": [name, i]}, tuple(s), d) for i, (s, d) in enumerate(results)]

    def together(self, refs) -> object:
        """One operand that stands for all of `refs`, for the order of side effects."""
        return self._add([r.operand for r in refs], [list(r.shape) for r in refs], [r.dtype for r in refs],
                         op="MakeTuple")

    def reshape(self, x: Ref, shape) -> Ref:
        """`x` in another shape: what it was reshaped from, if that has it, since a Reshape copies on the CPU."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        node = self.nodes.get(x.operand) if isinstance(x.operand, int) else None
        while node is not None and node.op == "Reshape":
            node = node.inputs[0]
            if node.shape == shape:
                return self.ref(node)
        return self.op("Reshape", [x, shape], shape, x.dtype)

    def cast(self, x: Ref, dtype: str) -> Ref:
        """`x` in another dtype."""
        return x if x.dtype == dtype else self.op("Cast", [x, _NUMBERS[dtype]], x.shape, dtype)

    def binary(self, op: str, a: Ref, b: Ref, dtype: str) -> Ref:
        """An elementwise op of two Tensors."""
        rank = max(len(a.shape), len(b.shape))
        padded = [(1,) * (rank - len(x.shape)) + x.shape for x in (a, b)]
        return self.op(op, [a, b], tuple(max(pair) for pair in zip(*padded)), dtype)

    def arrange(self, x: Ref, have, want, shape) -> Ref:
        """`x`, whose elements lie in memory as the atoms `have`, in the order of `want`, as `shape`.

        Atoms are (size, stride) in strides that both share; those of stride 0 in `want` are repetitions. Returns
        ``None`` if `want` is no arrangement of all of `have`.
        """
        have, want = merged(have), [atom for atom in want if atom[0] != 1]
        if merged(want) == have:
            return self.reshape(x, shape)
        fine = refine(have, want)
        if fine is None:
            return None
        have, want = fine
        kept = [atom for atom in want if atom[1]]
        if sorted(kept) != sorted(have):
            return None
        order = [have.index(atom) for atom in kept]
        # neighbours that stay neighbours move as one
        groups = []
        for at in order:
            if groups and groups[-1][-1] + 1 == at:
                groups[-1].append(at)
            else:
                groups.append([at])
        blocks = sorted(groups)
        x = self.reshape(x, [math.prod(have[i][0] for i in block) for block in blocks])
        perm = tuple(blocks.index(group) for group in groups)
        if perm != tuple(range(len(perm))):
            self.transposes += 1
            x = self.op("Transpose", [x, perm], tuple(x.shape[i] for i in perm), x.dtype)
        if len(kept) != len(want):
            self.transposes += 1
            ones = self.reshape(x, [size if stride else 1 for size, stride in want])
            full = tuple(size for size, _ in want)
            x = self.op("BroadcastTo", [ones, full], full, x.dtype)
        return self.reshape(x, shape)
