"""The node ``ai.msflash::FlashAttention``, version 1: one table for function bodies, kernels, checks and docs.

Y = softmax(softcap * tanh(scale * Q K^T / softcap) + mask) V over the keys that mask and band leave, in float32
whatever the dtype of Q. Names follow ai.onnx ``Attention``; what differs from it is fixed here:

- A row with no allowed key gives Y = 0 and LSE = -inf, never NaN. A key whose mask is False or -inf, or that is outside
  the band, is not read into any result: NaN stored there has no effect.
- A finite number in a float mask is added, however low it is.
- With o = T - S for ``causal_alignment`` 1 and o = 0 for 0, query i sees the keys j with
  i + o - left_window_size <= j <= i + o + right_window_size, both inclusive, -1 being no limit; ``is_causal`` adds
  j <= i + o.
- Query head h reads head h // (Hq / Hkv) of K and V; Hq is a multiple of Hkv.
- LSE is the natural logarithm of the softmax denominator.
"""

from __future__ import annotations

from typing import NamedTuple

DOMAIN = "ai.msflash"
OP_TYPE = "FlashAttention"
SINCE_VERSION = 1
DOC = __doc__

# Type constraints. M is chosen independently of E.
TYPES = {
    "E": ("tensor(float)", "tensor(float16)", "tensor(bfloat16)"),
    "M": ("tensor(bool)", "tensor(float)", "tensor(float16)", "tensor(bfloat16)"),
    "F": ("tensor(float)",),
}


class Tensor(NamedTuple):
    """An input or output. `shape` names its axes."""

    name: str
    type: str           # key of TYPES
    shape: str
    optional: bool
    meaning: str


class Attribute(NamedTuple):
    """An attribute. Its type is that of `default`: int or float. The exporter writes every one on every node."""

    name: str
    default: int | float
    meaning: str


INPUTS = (
    Tensor("Q", "E", "[B,Hq,S,D]", False, "queries"),
    Tensor("K", "E", "[B,Hkv,T,D]", False, "keys"),
    Tensor("V", "E", "[B,Hkv,T,Dv]", False, "values"),
    Tensor("attn_mask", "M", "[B,Hq,S,T]", True,
           "right-aligned with [B,Hq,S,T], rank 1 to 4, every axis 1 or full; bool: True = keep; float: added"),
)

OUTPUTS = (
    Tensor("Y", "E", "[B,Hq,S,Dv]", False, "result"),
    Tensor("LSE", "F", "[B,Hq,S]", True, "log-sum-exp of the scores of each row"),
)

ATTRIBUTES = (
    Attribute("is_causal", 0, "1: no key after the diagonal"),
    Attribute("scale", 0.0, "factor of Q K^T; 0 is 1 / sqrt(D)"),
    Attribute("softcap", 0.0, "bound of the scaled scores; 0 is none"),
    Attribute("left_window_size", -1, "keys before the diagonal that a query sees; -1 is no limit"),
    Attribute("right_window_size", -1, "keys after the diagonal that a query sees; -1 is no limit"),
    Attribute("causal_alignment", 1, "corner where the diagonal ends: 1 bottom right, 0 top left"),
)

DEFAULTS = {attribute.name: attribute.default for attribute in ATTRIBUTES}

# Strings that TensorRT reads to find its plugin. Other runtimes ignore them; profile "plugin" writes them.
PLUGIN_ATTRIBUTES = {"plugin_version": "1", "plugin_namespace": ""}
