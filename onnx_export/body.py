"""The attention node written out in ONNX's own ops: as the body of its function, or in place of it."""

from __future__ import annotations

from typing import NamedTuple

from . import schema
from .builder import Builder, Reference, Tensor

_FAR = 2**30        # a window without limit


class Kind(NamedTuple):
    """What a body is made for; the rest it reads from the attributes of its node."""

    mask: str           # "", "bool" or "float"
    band: bool          # causal or windows
    softcap: bool
    grouped: bool       # fewer heads of K and V than of Q

    @property
    def label(self):
        """Name for people, and for the overload of the function."""
        parts = [self.mask and self.mask + "_mask", self.band and "band", self.softcap and "softcap",
                 self.grouped and "grouped"]
        return "_".join(part for part in parts if part) or "plain"


class _Attributes:
    """The attributes as Tensors: read from the node of a function, or known."""

    def __init__(self, b, values=None):
        self.b, self.values = b, values

    def _reference(self, name):
        kind = type(schema.DEFAULTS[name])
        key = "value_float" if kind is float else "value_int"
        return self.b.op("Constant", dtype="float32" if kind is float else "int64", shape=(),
                         **{key: Reference(name, kind)})

    def scale(self, head_dim):
        """Factor of the scores; `head_dim` is a float32 Tensor of rank 0, or a number."""
        b = self.b
        if self.values is not None and isinstance(head_dim, int):
            return b.constant(self.values["scale"] or head_dim ** -0.5, "float32")
        if self.values is not None and self.values["scale"]:
            return b.constant(self.values["scale"], "float32")
        default = b.op("Reciprocal", b.op("Sqrt", head_dim))
        if self.values is not None:
            return default
        given = self._reference("scale")
        zero = b.op("Equal", given, b.constant(0.0, "float32"), dtype="bool")
        return b.op("Where", zero, default, given, dtype="float32")

    def softcap(self):
        """Bound of the scores, float32."""
        if self.values is not None:
            return self.b.constant(self.values["softcap"], "float32")
        return self._reference("softcap")

    def band(self, q_len, k_len):
        """(lowest, highest) of key - query inside the band, int64 Tensors; None is no limit."""
        b = self.b
        if self.values is not None:
            left, right = self.values["left_window_size"], self.values["right_window_size"]
            right = 0 if self.values["is_causal"] else right
            shift = b.op("Sub", k_len, q_len) if self.values["causal_alignment"] else None
            limit = lambda n: b.constant(n, "int64") if shift is None else b.op("Add", shift, b.constant(n, "int64"))
            return None if left < 0 else limit(-left), None if right < 0 else limit(right)
        far, zero = b.constant(_FAR, "int64"), b.constant(0, "int64")
        shift = b.op("Mul", self._reference("causal_alignment"), b.op("Sub", k_len, q_len))
        sides = []
        for name in ("left_window_size", "right_window_size"):
            side = self._reference(name)
            sides.append(b.op("Where", b.op("Less", side, zero, dtype="bool"), far, side, dtype="int64"))
        causal = b.op("Equal", self._reference("is_causal"), zero, dtype="bool")
        right = b.op("Where", causal, sides[1], zero, dtype="int64")
        return b.op("Sub", shift, sides[0]), b.op("Add", shift, right)


def function(kind: Kind, opset: int, overload=""):
    """The FunctionProto of the node for one Kind."""
    from .extras import need
    from .model import node_proto

    onnx = need("onnx")
    b = Builder(opset, constants_inside=True)
    dtype, unknown = "float32", (-1,) * 4
    q, k, v = (Tensor(dtype, unknown, b.unique(t.name)) for t in schema.INPUTS[:3])
    mask = Tensor("bool" if kind.mask == "bool" else dtype, unknown, b.unique("attn_mask")) if kind.mask else None
    for output in schema.OUTPUTS:
        b.unique(output.name)
    write(b, kind, _Attributes(b), q, k, v, mask, generic=True)
    proto = onnx.FunctionProto(name=schema.OP_TYPE, domain=schema.DOMAIN, overload=overload)
    proto.input.extend(t.name for t in schema.INPUTS)
    proto.output.extend(t.name for t in schema.OUTPUTS)
    proto.attribute.extend(a.name for a in schema.ATTRIBUTES)
    proto.node.extend(node_proto(node) for node in b.block.nodes)
    proto.opset_import.append(onnx.helper.make_opsetid("", opset))
    proto.doc_string = f"{schema.OP_TYPE} in ONNX's own ops: {kind.label.replace('_', ' ')}"
    return proto


def inline(b, kind: Kind, attributes, q, k, v, mask, fill=None):
    """The same nodes in the graph itself; returns (Y, LSE). `fill`: (bool Tensor, number), where that Tensor is True
    the score is the number."""
    return write(b, kind, _Attributes(b, attributes), q, k, v, mask, fill=fill)


