"""FlashAttention's rule: a kernel may err twice (gradients: thrice) as much as the naive low-precision computation.

Both sides come from `ms_flash/reference.py`, loaded by its path so that no MindSpore is needed.
"""
from __future__ import annotations

import importlib.util
from pathlib import Path

import ml_dtypes
import numpy as np

_FILE = Path(__file__).resolve().parents[1] / "ms_flash" / "reference.py"
_SPEC = importlib.util.spec_from_file_location("ms_flash_reference", _FILE)
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)


def evaluate(call, dout, dlse=None, rounding=None):
    """Output, LSE and all gradients of the reference call, in one dict; absent gradients are left out."""
    out, lse, saved = reference.forward(**call, rounding=rounding)
    grads = {} if dout is None else reference.backward(dout, dlse, saved)
    return {"out": out, "lse": lse, **{name: grad for name, grad in grads.items() if grad is not None}}


def unavoidable(call, dout, dlse, out):
    """Errors of gradients that a backward cannot help, by what the forward left it: a rounded output, and a maximum.

    delta = rowsum(dout * out) takes that rounding and adds a multiple of it to every score of the row. dq and dk are
    asked for what `out`, the output that the kernel wrote, does to exact arithmetic: with a few rows (one query of
    33 keys in bfloat16) it is twice the error of the naive computation, which sums the products that it has. dbias and
    dsinks are sums over rows, down to a single number, where the naive computation may be right by luck; there it is
    the most that rounding can do.
    """
    exact, _, saved = reference.forward(**call)
    dout = np.asarray(dout, np.float64)

    def follows(per_row):
        return reference.backward(np.zeros_like(exact), per_row if exact.ndim == 4 else per_row.T, saved)

    lost = follows(np.nan_to_num((np.asarray(out).astype(np.float64) - exact) * dout).sum(-1))
    most = follows(np.abs(np.nan_to_num(exact * dout)).sum(-1) * _half_ulp(call["q"].dtype))
    whole = reference.backward(dout, dlse, saved)
    zero = np.zeros(())
    return {name: _largest(by_output) + score_rounding(call) * _largest(whole[name])
            for name, by_output in {"dq": lost["dq"], "dk": lost["dk"], "dv": zero, "dbias": most["dbias"],
                                    "dsinks": most["dsinks"]}.items() if by_output is not None}


def _largest(x):
    return np.abs(x[np.isfinite(x)]).max(initial=0.0)


def _half_ulp(dtype):
    return float(ml_dtypes.finfo(dtype).eps) / 2


def broken(name, got, exact, naive, margin=0.0):
    """Why `got` is not good enough, or None. Where the exact result is not finite nothing is asked."""
    dtype = np.asarray(got).dtype
    got = np.asarray(got).astype(np.float64)
    if got.shape != exact.shape:
        return f"{name}: shape {got.shape}, expected {exact.shape}"
    asked = np.isfinite(exact) | np.isneginf(exact)
    if (np.isneginf(got) != np.isneginf(exact))[asked].any():
        return f"{name}: -inf at other places than expected"
    asked = np.isfinite(exact)
    if not np.isfinite(got[asked]).all():
        return f"{name}: not finite at {np.argwhere(asked & ~np.isfinite(got))[0].tolist()}"
    if not asked.any():
        return None
    error = np.where(asked, np.abs(got - np.where(asked, exact, 0.0)), 0.0)
    largest = np.abs(exact[asked]).max()
    if name == "lse":
        bound = 2e-5 * max(1.0, largest) + margin
    else:
        low = np.abs(naive[asked] - exact[asked])
        low = low[np.isfinite(low)]
        bound = (2 if name == "out" else 3) * low.max(initial=0.0) + 1e-5 * max(1.0, largest) + margin
        # the correctly rounded result is never wrong, however lucky the naive computation is
        bound += np.abs(exact[asked].astype(dtype).astype(np.float64) - exact[asked]).max()
    if error.max() > bound:
        at = np.unravel_index(error.argmax(), error.shape)
        return (f"{name}: error {error.max():.3g} at {[int(i) for i in at]} (got {got[at]:.6g}, expected "
                f"{exact[at]:.6g}), allowed {bound:.3g}")
    return None


def score_rounding(call):
    """What float32 may lose of a score: 2^-23 of the largest sum of |query| * |key| * scale, by Cauchy's bound.

    A backward computes the scores again, in another order than the forward whose maximum it takes, so its
    probabilities are off by this much: 4e-5 with a scale of 100. The naive computation has no second time.
    """
    scale = call.get("scale")
    scale = call["q"].shape[-1] ** -0.5 if scale is None else abs(scale)
    for x in (call["q"], call["k"]):
        norms = np.sqrt(np.square(np.asarray(x, np.float64)).sum(-1))
        scale *= norms[np.isfinite(norms)].max(initial=0.0)
    return scale * 2.0**-23


def check(got, exact, naive, margins=None):
    """Raises AssertionError naming every result of `got` that breaks the rule; `got` may hold some of the results."""
    reasons = [broken(name, got[name], exact[name], naive[name], (margins or {}).get(name, 0.0)) for name in got]
    empty = np.isneginf(exact["lse"])
    if "out" in got and np.asarray(got["out"], np.float64)[empty if exact["out"].ndim == 4 else empty.T].any():
        reasons.append("out: rows without keys are not exactly zero")
    reasons = [reason for reason in reasons if reason]
    assert not reasons, "\n".join(reasons)
