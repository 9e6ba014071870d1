"""From a softmax up to the product of queries and keys: scale, softcap, biases and masks, in any spelling and order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from .constants import Constants
from .ir import FLOATS, Node, Unknown
from .products import PRODUCTS, Product, product
from .reasons import Refusal
from .views import View, Views, merged

_MULTIPLY, _DIVIDE = ("Mul", "Muls"), ("Div", "Divs", "RealDiv")
_ADD, _SUBTRACT = ("Add", "AddExt", "AddScalar", "Adds"), ("Sub", "SubExt", "SubScalar", "Subs")
_FILL, _SELECT = ("MaskedFill", "MaskedFillScalar"), ("Select", "Where")
_DROPOUT = ("Dropout", "DropoutExt", "DropoutDoMask", "DropoutDoMaskExt", "DropoutExtV2")
_SHIFTS = ("Concat", "Pad", "PadV3", "ConstantPadND", "GatherD", "Gather", "StridedSlice", "SliceExt", "Roll")


@dataclass(eq=False)
class Step:
    """One operation between product and softmax. `before` is the scores it takes, `node` what it makes of them."""

    kind: str                   # cast, view, scale, bias, fill, tanh
    node: Node
    before: Node
    value: float = 1.0          # factor of a scale, or of a bias; the score that a fill puts
    other: Node | None = None   # bias or mask
    keep: bool = False          # the mask says which scores to keep


@dataclass(eq=False)
class Term:
    """A bias or mask as the scores see it."""

    node: Node
    view: View                  # dimensions (batch and heads, queries, keys)
    step: Step
    value: float                # factor of a bias, fill of a mask
    keep: bool = False
    const: np.ndarray | None = None     # (batch and heads or 1, queries or 1, keys or 1)


@dataclass
class Scores:
    """Scores in the order in which the kernel computes them: scale, softcap, biases, masks."""

    product: Product
    steps: list[Step]           # from the product to the softmax
    scale: float = 1.0
    softcap: float = 0.0
    biases: list[Term] = field(default_factory=list)
    masks: list[Term] = field(default_factory=list)

    @property
    def terms(self) -> list[Term]:
        """Biases and masks."""
        return self.biases + self.masks


class ScoreGrammar:
    """Reads scores in one graph."""

    def __init__(self, views: Views, constants: Constants):
        self.views, self.constants = views, constants
        self._known = {}

    def read(self, node: Node) -> Scores:
        """The scores that `node` holds. Raises Refusal."""
        if not node.static or not node.shape:
            raise Refusal("dynamic_shape", detail=f"scores {node.shape}")
        steps, found = self._climb(node)
        return self._normal(Scores(found, steps))

    # --- up the graph ---

    def _climb(self, node):
        """Steps and product behind `node`, or the Refusal that says why not, remembered either way."""
        if node not in self._known:
            try:
                self._known[node] = self._climb_from(node)
            except Refusal as refusal:
                self._known[node] = refusal
        found = self._known[node]
        if isinstance(found, Refusal):
            raise found
        return found

    def _climb_from(self, node):
        found = product(self.views, node)
        if found is not None:
            self._check_product(found)
            return [], found
        made = self._step(node)
        made = made if isinstance(made, list) else [made]
        steps, found = self._climb(made[0].before)
        return steps + made, found

    def _check_product(self, found):
        for view, name in ((found.left, "left"), (found.right, "right")):
            base = view.base
            base = base.inputs[0] if base.op == "Load" else base
            if base.op == "Parameter" and base.weight and len(base.shape) == 2:
                inner = found.operands[name == "left"]
                if self._is_about_scores(inner):
                    raise Refusal("scores_modified", op=f"a projection by the weight {base.name}")
                raise Refusal("not_attention", detail=f"its input is a projection by the weight {base.name}")

    def _leads_to_product(self, node):
        try:
            self._climb(node)
        except Refusal:
            return False
        return True

    def _is_about_scores(self, node):
        """Whether `node` is made of a product, in whatever way, for the choice of a reason."""
        try:
            self._climb(node)
        except Refusal as refusal:
            return refusal.code != "not_attention"
        return True

    def _step(self, node):
        if not node.static:
            raise Refusal("dynamic_shape", detail=f"{node.op} {node.shape}")
        view = self.views.of(node)
        if view.base is not node:
            return self._view(node, view)
        op = node.op
        if op == "Cast":
            if node.dtype not in FLOATS or node.inputs[0].dtype not in FLOATS:
                raise Refusal("not_attention", detail=f"its input is a Cast from {node.inputs[0].dtype}")
            return Step("cast", node, node.inputs[0])
        if op in _MULTIPLY:
            return self._multiply(node)
        if op in _DIVIDE:
            return Step("scale", node, node.inputs[0], 1 / self._factor(node, node.inputs[1]))
        if op == "Neg":
            return Step("scale", node, node.inputs[0], -1.0)
        if op in _ADD + _SUBTRACT:
            return self._add(node)
        if op in _FILL:
            if node.shape != node.inputs[0].shape and self._leads_to_product(node.inputs[0]):
                raise Refusal("bias_repeats", shape=node.inputs[1].shape, scores=node.inputs[0].shape)
            return Step("fill", node, node.inputs[0], self._fill(node.inputs[2]), node.inputs[1])
        if op in _SELECT:
            return self._select(node)
        if op == "Tanh":
            return Step("tanh", node, node.inputs[0])
        if op in _DROPOUT or (op == "TupleGetItem" and node.inputs[0].op in _DROPOUT):
            source = node.inputs[0].inputs[0] if op == "TupleGetItem" else node.inputs[0]
            code = "dropout_on_scores" if self._leads_to_product(source) else "not_attention"
            raise Refusal(code, detail="its input goes through dropout")
        if any(n is not None and n.static and self._is_about_scores(n) for n in node.inputs):
            raise Refusal("scores_modified", op=op)
        if op in ("Parameter", "FuncGraph", "Call"):
            raise Refusal("not_attention", detail=f"its input is {node.name or op}")
        raise Refusal("not_attention", detail=f"its input comes from {op}")

    def _view(self, node, view):
        base = view.base
        plain = merged([atom for dim in view.dims for atom in dim]) in ((), ((base.size, 1),)) and not view.offset
        if plain and node.size == base.size and base.shape and base.shape[-1] == node.shape[-1]:
            return Step("view", node, base)
        self._climb(base)       # its own refusal says more
        raise Refusal("rows_not_kept", detail=f"{base.op} {base.shape} is read as {node.shape}")

    def _factor(self, node, other):
        try:
            factor = self.constants.number(other)
        except Unknown:
            try:
                varies = self.constants.known(other) or max(other.shape[-2:], default=1) > 1
            except (TypeError, AttributeError):
                varies = False
            if varies and self._leads_to_product(node.inputs[0] if other is node.inputs[1] else node.inputs[1]):
                raise Refusal("multiplied_mask") from None
            raise Refusal("scale_not_constant", detail=f"{node.op} by {_describe(other)}") from None
        if not math.isfinite(factor) or (factor == 0 and node.op in _DIVIDE):
            raise Refusal("scale_not_constant", detail=f"{node.op} by {factor}")
        return factor

    def _multiply(self, node):
        for score, other in (node.inputs[:2], node.inputs[1::-1]):
            if self.constants.known(other) and not self.constants.known(score):
                return Step("scale", node, score, self._factor(node, other))
        for score, other in (node.inputs[:2], node.inputs[1::-1]):
            if score.static and self._leads_to_product(score):
                if other.static and self._is_about_scores(other):
                    raise Refusal("scores_modified", op=f"{node.op} with scores")
                self._factor(node, other)
        raise Refusal("not_attention", detail="its input is a product of two Tensors, element by element")

    def _add(self, node):
        a, b = node.inputs[:2]
        factor = -1.0 if node.op in _SUBTRACT else 1.0
        if node.op in ("AddExt", "SubExt") and len(node.inputs) > 2:
            factor *= self._number(node, node.inputs[2])
        if a.static and b.static and a.shape == b.shape and self.views.of(a).key == self.views.of(b).key:
            return self._twice(node, a, 1.0 + factor)
        refusals = []
        for score, other, of_score, of_other in ((a, b, 1.0, factor), (b, a, factor, 1.0)):
            if not score.static or not of_score:
                continue
            try:
                _, found = self._climb(score)
            except Refusal as refusal:
                refusals.append(refusal)
                continue
            if score.shape != node.shape:
                refusals.append(Refusal("bias_repeats", shape=other.shape, scores=score.shape))
                continue
            self._check_bias(other)
            self._check_other_scores(node, found, other)
            steps = [Step("bias", node, score, of_other, other)]
            return steps if of_score == 1.0 else [Step("scale", node, score, of_score), *steps]
        refusals = refusals or [Refusal("not_attention", detail=f"its input comes from {node.op}")]
        raise next((r for r in refusals if r.code != "not_attention"), refusals[0])

    def _twice(self, node, score, factor):
        """Scores added to themselves, or taken from themselves."""
        self._climb(score)
        if not factor:
            raise Refusal("scores_modified", op=f"{node.op} with the same scores, which leaves nothing")
        return Step("scale", node, score, factor)

    def _check_other_scores(self, node, found, other):
        """A bias made of the very product that it is added to would be the scores once more, kept whole in memory."""
        if not other.static:
            return
        try:
            _, again = self._climb(other)
        except Refusal:
            return
        if again.node is found.node:
            raise Refusal("scores_modified", op=f"{node.op} with scores of the same product")

    def _check_bias(self, node):
        """A second product, shifted to relative positions, is not a bias worth keeping whole in memory."""
        shifted = False
        while node is not None and node.inputs:
            if node.op in PRODUCTS:
                if shifted:
                    raise Refusal("scores_modified", op="a second product, shifted to relative positions")
                return
            shifted = shifted or node.op in _SHIFTS
            if node.op not in _SHIFTS + ("MakeTuple", "TupleGetItem") + _MULTIPLY + _DIVIDE and \
                    self.views.source(node) is None:
                return
            tuples = [n for n in node.inputs if n is not None and n.op == "MakeTuple"]
            inputs = tuples[0].inputs if tuples else node.inputs
            node = next((n for n in reversed(inputs) if n is not None and n.op not in ("Const", "Parameter", "Load")),
                        None)

    def _number(self, node, source):
        try:
            return self.constants.number(source)
        except Unknown:
            raise Refusal("scale_not_constant", detail=f"{node.op} by {_describe(source)}") from None

    def _fill(self, source):
        try:
            value = self.constants.number(source)
        except Unknown:
            raise Refusal("fill_not_constant") from None
        if math.isnan(value) or value == math.inf:
            raise Refusal("fill_not_constant")
        return value

    def _select(self, node):
        condition, a, b = node.inputs[:3]
        for score, fill, keep in ((a, b, True), (b, a, False)):
            if not score.static or not self._leads_to_product(score):
                continue
            if score.shape != node.shape:
                raise Refusal("bias_repeats", shape=condition.shape, scores=score.shape)
            return Step("fill", node, score, self._fill(fill), condition, keep)
        raise Refusal("not_attention", detail=f"its input comes from {node.op}")

    # --- in the order of the kernel ---

    def _normal(self, scores: Scores) -> Scores:
        for step in scores.steps:
            getattr(self, f"_take_{step.kind}")(scores, step)
        return scores

    def _take_cast(self, scores, step):
        del scores, step        # the kernel keeps scores in float32

    _take_view = _take_cast

    def _take_scale(self, scores, step):
        scores.scale *= step.value
        scores.softcap *= abs(step.value)
        for term in scores.biases:
            term.value *= step.value
        for term in scores.masks:
            term.value *= step.value
            if math.isnan(term.value) or term.value == math.inf:
                raise Refusal("mask_order", detail="masked scores are multiplied by a number that is not positive")

    def _take_tanh(self, scores, step):
        del step
        if scores.softcap or scores.biases or scores.masks:
            raise Refusal("scores_modified", op="Tanh after a bias, a mask or another Tanh")
        scores.softcap = 1.0

    def _take_bias(self, scores, step):
        if any(term.value != -math.inf for term in scores.masks):
            raise Refusal("mask_order", detail="a bias is added to scores that were masked with a finite number")
        if not step.other.static:
            number = self._number(step.node, step.other)
            if number:
                raise Refusal("scores_modified", op=f"{step.node.op} of the number {number}")
            return
        scores.biases.append(self._term(scores, step, step.value))

    def _take_fill(self, scores, step):
        scores.masks.append(self._term(scores, step, step.value))

    def _term(self, scores, step, value):
        other, shape = step.other, scores.product.node.shape
        full = (math.prod(shape[:-2]),) + shape[-2:]
        view = self.views.of(other).broadcast(step.node.shape) if other.static else None
        view = view and view.regrouped(full)
        if view is None:
            raise Refusal("mask_shape", shape=other.shape, scores=step.node.shape)
        const = None
        try:
            const = np.asarray(self.constants.value(other))
            const = np.broadcast_to(const, step.node.shape)
            small = tuple(slice(None) if any(stride for _, stride in dim) else slice(0, 1) for dim in view.dims)
            const = np.reshape(const, full)[small]
        except Unknown:
            pass
        return Term(other, view, step, value, step.keep, const)


def _describe(node):
    while node.op in ("Load", "Depend") and node.inputs:
        node = node.inputs[0]
    return f"the parameter {node.name}" if node.op == "Parameter" and node.weight else f"{node.op} {node.shape}"


