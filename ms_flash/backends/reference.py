"""The reference backend: float64 numpy, as Python custom ops."""

from __future__ import annotations

import mindspore
import ml_dtypes
import numpy as np

from .. import reference
from ..kvcache_spec import KVCACHE_SLOTS, MERGE_SLOTS
from ..spec import SLOTS
from .base import Backend, Custom

_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_TO_BNSD = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3)}


class ReferenceBackend(Backend):
    """The truth for the other backends: slow, and O(Sq*Sk) memory."""

    name = "reference"
    takes_none = False
    dynamic_shape = False
    writes_inputs = False
    takes_empty = False     # MindSpore cannot hand a Python op an empty Tensor: "memcpy failed"

    def available(self):
        return True, ""

    def key(self, spec):
        return spec     # with its shapes: a Python op in a graph has to state those of its results

    def primitive(self, op, spec, bprop):
        run = {"MsFlashFwd": _forward, "MsFlashBwd": _backward, "MsFlashBiasGrad": _bias_grad,
               "MsFlashKvCache": _kvcache, "MsFlashMerge": _merge}[op]
        results, slots = _results(op, spec), _slots(op)
        shapes, dtypes = tuple(s for s, _ in results), tuple(getattr(mindspore, d) for _, d in results)

        def call(*arrays):
            values = run(spec, _named(spec, slots, arrays), arrays[len(slots):])
            values = [_stored(v, shape, dtype) for v, (shape, dtype) in zip(values, results)]
            return tuple(values) if len(values) > 1 else values[0]

        # MindSpore counts the named parameters of a Python op
        def forward(q, k, v, mask, bias, slopes, sinks, seed, drop, cu_q, cu_k):
            return call(q, k, v, mask, bias, slopes, sinks, seed, drop, cu_q, cu_k)

        def gradient(q, k, v, mask, bias, slopes, sinks, seed, drop, cu_q, cu_k, out, row_max, row_sum, dout, dlse):
            return call(q, k, v, mask, bias, slopes, sinks, seed, drop, cu_q, cu_k, out, row_max, row_sum, dout, dlse)

        def kvcache(q, k_cache, v_cache, k, v, lengths, table, cos, sin, slopes, sinks):
            return call(q, k_cache, v_cache, k, v, lengths, table, cos, sin, slopes, sinks)

        def merge(outs, lses):
            return call(outs, lses)

        if len(results) == 1:
            shapes, dtypes = shapes[0], dtypes[0]
        function = {"MsFlashFwd": forward, "MsFlashKvCache": kvcache, "MsFlashMerge": merge}.get(op, gradient)
        return Custom(function, lambda *_: shapes, lambda *_: dtypes, "pyfunc", bprop)


def _slots(op):
    return {"MsFlashKvCache": KVCACHE_SLOTS, "MsFlashMerge": MERGE_SLOTS}.get(op, SLOTS)


def _results(op, spec):
    """Shapes and dtypes of the results of `op`."""
    if op == "MsFlashFwd":
        return [(spec.out_shape, spec.dtype)] + [(spec.lse_shape, "float32")] * 3
    if op == "MsFlashKvCache":
        out = [(spec.attention.out_shape, spec.dtype), (spec.attention.lse_shape, "float32")]
        return out + list(spec.inputs[1:3]) if spec.appends else out
    if op == "MsFlashMerge":
        return [(arg.shape[1:], arg.dtype) for arg in spec.inputs]
    if op == "MsFlashBiasGrad":
        return [spec.inputs[SLOTS.index("bias")]]
    tensors = [spec.inputs[0]] + [arg if arg else ((1,), spec.dtype) for arg in spec.inputs[1:3]]
    sinks = spec.inputs[SLOTS.index("sinks")]
    return [(shape, dtype) for shape, dtype in tensors + [sinks or ((1,), "float32")]]


def _named(spec, slots, arrays):
    """The inputs that are given, by name."""
    return {name: array for name, array, arg in zip(slots, arrays, spec.inputs) if arg is not None}


def _stored(value, shape, dtype):
    """Rounded once, to the dtype of the result. MindSpore copies the bytes, and NumPy knows no buffer of bfloat16."""
    value = np.zeros(shape) if value is None else value.reshape(shape)
    value = np.ascontiguousarray(value.astype(_NUMPY[dtype]))
    return value.view(np.uint16) if dtype == "bfloat16" else value


