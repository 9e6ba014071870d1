"""One attention in the forward pass: scores, softmax, dropout, and the product with the values."""

from __future__ import annotations

from dataclasses import dataclass, field

from .constants import Constants
from .ir import FLOATS, Graph, Node, Unknown, orders
from .products import PRODUCTS, Product, product
from .reasons import Refusal
from .scores import ScoreGrammar, Scores, Step
from .views import Views, merged

SOFTMAX = ("Softmax",)
SOFTMAX_GRADIENT = {"SoftmaxBackward": (0, 1), "SoftmaxGrad": (1, 0)}    # where the gradient and the softmax are
GRADIENTS = (*SOFTMAX_GRADIENT, "DropoutGrad", "DropoutGradExt", "DropoutDoMaskExt")


@dataclass(eq=False)
class Forward:
    """A match in the forward pass. `inner` are the nodes that vanish, apart from views."""

    softmax: Node
    scores: Scores
    output: Product | None = None       # (batch..., queries, keys) @ (batch..., keys, value head_dim); may have no node
    dropout: Node | None = None
    keep_prob: float = 1.0
    zeroed: Step | None = None  # a mask of the scores that is also put to 0 in the weights
    inner: set = field(default_factory=set)
    before: dict = field(default_factory=dict)      # what the weights were before each node they go through

    @property
    def drops(self) -> bool:
        """Whether weights are dropped: a dropout of rate 0 is there, and drops none."""
        return self.keep_prob != 1

    @property
    def query(self):
        """(batch..., queries, head_dim)."""
        return self.scores.product.left

    @property
    def key(self):
        """(batch..., keys, head_dim)."""
        return self.scores.product.right.swapped()

    @property
    def value(self):
        """(batch..., keys, value head_dim)."""
        return self.output.right


