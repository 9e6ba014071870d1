"""How attention is written, by what is to run it."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field

from . import body, schema
from .builder import Tensor, Unsupported
from .mindir import TensorType


@dataclass
class Attention:
    """One attention in the terms of the node: inputs (B, N, S, D), a mask as ONNX has it, all attributes."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    attributes: dict = field(default_factory=dict)
    fill: tuple | None = None       # (bool Tensor, number): where it is True the score is the number
    grouped: bool | None = None     # fewer heads of K and V than of Q; None: if the shapes do not say otherwise

    def __post_init__(self):
        self.attributes = {**schema.DEFAULTS, **self.attributes}

    @property
    def kind(self) -> body.Kind:
        """What a body for it must do."""
        a = self.attributes
        banded = bool(a["is_causal"]) or a["left_window_size"] >= 0 or a["right_window_size"] >= 0
        q_heads, k_heads = self.q.shape[1], self.k.shape[1]
        grouped = self.grouped if self.grouped is not None else q_heads != k_heads or q_heads < 0
        return body.Kind("" if self.mask is None else "bool" if self.mask.dtype == "bool" else "float", banded,
                         bool(a["softcap"]), grouped)

    @property
    def result(self):
        """Types of Y and LSE."""
        batch, heads, length, _ = self.q.shape
        return (TensorType(self.q.dtype, (batch, heads, length, self.v.shape[3])),
                TensorType("float32", (batch, heads, length)))


class Profile(abc.ABC):
    """One way to write attention. `default_opset` is that of the model unless the user asks for another."""

    name: str
    summary: str
    default_opset = 18
    lowest_opset = 18
    runs_in_onnxruntime = True

    def __init__(self, opset):
        self.opset = opset

    def attend(self, b, call: Attention):
        """Writes one attention; returns (Y, LSE)."""
        if call.fill is not None:       # a finite score for masked keys: no node has it
            return body.inline(b, call.kind, call.attributes, call.q, call.k, call.v, call.mask, call.fill)
        return self.write(b, call)

    @abc.abstractmethod
    def write(self, b, call: Attention):
        """Writes one attention without a fill."""

    def functions(self):
        """FunctionProtos that the model needs."""
        return []


class Portable(Profile):
    """The node with a function body: a fast kernel where one is registered, ONNX's own ops everywhere else."""

    name = "portable"
    summary = "node ai.msflash::FlashAttention with a function body of standard ops"

    def __init__(self, opset):
        super().__init__(opset)
        self.kinds = {}

    def write(self, b, call):
        kind = call.kind
        if kind not in self.kinds:      # the first body is the function; others are overloads of it
            self.kinds[kind] = kind.label if self.kinds else ""
        return _node(b, call, {}, self.kinds[kind])

    def functions(self):
        return [body.function(kind, self.opset, overload) for kind, overload in self.kinds.items()]


class Inlined(Profile):
    """ONNX's own ops only, for runtimes that know neither the node nor functions."""

    name = "inlined"
    summary = "standard ops only, no functions"

    def write(self, b, call):
        return body.inline(b, call.kind, call.attributes, call.q, call.k, call.v, call.mask)


class Standard(Profile):
    """ai.onnx Attention, for runtimes that have a kernel for it."""

    name = "standard"
    summary = "node Attention of ai.onnx, opset 25"
    default_opset = 25
    lowest_opset = 23

    def write(self, b, call):
        a = dict(call.attributes)
        left, right = a["left_window_size"], a["right_window_size"]
        windowed = left >= 0 or (right >= 0 and not a["is_causal"])
        mask, causal = call.mask, 0
        same = self._same_length(call)
        if a["is_causal"] and not windowed and same:
            causal = 1
        elif windowed or a["is_causal"]:
            # without a past, Attention aligns to the top left corner; a mask says the same on every runtime
            band = body.band(b, a, call.q, call.k)
            mask = band if mask is None else _joined(b, mask, band)
        if mask is not None:
            mask = self._mask(b, mask, call)
        q, scale = call.q, float(a["scale"])
        if scale < 0:       # runtimes take the square root of it for Q and K each
            q, scale = b.op("Neg", q), -scale
        y = b.op("Attention", q, call.k, call.v, mask, is_causal=causal, scale=scale or None,
                 softcap=float(a["softcap"]), softmax_precision=1, dtype=call.q.dtype, shape=call.result[0].shape)
        _, lse = body.inline(b, call.kind, call.attributes, call.q, call.k, call.v, call.mask)
        return y, lse       # nodes of an LSE that nobody reads are removed

    @staticmethod
    def _mask(b, mask, call):
        """A mask as Attention wants it: of the dtype of Q, with all keys, since one with fewer would be padded."""
        mask = mask if mask.dtype == "bool" else b.cast(mask, call.q.dtype)
        if mask.rank == 1:
            mask = b.op("Unsqueeze", mask, b.constant([0], "int64"), shape=(1, *mask.shape))
        if mask.shape[-1] == 1 and call.k.shape[2] != 1:
            dims = b.vector([1] * (mask.rank - 1) + [b.length(call.k, 2)])
            mask = b.op("Expand", mask, dims, shape=(*mask.shape[:-1], call.k.shape[2]))
        return mask

    @staticmethod
    def _same_length(call):
        q_len, k_len = call.q.shape[2], call.k.shape[2]
        return q_len == k_len and q_len >= 0


