"""A proven match as new nodes: in which layout, from which tensors of the graph, and what they replace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .. import backends
from ..spec import OPTIONS, SLOTS, Arg, AttentionSpec
from .emit import Emitter, Ref
from .forward import ORDERING, where
from .ir import FLOATS, Unknown
from .masks import Masking
from .reasons import Refusal
from .views import contiguous, identity, merged

# The order in memory of (batch, heads, length, head_dim) in the layouts that the op takes.
LAYOUTS = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "SBH": (2, 0, 1, 3)}


@dataclass(frozen=True)
class Geometry:
    """How the one batch axis of the products divides."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int

    def dims(self, name):
        """(batch, heads, length, head_dim) of query, key, value or out."""
        heads = self.heads if name in ("query", "out") else self.kv_heads
        length = self.queries if name in ("query", "out") else self.keys
        return self.batch, heads, length, self.value_dim if name in ("value", "out") else self.head_dim


class NotShared(Exception):
    """The gradient of a repeated key or value is not summed where it was looked for."""


def geometries(forward) -> list[Geometry]:
    """The ways to read the batch of the products as batch and heads, those with shared key heads first."""
    views = forward.query, forward.key, forward.value
    total = math.prod(forward.query.shape[:-2])
    counts = {1, total}
    for view in views:
        size = 1
        for dim in reversed(view.dims[:-2]):
            for atom, _ in reversed(dim):
                size *= atom
                counts.add(size)
    found = []
    for heads in sorted(counts):
        if total % heads:
            continue
        split = [v.regrouped((total // heads, heads) + v.shape[-2:]) for v in views]
        if any(v is None for v in split):
            continue
        sizes = (forward.query.shape[-2], forward.key.shape[-2], forward.query.shape[-1], forward.value.shape[-1])
        shared = {_kv_heads(v.dims[1]) for v in split[1:]}
        kv_heads = shared.pop() if len(shared) == 1 else None
        for count in {kv_heads, heads} - {None}:
            found.append(Geometry(total // heads, heads, count, *sizes))
    return found


def _kv_heads(atoms):
    """Number of heads that are not repetitions, if every one is repeated as a whole, else ``None``."""
    strides = [stride for _, stride in atoms]
    distinct = sum(1 for stride in strides if stride)
    if 0 in strides[:distinct]:
        return None
    return math.prod(size for size, stride in atoms if stride)


class Fused:
    """Builds one site in one layout and geometry."""

    def __init__(self, grammar, forward, backward, masking: Masking, geometry, layout, options, prefix, like):
        self.graph, self.views = grammar.graph, grammar.views
        self.forward, self.backward, self.masking = forward, backward, masking
        self.geometry, self.layout, self.options = geometry, layout, options
        self.emit = Emitter(prefix, like, options["handle"])
        self.replace, self.order = [], []
        self.copies = 0     # transposes around the op, old and new, by which layouts are compared
        self.follow = layout != "BNSD" or options["level"] != "core"    # replace what lies behind transposes
        self.replaced, self.passed = set(), set()

    def build(self):
        """Fills `replace`, `order` and the emitter; raises Refusal or NotShared."""
        tensors = {name: self._operand(name) for name in ("query", "key", "value")}
        slots = dict(tensors, attn_mask=self._mask(), bias=self._bias(), seed=self._seed())
        inputs = [slots.get(name) for name in SLOTS]
        self.spec = self._spec(inputs)
        backend = backends.select("fuse", self.options.get("backend"))
        out, _, row_max, row_sum = self.emit.custom(backend.forward(self.spec), inputs, [
            (self.spec.out_shape, self.spec.dtype)] + [(self.spec.lse_shape, "float32")] * 3)
        self.out = out
        if self.forward.output is not None:
            self._put(self.forward.output.node, False, "out", out)
        self.gradient = None
        if self.backward is not None:
            grad = self._grad()
            inputs = inputs + [out, row_max, row_sum, grad, None]
            results = [(x.shape, x.dtype) for x in tensors.values()] + [((1,), "float32")]
            dq, dk, dv, _ = self.emit.custom(backend.backward(self.spec), inputs, results)
            self.gradient = dq
            for name, leaf, grad in (("query", self.backward.query, dq), ("key", self.backward.key, dk),
                                     ("value", self.backward.value, dv)):
                if leaf is not None:
                    self._put(leaf.node, leaf.flipped, name, grad)
            if self.backward.biases:
                dbias, = self.emit.custom(backend.bias_grad(self.spec), inputs, [(slots["bias"].shape,
                                                                                  slots["bias"].dtype)])
                self._put_biases(dbias)
        return self

    # --- what goes in ---

    def _spec(self, inputs):
        masking, forward = self.masking, self.forward
        args = tuple(None if x is None else Arg(x.shape, x.dtype) for x in inputs)
        geometry = self.geometry
        given = {"dropout_p": 1 - forward.keep_prob, "softmax_scale": float(forward.scores.scale), "causal": False,
                 "softcap": float(forward.scores.softcap), "layout": self.layout, "causal_align": masking.align,
                 "training": True, "deterministic": True, "precision_mode": "default", "block_m": None,
                 "block_n": None, "num_heads": geometry.heads, "num_kv_heads": geometry.kv_heads,
                 "mask_fill": masking.fill if masking.masks else None}
        try:
            return AttentionSpec.parse("fuse", args, (masking.left, masking.right),
                                       tuple(given[name] for name in OPTIONS))
        except (TypeError, ValueError) as error:
            raise Refusal("shape", detail=str(error)) from error

    def _operand(self, name):
        product, side = {"query": (self.forward.scores.product, 0), "key": (self.forward.scores.product, 1),
                         "value": (self.forward.output, 1)}[name]
        view = getattr(self.forward, name)
        flipped = product.flipped[side] != (name == "key")
        return self._laid_out(name, product.operands[side], flipped, product.batch, view.shape[-2:])

    def _grad(self):
        """The gradient of the output, from the node where it is nearest to the layout."""
        view = self.backward.grad
        before = self.emit.transposes
        shape = self.geometry.dims("out")
        atoms = self._ordered(view.regrouped(shape).dims)
        ref = self.emit.ref(view.base)
        made = None if view.offset else self.emit.arrange(ref, self._atoms(view.base), atoms, self._shape("out"))
        if made is None:
            raise Refusal("shape", detail="the gradient of the output is part of a larger tensor")
        self.copies += self.emit.transposes - before
        return made

    @staticmethod
    def _atoms(node):
        return [atom for dim in contiguous(node.shape) for atom in dim]

    def _laid_out(self, name, operand, flipped, batch, matrix):
        """`operand` of a product in the layout, from the earliest node from which that takes the fewest copies."""
        best = None
        shared = self.geometry.dims(name)[1] != self.geometry.heads
        for source in self.views.chain(operand):
            view = self.views.relative(operand, source)
            if view is None or view.offset:
                continue
            view = (view.swapped() if flipped else view).broadcast(batch + matrix)
            view = view and view.regrouped((self.geometry.batch, self.geometry.heads) + matrix)
            if view is None:
                continue
            dims = view.dims
            if shared:
                dims = (dims[0], tuple(a for a in dims[1] if a[1]), *dims[2:])
                if math.prod(s for s, _ in dims[1]) != self.geometry.kv_heads:
                    continue
            atoms = self._ordered(dims)
            trial = Emitter("", source, None)
            if trial.arrange(trial.ref(source), self._atoms(source), atoms, self._shape(name)) is None:
                continue
            cost = trial.transposes + sum(self._copies(node) for node in self.views.chain(source))
            if best is None or cost < best[0] or (self.follow and cost == best[0]):
                best = cost, source, atoms
        if best is None:
            raise Refusal("shape", detail=f"the {name} cannot be laid out")
        cost, source, atoms = best
        self.copies += cost
        return self.emit.arrange(self.emit.ref(source), self._atoms(source), atoms, self._shape(name))

    def _copies(self, node):
        """1 for a view that moves memory when it runs."""
        source = self.views.source(node)
        if source is None or node.op == "TupleGetItem":
            return 0
        view = self.views.relative(node, source)
        return int(view is not None and merged([a for d in view.dims for a in d]) not in ((), ((source.size, 1),)))

    def _ordered(self, dims):
        """Atoms in the order in memory of the layout."""
        return [atom for axis in LAYOUTS[self.layout] for atom in dims[axis]]

    def _shape(self, name):
        dims = [self.geometry.dims(name)[axis] for axis in LAYOUTS[self.layout]]
        return tuple(dims[:2]) + (dims[2] * dims[3],) if self.layout == "SBH" else tuple(dims)

    # --- masks and biases ---

    def _plane(self, term, direct=False):
        """A mask or bias as (batch or 1, heads or 1, queries or 1, keys or 1)."""
        geometry = self.geometry
        full = (geometry.batch, geometry.heads, geometry.queries, geometry.keys)
        for source in ([term.node] if direct else reversed(self.views.chain(term.node))):
            view = self.views.relative(term.node, source)
            view = view and not view.offset and view.broadcast(term.step.node.shape)
            view = view and view.regrouped(full)
            if not view:
                continue
            dims = tuple(() if all(not stride for _, stride in dim) else dim for dim in view.dims)
            shape = tuple(size if dim else 1 for size, dim in zip(full, dims))
            made = self.emit.arrange(self.emit.ref(source), self._atoms(source), [a for d in dims for a in d], shape)
            if made is not None:
                return made
        raise Refusal("mask_shape", shape=term.node.shape, scores=term.step.node.shape)

    def _mask(self):
        made = None
        for term in self.masking.masks:
            mask = self._plane(term)
            if term.keep:
                mask = self.emit.op("LogicalNot", [mask], mask.shape, "bool")
            made = mask if made is None else self.emit.binary("LogicalOr", made, mask, "bool")
        return made

    def _bias(self):
        made = None
        self.planes = {}
        dtype = self.forward.query.base.dtype
        trained = set(self.backward.biases) if self.backward is not None else set()
        for term in self.masking.biases:
            bias = self._plane(term, term.step in trained)
            self.planes[term.step] = bias
            if bias.dtype not in ("float32", dtype) or (made is not None and bias.dtype != made.dtype):
                bias = self.emit.cast(bias, "float32")
            if term.value != 1:
                bias = self.emit.op("Mul", [bias, self._number(term.value, bias.dtype)], bias.shape, bias.dtype)
            if made is not None:
                made = self.emit.cast(made, bias.dtype)
            made = bias if made is None else self.emit.binary("Add", made, bias, bias.dtype)
        return made

    def _number(self, value, dtype):
        return Ref({"tensor": {"dtype": dtype, "shape": [], "values": [value]}}, (), dtype)

    def _seed(self):
        if self.forward.dropout is None:
            return None
        return self.options["seed"](self.emit)

    # --- what comes out ---

    def _put(self, node, flipped, name, tensor):
        """Replaces `node`, a product with the result `name`, or rather what it is reshaped and transposed to."""
        matrix = node.shape[-2:]
        view = identity(node)
        canonical = view.swapped() if flipped else view
        matrix = canonical.shape[-2:]
        dims = canonical.regrouped((self.geometry.batch, self.geometry.heads) + matrix).dims
        shared = name in ("key", "value") and self.geometry.kv_heads != self.geometry.heads
        if shared:
            group = self.geometry.heads // self.geometry.kv_heads
            heads = canonical.regrouped((self.geometry.batch, self.geometry.kv_heads, group) + matrix).dims
            dims = heads[:2] + heads[3:]
            for at, summed in self._sums(node, view, heads[2]):
                self._follow(at, summed, self._ordered(dims), tensor)
            return
        self._follow(node, view, self._ordered(dims), tensor)

    def _sums(self, node, view, group):
        """Where the gradients of repeated heads are summed: the nodes behind, as views of `node` without `group`."""
        found = []
        for user, position in self._users(node):
            if user.op in ("ReduceSum", "SumExt") and position == 0:
                after = self._summed(user, view, group)
                if after is None:
                    raise NotShared
                found.append((user, after))
                self.passed.add(user)
            elif self.views.source(user) is node:
                after = self._through(user, view)
                if after is None:
                    raise NotShared
                found += self._sums(user, after, group)
            else:
                raise NotShared
        if not found:
            raise NotShared
        return found

    def _summed(self, node, view, group):
        try:
            axes = node.argument(1)
        except Unknown as error:
            raise NotShared from error
        rank = len(view.dims)
        axes = set(range(rank)) if axes in (None, ()) else {
            a % rank for a in (axes if isinstance(axes, tuple) else (axes,))}
        gone = merged([atom for axis in sorted(axes) for atom in view.dims[axis]])
        if gone != merged(group):
            return None
        kept = tuple(dim for axis, dim in enumerate(view.dims) if axis not in axes)
        return replace(view, dims=kept).regrouped(node.shape)

    def _through(self, user, view):
        """`view`, of some product, after `user`, which is a view of the node it stands for."""
        return self.views.after(user, view)

    def _users(self, node):
        return [(user, position) for user, position in node.users if user.op not in ORDERING
                and not (user.op in ("Depend", "Load") and position > 0)]

    def _follow(self, node, view, want, tensor):
        """Replaces `node` if it lies in memory as `tensor` does; else what follows, if that is views alone."""
        order = [atom for dim in view.dims for atom in dim]
        if merged(order) != merged(want) and self.follow:
            following = []
            for user, position in self._users(node):
                if position == 0 and self.views.source(user) is node:
                    following.append((user, self._through(user, view), tensor))
                elif user.op == "Cast" and user.dtype in FLOATS:
                    following.append((user, view, user.dtype))
                else:
                    following.append((user, None, None))
            if following and all(after is not None for _, after, _ in following):
                for user, after, change in following:
                    self._follow(user, after, want,
                                 self.emit.cast(tensor, change) if isinstance(change, str) else tensor)
                return
        before = self.emit.transposes
        made = self.emit.arrange(tensor, want, order, node.shape)
        self.copies += self.emit.transposes - before + max((self._copies(user) for user, at in self._users(node)
                                                            if at == 0 and self.views.source(user) is node), default=0)
        if made is None:
            raise Refusal("shape", detail=f"{node.op} {node.shape}{where(node)} cannot be made of the result")
        made = self.emit.cast(made, node.dtype)
        self.replace.append([node.id, made.operand])
        self.replaced.add(node)

    def _put_biases(self, dbias):
        for step, leaf in self.backward.biases.items():
            term = next(t for t in self.masking.biases if t.step is step)
            have = self.planes[step].shape
            grad = dbias
            axes = tuple(axis for axis, (a, b) in enumerate(zip(dbias.shape, have)) if a != b)
            if axes:
                grad = self.emit.op("ReduceSum", [grad, axes, True, False], have, grad.dtype)
            outer = term.value / step.value     # scales between the bias and the softmax; the graph has the sign
            if outer != 1:
                grad = self.emit.op("Mul", [grad, self._number(outer, grad.dtype)], grad.shape, grad.dtype)
            grad = self.emit.cast(self.emit.reshape(grad, leaf.node.shape), leaf.node.dtype)
            self.replace.append([leaf.node.id, grad.operand])
            self.replaced.add(leaf.node)

