"""The spellings of a batched matrix product."""

from __future__ import annotations

from dataclasses import dataclass

from .ir import Node, Unknown
from .views import View, Views

_WITH_FLAGS = ("MatMul", "BatchMatMul")
_PLAIN = ("MatMulExt", "BatchMatMulExt", "MatMulV2Ext")
PRODUCTS = _WITH_FLAGS + _PLAIN


@dataclass(frozen=True)
class Product:
    """`left` (batch..., rows, inner) @ `right` (batch..., inner, columns), both with the batch of the result."""

    node: Node
    left: View
    right: View
    operands: tuple[Node, Node]
    flipped: tuple[bool, bool]      # whether the operand is used transposed

    @property
    def batch(self) -> tuple[int, ...]:
        """The dimensions before the last two."""
        return self.right.shape[:-2]


def product(views: Views, node: Node) -> Product | None:
    """`node` as a product, or ``None``."""
    if node.op not in PRODUCTS or not node.static or len(node.shape) < 2:
        return None
    a, b = node.inputs[:2]
    if not (a.static and b.static) or min(len(a.shape), len(b.shape)) < 2:
        return None
    flipped = (False, False)
    if node.op in _WITH_FLAGS:
        try:
            flipped = tuple(bool(node.attrs[name] if name in node.attrs else node.argument(at, False))
                            for at, name in ((2, "transpose_a"), (3, "transpose_b")))
        except Unknown:
            return None
    sides = []
    for operand, flip in zip((a, b), flipped):
        view = views.of(operand)
        view = view.swapped() if flip else view
        wide = view.broadcast(node.shape[:-2] + view.shape[-2:])
        if wide is None:
            return None
        sides.append(wide)
    left, right = sides
    if left.shape[-1] != right.shape[-2] or (left.shape[-2], right.shape[-1]) != node.shape[-2:]:
        return None
    return Product(node, left, right, (a, b), flipped)