def _joined(b, mask, band):
    if mask.dtype == "bool":
        return b.op("And", mask, band, dtype="bool", shape=(-1,) * max(mask.rank, 2))
    minus_inf = b.constant(float("-inf"), mask.dtype)
    return b.op("Where", band, mask, minus_inf, dtype=mask.dtype, shape=(-1,) * max(mask.rank, 2))


class Plugin(Profile):
    """The bare node: TensorRT looks for a plugin of its name only when there is no function."""

    name = "plugin"
    summary = "node FlashAttention without a body, for a TensorRT plugin"
    runs_in_onnxruntime = False

    def write(self, b, call):
        return _node(b, call, schema.PLUGIN_ATTRIBUTES)


class MsLite(Profile):
    """The operator that MindSpore Lite's converter knows for Ascend."""

    name = "mslite"
    summary = "node PromptFlashAttention of MindSpore Lite"
    runs_in_onnxruntime = False

    def write(self, b, call):
        a = call.attributes
        heads, kv_heads, head_dim = call.q.shape[1], call.k.shape[1], call.q.shape[3]
        for what, size in (("heads", heads), ("heads of the key", kv_heads), ("head_dim", head_dim)):
            if size < 0:
                raise Unsupported(f"profile 'mslite' needs the number of {what} to be fixed")
        if a["softcap"]:
            raise Unsupported("profile 'mslite' has no softcap")
        if call.mask is not None and call.mask.dtype != "bool":
            raise Unsupported("profile 'mslite' has no float mask")
        if call.v.shape[3] != head_dim:
            raise Unsupported("profile 'mslite' needs the head_dim of the value to be that of the query")
        mask = None
        banded = call.kind.band
        if banded:
            mask = body.band(b, a, call.q, call.k)
        if call.mask is not None:
            mask = call.mask if mask is None else _joined(b, call.mask, mask)
        if mask is not None:        # here True masks out
            mask = b.op("Not", mask)
        # the converter looks at the name alone; the domain keeps the file valid for ONNX's checker
        y = b.op("PromptFlashAttention", call.q, call.k, call.v, mask, num_heads=heads, num_key_value_heads=kv_heads,
                 scale_value=float(a["scale"]) or head_dim ** -0.5, next_tokens=2**31 - 1, pre_tokens=2**31 - 1,
                 inner_precise=0, input_layout="BNSD", domain=MSLITE_DOMAIN, shape=call.result[0].shape)
        _, lse = body.inline(b, call.kind, call.attributes, call.q, call.k, call.v, call.mask)
        return y, lse


def _node(b, call, extra, overload=""):
    """The node of the schema, with every attribute written and both outputs listed."""
    attributes = {name: type(default)(call.attributes[name]) for name, default in schema.DEFAULTS.items()}
    inputs = [call.q, call.k, call.v] + ([] if call.mask is None else [call.mask])
    results = b.op(schema.OP_TYPE, *inputs, domain=schema.DOMAIN, outputs=call.result, overload=overload,
                   **attributes, **extra)
    written = b.block.nodes[-1].inputs
    written += [""] * (len(schema.INPUTS) - len(written))       # evaluators want every input of a function named
    return results


MSLITE_DOMAIN = "ai.mindspore"
PROFILES = {profile.name: profile for profile in (Portable, Inlined, Standard, Plugin, MsLite)}


def make(name, opset, func="export_onnx") -> Profile:
    """The profile of that name, for an opset (None: its own)."""
    from .model import IR_VERSIONS

    if not isinstance(name, str):
        raise TypeError(f"For '{func}', the type of 'profile' must be str, but got {type(name).__name__}.")
    if name not in PROFILES:
        raise ValueError(f"For '{func}', the 'profile' must be one of {', '.join(map(repr, PROFILES))}, but got "
                         f"{name!r}.")
    chosen = PROFILES[name]
    if opset is None:
        opset = chosen.default_opset
    if isinstance(opset, bool) or not isinstance(opset, int):
        raise TypeError(f"For '{func}', the type of 'opset' must be int, but got {type(opset).__name__}.")
    if not chosen.lowest_opset <= opset <= max(IR_VERSIONS):
        raise ValueError(f"For '{func}', the 'opset' must be in the range [{chosen.lowest_opset}, {max(IR_VERSIONS)}] "
                         f"for profile '{name}', but got {opset}.")
    return chosen(opset)

