"""Random problems for the block op, and the float64 truth about them."""
from __future__ import annotations

import flash_rule
import native
import numpy as np


def draw(rng, dtype, *, batch=2, q_len=37, k_len=None, e=40, heads=4, kv_heads=None, d=13, dv=None, out=None,
         cross=False, values_apart=False, pack="none", transposed=(False,) * 4, interleaved=False, biases=True,
         w_o=True, bias_dtype=None, mask=None, bias=None, alibi=False, sinks=False):
    """Inputs by slot name and options, of a block op of these sizes. pack: "none", "kv" or "qkv"."""
    kv_heads, dv, out = kv_heads or heads, dv or d, out or e
    k_len = k_len or q_len
    normal = lambda *shape, scale=1.0: (rng.standard_normal(shape) * scale).astype(dtype)
    given = {"x": normal(batch, q_len, e)}
    ek = e
    if cross:
        ek = e + 7
        given["context"] = normal(batch, k_len, ek)
    ev = ek
    if values_apart:
        given["context_v"] = normal(batch, k_len, ev)
    sizes = {"q": (heads * d, e), "k": (kv_heads * d, ek), "v": (kv_heads * dv, ev)}
    if pack == "qkv":
        sizes = {"q": ((heads + 2 * kv_heads) * d, e)}
    elif pack == "kv":
        sizes = {"q": sizes["q"], "k": (2 * kv_heads * d, ek)}
    if w_o:
        sizes["o"] = (out, heads * dv)
    for (name, (rows, cols)), turned in zip(sizes.items(), (transposed[i] for i in ("qkvo".index(n) for n in sizes))):
        shape = (cols, rows) if turned else (rows, cols)
        given["w_" + name] = normal(*shape, scale=cols**-0.5)
        if biases is True or (biases and name in biases):
            given["b_" + name] = (rng.standard_normal(rows) * 0.5).astype(bias_dtype or dtype)
    if mask is not None:
        given["attn_mask"] = rng.random(mask) < 0.3
    if bias is not None:
        given["bias"] = normal(*bias)
    if alibi:
        given["alibi_slopes"] = rng.random(heads).astype(np.float32)
    if sinks:
        given["sinks"] = normal(heads)
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "transposed": transposed, "interleaved": interleaved}
    channels = (out if w_o else heads * dv, heads * d, kv_heads * d, kv_heads * dv, heads * dv)
    return given, options, channels


def truth(given, options, dy, rounding=None):
    """Output and gradients of the reference."""
    y, saved = flash_rule.reference.mha_forward(given, **options, rounding=rounding)
    return {"y": y, **flash_rule.reference.mha_backward(dy, saved)}


def size(name, exact):
    """What an error is measured against: the largest exact value.

    A bias of the keys moves all scores of a row alike, so that its exact gradient is 0, a sum of terms that cancel.
    """
    own = np.abs(exact[name]).max(initial=0.0)
    return max(own, np.abs(exact["dw_k"]).max(initial=0.0)) if name == "db_k" else own


def relative_error(got, exact, largest):
    """Largest error, relative to `largest`."""
    got = np.asarray(got, np.float64)
    assert got.shape == exact.shape, f"{got.shape} != {exact.shape}"
    return np.abs(got - exact).max(initial=0.0) / max(largest, 1e-30)


def check(got, given, options, dy):
    """float32: relative error of every result at most 1e-5. 16-bit: FlashAttention's rule."""
    exact = truth(given, options, dy)
    assert got.keys() == exact.keys()
    dtype = given["x"].dtype
    if dtype == np.float32:
        errors = {name: relative_error(got[name], exact[name], size(name, exact)) for name in got}
        wrong = {name: error for name, error in errors.items() if not error <= 1e-5}
        assert not wrong, wrong
        return
    naive = truth(given, options, dy, rounding=dtype)
    reasons = [flash_rule.broken("out" if name == "y" else name, got[name], exact[name], naive[name]) for name in got]
    assert not any(reasons), "\n".join(filter(None, reasons))


def run_native(given, options, channels, dy, **native_options):
    """Output and gradients of the native op."""
    native_options = {**options, **native_options, "channels": channels}
    saved = native.mha_forward(given, **native_options)
    return {"y": saved["y"], **native.mha_backward(given, saved, dy, **native_options)}
