"""The seed of a fused dropout: drawn anew at every step, by a random op of MindSpore inside the graph."""

from __future__ import annotations

import os

from mindspore import get_seed
from mindspore.ops import Primitive

from .emit import Emitter, Ref

_HIGHEST = 2**31 - 1


def seed(emit: Emitter) -> Ref:
    """(seed, offset) as an int64 Tensor; repeatable after ``mindspore.set_seed``, and different for every site."""
    chosen = get_seed()
    first = int.from_bytes(os.urandom(4), "little") >> 1 if chosen is None else chosen % _HIGHEST
    drawn = emit.custom(lambda: _random(first, _site_number(emit)), [
        Ref({"const": [2]}, (), ""), _bound(0), _bound(_HIGHEST)], [((2,), "int32")])[0]
    return emit.cast(drawn, "int64")


def _random(first, second):
    """MindSpore's UniformInt, made by hand: its class logs that it is deprecated, to the user who never called it."""
    random = Primitive("UniformInt")
    random.init_prim_io_names(inputs=["shape", "minval", "maxval"], outputs=["output"])
    for name, value in (("seed", first), ("seed2", second), ("side_effect_hidden", True)):
        random.add_prim_attr(name, value)
    return random


def _site_number(emit):
    """A number of the site, from the prefix of its node names."""
    return 1 + int("".join(c for c in emit.prefix if c.isdigit()) or 0)


def _bound(value):
    return Ref({"tensor": {"dtype": "int32", "shape": [], "values": [value]}}, (), "int32")
