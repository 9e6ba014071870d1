"""The public call as tests use it: arguments of `reference.forward`, numpy in and out, MindSpore in PyNative mode."""
from __future__ import annotations

import mindspore as ms
import ml_dtypes
import native
import numpy as np
from mindspore import ops

import ms_flash


def tensor(x):
    if x is None:
        return None
    x = np.asarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return ms.Tensor(x.astype(np.float32)).astype(ms.bfloat16)
    return ms.Tensor(np.ascontiguousarray(x))


def array(x):
    """float64: exact for every dtype, bfloat16 included."""
    return (x.astype(ms.float32) if x.dtype == ms.bfloat16 else x).asnumpy().astype(np.float64)


def numpy_of(x):
    """The bits of a Tensor, as an array of its own dtype."""
    return x.astype(ms.float32).asnumpy().astype(ml_dtypes.bfloat16) if x.dtype == ms.bfloat16 else x.asnumpy()


def attention(call, backend, dout=None, dlse=None, layout="BNSD", **options):
    """dict(out, lse) and, given `dout`, the gradients of all differentiable inputs, in the shapes of the reference."""
    call = dict(call)
    q, k, v = call.pop("q"), call.pop("k"), call.pop("v")
    cu_q, cu_k = call.pop("cu_q", None), call.pop("cu_k", None)
    bias, sinks = tensor(call.pop("bias", None)), tensor(call.pop("sinks", None))
    attn_mask, alibi_slopes = tensor(call.pop("attn_mask", None)), tensor(call.pop("alibi_slopes", None))
    renamed = {"softmax_scale": call.pop("scale", None), "causal_align": call.pop("align", "bottom_right"),
               "window_size": (call.pop("left", -1), call.pop("right", -1))}
    options = {**renamed, **call, **options, "alibi_slopes": alibi_slopes, "return_lse": True, "backend": backend}
    heads, kv_heads = q.shape[1], k.shape[1]
    if layout in ("BSH", "SBH"):
        options.update(num_heads=heads, num_kv_heads=kv_heads)
    inputs = [tensor(native.to_layout(x, layout)) for x in (q, k, v)]
    extra = [x for x in (bias, sinks) if x is not None]

    def run(query, key, value, *extra):
        extra = list(extra)
        options["bias"] = None if bias is None else extra.pop(0)
        options["sinks"] = None if sinks is None else extra.pop(0)
        if cu_q is not None:
            options.pop("bias")
            return ms_flash.flash_attention_varlen(query, key, value, tensor(cu_q), tensor(cu_k), attn_mask, **options)
        return ms_flash.flash_attention(query, key, value, attn_mask, layout=layout, **options)

    out, lse = run(*inputs, *extra)
    results = {"out": native.from_layout(array(out), layout, heads), "lse": array(lse)}
    if dout is None:
        return results
    sens = tensor(native.to_layout(np.asarray(dout, q.dtype), layout)), \
        tensor(np.zeros(lse.shape, np.float32) if dlse is None else np.asarray(dlse, np.float32))
    grads = ops.GradOperation(get_all=True, sens_param=True)(run)(*inputs, *extra, sens)
    names = ["dq", "dk", "dv"] + [name for name, x in (("dbias", bias), ("dsinks", sinks)) if x is not None]
    for name, grad, count in zip(names, grads, [heads, kv_heads, kv_heads, 0, 0]):
        results[name] = native.from_layout(array(grad), layout, count) if count else array(grad)
    return results