def write(b, kind, attributes, q, k, v, mask, generic=False, fill=None):
    """Writes the nodes. `generic`: for any dtype, with the names of the schema for the results."""
    f32 = "float32"
    wide = (lambda x: b.op("Cast", x, to=1, dtype=f32)) if generic else (lambda x: b.cast(x, f32))
    batch, heads, q_len, head_dim = q.shape
    kv_heads, k_len = k.shape[1], k.shape[2]
    value_dim = v.shape[3]
    rows = (batch, heads, q_len)
    scores_shape = (*rows, k_len)

    q32, k32, v32 = wide(q), wide(k), wide(v)
    head = head_dim if head_dim > 0 else b.op("Squeeze", b.cast(b.length(q, 3), f32), b.constant([0], "int64"),
                                              dtype=f32, shape=())
    q32 = b.op("Mul", q32, attributes.scale(head))
    k_transposed = b.op("Transpose", k32, perm=[0, 1, 3, 2], shape=(batch, kv_heads, head_dim, k_len))
    if kind.grouped:
        fold = b.vector([0, b.length(k, 1), -1, b.length(q, 3)])
        q32 = b.op("Reshape", q32, fold, shape=(batch, kv_heads, -1, head_dim))
    scores = b.op("MatMul", q32, k_transposed, shape=(batch, kv_heads, -1, k_len) if kind.grouped else scores_shape)
    if kind.grouped:
        unfold = b.vector([0, b.length(q, 1), -1, b.length(k, 2)])
        scores = b.op("Reshape", scores, unfold, shape=scores_shape)
    if kind.softcap:
        cap = attributes.softcap()
        scores = b.op("Mul", b.op("Tanh", b.op("Div", scores, cap)), cap)

    def log_sum(op, *inputs, **attrs):
        return _named(b, op, "LSE", *inputs, **attrs) if generic else b.op(op, *inputs, shape=rows, name="LSE", **attrs)

    minus_inf, zero = b.constant(float("-inf"), f32), b.constant(0.0, f32)
    allowed = None
    if kind.mask == "bool":
        allowed = b.op("Expand", mask, b.constant([1, 1, 1, 1], "int64"), shape=(-1,) * 4)
    elif kind.mask == "float":
        added = b.op("Expand", wide(mask), b.constant([1, 1, 1, 1], "int64"), shape=(-1,) * 4)
        scores = b.op("Add", scores, added, shape=scores_shape)
        allowed = b.op("Not", b.op("Equal", added, minus_inf, dtype="bool"))
    if fill is not None:
        scores = b.op("Where", fill[0], b.constant(fill[1], f32), scores, dtype=f32, shape=scores_shape)
    if kind.band:
        band = _band(b, attributes, q, k)
        allowed = band if allowed is None else b.op("And", allowed, band, shape=(-1,) * 4)
    if allowed is None:
        lse = log_sum("ReduceLogSumExp", scores, b.constant([3], "int64"), keepdims=0)
        weights, total = b.op("Softmax", scores, axis=-1), None
    else:
        scores = b.op("Where", allowed, scores, minus_inf, dtype=f32, shape=scores_shape)
        seen = _seen(b, allowed, kind)
        v32 = b.op("Where", seen, v32, zero, dtype=f32, shape=v.shape)      # 0 * NaN of a key that nobody sees
        top = b.op("ReduceMax", scores, b.constant([3], "int64"), keepdims=1, shape=(*rows, 1))
        empty = b.op("Equal", top, minus_inf, dtype="bool")
        shift = b.op("Where", empty, zero, top, dtype=f32, shape=top.shape)
        weights = b.op("Exp", b.op("Sub", scores, shift))
        total = b.op("ReduceSum", weights, b.constant([3], "int64"), keepdims=1, shape=top.shape)
        log = b.op("Add", shift, b.op("Log", total))
        lse = log_sum("Squeeze", log, b.constant([3], "int64"))
        # a row with a key has a total of 1 or more: its largest term is exp(0)
        total = b.op("Max", total, b.constant(1.0, f32))
    if kind.grouped:
        weights = b.op("Reshape", weights, b.vector([0, b.length(k, 1), -1, b.length(k, 2)]),
                       shape=(batch, kv_heads, -1, k_len))
    out = b.op("MatMul", weights, v32, shape=(*rows, value_dim))
    if kind.grouped:
        out = b.op("Reshape", out, b.vector([0, b.length(q, 1), -1, b.length(v, 3)]), shape=(*rows, value_dim))
    if total is not None:
        out = b.op("Div", out, total)
    out = _named(b, "CastLike", "Y", out, q) if generic else b.cast(out, q.dtype)
    return out, lse


def _seen(b, allowed, kind):
    """bool (..., T, 1): the keys that any query sees."""
    flat = not kind.mask        # a band alone is (S, T)
    seen = b.op("ReduceMax", b.op("Cast", allowed, to=2, dtype="uint8"),
                b.constant([0] if flat else [1, 2], "int64"), keepdims=1, shape=(1, -1) if flat else (-1, 1, 1, -1))
    seen = b.op("Transpose", seen, perm=[1, 0] if flat else [0, 1, 3, 2])
    return b.op("Cast", seen, to=9, dtype="bool")


def _named(b, op, name, *inputs, **attrs):
    """A node whose result has exactly this name: an output of the function."""
    result = b.op(op, *inputs, **attrs)
    b.block.nodes[-1].outputs = [name]
    result.name = name
    return result


def band(b, attributes, q, k):
    """bool (Sq, Sk), True = seen: the band of the given attributes."""
    return _band(b, _Attributes(b, attributes), q, k)


def _band(b, attributes, q, k):
    """bool (Sq, Sk): which keys the band leaves."""
    one = lambda x, axis: b.tensor(b.length(x, axis), "int64")
    q_len, k_len = one(q, 2), one(k, 2)
    start, step = b.constant(0, "int64"), b.constant(1, "int64")
    queries = b.op("Unsqueeze", b.op("Range", start, q_len, step, shape=(-1,)), b.constant([1], "int64"), shape=(-1, 1))
    keys = b.op("Unsqueeze", b.op("Range", start, k_len, step, shape=(-1,)), b.constant([0], "int64"), shape=(1, -1))
    distance = b.op("Sub", keys, queries, shape=(q.shape[2], k.shape[2]))
    low, high = attributes.band(q_len, k_len)
    inside = []
    if low is not None:
        inside.append(b.op("GreaterOrEqual", distance, low, dtype="bool"))
    if high is not None:
        inside.append(b.op("LessOrEqual", distance, high, dtype="bool"))
    return inside[0] if len(inside) == 1 else b.op("And", *inside)
