"""A proven match as new nodes: in which layout, from which tensors of the graph, and what they replace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .. import backends
from ..spec import OPTIONS, SLOTS, Arg, AttentionSpec
from .emit import Emitter, Ref
from .forward import where
from .ir import FLOATS, Unknown
from .masks import Masking
from .reasons import Refusal
from .views import contiguous, cut, identity, merged, paired, refine, scattered

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


def geometries(forward, masking) -> list[Geometry]:
    """The ways to read the batch of the products as batch and heads, those with shared key heads first."""
    views = forward.query, forward.key, forward.value
    total = math.prod(forward.query.shape[:-2])
    shape, counts, size = forward.scores.product.node.shape, set(), 1
    for dim, atoms in zip(reversed(shape[:-2]), reversed(forward.query.dims[:-2])):
        before = size
        for atom, _ in reversed(atoms):
            size *= atom
            counts.add(size)
        size = before * dim
        counts.add(size)
    for term in masking.masks + masking.biases:
        size = 1
        for atom, _ in reversed(term.view.dims[0]):
            size *= atom
            counts.add(size)
    for base, depth in ((view.base, view.shape[-1]) for view in views):     # a projection, maybe of all three
        counts |= {base.shape[-1] // (depth * parts) for parts in (1, 3) if base.shape[-1] % (depth * parts) == 0}
    # all heads or none only where there is no other way
    counts = {n for n in counts - {0, 1, total} if total % n == 0} or {1, total}
    found = []
    for heads in sorted(counts):
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

    block = outputs = None      # of level block: the MhaSpec, and the nodes that the output replaces
    sums = ()                   # and the sums that its gradients enter, see block.Sums

    def __init__(self, grammar, forward, backward, masking: Masking, geometry, layout, options, prefix, like):
        self.grammar, self.graph, self.views = grammar, grammar.graph, grammar.views
        self.forward, self.backward, self.masking = forward, backward, masking
        self.geometry, self.options = geometry, options
        self.packed = layout == "packed"
        self.layout = "BSND" if self.packed else layout
        self.factors = {}   # of query and key that the op takes into its scale
        self.emit = Emitter(prefix, like, options["handle"])
        self.replace, self.order = [], []
        self.copies = 0     # transposes around the op, old and new, by which layouts are compared
        self.moved = []     # names of the inputs that some of them are for
        self.follow = options["level"] != "core"    # replace what lies behind transposes
        self.replaced, self.passed = set(), set()

    def build(self):
        """Fills `replace`, `order` and the emitter; raises Refusal or NotShared."""
        tensors = self._tensors()
        slots = dict(tensors, attn_mask=self._mask(), bias=self._bias(), seed=self._seed())
        inputs = [slots.get(name) for name in SLOTS]
        self.spec = self._spec(inputs)
        backend = self._backend()
        if backend.form(self.spec) is not None:
            raise Refusal("backend", detail=f"a call of the backend {backend.name!r} takes more than its inputs")
        out, _, row_max, row_sum = self.emit.custom(lambda: backend.forward(self.spec), inputs, [
            (self.spec.out_shape, self.spec.dtype)] + [(self.spec.lse_shape, "float32")] * 3)
        self.out = out
        if self.forward.output.node is not None:
            self._put(self.forward.output.node, False, "out", out)
        self.gradient = None
        if self.backward is not None:
            grad = self._grad()
            inputs = inputs + [out, row_max, row_sum, grad, None]
            results = [((1,), out.dtype) if x is None else (x.shape, x.dtype) for x in tensors.values()]
            dq, dk, dv, _ = self.emit.custom(lambda: backend.backward(self.spec), inputs, results + [((1,), "float32")])
            self.gradient = dq
            leaves = {"query": self.backward.query, "key": self.backward.key, "value": self.backward.value}
            if self.packed:
                self._put_packed(leaves, dq)
            else:
                for (name, leaf), grad in zip(leaves.items(), (dq, dk, dv)):
                    if leaf is not None:
                        self._put(leaf.node, leaf.flipped, name, grad)
            if self.backward.biases:
                dbias, = self.emit.custom(lambda: backend.bias_grad(self.spec), inputs, [(slots["bias"].shape,
                                                                                  slots["bias"].dtype)])
                self._put_biases(dbias)
        return self

    def _backend(self):
        try:
            backend = backends.select("fuse", self.options.get("backend"))
            backend.check("MsFlashFwd", self.spec)
        except (TypeError, ValueError) as error:
            raise Refusal("backend", detail=str(error)) from error
        if not backend.takes_none:
            raise Refusal("backend", detail=f"the backend {backend.name!r} cannot leave an input out")
        return backend

    # --- what goes in ---

    def _spec(self, inputs):
        masking, forward = self.masking, self.forward
        args = tuple(None if x is None else Arg(x.shape, x.dtype) for x in inputs)
        geometry, scale = self.geometry, forward.scores.scale * math.prod(self.factors.values())
        given = {"dropout_p": 1 - forward.keep_prob, "softmax_scale": float(scale), "causal": False,
                 "softcap": float(forward.scores.softcap), "layout": self.layout, "causal_align": masking.align,
                 "training": True, "deterministic": True, "precision_mode": "default", "block_m": None,
                 "block_n": None, "num_heads": geometry.heads, "num_kv_heads": geometry.kv_heads,
                 "mask_fill": masking.fill if masking.masks else None}
        try:
            return AttentionSpec.parse("fuse", args, (masking.left, masking.right),
                                       tuple(given[name] for name in OPTIONS))
        except (TypeError, ValueError) as error:
            raise Refusal("shape", detail=str(error)) from error

    def _tensors(self):
        """query, key and value in the layout, or all three as one packed query."""
        if self.packed:
            packed = self._packed_operand()
            return {"query": packed, "key": None, "value": None}
        return {name: self._operand(name) for name in ("query", "key", "value")}

    def side(self, name):
        """(operand, whether it is used transposed) of a product."""
        product, side = {"query": (self.forward.scores.product, 0), "key": (self.forward.scores.product, 1),
                         "value": (self.forward.output, 1)}[name]
        return product.operands[side], product.flipped[side] != (name == "key"), product.batch

    def paths(self, operand, scales):
        """Nodes from which `operand` comes by views, one cast and constant factors: (source, nodes between, factor)."""
        at, path, factor, cast = operand, (), 1.0, False
        while True:
            yield at, path, factor
            source = self.views.source(at)
            if source is None and self.follow and at.op == "Cast" and not cast and at.inputs[0].dtype in FLOATS:
                source, cast = at.inputs[0], True
            elif source is None and self.follow and scales:
                source, number = self.grammar.constant_factor(at)
                factor *= number
            if source is None:
                return
            at, path = source, (at, *path)

    def view(self, source, path, flipped, batch, matrix):
        """What the end of `path` is of `source`, as (batch, heads, length, head_dim)."""
        view = identity(source)
        for node in path:
            if self.views.source(node) is not None:
                view = self.views.after(node, view)
            if view is None:
                return None
        view = (view.swapped() if flipped else view).broadcast(batch + matrix)
        return view and view.regrouped((self.geometry.batch, self.geometry.heads) + matrix)

    def _operand(self, name):
        """An operand in the layout, from the earliest node from which that takes the fewest copies."""
        operand, flipped, batch = self.side(name)
        matrix = getattr(self.forward, name).shape[-2:]
        best = None
        shared = self.geometry.dims(name)[1] != self.geometry.heads
        for source, path, factor in self.paths(operand, name != "value"):
            view = self.view(source, path, flipped, batch, matrix)
            if view is None or view.offset:
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
            if best is None or cost < best[0] or (self.follow and cost == best[0] and factor == best[3]):
                best = cost, source, atoms, factor
        if best is None:
            raise Refusal("shape", detail=f"the {name} cannot be laid out")
        cost, source, atoms, factor = best
        self._count(cost, name)
        self.factors[name] = factor
        ref = self.emit.cast(self.emit.ref(source), operand.dtype)
        return self.emit.arrange(ref, self._atoms(source), atoms, self._shape(name))

    def _packed_operand(self):
        """Query, key and value from one node that holds them side by side."""
        found = {}
        for name in ("query", "key", "value"):
            operand, flipped, batch = self.side(name)
            for source, path, factor in self.paths(operand, name != "value"):
                view = self.view(source, path, flipped, batch, getattr(self.forward, name).shape[-2:])
                if view is not None:
                    found.setdefault(source, {})[name] = view, factor, operand.dtype
        best = None
        for source, parts in found.items():
            atoms = len(parts) == 3 and self._packed_atoms([parts[name][0] for name in ("query", "key", "value")])
            if not atoms:
                continue
            trial = Emitter("", source, None)
            if trial.arrange(trial.ref(source), self._atoms(source), atoms, self._shape("packed")) is None:
                continue
            cost = trial.transposes + sum(self._copies(node) for node in self.views.chain(source))
            if best is None or cost <= best[0]:
                best = cost, source, atoms, parts
        if best is None:
            raise Refusal("shape", detail="query, key and value are not parts of one tensor")
        cost, source, atoms, parts = best
        self._count(cost, *parts)
        self.factors.update({name: factor for name, (_, factor, _) in parts.items()})
        ref = self.emit.cast(self.emit.ref(source), parts["query"][2])
        return self.emit.arrange(ref, self._atoms(source), atoms, self._shape("packed"))

    def _packed_atoms(self, views):
        """Atoms of (batch, length, parts and heads, head_dim) if query, key and value lie side by side."""
        if self.geometry.kv_heads != self.geometry.heads:       # without the repetitions
            views = [replace(x, dims=(x.dims[0], tuple(a for a in x.dims[1] if a[1]), *x.dims[2:])) for x in views]
        middle = side_by_side(views)
        batch, _, length, head_dim = views[0].dims
        return middle and [*batch, *length, *middle, *head_dim]

    def _grad(self):
        """The gradient of the output, from the node where it is nearest to the layout."""
        best = None
        view = self.backward.grad
        shape = self.geometry.dims("out")
        found = [(view.base, view.regrouped(shape))]
        if self.follow and view.base.op == "Cast" and view.base.inputs[0].dtype in FLOATS:
            found += self._behind_cast(view.base, view)
        for source, at in found:
            if at is None or at.offset:
                continue
            atoms, trial = self._ordered(at.dims), Emitter("", source, None)
            if trial.arrange(trial.ref(source), self._atoms(source), atoms, self._shape("out")) is None:
                continue
            cost = trial.transposes + sum(self._copies(node) for node in self.views.chain(source))
            if best is None or cost < best[0]:
                best = cost, source, atoms
        if best is None:
            raise Refusal("shape", detail="the gradient of the output is part of a larger tensor")
        cost, source, atoms = best
        self._count(cost, "the gradient")
        ref = self.emit.cast(self.emit.ref(source), view.base.dtype)
        return self.emit.arrange(ref, self._atoms(source), atoms, self._shape("out"))

    def _count(self, copies, *names):
        self.copies += copies
        self.moved += names if copies else ()

    def _behind_cast(self, cast, view):
        """`view` of a cast as views of what is cast."""
        inner = self.views.of(cast.inputs[0])
        view = view.regrouped(self.geometry.dims("out"))
        pairs = paired(self._atoms(cast), [atom for dim in inner.dims for atom in dim])
        if pairs is None or view is None:
            return
        moved = translate(view, pairs)
        if moved is not None:
            yield inner.base, replace(view, base=inner.base, offset=inner.offset, dims=moved)

    @staticmethod
    def _atoms(node):
        return [atom for dim in contiguous(node.shape) for atom in dim]

    def _copies(self, node):
        """1 for a view that moves memory when it runs."""
        source = self.views.source(node)
        if source is None:
            return 0
        view = self.views.relative(node, source)
        return int(view is not None and merged([a for d in view.dims for a in d]) not in ((), ((source.size, 1),)))

    def _ordered(self, dims):
        """Atoms in the order in memory of the layout."""
        return [atom for axis in LAYOUTS[self.layout] for atom in dims[axis]]

    def _shape(self, name):
        if name == "packed":
            batch, heads, length, head_dim = self.geometry.dims("query")
            kv_heads = self.geometry.kv_heads
            return (batch, length, 3, heads, head_dim) if kv_heads == heads else \
                (batch, length, heads + 2 * kv_heads, head_dim)
        dims = [self.geometry.dims(name)[axis] for axis in LAYOUTS[self.layout]]
        return tuple(dims[:2]) + (dims[2] * dims[3],) if self.layout == "SBH" else tuple(dims)

    # --- masks and biases ---

    def _plane(self, term, direct=False):
        """A mask or bias as (batch or 1, heads or 1, queries or 1, keys or 1)."""
        geometry = self.geometry
        full = (geometry.batch, geometry.heads, geometry.queries, geometry.keys)
        best = None
        for source in [term.node] if direct else self.views.chain(term.node):
            view = self.views.relative(term.node, source)
            view = view and not view.offset and view.broadcast(term.step.node.shape)
            view = view and view.regrouped(full)
            if not view:
                continue
            dims = tuple(() if all(not stride for _, stride in dim) else dim for dim in view.dims)
            shape = tuple(size if dim else 1 for size, dim in zip(full, dims))
            atoms, trial = [a for d in dims for a in d], Emitter("", source, None)
            if trial.arrange(trial.ref(source), self._atoms(source), atoms, shape) is not None:
                cost = math.prod(shape), trial.transposes
                if best is None or cost <= best[0]:
                    best = cost, source, atoms, shape
        if best is not None:
            (_, copies), source, atoms, shape = best
            self.copies += copies
            return self.emit.arrange(self.emit.ref(source), self._atoms(source), atoms, shape)
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
        if not self.forward.drops:
            return None
        twin = self.graph.copies[self.forward.dropout]      # the same dropout, computed again for the backward
        self.seed = self.options["seeds"].get(twin) or self.options["seed"](self.emit)
        return self.seed

    # --- what comes out ---

    def _put(self, node, flipped, name, tensor):
        """Replaces `node`, a product with the result `name`, or rather what it is reshaped and transposed to."""
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
                self._follow(at, summed, self._ordered(dims), tensor, self.factors.get(name, 1.0))
            return
        self._follow(node, view, self._ordered(dims), tensor, self.factors.get(name, 1.0))

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
        return self.grammar.forward_users(node)

    def following(self, node, view):
        """What uses `node` by views, casts and constant factors: (user, its view, dtype, factor), or ``None``."""
        found = []
        for user, position in self._users(node):
            if position == 0 and self.views.source(user) is node:
                found.append((user, self._through(user, view), user.dtype, 1.0))
            elif user.op == "Cast" and user.dtype in FLOATS:
                found.append((user, view, user.dtype, 1.0))
            else:
                source, factor = self.grammar.constant_factor(user)
                if source is not node:
                    return []
                found.append((user, view, user.dtype, factor))
        return found if all(step[1] is not None for step in found) else []

    def _follow(self, node, view, want, tensor, factor=1.0):
        """Replaces `node` by `tensor` / `factor` if it lies in memory as that does; else what follows, if it may."""
        order = [atom for dim in view.dims for atom in dim]
        settled = merged(order) == merged(want) and close(factor, 1)
        following = [] if settled or not self.follow else self.following(node, view)
        if following:
            for user, after, dtype, number in following:
                self.passed.add(user)
                self._follow(user, after, want, self.emit.cast(tensor, dtype), factor / number if number else 0)
            return
        before = self.emit.transposes
        made = self.emit.arrange(tensor, want, order, node.shape)
        if made is None or not factor:
            raise Refusal("shape", detail=f"{node.op} {node.shape}{where(node)} cannot be made of the result")
        if not close(factor, 1):
            made = self.emit.op("Mul", [made, self._number(1 / factor, made.dtype)], made.shape, made.dtype)
            self.copies += 1
        self.copies += self.emit.transposes - before + max((self._copies(user) for user, at in self._users(node)
                                                            if at == 0 and self.views.source(user) is node), default=0)
        made = self.emit.cast(made, node.dtype)
        self.replace.append([node.id, made.operand])
        self.replaced.add(node)

    def _put_packed(self, leaves, tensor):
        """Replaces the node that joins the three gradients."""
        if None in leaves.values():
            raise Refusal("shape", detail="a gradient of packed query, key and value is missing")
        parts = [self.joined(name, leaf) for name, leaf in leaves.items()]
        joints = {joint for joint, _ in parts}
        atoms = self._packed_atoms([view for _, view in parts]) if len(joints) == 1 else None
        if atoms is None:
            raise Refusal("shape", detail="the gradients of packed query, key and value are not joined")
        joint, = joints
        self.passed.add(joint)
        if math.prod(size for size, _ in atoms) != joint.size:
            raise Refusal("shape", detail="the packed tensor holds more than query, key and value")
        self._follow(joint, identity(joint), atoms, tensor)

    def joined(self, name, leaf, parts=3):
        """(the node that joins the gradient of `name` with those of all `parts`, that gradient as a view of it)."""
        view = identity(leaf.node)
        canonical = view.swapped() if leaf.flipped else view
        matrix, heads = canonical.shape[-2:], self.geometry.dims(name)[1]
        group = self.geometry.heads // heads
        canonical = canonical.regrouped((self.geometry.batch, heads, group) + matrix)
        node, factor = leaf.node, self.factors[name]
        if group > 1:       # the gradients of repeated heads are added up first
            sums = self._sums(node, view, canonical.dims[2])
            if len(sums) != 1:
                raise NotShared
            (node, view), = sums
        canonical = replace(canonical, dims=canonical.dims[:2] + canonical.dims[3:])
        while True:
            joint, part = self._joint(node, parts)
            if joint is not None and close(factor, 1):
                break
            following = self.following(node, view)
            if len(following) != 1:
                raise Refusal("shape", detail=f"the gradient of the packed {name} has other users")
            node, view, _, number = following[0]
            self.passed.add(node)
            factor /= number or math.inf
        pairs = paired([a for d in view.dims for a in d], [a for d in part.dims for a in d])
        dims = pairs and translate(canonical, pairs)
        if not dims:
            raise Refusal("shape", detail=f"the gradient of the packed {name} is joined in another order")
        return joint, replace(part, dims=dims)

    def _joint(self, node, parts):
        """(Concat, Stack or sum of `parts` that takes `node`, the part of it that `node` is), or (None, None)."""
        users = self._users(node)
        if len(users) != 1:
            return None, None
        (user, position), part = users[0], None
        if user.op == "StridedSliceGrad" and position == 0:
            part = scattered(user)
            self.passed.add(user)
            users = self._users(user)
            if part is None or len(users) != 1:
                return None, None
            user, position = users[0]
        if user.op != "MakeTuple" or len(self._users(user)) != 1:
            return None, None
        joint = self._users(user)[0][0]
        self.passed.add(user)
        if joint.op == "AddN" and part is not None and len(user.inputs) == parts:
            return joint, replace(part, base=joint)
        if joint.op in ("Concat", "Stack", "StackExt") and part is None:
            return joint, self._slot(joint, user, position)
        return None, None

    @staticmethod
    def _slot(joint, parts, position):
        try:
            axis = joint.attrs["axis"] if "axis" in joint.attrs else joint.argument(1, 0)
        except Unknown:
            return None
        axis %= len(joint.shape)
        sizes = [part.shape[axis] if joint.op == "Concat" else 1 for part in parts.inputs]
        view = cut(identity(joint), axis, sum(sizes[:position]), sizes[position])
        if view is None or joint.op == "Concat":
            return view
        return replace(view, dims=view.dims[:axis] + view.dims[axis + 1:])

    def _put_biases(self, dbias):
        for step, leaf in self.backward.biases.items():
            have = self.planes[step].shape
            grad = dbias
            axes = tuple(axis for axis, (a, b) in enumerate(zip(dbias.shape, have)) if a != b)
            if axes:
                grad = self.emit.op("ReduceSum", [grad, axes, True, False], have, grad.dtype)
            if math.prod(grad.shape) != leaf.node.size:     # repeated along a part of an axis, for windows
                raise Refusal("mask_shape", shape=step.other.shape, scores=step.node.shape)
            if leaf.factor != 1:
                grad = self.emit.op("Mul", [grad, self._number(leaf.factor, grad.dtype)], grad.shape, grad.dtype)
            grad = self.emit.cast(self.emit.reshape(grad, leaf.node.shape), leaf.node.dtype)
            self.replace.append([leaf.node.id, grad.operand])
            self.replaced.add(leaf.node)


def side_by_side(views, interleaved=False) -> list | None:
    """What lies between the rows and the channels of some views (batch, heads, length, head_dim) that together fill a
    tensor: atoms of (part, head), or of (head, part), or of all heads where parts have different numbers of them."""
    first, step, parts = views[0], views[1].offset, len(views)
    if first.offset or not step:
        return None
    if all(view.dims == first.dims and view.offset == at * step for at, view in enumerate(views)):
        return [*first.dims[1], (parts, step)] if interleaved else [(parts, step), *first.dims[1]]
    total, step = 0, step // first.shape[1]
    for view in views:
        heads = view.shape[1]
        if (view.offset, merged(view.dims[1])) != (total * step, merged(((heads, step),))) \
                or view.dims[:1] + view.dims[2:] != first.dims[:1] + first.dims[2:]:
            return None
        total += heads
    return [(total, step)]


def translate(view, pairs):
    """The dimensions of `view` in the strides of the second atoms of `pairs`, which are cut at the first."""
    flat = [atom for dim in view.dims for atom in dim]
    fine = refine(flat, [a for a, _ in pairs])
    if fine is None:
        return None
    known = {}
    for (size, stride), (_, other) in pairs:
        pieces = [atom for atom in fine[1] if stride <= atom[1] < size * stride and atom[1] % stride == 0]
        known.update({piece: (piece[0], other * (piece[1] // stride)) for piece in pieces})
    dims = []
    for dim in view.dims:
        cuts = refine(dim, [a for a, _ in pairs], flat)
        if cuts is None or any(atom not in known for atom in cuts[0]):
            return None
        dims.append(merged([known[atom] for atom in cuts[0]]))
    return tuple(dims)


def close(a, b):
    """Equal but for the rounding of factors that the graph holds as float32."""
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b))
