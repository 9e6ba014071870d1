"""What happens to a request before its op runs: in PyNative at the call, in a graph while that is compiled.

Apart from functional.py, whose functions MindSpore's rewriting (AMP O1) copies: they may refer to imported names only.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, get_seed
from mindspore.common import dtype as mstype
from mindspore.common.generator import default_generator
from mindspore.common.seed import _KERNEL_SEED
from mindspore.ops import PrimitiveWithInfer

from . import backends
from .spec import OPTIONS, SLOTS, Arg, AttentionSpec, Unknown, type_error, value_error

_DTYPE_NAMES = {getattr(mstype, name): name for name in (
    "float16", "float32", "float64", "bfloat16", "bool_", "uint8", "int8", "int16", "int32", "int64", "uint16",
    "uint32", "uint64", "complex64", "complex128")}
_DTYPE_NAMES[mstype.bool_] = "bool"
PLACEHOLDER = Tensor([0.0], mstype.float32)
GENERATOR_STEP = Tensor(1, mstype.int64)


class _Resolve(PrimitiveWithInfer):
    """Turns a request into the op that serves it: in PyNative when called, in a graph while that is compiled.

    Its result is a tuple (op, seed_source, seed_shift, takes_none, shapes): `op` is the primitive to call; `seed_shift`
    is for a drawn seed; `shapes` is ``None``, or those of (out, lse) when there is nothing to compute.
    """

    def __init__(self):
        super().__init__("MsFlashResolve")
        self.set_const_prim(True)
        self.add_prim_attr("constexpr_prim", True)
        self.add_prim_attr("forbid_reuse_result", True)

    def __infer__(self, func, backend, *items):
        func, backend = func["value"], _graph_option("backend", backend)
        inputs = tuple(_graph_input(func, name, item) for name, item in zip(SLOTS, items))
        options = [_graph_option(name, item) for name, item in zip(("window_size",) + OPTIONS, items[len(SLOTS):])]
        return {"shape": None, "dtype": None, "value": _resolve_spec(func, backend, inputs, options[0],
                                                                     tuple(options[1:]), True)}

    def __call__(self, func, backend, *items):
        inputs = tuple([_input(func, name, x) for name, x in zip(SLOTS, items)])
        return _resolve_spec(func, backend, inputs, items[len(SLOTS)], items[len(SLOTS) + 1:], False)


def _resolve_spec(func, backend, inputs, window_size, options, in_graph):
    chosen = backends.select(func, backend)
    spec = AttentionSpec.parse(func, inputs, window_size, options)
    if in_graph and not chosen.dynamic_shape and not spec.static:
        raise value_error(func, f"the backend '{chosen.name}' needs shapes that are known when a graph is compiled, "
                                f"but got query {spec.inputs[0]}. Hint: use another backend, or PyNative mode.")
    shapes = (spec.out_shape, spec.lse_shape) if spec.empty and -1 not in spec.out_shape + spec.lse_shape else None
    shift = _seed_shift(in_graph) if spec.seed_source == "generator" else None
    return chosen.forward(spec), spec.seed_source, shift, chosen.takes_none, shapes


def _input(func, name, x):
    """What the spec needs to know of an input, in PyNative."""
    if x is None:
        return None
    if isinstance(x, Tensor):
        return Arg(x.shape, _DTYPE_NAMES.get(x.dtype) or str(x.dtype).lower())
    return _not_a_tensor(func, name, x)


def _graph_input(func, name, item):
    """The same while a graph is compiled, from what MindSpore has inferred."""
    dtype = item["dtype"]
    if dtype is None:
        return None
    if hasattr(dtype, "element_type"):
        shape = tuple(item["shape"])
        return Arg(None if -2 in shape else shape, _DTYPE_NAMES.get(dtype.element_type()) or str(dtype.element_type()))
    return _not_a_tensor(func, name, _graph_option(name, item))


def _not_a_tensor(func, name, x):
    pair = isinstance(x, (tuple, list))
    if (name == "attn_mask" and pair) or (name == "seed" and not pair):
        return x
    kind = x if isinstance(x, Unknown) else type(x).__name__
    raise type_error(func, f"the type of '{name}' must be Tensor, but got {kind}.")


def _graph_option(name, item):
    """The value of a constant; a graph holds floats as float32, so the shortest text gives the number back."""
    dtype, value = item["dtype"], item["value"]
    if dtype is None:
        return None
    if hasattr(dtype, "element_type"):
        return Unknown("Tensor")
    if value is None:
        return Unknown(f"a variable of the graph ({dtype})")
    return value


def _seed_shift(in_graph):
    """(seed, offset) to add to what MindSpore's default generator draws, so that mindspore.set_seed counts.

    set_seed leaves that generator alone: after it, the stream becomes (seed, 0), (seed, 1), ... by subtraction of where
    the generator stands. Reseeding it instead would break recomputation, which puts its state back. A graph reads the
    generator's parameters; PyNative keeps the state inside the operator.
    """
    mark = ("MsFlashDropout", int(in_graph))     # set_seed puts the second number back as the value
    seed = get_seed()
    if seed is not None and _KERNEL_SEED.get(mark, mark[1]) == mark[1]:
        _KERNEL_SEED[mark] = -1
        if in_graph:
            start = default_generator._seed.asnumpy(), default_generator._offset.asnumpy()
        else:
            start = default_generator.get_state().asnumpy().view(np.int64)
        _shifts[in_graph] = seed - int(start[0]), -int(start[1])
    return _shifts[in_graph]


_shifts = {True: (0, 0), False: (0, 0)}
resolve = _Resolve()
# A recomputed graph would draw anew, and its backward work with another mask than its forward.
default_generator._generator.recompute(False)
