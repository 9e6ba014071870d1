"""Finds attention that a net wrote out in small ops, and writes it as the node.

This runs on the ONNX nodes of the conversion: there the many spellings of MindSpore are already one, and free lengths
are no obstacle. A site is a Softmax over the last axis; what leads up to it and away from it must be attention and
nothing else, and no value in between may be used elsewhere. What is not recognised stays as it was written.

    weights = Softmax(steps(MatMul(Q, K^T)));  Y = MatMul(weights, V)

where the steps are factors, added masks, masks by Where, a softcap, casts, and a split of the batch into batch and
heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from .builder import Block, Builder, Tensor
from .profiles import Attention
from .rules.arithmetic import binary, broadcast_shape
from .rules.attention import SMALLEST_SCALE
from .rules.shape import permute, unsqueeze

# A masked-out score from here on down has weight 0 beside any score that float32 attention produces: exp underflows at
# a distance of 104. Rows that are masked out as a whole are treated apart, so that they give what the net gives.
MASKED_FROM = -1e4


class Site(NamedTuple):
    """One softmax of the net: fused, or left for a reason."""

    scope: str
    fused: bool
    reason: str = ""


class _Left(Exception):
    """Why a site is left as it is."""


@dataclass
class _Scores:
    """What stands between the product and the softmax, read from the softmax upwards."""

    product: object = None
    factor: float = 1.0
    softcap: float = 0.0
    added: list = field(default_factory=list)       # Tensors
    hidden: list = field(default_factory=list)      # (bool Tensor, whether True keeps, fill)
    split: object = None                            # the Reshape from (B*N, S, T) to (B, N, S, T)
    inner: list = field(default_factory=list)       # nodes that vanish


def fuse(builder: Builder) -> list[Site]:
    """Replaces every attention of the main graph that it recognises; returns one Site per Softmax."""
    sites = []
    for softmax in [node for node in builder.block.nodes if node.op == "Softmax"]:
        scope = softmax.name.rsplit("/", 1)[0] if "/" in softmax.name else ""
        try:
            _Matcher(builder, softmax).replace()
            sites.append(Site(scope, True))
        except _Left as reason:
            sites.append(Site(scope, False, str(reason)))
    return sites


class _Matcher:
    def __init__(self, builder, softmax):
        self.b, self.softmax = builder, softmax
        self.makers = {name: node for node in builder.block.nodes for name in node.outputs if name}
        self.uses: dict[str, int] = {}
        self._count(builder.block)

    def _count(self, block):
        for tensor in block.outputs:
            self.uses[tensor.name] = self.uses.get(tensor.name, 0) + 1
        for node in block.nodes:
            for name in node.inputs:
                self.uses[name] = self.uses.get(name, 0) + 1
            for value in node.attrs.values():
                if isinstance(value, Block):
                    self._count(value)

    # ---- reading -----------------------------------------------------------------------------------------------------
    def _type(self, name) -> Tensor:
        return self.b.initializers.get(name) or self.b.types[name]

    def _number(self, name):
        """The value of a fixed Tensor of one element, or None."""
        tensor = self.b.initializers.get(name)
        if tensor is None or not isinstance(tensor.array, np.ndarray) or tensor.array.size != 1:
            return None
        return float(tensor.array.reshape(()).astype(np.float64))

    def _once(self, name):
        if self.uses.get(name, 0) != 1:
            raise _Left("the scores or the weights are used elsewhere too")

    def _scores(self, name, found):
        """Reads upwards from `name` to the product of query and key."""
        self._once(name)
        node = self.makers.get(name)
        if node is None:
            raise _Left("no product of query and key leads to the softmax")
        found.inner.append(node)
        step = getattr(self, "_step_" + node.op.lower(), None)
        if step is None:
            raise _Left(f"{node.op} between the product and the softmax")
        return step(node, found)

    def _step_matmul(self, node, found):
        found.product = node
        return found

    def _step_cast(self, node, found):
        if "float" not in self._type(node.inputs[0]).dtype:
            raise _Left("scores that are not floating point")
        return self._scores(node.inputs[0], found)

    def _step_mul(self, node, found):
        for x, y in (node.inputs, node.inputs[::-1]):
            factor = self._number(y)
            if factor is not None:
                return self._scaled(x, factor, found)
        raise _Left("a factor that is not one fixed number")

    def _step_div(self, node, found):
        factor = self._number(node.inputs[1])
        if factor is None or factor == 0:
            raise _Left("a divisor that is not one fixed number")
        return self._scaled(node.inputs[0], 1 / factor, found)

    def _scaled(self, name, factor, found):
        found.factor *= factor
        masks = len(found.added) + len(found.hidden)
        self._scores(name, found)
        if len(found.added) + len(found.hidden) != masks:
            raise _Left("a factor after a mask")        # which it scales too
        return found

    def _step_tanh(self, node, found):
        if found.softcap or found.factor <= 0:
            raise _Left("Tanh that is no softcap")
        found.softcap, found.factor = found.factor, found.factor
        before = len(found.added) + len(found.hidden)
        self._scores(node.inputs[0], found)
        if len(found.added) + len(found.hidden) != before:
            raise _Left("a mask inside the softcap")
        return found

    def _step_add(self, node, found):
        for x, y in (node.inputs, node.inputs[::-1]):
            trial = replace(found, added=[*found.added], hidden=[*found.hidden], inner=[*found.inner])
            try:
                self._scores(x, trial)
            except _Left as left:
                reason = left
                continue
            if len(trial.hidden) > len(found.hidden):
                raise _Left("something is added to masked-out scores")
            trial.added.append(self._type(y))
            vars(found).update(vars(trial))
            return found
        raise reason

    def _step_where(self, node, found):
        condition, when_true, when_false = node.inputs
        for chain, other, keeps in ((when_true, when_false, True), (when_false, when_true, False)):
            fill = self._number(other)
            if fill is None:
                continue
            if not fill <= MASKED_FROM:
                raise _Left(f"masked-out scores of {fill}, which still have weight")
            found.hidden.append((self._type(condition), keeps, fill))
            return self._scores(chain, found)
        raise _Left("a choice between two Tensors of scores")

    def _step_reshape(self, node, found):
        have, want = self._type(node.inputs[0]), self._type(node.outputs[0])
        if have.rank != 3 or want.rank != 4 or have.shape[1:] != want.shape[2:] or found.split is not None:
            raise _Left("scores in another shape")
        found.split = node
        return self._scores(node.inputs[0], found)

    # ---- from the softmax down ---------------------------------------------------------------------------------------
    def _output(self, name):
        """The product of the weights `name` and the values, and whether the weights were joined to (B*N, S, T)."""
        self._once(name)
        node = next((n for n in self.b.block.nodes if name in n.inputs), None)
        if node is None or name not in node.inputs[:1]:
            raise _Left("the weights are not multiplied by values")
        if node.op == "Cast":
            return self._output(node.outputs[0])
        if node.op == "Reshape":
            have, want = self._type(name), self._type(node.outputs[0])
            if have.rank != 4 or want.rank != 3 or have.shape[2:] != want.shape[1:]:
                raise _Left("weights in another shape")
            return self._output(node.outputs[0])
        if node.op != "MatMul":
            raise _Left(f"{node.op} between the softmax and the values")
        return node

    # ---- writing -----------------------------------------------------------------------------------------------------
    def replace(self):
        """Reads the site, and writes the node in the place of the product with the values."""
        rank = self._type(self.softmax.outputs[0]).rank
        if self.softmax.attrs.get("axis", -1) not in (-1, rank - 1):
            raise _Left("a softmax over another axis than the last")
        found = self._scores(self.softmax.inputs[0], _Scores())
        output = self._output(self.softmax.outputs[0])
        q, kt = (self._type(name) for name in found.product.inputs)
        v = self._type(output.inputs[1])
        y = self._type(output.outputs[0])
        if q.rank not in (3, 4) or kt.rank != q.rank or v.rank != q.rank or y.rank != q.rank:
            raise _Left(f"operands of rank {q.rank}, {kt.rank} and {v.rank}")
        if len({q.dtype, kt.dtype, v.dtype}) != 1 or "float" not in q.dtype:
            raise _Left(f"operands of dtype {q.dtype}, {kt.dtype} and {v.dtype}")
        for a, c in ((q.shape[0], kt.shape[0]), (kt.shape[0], v.shape[0])):
            if a != c:
                raise _Left("batches that are repeated for each other")
        for mask in (*found.added, *(h[0] for h in found.hidden)):
            if mask.rank > (4 if found.split is not None else q.rank):
                raise _Left("a mask of more axes than the scores")
        self._write(found, output, q, kt, v, y)

    def _write(self, found, output, q, kt, v, y):
        b = self.b
        at = next(i for i, node in enumerate(b.block.nodes) if node is output)
        outer, scope = b.block, b.scope
        b.block, b.scope = Block(), output.name.rsplit("/", 1)[0] if "/" in output.name else ""
        try:
            k = self._key(kt)
            q, k, v = self._four(found, q), self._four(found, k), self._four(found, v)
            k, v = self._ungrouped(q, k, v)
            mask, causal, dead = self._mask(found)
            if dead is not None and q.shape[1] != v.shape[1]:
                raise _Left("rows without keys, with grouped heads")
            scale = found.factor or SMALLEST_SCALE
            out, _ = b.profile.attend(b, Attention(q, k, v, mask, {
                "scale": scale, "softcap": found.softcap, "is_causal": int(causal),
                "causal_alignment": int(not causal)}, grouped=q.shape[1] != k.shape[1]))
            if dead is not None:
                mean = b.op("ReduceMean", v, b.constant([2], "int64"), keepdims=1, shape=(*v.shape[:2], 1, v.shape[3]))
                out = b.op("Where", dead, mean, out, dtype=out.dtype, shape=out.shape)
            if y.rank == 3:
                shape = b.vector([y.shape[0], b.length(out, 2), b.length(out, 3)])
                out = b.op("Reshape", out, shape, shape=y.shape)
            b.op("Identity", out)
            b.block.nodes[-1].outputs = list(output.outputs)
            new = b.block.nodes
        finally:
            b.block, b.scope = outer, scope
        b.block.nodes[at:at + 1] = new

    def _key(self, kt):
        """K of K^T, without transposing twice."""
        swap = [*range(kt.rank - 2), kt.rank - 1, kt.rank - 2]
        maker = self.makers.get(kt.name)
        if maker is not None and maker.op == "Transpose":
            order = maker.attrs["perm"]
            return permute(self.b, self._type(maker.inputs[0]), [order[i] for i in swap])
        return permute(self.b, kt, swap)

    def _four(self, found, x):
        """(B, N, S, D)."""
        if x.rank == 4:
            return x
        if found.split is None:     # every row of the batch is a head of one batch
            return unsqueeze(self.b, x, [0])
        b = self.b
        batch, heads = self._type(found.split.outputs[0]).shape[:2]
        if heads < 0:
            raise _Left("a number of heads that the graph does not know")
        dims = [-1 if batch < 0 else batch, heads, b.length(x, 1), b.length(x, 2)]
        return b.op("Reshape", x, b.vector(dims), shape=(batch, heads, *x.shape[1:]))

    def _ungrouped(self, q, k, v):
        """K and V before they were repeated for the heads of a group."""
        short = [self._unrepeated(x) for x in (k, v)]
        if all(x is not None and x.shape[1] > 0 for x in short) and short[0].shape[1] == short[1].shape[1]:
            return short
        if k.shape[1] != v.shape[1] or (q.shape[1] != k.shape[1] and k.shape[1] != 1) or q.shape[1] == 0:
            raise _Left(f"{q.shape[1]}, {k.shape[1]} and {v.shape[1]} heads")
        return k, v

    def _unrepeated(self, x):
        """x of Reshape(Expand(Unsqueeze(x, 2))), each head repeated in place; None for another Tensor."""
        chain = []
        name = x.name
        for op in ("Reshape", "Expand", "Unsqueeze"):
            node = self.makers.get(name)
            if node is None or node.op != op:
                return None
            chain.append(node)
            name = node.inputs[0]
        axes = self.b.initializers.get(chain[2].inputs[1])
        source, wide = self._type(name), self._type(chain[1].outputs[0])
        if axes is None or list(axes.array.reshape(-1)) != [2] or source.rank != 4 or wide.rank != 5:
            return None
        if source.shape[1] < 0 or wide.shape[2] < 0 or x.shape[1] != source.shape[1] * wide.shape[2]:
            return None
        return source

    def _mask(self, found):
        """(mask, whether a causal band stands for it, rows without keys as a bool Tensor or None)."""
        b = self.b
        causal = False
        hidden, added = [], []
        for tensor, keeps, fill in found.hidden:
            while (maker := self.makers.get(tensor.name)) is not None and maker.op == "Not":
                tensor, keeps = self._type(maker.inputs[0]), not keeps
            # beside another mask the two of them decide which rows are left without keys
            if len(found.hidden) == 1 and self._triangle(tensor, lambda array, keeps=keeps: array == keeps):
                causal = True
            else:
                hidden.append((tensor, keeps, fill))
        for tensor in found.added:
            if self._triangle(tensor, self._added_triangle):
                causal = True
            else:
                added.append(tensor)
        keep, dead = None, None
        for tensor, keeps, _ in hidden:
            one = tensor if keeps else b.op("Not", tensor)
            keep = one if keep is None else binary(b, "And", keep, one)
        if keep is not None and all(np.isfinite(fill) for _, _, fill in hidden):
            if causal or len({fill for _, _, fill in hidden}) > 1:
                raise _Left("several masks that may together leave a row without keys")
            if not self._sees_first(hidden):
                seen = b.op("ReduceMax", b.op("Cast", keep, to=2, dtype="uint8"), b.constant([-1], "int64"), keepdims=1,
                            shape=(*keep.shape[:-1], 1))
                dead = b.op("Equal", seen, b.constant(0, "uint8"), dtype="bool")
        if not added:
            return keep, causal, dead
        total = added[0]
        for more in added[1:]:
            total = binary(b, "Add", total, more)
        if keep is not None:
            low = b.constant(float("-inf"), total.dtype)
            total = b.op("Where", keep, total, low, dtype=total.dtype, shape=broadcast_shape(keep, total))
        return total, causal, dead

    @staticmethod
    def _added_triangle(array):
        """Where an added mask keeps (0) or masks out; None where it does something else."""
        low = array <= MASKED_FROM
        return None if ((array != 0) & ~low).any() else ~low

    def _fixed(self, tensor):
        """(array, axes cut at a computed length): a fixed Tensor, or the upper left corner of one."""
        cut = set()
        name = tensor.name
        while True:
            held = self.b.initializers.get(name)
            if held is not None:
                return (held.array, cut) if isinstance(held.array, np.ndarray) else (None, cut)
            node = self.makers.get(name)
            if node is None or node.op != "Slice" or len(node.inputs) != 4:
                return None, cut
            starts, axes = (self.b.initializers.get(node.inputs[i]) for i in (1, 3))
            if starts is None or axes is None or np.any(starts.array != 0):
                return None, cut
            cut |= {int(a) % tensor.rank for a in axes.array.reshape(-1)}
            name = node.inputs[0]

    def _triangle(self, tensor, keeps):
        """Whether the mask is the corner of a fixed lower triangle: causal, the diagonal from the upper left."""
        array, cut = self._fixed(tensor)
        if array is None or array.ndim < 2 or array.shape[-1] != array.shape[-2] or array.size != array.shape[-1] ** 2:
            return False
        rank = array.ndim
        if cut not in (set(), {rank - 2, rank - 1}) or array.shape[-1] < 2:
            return False
        kept = keeps(array.reshape(array.shape[-2:]).astype(np.float64 if array.dtype.kind != "b" else bool))
        return kept is not None and np.array_equal(kept, np.tri(array.shape[-1], dtype=bool))

    def _sees_first(self, hidden):
        """Whether every row keeps its first key, whatever the lengths: then no row is without keys."""
        for tensor, keeps, _ in hidden:
            array, _ = self._fixed(tensor)
            if array is None or array.ndim < 1 or not (array[..., 0] == keeps).all():
                return False
        return True