class ForwardGrammar:
    """Finds attention around the softmax nodes of one graph."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.views = Views(graph)
        self.constants = Constants(self.views)
        self.scores = ScoreGrammar(self.views, self.constants)

    def softmax_nodes(self) -> list[Node]:
        """Where attention may be."""
        return self.graph.named(*SOFTMAX)

    def match(self, softmax: Node) -> Forward:
        """The attention around `softmax`. Raises Refusal."""
        self._check_axis(softmax)
        scores = self.scores.read(softmax.inputs[0])
        found = Forward(softmax, scores)
        found.inner = {scores.product.node, softmax} | {step.node for step in scores.steps}
        self._descend(found)
        return found

    def _check_axis(self, softmax):
        if not softmax.static:
            raise Refusal("dynamic_shape", detail=f"softmax of {softmax.shape}")
        try:
            axis = softmax.attrs["axis"] if "axis" in softmax.attrs else softmax.argument(1, -1)
        except Unknown:
            axis = None
        axis = axis[0] if isinstance(axis, (tuple, list)) and len(axis) == 1 else axis
        rank = len(softmax.shape)
        if not isinstance(axis, int) or axis % max(rank, 1) != rank - 1:
            raise Refusal("softmax_axis", axis=axis, shape=softmax.shape)

    def constant_factor(self, node: Node):
        """(what `node` multiplies by a constant number, the number), or (None, 1)."""
        try:
            if node.op in ("Mul", "Muls"):
                for source, other in (node.inputs[:2], node.inputs[1::-1]):
                    if source.static and source.shape == node.shape and self.constants.known(other):
                        return source, self.constants.number(other)
            elif node.op in ("Div", "Divs", "RealDiv") and node.inputs[0].shape == node.shape:
                return node.inputs[0], 1 / self.constants.number(node.inputs[1])
        except (Unknown, ZeroDivisionError):
            pass
        return None, 1.0

    # --- down the graph ---

    def _descend(self, found):
        """Follows the weights from the softmax to the product with the values."""
        todo, others, outputs = [found.softmax], [], []
        while todo:
            at = todo.pop()
            for user, position in self.forward_users(at):
                kind = self._use(found, at, user, position)
                if kind == "output":
                    outputs.append((at, product(self.views, user)))
                elif kind == "through":
                    found.inner.add(user)
                    found.before[user] = at
                    todo.append(user)
                elif kind == "other":
                    others.append(user)
        if len(outputs) > 1 and found.softmax.shape[-2:] == (1, 1):
            # Transposed weights are the weights: the gradient of the values looks like the output, but has no line.
            outputs = [output for output in outputs if output[1].node.line] or outputs
        if len(outputs) > 1:
            raise used("probs_used", outputs[1][1].node)
        if outputs:
            at, found.output = outputs[0]
            found.inner.add(found.output.node)
            if others:
                raise used("probs_used", others[0])
            self._check_path(found, at)
            return
        if not others:
            for at in (found.softmax, *found.before):
                self._check_side(at)
            found.output = self._recomputed(found)
        if found.output is not None:
            return
        for user in others or self._products_of_views(found.softmax):
            self._explain(user)
        raise Refusal("not_attention", detail="its result is not multiplied by values")

    def _check_side(self, node):
        """Refuses weights, or a transposed view of them, that a product of the forward pass takes on its right."""
        for user, position in self.forward_users(node):
            if user.op in PRODUCTS and position == 1 and user.line:     # a product of the backward pass has no line
                raise Refusal("weights_right", where=where(user))
            if self.views.source(user) is node:
                self._check_side(user)

    def _recomputed(self, found):
        """The product with the values as the backward pass implies it, where only the backward needs the weights.

        Recomputation leaves such a softmax: the product itself was computed in the forward pass, and not again.
        """
        ends = {*found.before, found.softmax} - set(found.before.values())
        gradients = [user for user, _ in self.forward_users(found.softmax) if user.op in SOFTMAX_GRADIENT]
        if len(ends) != 1 or len(gradients) != 1:
            return None
        at = gradients[0].inputs[SOFTMAX_GRADIENT[gradients[0].op][0]]
        while at.op in (*GRADIENTS, "Cast", "MaskedFill", "MaskedFillScalar", "TupleGetItem") \
                or self.views.source(at) is not None:
            at = at.inputs[0]
        multiplied, end = product(self.views, at), ends.pop()
        scores = found.scores.product.node
        if multiplied is None or not end.static or multiplied.node.size != scores.size \
                or multiplied.node.shape[-2:] != scores.shape[-2:]:
            return None
        return Product(None, self.views.of(end), multiplied.right.swapped(), (end, multiplied.operands[1]),
                       (False, not multiplied.flipped[1]))

    def _products_of_views(self, node):
        """Products with a weight that take `node`, or a view of it: they mix heads or channels."""
        found = []
        for user, _ in self.forward_users(node):
            if user.op in PRODUCTS:
                bases = [self.views.of(n).base for n in user.inputs[:2] if n.static]
                found += [user for base in bases if base.op == "Load" and len(base.shape) == 2]
            elif self.views.source(user) is node:
                found += self._products_of_views(user)
        return found

    def _check_path(self, found, at):
        """All that the weights go through leads to the one product."""
        path = {found.softmax}
        while at is not found.softmax:
            path.add(at)
            at = found.before[at]
        if found.dropout is not None and found.dropout not in path:
            raise used("probs_used", found.dropout)

    def forward_users(self, node):
        """Users of `node` that compute with it: not the order of side effects."""
        return [(user, position) for user, position in node.users if not orders(user, position)]

    def _use(self, found, at, user, position):
        """What `user` does with the weights `at`: output, through, backward or other."""
        if user.op in GRADIENTS:
            return "backward"
        if user.op in PRODUCTS:
            multiplied = product(self.views, user)
            if multiplied is None:
                return "other"
            flat = multiplied.left.regrouped(found.scores.product.node.shape)
            if position == 0 and flat is not None and flat.key == self.views.of(at).key \
                    and multiplied.left.shape[-1] == found.scores.product.node.shape[-1]:
                return "output"
            return "backward"       # a product over the queries: the gradient of the values, or a refusal there
        if user.op == "Cast":
            return "through" if user.dtype in FLOATS else "other"
        if user.op in ("Dropout", "DropoutExt"):
            return self._dropout(found, user)
        if user.op in ("MaskedFill", "MaskedFillScalar") and position == 0:
            return self._zeroed(found, user)
        if user.op == "TupleGetItem" and at.op in ("Dropout", "DropoutExt"):
            return "through" if user.argument(1) == 0 else "backward"
        if self.views.source(user) is at:
            view = self.views.relative(user, at)
            if view is None:
                return "other"
            same = merged([atom for dim in view.dims for atom in dim]) in ((), ((at.size, 1),))
            if same and user.size == at.size and user.shape[-1] == at.shape[-1]:
                return "through"
            return "backward" if self._only_products(user) else "other"
        return "other"

    def _only_products(self, node):
        """Whether a transposed view of the weights goes into products only, as the gradient of the values has it."""
        return all(user.op in PRODUCTS or (self.views.source(user) is node and self._only_products(user))
                   for user, _ in self.forward_users(node))

    def _dropout(self, found, user):
        if found.dropout is not None:
            return "other"
        keep = self.constants.number(user.inputs[1])
        found.dropout = user
        found.keep_prob = keep if user.op == "Dropout" else 1 - keep
        return "through"

    def _zeroed(self, found, user):
        """Weights put to 0 where the scores were masked are 0 there already, or their whole row is masked."""
        try:
            zero = self.constants.number(user.inputs[2]) == 0
        except Unknown:
            zero = False
        key = self.views.of(user.inputs[1]).key
        for step in found.scores.steps:
            if zero and found.zeroed is None and step.kind == "fill" and not step.keep \
                    and self.views.of(step.other).key == key:
                found.zeroed = step
                return "through"
        return "other"

    def _explain(self, user):
        if user.op in ("MakeTuple", "Return", "Depend"):
            raise Refusal("not_attention", detail="its result is not multiplied by values")
        raise Refusal("probs_modified", op=user.op)


def used(code: str, node: Node) -> Refusal:
    """The refusal that says that `node` uses what would vanish."""
    if node.op == "OtherGraphs":
        return Refusal("other_graph", detail="a branch or loop uses its scores or weights")
    return Refusal(code, op=node.op, where=where(node))


def where(node: Node) -> str:
    """Place of `node` for a text: `` at file.py:12``, or nothing."""
    return f" at {node.line}" if node.line else ""
