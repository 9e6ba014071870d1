"""The rule table: how each MindSpore primitive is written in ONNX.

A rule is a function ``rule(b, node, *inputs)``. `b` is the Builder; `node` the MindSpore node (`op`, `attrs`, `type`,
`scope`); the inputs come as Tensor (a value of the graph, fixed or not), Scalar (a number that the graph computes), or
as Python values: numbers, strings, None, DType, tuples of all these. It returns what the node gives: a Tensor, or a
tuple.

    from ms_flash.onnx_export.rules import register

    @register("Softsign")
    def softsign(b, node, x):
        return b.op("Softsign", x)
"""

from __future__ import annotations

import importlib

from ..builder import Scalar, Tensor, Unsupported

RULES = {}
_MODULES = ("arithmetic", "attention", "index", "layers", "product", "reduce", "shape", "structure")


def register(*names):
    """
    Makes a function the rule for MindSpore primitives; it replaces the rule that was there.

    Args:
        names (str): Names of primitives, as the error about missing rules calls them.

    Returns:
        function, a decorator that gives the function back.
    """
    def decorate(rule):
        for name in names:
            RULES[name] = rule
        return rule

    return decorate


__all__ = ["RULES", "Scalar", "Tensor", "Unsupported", "register"]

for _module in _MODULES:    # last: they use `register`; first of all: what users register replaces them
    importlib.import_module("." + _module, __name__)
