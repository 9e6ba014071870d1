"""Projections around an attention: ``x @ w + b`` in the forward pass, and what their gradients look like."""

from __future__ import annotations

from dataclasses import dataclass

from .ir import Node, Unknown
from .products import PRODUCTS, product
from .views import View, identity

_ADDS = ("Add", "AddExt", "BiasAdd")
_SUMS = ("ReduceSum", "SumExt")


@dataclass(eq=False)
class Linear:
    """`result` = `x` (rows, in) times `weight`, plus `bias`. `stored_in_out`: so the weight lies in memory."""

    result: Node
    product: Node
    x: Node
    weight: Node
    stored_in_out: bool
    right: View             # the weight as (in, out)
    bias: Node | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Channels in and out."""
        return self.right.shape

    @property
    def inner(self) -> set:
        """Nodes that vanish with it, apart from views."""
        return {self.result, self.product}


def linear(views, node: Node) -> Linear | None:
    """The projection that `node` is the result of, or ``None``."""
    at, bias = node, None
    if at.op == "Dense":
        return _dense(views, at)
    if at.op in _ADDS and at.static:
        sides = [(at.inputs[0], at.inputs[1])] + ([(at.inputs[1], at.inputs[0])] if at.op != "BiasAdd" else [])
        found = [(a, b) for a, b in sides if a.op in PRODUCTS and b.static and b.shape == at.shape[-1:]]
        if not found or not _plain_add(at):
            return None
        at, bias = found[0]
    made = product(views, at)
    if made is None or made.flipped[0] or len(made.operands[1].shape) != 2:
        return None
    return _stored(node, at, made.operands[0], _right(views, made), bias)


def _dense(views, node):
    """mint's linear: x, the weight as (out, in), and a bias or ``None``."""
    x, weight, bias = node.inputs[:3]
    if not (node.static and weight.static and len(weight.shape) == 2 and x.static and len(x.shape) > 1):
        return None
    if bias.op == "Const" and bias.kind != "Tensor":
        bias = None
    return _stored(node, node, x, views.of(weight).swapped(), bias)


def _stored(result, product_node, x, right, bias):
    """A Linear, if its weight is the whole of a node, as it is or transposed."""
    weight = right.base
    if len(weight.shape) != 2:
        return None
    for view, stored_in_out in ((right, True), (right.swapped(), False)):
        if view.key == identity(weight).key:
            return Linear(result, product_node, x, weight, stored_in_out, right, bias)
    return None


def _plain_add(node):
    """Whether an AddExt has no factor."""
    try:
        return node.op != "AddExt" or node.argument(2, 1) == 1
    except Unknown:
        return False


def is_gradient_of_x(views, node: Node, gradient, weight: View) -> bool:
    """Whether `node` is `gradient` (rows, out) times the weight, given as (in, out), transposed."""
    made = product(views, node)
    return (made is not None and not made.flipped[0] and len(made.operands[1].shape) == 2
            and views.of(made.operands[0]).key == gradient
            and _right(views, made).key == weight.swapped().key)


def _right(views, made):
    view = views.of(made.operands[1])
    return view.swapped() if made.flipped[1] else view


def weight_gradient(views, node: Node, gradient, x) -> str | None:
    """"out_in" or "in_out" if `node` is the gradient of a weight in that orientation, else ``None``."""
    made = product(views, node)
    if made is None or len(node.shape) != 2:
        return None
    left, right = made.left.swapped().key, made.right.key
    if (left, right) == (gradient, x):
        return "out_in"
    return "in_out" if (left, right) == (x, gradient) else None


def is_bias_gradient(node: Node, rows: int) -> bool:
    """Whether `node` sums its first input over all axes but the last, which are `rows` in all."""
    if not node.static or node.size * rows != node.inputs[0].size:
        return False
    if node.op == "BiasAddGrad":
        return True
    try:
        axes = node.argument(1) if node.op in _SUMS else ()
    except Unknown:
        return False
    rank = len(node.inputs[0].shape)
    axes = axes if isinstance(axes, tuple) else (axes,)
    return None not in axes and {axis % rank for axis in axes} == set(range(rank - 1))


def summands(node: Node) -> tuple[Node, ...]:
    """The terms of a sum of Tensors of one shape; none if `node` is something else."""
    if node.op == "AddN" and node.inputs[0].op == "MakeTuple":
        return node.inputs[0].inputs
    if node.op in ("Add", "AddExt") and _plain_add(node) and node.inputs[0].shape == node.inputs[1].shape:
        return node.inputs[:2]
    return ()


def added(node: Node, uses) -> Node | None:
    """The sum that takes `node`, if that is its one use; `uses` tells the users of a node."""
    users = uses(node)
    if len(users) == 1 and users[0].op == "MakeTuple":
        users = uses(users[0])
    return users[0] if len(users) == 1 and summands(users[0]) else None