def _split(spec, given):
    """query, key and value as BNSD (TND as it is)."""
    query = given["query"]
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if not spec.packed:
        return (_bnsd(spec, query, heads), _bnsd(spec, given["key"], kv_heads), _bnsd(spec, given["value"], kv_heads))
    if query.ndim == 5:
        query = query.reshape(query.shape[:2] + (3 * heads,) + query.shape[4:])
    packed = _bnsd(spec, query, heads + 2 * kv_heads)
    return packed[:, :heads], packed[:, heads:heads + kv_heads], packed[:, heads + kv_heads:]


def _bnsd(spec, x, heads):
    if spec.layout == "TND":
        return x
    if x.ndim == 3:
        x = x.reshape(x.shape[:2] + (heads, -1))
    return x.transpose(_TO_BNSD[spec.layout])


def _laid_out(spec, x):
    """BNSD back to the layout of the call; BSH and SBH are joined by the reshape that follows."""
    return x if spec.layout == "TND" else x.transpose(np.argsort(_TO_BNSD[spec.layout]))


def _run(spec, given):
    q, k, v = _split(spec, given)
    seed, offset = given.get("seed", (spec.seed, 0))
    return reference.forward(
        q, k, v, attn_mask=given.get("attn_mask"), bias=given.get("bias"), alibi_slopes=given.get("alibi_slopes"),
        sinks=given.get("sinks"), drop_mask=given.get("drop_mask"), cu_q=given.get("cu_seqlens_q"),
        cu_k=given.get("cu_seqlens_k"), scale=spec.scale, left=spec.left, right=spec.right, align=spec.align,
        softcap=spec.softcap, dropout_p=spec.dropout_p, seed=int(seed), offset=int(offset), mask_fill=spec.mask_fill)


def _forward(spec, given, _):
    _check_lengths(spec, given)
    out, lse, saved = _run(spec, given)
    return _laid_out(spec, out), lse, saved["row_max"], saved["row_sum"]


def _gradients(spec, given, saved):
    dout, dlse = saved[-2:]
    return reference.backward(_bnsd(spec, dout, spec.num_heads), dlse, _run(spec, given)[2])


def _backward(spec, given, saved):
    grads = _gradients(spec, given, saved)
    parts = [grads[name] for name in ("dq", "dk", "dv")]
    if spec.packed:
        return _laid_out(spec, np.concatenate(parts, axis=1)), None, None, grads["dsinks"]
    return [_laid_out(spec, part) for part in parts] + [grads["dsinks"]]


def _bias_grad(spec, given, saved):
    return [_gradients(spec, given, saved)["dbias"]]


def _kvcache(spec, given, _):
    try:
        spec.check_values(given["cache_seqlens"], given.get("block_table"))
    except ValueError as error:     # what a graph sees of the CPU backend as well
        raise RuntimeError(str(error)) from None
    attention = spec.attention
    kind = _NUMPY[spec.dtype]   # MindSpore has a bfloat16 of its own, which NumPy does not cast to this one

    def turned(name):
        return None if name not in given else _bnsd(attention, given[name].view(kind), 0)

    out, lse, k_cache, v_cache = reference.kvcache_forward(
        *(turned(name) for name in KVCACHE_SLOTS[:5]), given["cache_seqlens"], block_table=given.get("block_table"),
        cos=given.get("rotary_cos"), sin=given.get("rotary_sin"), interleaved=spec.interleaved,
        alibi_slopes=given.get("alibi_slopes"), sinks=given.get("sinks"), scale=attention.scale, left=attention.left,
        right=attention.right, softcap=attention.softcap)
    return [_laid_out(attention, out), lse, _laid_out(attention, k_cache), _laid_out(attention, v_cache)]


def _merge(spec, given, _):
    outs, lses = given["outs"], given["lses"]
    if spec.layout == "BSND":
        outs = outs.transpose(0, 1, 3, 2, 4)
    out, lse = reference.merge(outs, lses)
    return _laid_out(spec, out), lse


def _check_lengths(spec, given):
    """Cumulative lengths hold values, which only a running op can see."""
    for name, total in (("cu_seqlens_q", spec.q_len), ("cu_seqlens_k", spec.k_len)):
        lengths = given.get(name)
        if lengths is None:
            continue
        if lengths[0] != 0:
            raise RuntimeError(f"For '{spec.func}', '{name}' must start with 0, but got {lengths[0]}.")
        for low, high in zip(lengths, lengths[1:]):
            if high < low:
                raise RuntimeError(f"For '{spec.func}', '{name}' must not decrease, but got {low} followed by {high}.")
        if lengths[-1] > total:
            raise RuntimeError(f"For '{spec.func}', the last value of '{name}' must be at most the number of rows "
                               f"{total}, but got {lengths[-1]}.")
