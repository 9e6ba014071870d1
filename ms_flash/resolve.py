"""What happens to a request before its op runs: in PyNative at the call, in a graph while that is compiled.

Apart from functional.py, whose functions MindSpore's rewriting (AMP O1) copies: they may refer to imported names only.
"""

from __future__ import annotations

import functools
import threading

import numpy as np
from mindspore import Tensor, get_seed
from mindspore.common import dtype as mstype
from mindspore.common.generator import default_generator
from mindspore.common.seed import _KERNEL_SEED

from . import backends
from .compile_time import CompileTime
from .spec import SLOTS, Arg, AttentionSpec, type_error, type_name, value_error

PLACEHOLDER = Tensor([0.0], mstype.float32)
GENERATOR_STEP = Tensor(1, mstype.int64)
_DTYPES = {getattr(mstype, name): name for name in ("float16", "float32", "bfloat16", "uint8", "int32", "int64")}
_DTYPES[mstype.bool_] = "bool"


class _Resolve(CompileTime):
    """Turns a request into the op that serves it.

    The arguments are the name of the public function, the backend, the inputs by slot, window_size and spec.OPTIONS.
    The result is a tuple (handle, seed_source, seed_shift, takes_none, shapes, form): `op_of(handle)` is the primitive
    to call; `seed_shift` is for a drawn seed; `shapes` is ``None``, or those of (out, lse) when there is nothing to
    compute; `form` is that of the backend, see `Backend.form`.

    The primitive itself must not be in the tuple. Once certain graphs were compiled in a process (see
    test_graph_after_other_graphs), MindSpore 2.10 fails on every graph with a Custom inside a constant tuple:
    "ValueProblem(DeadNode) can't be converted to abstract". By itself it is a constant like any other.
    """

    def __init__(self):
        super().__init__("MsFlashResolve", functools.partial(_resolve, True))

    def __call__(self, func, backend, *args):
        inputs = [described(x) for x in args[:len(SLOTS)]]
        resolved = _resolve(False, func, backend, *inputs, *args[len(SLOTS):])
        named = dict(zip(SLOTS, args))
        if named["cu_seqlens_q"] is not None:
            names = "query", "key", "attn_mask", "cu_seqlens_q", "cu_seqlens_k"
            _check_lengths(func, *(named[name] for name in names))
        return resolved


def _resolve(in_graph, func, backend, *args):
    chosen = backends.select(func, backend)
    inputs, window_size, options = args[:len(SLOTS)], args[len(SLOTS)], args[len(SLOTS) + 1:]
    for name, x in zip(SLOTS, inputs):
        if x is not None and not isinstance(x, Arg):
            _check_not_tensor(func, name, x)
    spec = AttentionSpec.parse(func, inputs, window_size, options)
    if not chosen.dynamic_shape and not spec.static:
        raise value_error(func, f"the backend '{chosen.name}' needs shapes that are known when a graph is compiled, "
                                f"but got query {spec.inputs[0]}. Hint: use another backend, or PyNative mode.")
    shift = _seed_shift(in_graph) if spec.seed_source == "generator" else None
    return (handle_of(chosen.forward(spec)), spec.seed_source, shift, chosen.takes_none, spec.empty_shapes,
            chosen.form(spec))


def described(x):
    """Of a Tensor its shape and dtype, anything else as it is."""
    return Arg(x.shape, _DTYPES.get(x.dtype) or str(x.dtype).lower()) if isinstance(x, Tensor) else x


def handle_of(op):
    """A number for `op`, which its backend keeps."""
    found = _handles.get(id(op))
    if found is None:
        with _numbering:
            found = _handles.setdefault(id(op), len(_ops))
            if found == len(_ops):
                _ops.append(op)
    return found


def _check_lengths(func, query, key, attn_mask, cu_q, cu_k):
    """Cumulative lengths are data: only PyNative can see them before the op runs. In a graph the op itself checks."""
    longest = []
    for name, cu, rows in (("cu_seqlens_q", cu_q, query.shape[0]), ("cu_seqlens_k", cu_k, key.shape[0])):
        values = cu.asnumpy()
        lengths = np.diff(values)
        if values[0] != 0:
            raise value_error(func, f"'{name}' must start with 0, but got {values[0]}.")
        if (lengths < 0).any():
            at = int(np.argmax(lengths < 0))
            raise value_error(func, f"'{name}' must not decrease, but got {values[at]} followed by {values[at + 1]}.")
        if values[-1] > rows:
            raise value_error(func, f"the last value of '{name}' must be at most the number of rows {rows}, but got "
                                    f"{values[-1]}.")
        longest.append(int(lengths.max(initial=0)))
    if isinstance(attn_mask, Tensor):
        for axis, size, need in zip(("query", "key"), attn_mask.shape, longest):
            if size != 1 and size < need:
                raise value_error(func, "the shape of 'attn_mask' must be (largest query length, largest key length) "
                                        f"= ({longest[0]}, {longest[1]}) at least, but got {tuple(attn_mask.shape)}: "
                                        f"too short for the longest {axis}.")


_OTHER_TYPES = {"attn_mask": "Tensor or a tuple (left, right)", "seed": "int or Tensor"}


def _check_not_tensor(func, name, x):
    """attn_mask may be a window and seed an int; nothing else."""
    pair = isinstance(x, (tuple, list))
    if not (name == "attn_mask" and pair) and not (name == "seed" and not pair):
        raise type_error(func, f"the type of '{name}' must be {_OTHER_TYPES.get(name, 'Tensor')}, but "
                               f"got {type_name(x)}.")


def _checked_flag(func, name, flag):
    """`flag`, which must be a bool."""
    if not isinstance(flag, bool):
        raise type_error(func, f"the type of '{name}' must be bool, but got {type_name(flag)}.")
    return flag


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
_ops, _handles, _numbering = [], {}, threading.Lock()
resolve = _Resolve()
op_of = CompileTime("MsFlashOp", _ops.__getitem__)
checked_flag = CompileTime("MsFlashFlag", _checked_flag)
# A recomputed graph would draw anew, and its backward work with another mask than its forward.
default_generator._generator.recompute(False)
