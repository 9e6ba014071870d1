"""The public functions: they parse the request, choose a backend and call its op."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, get_seed, ops
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
_PLACEHOLDER = Tensor([0.0], mstype.float32)
_GENERATOR_STEP = Tensor(1, mstype.int64)


class _Resolve(PrimitiveWithInfer):
    """Turns a request into the op that serves it: in PyNative when called, in a graph while that is compiled.

    Its result is a tuple (op, seed_source, seed_shift, takes_none, shapes): `op` is the primitive to call; `shapes` is ``None``,
    or those of (out, lse) when there is nothing to compute.
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
    if name == "attn_mask" and isinstance(x, (tuple, list)) or name == "seed" and not isinstance(x, (tuple, list)):
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
_resolve = _Resolve()


def _or_placeholder(x):
    """For ops that cannot take ``None``."""
    if x is None:
        return _PLACEHOLDER
    return x


def _drawn_seed(shift):
    """The next (seed, offset) of MindSpore's default generator, shifted."""
    seed, offset = default_generator._step(_GENERATOR_STEP)
    return ops.concat(((seed + shift[0]).reshape((1,)), (offset + shift[1]).reshape((1,))))


def _empty_result(query, sinks, cu_q, shapes):
    """Output and LSE when there is no key for any query: the sinks alone are in the softmax."""
    out = ops.zeros(shapes[0], query.dtype)
    if sinks is None:
        return out, ops.full(shapes[1], float("-inf"), dtype=mstype.float32)
    lse = ops.zeros(shapes[1], mstype.float32) + sinks.astype(mstype.float32).reshape((-1, 1))
    if cu_q is not None:    # rows after the last sequence belong to none
        rows = ops.arange(shapes[1][-1])
        lse = ops.where(rows < cu_q[-1], lse, ops.full_like(lse, float("-inf")))
    return out, lse


def attention(func, query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k, dropout_p,
              softmax_scale, causal, window_size, softcap, layout, causal_align, training, deterministic,
              precision_mode, block_m, block_n, backend, num_heads, num_kv_heads, mask_fill):
    """Output and LSE: what all public forms share. `func` names the public one in error texts.

    Beyond the public arguments: `drop_mask`, uint8, 1 = kept, replaces the drawn dropout mask; `mask_fill` is the
    finite score of positions that `attn_mask` masks out (``None``: -inf).
    """
    op, seed_source, seed_shift, takes_none, shapes = _resolve(
        func, backend, query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k,
        window_size, dropout_p, softmax_scale, causal, softcap, layout, causal_align, training, deterministic,
        precision_mode, block_m, block_n, num_heads, num_kv_heads, mask_fill)
    if shapes is not None:
        return _empty_result(query, sinks, cu_q, shapes)
    if isinstance(attn_mask, (tuple, list)):
        attn_mask = None
    if seed_source == "generator":
        seed = _drawn_seed(seed_shift)
    elif seed_source != "tensor":
        seed = None
    if not training:
        drop_mask = None
    if not takes_none:
        key, value, attn_mask, bias = (_or_placeholder(key), _or_placeholder(value), _or_placeholder(attn_mask),
                                       _or_placeholder(bias))
        alibi_slopes, sinks, seed, drop_mask = (_or_placeholder(alibi_slopes), _or_placeholder(sinks),
                                                _or_placeholder(seed), _or_placeholder(drop_mask))
        cu_q, cu_k = _or_placeholder(cu_q), _or_placeholder(cu_k)
    outs = op(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, drop_mask, cu_q, cu_k)
    return outs[0], outs[1]


def flash_attention(query, key=None, value=None, attn_mask=None, *, dropout_p=0.0, softmax_scale=None, causal=False,
                    window_size=(-1, -1), bias=None, alibi_slopes=None, softcap=0.0, sinks=None, layout="BNSD",
                    causal_align="bottom_right", seed=None, training=True, return_lse=False, deterministic=True,
                    precision_mode="default", block_m=None, block_n=None, backend=None, num_heads=None,
                    num_kv_heads=None):
    """Exact attention."""
    out, lse = attention("flash_attention", query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, None, None,
                         None, dropout_p, softmax_scale, causal, window_size, softcap, layout, causal_align, training,
                         deterministic, precision_mode, block_m, block_n, backend, num_heads, num_kv_heads, None)
    if return_lse:
        return out, lse
    return out


def flash_attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, attn_mask=None, *, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), bias=None, alibi_slopes=None,
                           softcap=0.0, sinks=None, causal_align="bottom_right", seed=None, training=True,
                           return_lse=False, deterministic=True, precision_mode="default", block_m=None, block_n=None,
                           backend=None):
    """Exact attention over sequences end to end."""
    out, lse = attention("flash_attention_varlen", query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, None,
                         cu_seqlens_q, cu_seqlens_k, dropout_p, softmax_scale, causal, window_size, softcap, "TND",
                         causal_align, training, deterministic, precision_mode, block_m, block_n, backend, None, None,
                         None)
    if return_lse:
        return out, lse
    return out
