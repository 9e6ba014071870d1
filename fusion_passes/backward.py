"""The proof, in a graph that holds forward and backward, that its gradient is exactly that of the matched attention.

Nothing is assumed of how MindSpore's autodiff writes it: every operand is matched by the identity of its node, every
factor and mask between the softmax and a product is counted, and what is left over refuses the match.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .forward import SOFTMAX_GRADIENT, Forward, ForwardGrammar, used, where
from .ir import Node, Unknown
from .products import PRODUCTS, product
from .reasons import Refusal
from .views import View, identity, merged

_DROPOUT_GRADIENT = ("DropoutGrad", "DropoutGradExt", "DropoutDoMaskExt")
_SUMS = ("ReduceSum", "SumExt")
SHAPE_ONLY = ("ZerosLike", "ZerosLikeExt", "OnesLike", "OnesLikeExt", "Shape", "TensorShape")
_TOLERANCE = 1e-6      # of factors, which the graph holds as float32


@dataclass(eq=False)
class Leaf:
    """A node of the old graph that is one of the gradients; `flipped` if its last two axes are exchanged.

    `factor` is that of a bias: between the gradient of the softmax's input and this node.
    """

    node: Node
    flipped: bool = False
    factor: float = 1.0


@dataclass(eq=False)
class Backward:
    """The gradients of a match. A missing one is not asked for by the graph."""

    grad: View | None = None                    # of the output: (batch..., queries, value head_dim)
    query: Leaf | None = None
    key: Leaf | None = None
    value: Leaf | None = None
    biases: dict = field(default_factory=dict)  # by Step: Leaf, of the shape of the bias
    inner: set = field(default_factory=set)

    @property
    def leaves(self) -> list[Node]:
        """Nodes that the fused gradient replaces."""
        found = [self.query, self.key, self.value] + list(self.biases.values())
        return [leaf.node for leaf in found if leaf is not None]


class BackwardProof:
    """Proves one match."""

    def __init__(self, grammar: ForwardGrammar, forward: Forward):
        self.views, self.constants = grammar.views, grammar.constants
        self.users = grammar.forward_users
        self.forward, self.found = forward, Backward()
        shape = forward.scores.product.node.shape
        self.batch, (self.queries, self.keys) = math.prod(shape[:-2]), shape[-2:]
        self.value_dim = forward.value.shape[-1]

    def run(self) -> Backward | None:
        """The proven gradients, or ``None`` for a graph without a backward pass here. Raises Refusal."""
        gradients = [user for user, at in self.users(self.forward.softmax)
                     if user.op in SOFTMAX_GRADIENT and at == SOFTMAX_GRADIENT[user.op][1]]
        if len(gradients) > 1:
            raise Refusal("second_order")
        for gradient in gradients:
            self._weights(gradient)
        self._value()
        if self.found.grad is None:
            return None
        for gradient in gradients:
            self.found.inner.add(gradient)
            self._scores(gradient)
        return self.found

    # --- from the gradient of the output to the softmax ---

    def _weights(self, gradient):
        """Upwards: softmax gradient, dropout, product of the gradient of the output with the values."""
        at, dropped, zeroed = gradient.inputs[SOFTMAX_GRADIENT[gradient.op][0]], False, False
        while True:
            view = self.views.of(at)
            if view.base is not at:
                self._need(_plain(view), f"{at.op} between the products")
                self.found.inner.add(at)
                at = view.base
            elif at.op == "Cast":
                self.found.inner.add(at)
                at = at.inputs[0]
            elif at.op in _DROPOUT_GRADIENT or (at.op == "TupleGetItem" and at.inputs[0].op in _DROPOUT_GRADIENT):
                self.found.inner.add(at)
                at = at.inputs[0] if at.op == "TupleGetItem" else at
                self._need(not dropped and self._undrops(at), "its dropout")
                dropped = True
                self.found.inner.add(at)
                at = at.inputs[0]
            elif at.op in ("MaskedFill", "MaskedFillScalar") and not zeroed and self.forward.zeroed is not None \
                    and self._is_zero(at.inputs[2]) and self._is_mask(self.forward.zeroed, at.inputs[1]):
                self.found.inner.add(at)
                at, zeroed = at.inputs[0], True
            else:
                break
        self._need(zeroed == (self.forward.zeroed is not None), "the mask of the weights")
        self._need(dropped == (self.forward.dropout is not None), "its dropout")
        found = product(self.views, at)
        self._need(found is not None, f"the gradient of the weights comes from {at.op}")
        self.found.inner.add(at)
        value = self._canonical(self.forward.value, self.keys, self.value_dim)
        self._need(value.key == self._key(found.right.swapped(), self.keys, self.value_dim),
                   "the gradient of the weights is not a product with the values")
        self._take_grad(found.left)

    def _undrops(self, node):
        mask = node.inputs[1]
        try:
            keep = node.attrs.get("keep_prob")
            if keep is None:
                number = self.constants.number(node.inputs[2])
                keep = number if node.op == "DropoutGrad" else 1 - number
        except (Unknown, IndexError):
            return False
        return (mask.op == "TupleGetItem" and mask.inputs[0] is self.forward.dropout and mask.argument(1) == 1
                and _close(keep, self.forward.keep_prob))

    def _take_grad(self, view):
        view = self._canonical(view, self.queries, self.value_dim)
        if self.found.grad is None:
            self.found.grad = view
        self._need(self.found.grad.key == view.key, "two different gradients of the output are used")

    def _value(self):
        """The product of the weights with the gradient of the output: the gradient of the values."""
        for node in self._products(set(self.forward.before) | {self.forward.softmax}):
            if node is self.forward.output.node:
                continue
            found = product(self.views, node)
            weights = self._weights_key()
            if self._key(found.left.swapped(), self.queries, self.keys) in weights:
                leaf, grad = Leaf(node), found.right
            elif self._key(found.right, self.queries, self.keys) in weights:
                leaf, grad = Leaf(node, True), found.left.swapped()
            else:
                raise used("probs_used", node)
            self._need(self.found.value is None, "the values have two gradients")
            self._need(grad.shape[-2:] == (self.queries, self.value_dim), "the gradient of the values")
            self._take_grad(grad)
            self.found.value = leaf

    def _weights_key(self):
        """What the product with the values multiplies, as the gradient of the values has to."""
        return {self._key(self.forward.output.left, self.queries, self.keys)}

    # --- from the softmax to queries, keys and biases ---

    def _scores(self, gradient):
        """Downwards, counting factors and masks, to every place where a gradient is taken."""
        todo = [(gradient, _State())]
        seen = set()
        while todo:
            at, state = todo.pop()
            if at in seen:
                continue
            seen.add(at)
            self.found.inner.add(at)
            unknown = []
            for user, position in self.users(at):
                if user.op in SHAPE_ONLY:
                    continue
                after = self._through(user, position, state)
                if after is not None:
                    todo.append((user, after))
                elif not (self._product_leaves(user, at, state) if user.op in PRODUCTS
                          or self._is_view_for_products(user, at) else position == 0
                          and self._sum_leaf(user, at, state)):
                    unknown.append(user)
            if unknown:
                self._direct_leaf(at, state, unknown[0])

    def _through(self, user, position, state):
        """The state after `user`, if it is an operation between two steps of the scores, else ``None``."""
        op = user.op
        if op == "Cast":
            return state
        source = self.views.source(user)
        if source is not None and position == 0:
            view = self.views.relative(user, source)
            if view is not None and _plain(view) and user.shape and self._keeps_rows(user):
                return state
            return None
        if op in ("Mul", "Muls", "Div", "Divs", "RealDiv"):
            other = user.inputs[1 - position]
            if other is user.inputs[position] or (op not in ("Mul", "Muls") and position):
                return None
            try:
                number = self.constants.number(other)
            except Unknown:
                return None
            return state.scaled(number if op in ("Mul", "Muls") else 1 / number if number else 0.0)
        if op == "Neg":
            return state.scaled(-1.0)
        if op in ("Add", "AddExt", "MakeTuple") and len(set(user.inputs[:2])) == 1:      # scores added to themselves
            return self._added_to_itself(user, state)
        if op == "AddN" and len(set(user.inputs[0].inputs)) == 1:
            return state
        if op in ("MaskedFill", "MaskedFillScalar") and position == 0 and self._is_zero(user.inputs[2]):
            return self._masked(user.inputs[1], False, state)
        if op in ("Select", "Where") and position in (1, 2) and self._is_zero(user.inputs[3 - position]):
            return self._masked(user.inputs[0], position == 1, state)
        if op == "TanhGrad" and position == 1:
            steps = [s for s in self.forward.scores.steps if s.kind == "tanh" and s.node is user.inputs[0]]
            return state.with_step(steps[0]) if steps else None
        return None

    def _added_to_itself(self, user, state):
        try:
            if user.op == "MakeTuple":
                alike = len(set(user.inputs)) == 1 and all(u.op == "AddN" for u, _ in self.users(user))
                return state.scaled(len(user.inputs)) if alike else None
            return state.scaled(1 + (user.argument(2, 1) if user.op == "AddExt" else 1))
        except Unknown:
            return None

    def _keeps_rows(self, node):
        """A reshape that keeps the keys as last axis, or only adds and drops ones around (queries, keys)."""
        return node.shape[-1] == self.keys

    def _masked(self, mask, keep, state):
        for step in self.forward.scores.steps:
            if step.kind == "fill" and step not in state.steps and step.keep == keep and self._is_mask(step, mask):
                return state.with_step(step)
        return None

    def _is_mask(self, step, mask):
        return step.other is mask or self.views.of(step.other).key == self.views.of(mask).key

    def _is_zero(self, node):
        try:
            return self.constants.number(node) == 0
        except Unknown:
            return False

    def _is_view_for_products(self, node, of):
        """A transpose of the gradient of the scores that only products use."""
        if self.views.source(node) is not of:
            return False
        users = self.users(node)
        return bool(users) and all(user.op in PRODUCTS or self._is_view_for_products(user, node) for user, _ in users)

    def _product_leaves(self, node, gradient, state):
        known = True
        for at in [node] if node.op in PRODUCTS else self._products({node}):
            known = self._product_leaf(at, self.views.of(gradient).base, state) and known
        return known

    def _product_leaf(self, node, gradient, state):
        if node in self.found.leaves:
            return True
        found, scores = product(self.views, node), self.forward.scores
        query = self._key(self.forward.query, self.queries, scores.product.left.shape[-1])
        key = self._key(self.forward.key, self.keys, scores.product.left.shape[-1])
        head_dim = scores.product.left.shape[-1]
        leaf = None
        if found is not None:
            gradient_left = self._is_gradient(found.left, gradient)
            gradient_left_t = self._is_gradient(found.left.swapped(), gradient)
            gradient_right = self._is_gradient(found.right, gradient)
            gradient_right_t = self._is_gradient(found.right.swapped(), gradient)
            if gradient_left and self._key(found.right, self.keys, head_dim) == key:
                leaf = "query", Leaf(node)
            elif gradient_right_t and self._key(found.left.swapped(), self.keys, head_dim) == key:
                leaf = "query", Leaf(node, True)
            elif gradient_left_t and self._key(found.right, self.queries, head_dim) == query:
                leaf = "key", Leaf(node)
            elif gradient_right and self._key(found.left.swapped(), self.queries, head_dim) == query:
                leaf = "key", Leaf(node, True)
        if leaf is None:
            return False
        name, leaf = leaf
        self._need(getattr(self.found, name) is None, f"the {name} has two gradients")
        self._need(state.complete(scores.steps), f"the gradient of the {name} misses a scale or mask")
        setattr(self.found, name, leaf)
        return True

    def _is_gradient(self, view, gradient):
        """Whether `view` is (batch..., queries, keys) of the gradient of the scores that is being followed."""
        shape = self.queries, self.keys
        view = view.regrouped((self.batch,) + shape) if view.shape[-2:] == shape else None
        return view is not None and view.base is gradient and _plain(view)

    def _sum_leaf(self, node, at, state):
        """A sum over the axes along which a bias was repeated: its gradient."""
        axes = self._summed(node, at) if node.op in _SUMS else None
        for step in self.forward.scores.steps:
            if step.kind != "bias" or step in self.found.biases or not step.other.static:
                continue
            wide = identity(step.other).broadcast(step.node.shape)
            wide = wide and wide.regrouped(at.shape)
            if wide is None or axes is None or not state.reaches(self.forward.scores.steps, step):
                continue
            repeated = [any(stride == 0 for _, stride in dim) for dim in wide.dims]
            partly = [any(stride == 0 for _, stride in dim) != all(stride == 0 for _, stride in dim) and bool(dim)
                      for dim in wide.dims]
            needed = {axis for axis, yes in enumerate(repeated) if yes}
            ones = {axis for axis, dim in enumerate(wide.dims) if not dim}
            if any(partly) or not needed <= axes or not axes <= needed | ones:
                continue
            self.found.biases[step] = Leaf(node, factor=state.factor)
            return True
        return False

    def _summed(self, node, at):
        try:
            axes = node.argument(1)
        except Unknown:
            return None
        rank = len(at.shape)
        if axes is None or axes == ():
            return set(range(rank))
        return {axis % rank for axis in (axes if isinstance(axes, tuple) else (axes,))}

    def _direct_leaf(self, at, state, user):
        """The gradient of the scores itself is that of a bias as large as the scores."""
        for step in self.forward.scores.steps:
            if step.kind == "bias" and step not in self.found.biases and step.other.static \
                    and step.other.size == at.size and state.reaches(self.forward.scores.steps, step):
                self.found.biases[step] = Leaf(at, factor=state.factor)
                return
        for node in self.forward.inner - {self.forward.output.node}:
            for other, _ in self.users(node):
                if other.line and other not in self.forward.inner and not self.views.source(other):
                    raise used("scores_used", other)
        if user.op in PRODUCTS + _SUMS:
            raise Refusal("backward_differs", detail=f"{user.op}{where(user)} takes the gradient of the scores")
        raise used("scores_used", user)

    # --- views ---

    def _products(self, nodes):
        """Products that use one of `nodes`, or a view of it."""
        found, todo, seen = [], list(nodes), set()
        while todo:
            at = todo.pop()
            for user, _ in self.users(at):
                if user in seen:
                    continue
                if user.op in PRODUCTS:
                    seen.add(user)
                    found.append(user)
                elif self.views.source(user) is at and user not in nodes:
                    seen.add(user)
                    todo.append(user)
        return found

    def _canonical(self, view, rows, columns):
        view = view.regrouped((self.batch, rows, columns)) if view.shape[-2:] == (rows, columns) else None
        if view is None:
            raise Refusal("backward_differs", detail="its products have other shapes")
        return view

    def _key(self, view, rows, columns):
        if view.shape[-2:] != (rows, columns):
            return None
        view = view.regrouped((self.batch, rows, columns))
        return None if view is None else view.key

    def _need(self, condition, detail):
        if not condition:
            raise Refusal("backward_differs", detail=detail)


@dataclass(frozen=True)
class _State:
    """What the gradient has gone through since the softmax."""

    factor: float = 1.0
    steps: frozenset = frozenset()      # masks and tanh

    def scaled(self, factor):
        return _State(self.factor * factor, self.steps)

    def with_step(self, step):
        return _State(self.factor, self.steps | {step})

    def complete(self, steps) -> bool:
        """Whether this is all that `steps`, from the product to the softmax, do to a gradient."""
        return _close(self.factor, math.prod(s.value for s in steps if s.kind == "scale")) \
            and self.steps == {s for s in steps if s.kind in ("fill", "tanh")}

    def reaches(self, steps, bias) -> bool:
        """Whether the masks and softcap between the softmax and `bias` are gone through, and no others.

        The factor may be any, as where the bias has one of its own: the leaf is that many times the kernel's gradient.
        """
        return self.steps == {s for s in steps[steps.index(bias) + 1:] if s.kind in ("fill", "tanh")}


def _close(a, b):
    return a == b or abs(a - b) <= _TOLERANCE * max(abs(a), abs(b))


def _plain(view):
    """Whether a view has the elements of its base, all of them in their order."""
    return not view.offset and merged([atom for dim in view.dims for atom in dim]) in ((), ((view.base.size, 1),))
