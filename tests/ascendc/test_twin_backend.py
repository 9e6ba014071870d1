"""The Ascend kernels as a MindSpore backend: `backend="ascend-twin"`, both modes, forward and backward.

What the kernels compute is the business of test_kernels.py; here it is that MindSpore hands them what the user meant.
"""
from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import flash_rule
import mindspore as ms
import ml_dtypes
import native
import numpy as np
import pytest
from mindspore import nn, ops
from public_api import array, tensor
from test_kernels import Case

import ms_flash
from ms_flash.backends import ascend_twin

TWIN = "ascend-twin"
SLOTS = ("attn_mask", "bias", "alibi_slopes", "sinks", "seed", "cu_q", "cu_k")


class Attention(nn.Cell):
    """The public call with every tensor an input."""

    def __init__(self, varlen=False, backend=TWIN, **options):
        super().__init__()
        self.varlen, self.backend, self.options = varlen, backend, options

    def construct(self, query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, cu_q, cu_k):
        if self.varlen:
            return ms_flash.flash_attention_varlen(query, key, value, cu_q, cu_k, attn_mask, alibi_slopes=alibi_slopes,
                                                   sinks=sinks, seed=seed, return_lse=True, backend=self.backend,
                                                   **self.options)
        return ms_flash.flash_attention(query, key, value, attn_mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks,
                                        seed=seed, return_lse=True, backend=self.backend, **self.options)


