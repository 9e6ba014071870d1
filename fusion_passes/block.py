"""The block level: the projections around a fused attention are taken into it, forward and backward.

It starts from a site as level layout fuses it. There the query, key and value come straight from their projections, the
output goes straight into the output projection, and so do the gradients; what a projection's own gradient has to be is
then known to the node. Whatever is not exactly that is refused, and the site stays at level layout.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

from .. import backends
from ..mha_spec import GRADIENTS, MHA_SLOTS, MhaSpec
from ..spec import SLOTS, Arg
from .emit import Emitter, Ref
from .fused import NotShared, close, side_by_side
from .linear import Linear, added, is_bias_gradient, is_gradient_of_x, linear, summands, weight_gradient
from .products import PRODUCTS
from .reasons import Refusal
from .views import identity, merged

_PARTS = ("q", "k", "v")
_NAMES = ("query", "key", "value")
_GRAD = len(SLOTS) + 3      # where the backward op takes the gradient of the output


@dataclass(frozen=True)
class Reading:
    """A part of the result of a projection: from element `first` on, `dims` of (batch, heads, length, head_dim)."""

    projection: Linear
    factor: float       # that it is multiplied by before it is used
    first: int
    dims: tuple


class Block:
    """Makes one site at level layout, `made`, a site at level block."""

    def __init__(self, grammar, made, options):
        self.grammar, self.views, self.graph = grammar, grammar.views, grammar.graph
        self.made, self.options = made, options
        self.entries = {entry["id"]: entry for entry in made.emit.new}
        ops = [entry for entry in made.emit.new if "prim" in entry]
        ops = ops[[op["id"] for op in ops].index(made.out.operand["item"][0]):]    # without that which draws a seed
        self.forward, self.backward = ops[0], ops[1] if len(ops) > 1 else None
        self.bias_grad = ops[2] if len(ops) > 2 else None
        self.inner, self.slots, self.transposed = set(made.replaced), {}, [False] * 4
        self.gradients = {}     # by name: [(node that is replaced, orientation or None)]
        self.sums = {}          # source: (the sum that takes its gradients, those gradients)

    def build(self):
        """The site at level block. Raises Refusal."""
        if self.made.layout not in ("BSND", "SBH"):
            self._refuse("the attention still needs a transpose")
        self.projections = self._projections()
        self._sources()
        self.out = self._output()
        if self.backward is not None:
            self._output_gradients()
            for part, projection in self.projections.items():
                self._part_gradients(part, projection)
            for source in ("x", "context", "context_v"):
                self._source_gradient(source)
        return self._emit()

    @staticmethod
    def _refuse(detail):
        raise Refusal("not_block", detail=detail)

    # --- what the new nodes of level layout are made of ---

    def _trace(self, operand):
        """The old node, or the result of a new op, that `operand` is a reshape of."""
        while isinstance(operand, str) and self.entries[operand].get("op") == "Reshape":
            operand = self.entries[operand]["inputs"][0]
        return operand

    def _node(self, operand, what):
        at = self._trace(operand)
        if not isinstance(at, int):
            self._refuse(f"the {what} is cast or computed between projection and attention")
        return self.graph.by_id[at]

    def _replaced_by(self, entry, item):
        """The old nodes that a result of level layout stands for."""
        found = []
        for old, operand in self.made.replace:
            at = self._trace(operand)
            if isinstance(at, dict) and at.get("item") == [entry["id"], item]:
                found.append(self.graph.by_id[old])
        return found

    def _uses(self, node):
        """Users of `node` and of its reshapes."""
        found = []
        for user, position in self.grammar.forward_users(node):
            if self.views.source(user) is node and position == 0 and user.size == node.size \
                    and merged([a for d in self.views.relative(user, node).dims for a in d]) in ((), ((node.size, 1),)):
                found += self._uses(user)
            elif self.views.source(user) is node and self._only_products(user):
                found += self._products(user)
            else:
                found.append(user)
        return list(dict.fromkeys(found))

    def _only_products(self, node):
        users = self._uses_plain(node)
        products = [user.op in PRODUCTS or (self.views.source(user) is node and self._only_products(user))
                    for user in users]
        return bool(users) and all(products)

    def _products(self, node):
        found = []
        for user in self._uses_plain(node):
            found += [user] if user.op in PRODUCTS else self._products(user)
        return found

    # --- forward ---

    def _projections(self):
        """By part: its projection; one that holds several parts is that of the first."""
        readings = {name: self._reading(name) for name in _NAMES}
        self.factors = {name: reading.factor for name, reading in readings.items()}
        self.interleaved, self.packs, found = False, {}, {}
        for name, part in zip(_NAMES, _PARTS):
            reading = readings[name]
            pack = [other for other in _NAMES if readings[other].projection.product is reading.projection.product]
            if pack[0] != name:
                continue
            self.interleaved |= self._order(pack, readings)
            self.packs[part] = pack
            found[part] = reading.projection
            self.inner |= reading.projection.inner
            self._cut(reading.projection.result)
            self._take(part, reading.projection, _PARTS.index(part))
        return found

    def _reading(self, name):
        """Where query, key or value lies in the result of its projection."""
        operand, flipped, batch = self.made.side(name)
        matrix = getattr(self.made.forward, name).shape[-2:]
        heads = self.made.geometry.dims(name)[1]
        for source, path, factor in self.made.paths(operand, name != "value"):
            found = linear(self.views, source)
            if found is None:
                continue
            view = self.made.view(source, path, flipped, batch, matrix)
            if view is None or source.dtype != operand.dtype:
                break
            self.inner |= set(path)
            dims = view.dims
            if heads != self.made.geometry.heads:       # without the repetitions
                dims = (dims[0], tuple(atom for atom in dims[1] if atom[1]), *dims[2:])
            return Reading(found, factor, view.offset, dims)
        return self._refuse("query, key and value do not come straight from projections")

    def _order(self, pack, readings):
        """Checks that the parts `pack` fill their projection side by side; whether head by head."""
        geometry = self.made.geometry
        width = readings[pack[0]].projection.sizes[1]
        dims = [geometry.dims(name) for name in pack]
        total = sum(heads * depth for _, heads, _, depth in dims)
        if len(pack) > 1 and (pack not in (list(_NAMES), ["key", "value"]) or total != width):
            self._refuse("query, key and value share a projection that cannot be read as packed")
        if total != width:
            self._refuse(f"the projection of the {pack[0]} makes {width} channels, and the attention reads {total}")
        rows = (0, 2) if self.made.layout == "BSND" else (2, 0)
        for interleaved in (False, True) if len(pack) > 1 and len({d[1] for d in dims}) == 1 else (False,):
            first, fits = 0, True
            for name, (batch, heads, length, depth) in zip(pack, dims):
                step = len(pack) * depth if interleaved else depth
                want = [((batch * length, width),), ((heads, step),), ((depth, 1),)]
                have = readings[name].dims
                have = [[*have[rows[0]], *have[rows[1]]], have[1], have[3]]
                fits &= readings[name].first == first and [merged(x) for x in have] == [merged(x) for x in want]
                first += depth if interleaved else heads * depth
            if fits:
                return interleaved
        return self._refuse("the parts of a projection lie in an order that the block op does not read")

    def _cut(self, node):
        """The nodes that split a packed projection vanish with it."""
        for user, _ in node.users:
            if self.views.source(user) is node:
                self._cut(user)
                continue
            pieces = self._uses_plain(user)
            if pieces and all(piece.op == "TupleGetItem" and self.views.source(piece) is node for piece in pieces):
                self.inner.add(user)
                for piece in pieces:
                    self._cut(piece)

    def _take(self, part, projection, at):
        self.slots["w_" + part], self.slots["b_" + part] = projection.weight, projection.bias
        self.transposed[at] = projection.stored_in_out

    def _sources(self):
        """Slots x, context and context_v, and which of them every part reads."""
        keys = {part: self.views.of(p.x).key for part, p in self.projections.items()}
        self.source, known = {}, {}
        for part in self.projections:
            name = {"q": "x", "k": "context", "v": "context_v"}[part]
            before = known.get("k" if part == "v" else "q")
            if before is not None and keys[part] == before[0]:
                name = before[1]
            else:
                self.slots[name] = self.projections[part].x
            known[part] = keys[part], name
            self.source[part] = name

    def _output(self):
        """The output projection, or ``None`` where the output goes elsewhere."""
        results = self._replaced_by(self.forward, 0)
        if len(results) != 1 or len(results) != len([n for n in self.made.replaced if self._is_out(n)]):
            self._refuse("the output is used in several shapes")
        self.attention = results[0]
        users = self._uses(self.attention)
        key = self.views.of(self.attention).key
        ahead = [at for at in users if self._is_projection_of(at, key)]
        if len(ahead) != 1:
            return None
        after = self._uses_plain(ahead[0])
        result = after[0] if len(after) == 1 and linear(self.views, after[0]) is not None else ahead[0]
        found = linear(self.views, result)
        if found is None or found.product is not ahead[0]:
            return None
        self.inner |= {found.product}
        self._take("o", found, 3)
        return found

    def _uses_plain(self, node):
        return [user for user, _ in self.grammar.forward_users(node)]

    def _is_out(self, node):
        operand = next(new for old, new in self.made.replace if old == node.id)
        at = self._trace(operand)
        return isinstance(at, dict) and at["item"][0] == self.forward["id"]

    def _is_projection_of(self, node, key):
        found = linear(self.views, node)
        return found is not None and found.product is node and self.views.of(found.x).key == key

    # --- backward ---

    def _want(self, name, node, orientation=None):
        self.gradients.setdefault(name, []).append((node, orientation))
        self.inner.add(node)

    def _output_gradients(self):
        grad = self._node(self.backward["inputs"][_GRAD], "gradient of the output")
        if self.out is None:
            self.dy = grad
            return
        product = next((n for n in self.views.chain(grad) if self.views.source(n) is None), grad)
        made = [n for n in (grad, product) if n.op.startswith(("MatMul", "BatchMatMul"))]
        if not made or not is_gradient_of_x(self.views, made[0], self.views.of(made[0].inputs[0]).key, self.out.right):
            self._refuse("the gradient of the output does not come straight from the output projection")
        self.inner.add(made[0])
        self.dy = made[0].inputs[0]
        key, attention = self.views.of(self.dy).key, self.views.of(self.attention).key
        for user in self._uses(self.attention):
            if user is self.out.product:
                continue
            orientation = weight_gradient(self.views, user, key, attention)
            if orientation is None:
                self._refuse(f"the output is used by {user.op} too")
            self._want("w_o", user, orientation)
        if self.out.bias is not None:
            rows = self.dy.size // self.out.sizes[1]
            for user in self._uses(self.views.of(self.dy).base):
                if is_bias_gradient(user, rows):
                    self._want("b_o", user)

    def _part_gradients(self, part, projection):
        pack = self.packs[part]
        if len(pack) > 1:
            nodes = self._joined(pack)
        else:
            factor = self.factors[pack[0]] / self.made.factors.get(pack[0], 1.0)
            nodes = [behind for node in self._replaced_by(self.backward, _PARTS.index(part))
                     for behind in self._scaled(node, factor)]
        x = self.views.of(projection.x).key
        for node in nodes:
            gradient = self.views.of(node).key
            for user in self._uses(node):
                orientation = weight_gradient(self.views, user, gradient, x)
                if orientation is not None:
                    self._want("w_" + part, user, orientation)
                elif is_gradient_of_x(self.views, user, gradient, projection.right):
                    self._want(self.source[part], user)
                elif projection.bias is not None and is_bias_gradient(user, node.size // projection.sizes[1]):
                    self._want("b_" + part, user)
                else:
                    self._refuse(f"the gradient of a projection is used by {user.op}")

    def _scaled(self, node, factor):
        """The nodes behind `node`, by views, that multiply it by `factor`."""
        if close(factor, 1):
            return [node]
        found = []
        for user, _, dtype, number in self.made.following(node, identity(node)):
            if dtype != node.dtype or not number:
                self._refuse("the gradient of a projection is cast")
            self.inner.add(user)
            found += self._scaled(user, factor / number)
        if not found:
            self._refuse("the gradient of a projection is scaled in another way")
        return found

    def _joined(self, pack):
        """Where the gradients of the parts of one projection are put together, in the order of its result."""
        made = copy.copy(self.made)
        made.factors, made.passed = self.factors, set()
        leaves = {name: getattr(self.made.backward, name) for name in pack}
        if None in leaves.values():
            self._refuse("the gradient of a part of a projection is missing")
        try:
            parts = [made.joined(name, leaf, len(pack)) for name, leaf in leaves.items()]
        except NotShared:
            self._refuse("the gradients of repeated heads are not added up in one place")
        joint, first = parts[0]
        batch, _, length, depth = first.dims
        rows = [*batch, *length] if self.made.layout == "BSND" else [*length, *batch]
        middle = side_by_side([view for _, view in parts], self.interleaved)
        atoms = [*rows, *(middle or ()), *depth]
        if any(other is not joint for other, _ in parts) or math.prod(size for size, _ in atoms) != joint.size:
            self._refuse("the gradients of the parts of a projection are not joined as the parts are")
        nodes = self._settled(made, joint, identity(joint), atoms)
        self.inner |= made.passed | {joint}
        return nodes

    def _settled(self, made, node, view, want):
        """The nodes behind `node`, by views, whose memory is in the order `want`."""
        if merged([atom for dim in view.dims for atom in dim]) == merged(want):
            return [node]
        found = []
        for user, after, dtype, factor in made.following(node, view):
            if dtype != node.dtype or factor != 1:
                self._refuse("the gradient of a projection is cast or scaled")
            made.passed.add(user)
            found += self._settled(made, user, after, want)
        if not found:
            self._refuse("the gradient of a projection lies in another order")
        return found

    def _source_gradient(self, name):
        """Where the gradients of all parts that read `name` are added up."""
        terms = [node for node, _ in self.gradients.get(name, ())]
        parts = [part for part, source in self.source.items() if source == name]
        if not terms:
            return
        if len(terms) != len(parts):
            self._refuse("the gradient of an input is taken for some of its projections only")
        if len(terms) == 1:
            return
        chains = []
        for term in terms:
            chain, at = [], added(term, self._uses)
            while at is not None:
                chain.append(at)
                at = added(at, self._uses_plain)
            chains.append(chain)
        common = next((at for at in chains[0] if all(at in chain for chain in chains)), None)
        if common is None:
            self._refuse("the gradients of the projections' input are not added up in one place")
        self.gradients[name] = []
        self.sums[name] = common, terms

    # --- the new nodes ---

    def _ref(self, name, emit):
        """Slot `name` in the shape of the op."""
        node = self.slots.get(name)
        if node is None:
            return None
        ref = emit.ref(node)
        if name not in ("x", "context", "context_v"):
            return ref
        return emit.reshape(ref, self._rows("query" if name == "x" else "key", node.shape[-1]))

    def _rows(self, name, channels):
        batch, _, length, _ = self.made.geometry.dims(name)
        return (batch, length, channels) if self.made.layout == "BSND" else (length, batch, channels)

    def _spec(self, refs):
        attention = self.made.spec
        args = tuple(None if ref is None else Arg(ref.shape, ref.dtype) for ref in refs)
        try:
            return MhaSpec.parse(
                "fuse", args, num_heads=self.made.geometry.heads, num_kv_heads=self.made.geometry.kv_heads,
                layout="BSH" if self.made.layout == "BSND" else "SBH", transposed=tuple(self.transposed),
                interleaved=self.interleaved,
                recompute=self.options.get("memory") == "recompute",
                grads=None if self.backward is None else tuple(n for n in GRADIENTS if n in self.gradients),
                window_size=(attention.left, attention.right), dropout_p=attention.dropout_p,
                softmax_scale=self.made.forward.scores.scale * math.prod(self.factors.values()),
                softcap=attention.softcap, causal_align=attention.align, mask_fill=attention.mask_fill)
        except (TypeError, ValueError) as error:
            raise Refusal("not_block", detail=str(error)) from error

    def _emit(self):
        made = copy.copy(self.made)
        emit = Emitter(self.made.emit.prefix + "b", self.made.forward.softmax, self.made.emit.handle)
        refs = [self._ref(name, emit) for name in MHA_SLOTS[:11]]
        for operand, arg in zip(self.forward["inputs"][3:9], self.made.spec.inputs[3:9]):
            refs.append(None if arg is None else Ref(operand, arg.shape, arg.dtype))
        spec = self._spec(refs)
        backend = backends.select("fuse", self.options.get("backend"))
        try:
            backend.check("MsFlashMhaFwd", spec)
        except (TypeError, ValueError) as error:
            raise Refusal("not_block", detail=str(error)) from error
        heads = self.made.geometry
        q, k, v = (spec.attention.inputs[i].shape for i in range(3)) if spec.has("w_k") else (None,) * 3
        if q is None:
            width = spec.attention.head_dim
            q, k, v = (self._rows(name, n * width) for name, n in (
                ("query", heads.heads), ("key", heads.kv_heads), ("value", heads.kv_heads)))
        one = (1,)
        merged_heads = self._rows("query", heads.heads * spec.attention.v_head_dim)
        results = [spec.out_shape, q, k, v,
                   merged_heads if spec.has("w_o") else one]
        y, *saved = emit.custom(lambda: backend.mha_forward(spec), refs, [(s, spec.dtype) for s in results] + [
            (spec.attention.lse_shape, "float32")] * 2)
        made.replace, made.replaced, made.sums = [], set(), []
        results = self.out.result if self.out is not None else self.attention
        self._put(made, emit, results, y)
        made.outputs, made.out, made.gradient = {results}, y, None
        if self.backward is not None:
            inputs = refs + [(y, *saved)[i] for i in spec.saved] + [emit.reshape(emit.ref(self.dy), spec.out_shape)]
            by_name = dict(zip(MHA_SLOTS, refs))
            shapes = [(by_name[n].shape, by_name[n].dtype) if n in spec.grads and by_name[n] is not None
                      else (one, spec.dtype) for n in GRADIENTS]
            made.gradient = self._put_gradients(made, emit, emit.custom(
                lambda: backend.mha_backward(spec), inputs, [*shapes, (spec.work_shape, spec.dtype)]))
            if self.bias_grad is not None:
                bias = spec.inputs[MHA_SLOTS.index("bias")]
                emit.custom(lambda: backend.mha_bias_grad(spec), inputs, [(bias.shape, bias.dtype)])
                emit.new[-1]["id"] = self.bias_grad["id"]
                leaves = {leaf.node for leaf in self.made.backward.biases.values()}
                made.replaced |= leaves
                made.replace += [pair for pair in self.made.replace if self.graph.by_id[pair[0]] in leaves]
            made.backward = replace(self.made.backward, grad=identity(self.dy))
        made.passed = set(self.made.passed) | self.inner
        made.emit = copy.copy(self.made.emit)
        made.emit.prefix += "c"     # names are counted, and some are gone
        made.emit.new = self._needed(emit, [operand for _, operand in made.replace]
                                     + [ref.operand for _, _, ref in made.sums])
        made.block, made.moved = spec, []
        made.copies = sum(entry.get("op") in ("Transpose", "BroadcastTo") for entry in made.emit.new)
        return made

    def _put(self, made, emit, node, ref):
        made.replace.append([node.id, emit.cast(emit.reshape(ref, node.shape), node.dtype).operand])
        made.replaced.add(node)

    def _put_gradients(self, made, emit, results):
        first = None
        for name, ref in zip(GRADIENTS, results):
            for node, orientation in self.gradients.get(name, ()):
                first = first or ref
                if orientation is not None:
                    stored = self.transposed["qkvo".index(name[2])]
                    if (orientation == "in_out") != stored:
                        ref = emit.op("Transpose", [ref, (1, 0)], ref.shape[::-1], ref.dtype)
                self._put(made, emit, node, ref)
            if name in self.sums:
                first = first or ref
                node, terms = self.sums[name]
                made.sums.append((node, terms, ref))
                made.replaced.add(node)
        return first

    def _needed(self, emit, operands):
        """The new nodes of both emitters that anything needs, in order."""
        layout = self.made.emit.new
        at = layout.index(self.forward)
        gone = {self.forward["id"], self.backward and self.backward["id"], self.bias_grad and self.bias_grad["id"]}
        entries = layout[:at] + emit.new + [entry for entry in layout[at:] if entry["id"] not in gone]
        needed, kept = set(), []
        for operand in operands:
            needed |= _names(operand)
        for entry in reversed(entries):
            if entry["id"] in needed:
                kept.append(entry)
                for operand in entry["inputs"]:
                    needed |= _names(operand)
        return kept[::-1]


def _names(operand):
    """Names of new nodes in an operand."""
    if isinstance(operand, str):
        return {operand}
    if isinstance(operand, dict) and "item" in operand:
        return {operand["item"][0]} if isinstance(operand["item"][0], str) else set()
    return set()


class Sums:
    """Sums of the old graph of which blocks make some terms: each becomes what the blocks give plus the other terms.

    Several blocks may share one, as the layers of a decoder share the gradient of what they all attend to.
    """

    def __init__(self, views):
        self.views = views
        self.known = {}     # sum: (terms that blocks make, what the blocks give)

    def take(self, made):
        """Notes the sums of one site."""
        for node, terms, ref in made.sums:
            gone, refs = self.known.setdefault(node, (set(), []))
            gone.update(terms)
            refs.append(ref)

    def settle(self, plan, handle):
        """Adds their replacements to the plan."""
        for number, (node, (gone, refs)) in enumerate(self.known.items()):
            emit = Emitter(f"sum{number}_", node, handle)
            refs = refs + [emit.ref(other) for other in self._others(node, gone)]
            total = emit.reshape(refs[0], node.shape)
            for ref in refs[1:]:
                total = emit.op("Add", [total, emit.reshape(ref, node.shape)], node.shape, node.dtype)
            plan["new"] += emit.finish()
            plan["replace"].append([node.id, total.operand])

    def _others(self, node, gone):
        found = []
        for member in summands(node):
            inside = [n for n in self.views.chain(member) if n in gone or self._holds(n, gone)]
            if not inside:
                found.append(member)
            elif inside[0] not in gone:
                found += self._others(inside[0], gone)
        return found

    def _holds(self, node, gone):
        return any(n in gone or self._holds(n, gone) for member in summands(node) for n in self.views.chain(member))
