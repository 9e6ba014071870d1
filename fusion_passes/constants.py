"""Values that a graph computes from constants alone, such as a causal mask made of ones and tril."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .ir import TYPE_IDS, Node, Unknown
from .views import Views

_LARGEST = 1 << 26     # elements; a mask of 8192 x 8192
_DTYPES = {"bool": np.bool_, "bfloat16": ml_dtypes.bfloat16}


class Constants:
    """Evaluates nodes of one graph with NumPy; `value` raises Unknown for what depends on inputs or parameters."""

    def __init__(self, views: Views):
        self.views = views
        self._known: dict[Node, object] = {}

    def value(self, node: Node):
        """A number, tuple, ``None`` or NumPy array."""
        if node is None:
            raise Unknown
        if node not in self._known:
            self._known[node] = Unknown
            try:
                self._known[node] = self._evaluate(node)
            except (Unknown, TypeError, ValueError, IndexError, KeyError):
                self._known[node] = Unknown
        value = self._known[node]
        if value is Unknown:
            raise Unknown
        return value

    def number(self, node: Node) -> float:
        """The one number that `node` holds, everywhere."""
        value = self.value(node)
        if value is None or isinstance(value, (str, tuple)):
            raise Unknown
        value = np.asarray(value)
        if value.size == 0 or (value.size > 1 and not (value == value.flat[0]).all()):
            raise Unknown
        return float(value.flat[0])

    def known(self, node: Node) -> bool:
        """Whether `node` has a value."""
        try:
            self.value(node)
        except Unknown:
            return False
        return True

    def forget(self) -> None:
        """Drops what was evaluated."""
        self._known.clear()

    def _evaluate(self, node):
        if node.op == "Const":
            return node.constant()
        if node.op in ("Parameter", "FuncGraph", "Call") or not node.static or node.size > _LARGEST:
            raise Unknown
        view = self.views.of(node)
        if view.base is not node:
            return _gather(np.asarray(self.value(view.base)), view).reshape(node.shape)
        if node.op in ("FullLike", "FillLike"):
            return np.broadcast_to(np.asarray(self.number(node.inputs[1]), _numpy(node.dtype)), node.shape)
        if node.op in _ALIKE:
            return np.broadcast_to(np.asarray(_ALIKE[node.op], _numpy(node.dtype)), node.shape)
        rule = _RULES[node.op]
        result = np.asarray(rule(node, *(self._operand(n) for n in node.inputs)))
        return np.broadcast_to(result, node.shape).astype(_numpy(node.dtype))

    def _operand(self, node):
        if node is not None and node.dtype in ("umonad", "iomonad"):
            return None
        return self.value(node)


def _gather(array, view):
    index = np.full((), view.offset)
    for atoms in view.dims:
        for size, stride in atoms:
            index = index[..., None] + np.arange(size) * stride
    return np.ravel(array)[index]


def _numpy(name):
    return _DTYPES.get(name) or np.dtype(name)


def _cast(node, x, *_):
    return np.asarray(x).astype(_numpy(node.dtype))


def _filled(position):
    return lambda node, *args: np.full(node.shape, np.asarray(args[position]).reshape(()))


def _arange(node, start=0, end=None, step=1, *_):
    return np.arange(start, end, step)[:node.shape[0]]


def _triangle(keep):
    def rule(node, x, diagonal=None, *_):
        return keep(x, node.attrs.get("diagonal", 0) if diagonal is None else diagonal)
    return rule


def _simple(function):
    return lambda node, *args: function(*(a for a in args[:function.nin] if a is not None))


def _add_scaled(function):
    return lambda node, x, y, alpha=1, *_: function(x, np.asarray(y) * alpha)


def _select(node, condition, x, y, *_):
    return np.where(condition, x, y)


def _masked_fill(node, x, mask, value, *_):
    return np.where(mask, value, x)


_ALIKE = {"OnesLike": 1, "OnesLikeExt": 1, "ZerosLike": 0, "ZerosLikeExt": 0}    # whatever their input holds
_RULES = {
    "Cast": _cast, "Select": _select, "Where": _select, "MaskedFill": _masked_fill, "MaskedFillScalar": _masked_fill,
    "Ones": lambda node, *_: np.ones(node.shape), "Zeros": lambda node, *_: np.zeros(node.shape),
    "FillScalar": _filled(1), "FillTensor": _filled(1), "FillV2": _filled(1), "Fill": _filled(-1),
"Tril": _triangle(np.tril), "TrilExt": _triangle(np.tril), "Triu": _triangle(np.triu),
    "TriuExt": _triangle(np.triu), "Range": _arange, "Arange": _arange, "ScalarToTensor": _cast, "TupleToTensor": _cast,
    "Add": _simple(np.add), "Sub": _simple(np.subtract), "Mul": _simple(np.multiply), "Muls": _simple(np.multiply),
    "Div": _simple(np.divide), "Divs": _simple(np.divide), "RealDiv": _simple(np.divide),
    "AddScalar": _add_scaled(np.add), "AddExt": _add_scaled(np.add), "SubExt": _add_scaled(np.subtract),
    "SubScalar": _add_scaled(np.subtract), "Pow": _simple(np.power), "PowTensorScalar": _simple(np.power),
    "Sqrt": _simple(np.sqrt), "Rsqrt": lambda node, x, *_: 1 / np.sqrt(x), "Exp": _simple(np.exp),
    "Reciprocal": lambda node, x, *_: 1 / np.asarray(x), "Neg": _simple(np.negative), "Abs": _simple(np.abs),
    "LogicalNot": _simple(np.logical_not), "LogicalAnd": _simple(np.logical_and), "LogicalOr": _simple(np.logical_or),
    "Greater": _simple(np.greater), "GreaterEqual": _simple(np.greater_equal), "Less": _simple(np.less),
    "LessEqual": _simple(np.less_equal), "Equal": _simple(np.equal), "EqScalar": _simple(np.equal),
    "NotEqual": _simple(np.not_equal), "NeScalar": _simple(np.not_equal), "GreaterScalar": _simple(np.greater),
    "GreaterEqualScalar": _simple(np.greater_equal), "LessScalar": _simple(np.less),
    "LessEqualScalar": _simple(np.less_equal), "Minimum": _simple(np.minimum), "Maximum": _simple(np.maximum),
    "BitwiseNot": _simple(np.invert), "Identity": lambda node, x, *_: x,
}


def dtype_name(value) -> str:
    """The dtype that a Cast's argument names: MindSpore puts the number of the type there, or its name."""
    return TYPE_IDS.get(value, value) if not isinstance(value, str) else value