class Loss(nn.Cell):
    """Weights of output and LSE are their gradients."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def construct(self, query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, cu_q, cu_k, dout, dlse):
        out, lse = self.attention(query, key, value, attn_mask, bias, alibi_slopes, sinks, seed, cu_q, cu_k)
        return (out.astype(ms.float32) * dout).sum() + (lse * dlse).sum()


def run(case, backend=TWIN):
    """dict(out, lse, dq, dk, dv[, dbias][, dsinks]) of a case of test_kernels, in the shapes of the reference."""
    call, heads, kv_heads = dict(case.call), case.call["q"].shape[1], case.call["k"].shape[1]
    options = {"softmax_scale": call.get("scale"), "causal_align": call.get("align", "bottom_right"),
               "window_size": (call.get("left", -1), call.get("right", -1)), "softcap": call.get("softcap", 0.0),
               "dropout_p": call.get("dropout_p", 0.0)}
    if case.layout in ("BSH", "SBH") or case.packed:
        options.update(num_heads=heads, num_kv_heads=kv_heads)
    varlen = "cu_q" in call
    if not varlen:
        options["layout"] = case.layout
    inputs = case.inputs()
    qkv = [tensor(inputs.get(name)) for name in ("query", "key", "value")]
    if "seed" in call:
        call["seed"] = np.array([call["seed"], call.get("offset", 0)], np.uint64).view(np.int64)
    others = [tensor(call.get(name)) for name in SLOTS]
    attention = Attention(varlen, backend, **options)
    out, lse = attention(*qkv, *others)
    positions = [0] if case.packed else [0, 1, 2]
    positions += [3 + SLOTS.index(name) for name in ("bias", "sinks") if name in call]
    sens = [tensor(x.astype(np.float32)) for x in (
        case.dout if varlen else native.to_layout(case.dout, case.layout), case.dlse)]
    grads = ms.grad(Loss(attention), tuple(positions))(*qkv, *others, *sens)
    grads = [array(g) for g in (grads if isinstance(grads, tuple) else (grads,))]
    got = {"out": case.back(array(out), heads), "lse": array(lse)}
    if case.packed:
        whole = case.back(grads.pop(0), heads + 2 * kv_heads)
        got.update(zip(("dq", "dk", "dv"), np.split(whole, [heads, heads + kv_heads], axis=1)))
    else:
        names = (("dq", heads), ("dk", kv_heads), ("dv", kv_heads))
        got.update((name, case.back(grads.pop(0), n)) for name, n in names)
    got.update((f"d{name}", grads.pop(0)) for name in ("bias", "sinks") if name in call)
    return got


FEATURES = {
    "full": {"sq": 70, "sk": 90},
    "causal": {"right": 0, "sq": 50, "sk": 77},
    "causal top left": {"right": 0, "align": "top_left", "sq": 77, "sk": 50},
    "window": {"left": 13, "right": 6, "sq": 100, "sk": 100},
    "mask": {"mask": "bhqk", "batch": 2}, "mask of keys": {"mask": "bk", "batch": 2, "mask_share": 0.6},
    "bias": {"bias": "bhqk"}, "bias in the query's dtype": {"bias": "hqk", "bias_dtype": "query"},
    "bias of keys": {"bias": "k", "bias_inf": 0.3}, "bias of a row": {"bias": "hq", "batch": 2},
    "bias and packed QKV": {"bias": "qk", "packed": True, "layout": "BSH", "batch": 2},
    "alibi, causal": {"alibi": "bh", "batch": 2, "right": 0},
    "softcap, scale": {"softcap": 5.0, "scale": -0.3},
    "groups": {"heads": 6, "kv_heads": 2, "sq": 40}, "decoding": {"heads": 8, "kv_heads": 2, "sq": 1, "sk": 300},
    "lengths": {"lengths": [(5, 7), (0, 3), (40, 90), (33, 0)]},
    "lengths, causal, mask, sinks": {"lengths": [(70, 70), (1, 40)], "right": 0, "mask": "qk", "sinks": "query"},
    "sinks": {"sinks": "float32"},
    "dropout": {"dropout": 0.25, "seed": 2**63 + 11, "offset": 2**40 + 3, "right": 0},
    "dropout, lengths": {"dropout": 0.4, "seed": 7, "lengths": [(30, 30), (50, 20)]},
    "d 5, dv 33": {"d": 5, "dv": 33}, "d 111": {"d": 111, "sq": 33, "sk": 65, "right": 0, "bias": "qk"},
    "d 256": {"d": 256, "sq": 20}, "dv larger": {"d": 16, "dv": 80}, "no keys but sinks": {"sk": 0, "sinks": "float32"},
    "BSND": {"layout": "BSND", "batch": 2}, "SBH": {"layout": "SBH", "batch": 2, "d": 24},
    "packed QKV": {"packed": True, "layout": "BSND", "heads": 4, "kv_heads": 2, "d": 8},
    "everything": {"heads": 4, "kv_heads": 2, "sq": 70, "sk": 110, "right": 0, "left": 60, "mask": "bhqk",
                   "bias": "hqk", "alibi": "h", "softcap": 3.0, "sinks": "float32", "dropout": 0.2, "seed": 5},
}


@pytest.mark.parametrize("name", FEATURES)
def test_results_and_gradients(name, mode):
    for dtype in ("float16", "bfloat16")[len(name) % 2:][:1 if mode == "graph" else 2]:
        case = Case(len(name), dtype=dtype, **FEATURES[name])
        got = run(case)
        exact = flash_rule.evaluate(case.call, case.dout, case.dlse)
        naive = flash_rule.evaluate(case.call, case.dout, case.dlse, rounding=case.dtype)
        flash_rule.check(got, exact, naive, flash_rule.unavoidable(case.call, case.dout, case.dlse, got["out"]))


def probabilities(backend, seed, **options):
    """Which of 40 keys each query keeps: with the identity as values the output is the probabilities."""
    query, key = (tensor(np.random.default_rng(i).standard_normal((2, 3, n, 16)).astype(np.float16))
                  for i, n in ((0, 30), (1, 40)))
    value = tensor(np.broadcast_to(np.eye(40, dtype=np.float16), (2, 3, 40, 40)))
    net = Attention(backend=backend, dropout_p=0.4, **options)
    return array(net(query, key, value, None, None, None, None, seed, None, None)[0]) != 0


def test_dropout_is_that_of_the_cpu(mode):
    seed = ms.Tensor([2**40 + 9, 2**35 + 1], ms.int64)
    kept = probabilities(TWIN, seed)
    assert 0.55 < kept.mean() < 0.65
    np.testing.assert_array_equal(kept, probabilities("cpu", seed))
    np.testing.assert_array_equal(probabilities(TWIN, 77), probabilities("cpu", 77))
    assert (probabilities(TWIN, ms.Tensor([77, 1], ms.int64)) != probabilities(TWIN, 77)).any()


def test_drawn_seeds_are_those_of_the_cpu():
    drawn = []
    for backend in (TWIN, "cpu"):
        ms.set_seed(3)
        drawn.append([probabilities(backend, None) for _ in range(2)])
    np.testing.assert_array_equal(*drawn)
    assert (drawn[0][0] != drawn[0][1]).any()


def call(dtype=ms.float16, d=16, **options):
    x = ms.Tensor(np.ones((1, 1, 8, d)), dtype)
    return ms_flash.flash_attention(x, x, x, backend=TWIN, **options)


REFUSED = {
    "float32": (TypeError, r"dtype of 'query' must be one of float16, bfloat16 for the backend 'ascend-twin', but got "
                           "float32. Hint: cast", {"dtype": ms.float32}),
    "head_dim": (ValueError, "'head_dim' of 'query' must be at most 256 for the backend 'ascend-twin', but got 264",
                 {"d": 264}),
    "high precision": (ValueError, "'precision_mode' must be 'default' for the backend 'ascend-twin', but got 'high'",
                       {"precision_mode": "high"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_said_before_any_kernel_runs(name):
    error, text, options = REFUSED[name]
    ascend_twin.totals(reset=True)
    with pytest.raises(error, match=text):
        call(**options)
    assert ascend_twin.totals() == {}


def test_what_only_the_tiling_knows_is_an_error_too(mode, monkeypatch):
    monkeypatch.setenv("MS_FLASH_DEPTH", "500")
    with pytest.raises(RuntimeError, match="buffers do not fit"):
        call().asnumpy()


def test_environment_chooses_it_and_the_totals_count(monkeypatch, mode):
    monkeypatch.setenv("MS_FLASH_BACKEND", TWIN)
    ascend_twin.totals(reset=True)
    query, key, value = (tensor(np.random.default_rng(i).standard_normal((1, 2, 64, 32)).astype(np.float16))
                         for i in range(3))
    bias = ms.Tensor(np.zeros((64, 64)), ms.float32)

    class Net(nn.Cell):
        def construct(self, query, key, value, bias):
            return ms_flash.flash_attention(query, key, value, bias=bias).astype(ms.float32).sum()

    ms.value_and_grad(Net(), (0, 1, 2, 3))(query, key, value, bias)[0].asnumpy()
    totals = ascend_twin.totals()
    assert set(totals) == {"fwd", "bwd", "bias_grad"}
    for total in totals.values():
        assert total["launches"] == 1 and total["violations"] == 0 and 0 < total["cycles"][0] <= total["cycles"][1]
    assert totals["fwd"]["written"] >= 2 * 64 * 32 * 2
    assert ascend_twin.totals(reset=True) == totals and ascend_twin.totals() == {}


def test_settings():
    with pytest.raises(ValueError, match="'cores' must be a number"):
        ascend_twin.configure(cores=-1)
    with pytest.raises(ValueError, match="no setting 'colour'"):
        ascend_twin.configure(colour="red")


def test_a_graph_of_unknown_lengths():
    ms.set_context(mode=ms.GRAPH_MODE)
    net = Attention(causal=True)
    net.set_inputs(*[ms.Tensor(shape=[1, 2, None, 16], dtype=ms.float16)] * 3, *[None] * 7)
    rng = np.random.default_rng(0)
    for s in (5, 40, 17):
        qkv = [tensor(rng.standard_normal((1, 2, s, 16)).astype(np.float16)) for _ in range(3)]
        out = net(*qkv, *[None] * 7)[0]
        expected = ms_flash.flash_attention(*qkv, causal=True, backend="reference")
        np.testing.assert_allclose(array(out), array(expected), atol=2e-3)


def test_callers_on_several_threads():
    inputs = [tensor(np.random.default_rng(s).standard_normal((1, 2, s, 16)).astype(ml_dtypes.bfloat16))
              for s in range(1, 7)]
    expected = [array(ms_flash.flash_attention(x, x, x, causal=True, backend=TWIN)) for x in inputs]
    wrong = []

    def work(start):
        for turn in range(6):
            i = (start + turn) % len(inputs)
            got = array(ms_flash.flash_attention(inputs[i], inputs[i], inputs[i], causal=True, backend=TWIN))
            if (got != expected[i]).any():
                wrong.append((start, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not wrong and not any(thread.is_alive() for thread in threads)


class Written(nn.Cell):
    """Attention in MindSpore's own ops."""

    def construct(self, query, key, value):
        scores = ops.matmul(query, key.swapaxes(-1, -2)) * 0.25
        return ops.matmul(ops.softmax(scores, axis=-1), value)


@pytest.mark.parametrize("dtype, launches", [("float16", {"fwd"}), ("float32", set())])
def test_fusion_uses_it_where_it_takes_the_dtype(dtype, launches, monkeypatch):
    monkeypatch.setenv("MS_FLASH_BACKEND", TWIN)
    ms.set_context(mode=ms.GRAPH_MODE)
    qkv = [tensor(np.random.default_rng(i).standard_normal((1, 2, 40, 16)).astype(dtype)) for i in range(3)]
    expected = Written()(*qkv)
    ascend_twin.totals(reset=True)
    with ms_flash.fusion():
        got = Written()(*qkv)
    assert set(ascend_twin.totals()) == launches
    np.testing.assert_allclose(array(got), array(expected), atol=4e-3)


def test_the_sample_trains_on_it_and_agrees_with_the_cpu(tmp_path):
    sample = Path(__file__).resolve().parents[2] / "samples" / "ascend_twin_step.py"
    done = subprocess.run([sys.executable, sample, "--steps", "2", "--context", "40", "--batch", "1"], cwd=tmp_path,
                          text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "host twin" in done.stdout and "\nagree: " in done.stdout
    assert {"fwd", "bwd"} <= {line.split()[0] for line in done.stdout.splitlines() if line}
