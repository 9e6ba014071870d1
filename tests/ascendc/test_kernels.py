"""The Ascend kernels on the host twin, every check on, against the float64 reference.

FlashAttention's rule decides about the numbers (flash_rule.py); the twin decides about the rest: any report of it, a
hazard, an address, a value nobody wrote, fails the call.
"""
from __future__ import annotations

import ascend
import flash_rule
import native
import numpy as np
import pytest


class Case:
    """One call: arrays from a seed, and what the reference and the kernel are given."""

    def __init__(self, numbers, batch=1, heads=2, kv_heads=None, sq=64, sk=64, d=32, dv=None, dtype="float16",
                 layout="BNSD", lengths=None, packed=False, mask=None, mask_share=0.3, bias=None, bias_dtype="float32",
                 bias_inf=0.0, alibi=None, sinks=None, drop_mask=None, nan=None, **options):
        rng = np.random.default_rng(numbers)
        self.layout, self.packed, self.options = layout, packed, options
        self.dtype = native.DTYPES[dtype]
        kv_heads, dv = kv_heads or heads, dv or d
        normal = lambda *shape, of=self.dtype: rng.standard_normal(shape).astype(of)
        call = {}
        if lengths is None:
            q, k, rows = (batch, heads, sq), (batch, kv_heads, sk), (batch, heads, sq)
        else:
            self.layout = "TND"
            cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]) for x in np.array(lengths).T)
            call.update(cu_q=cu_q, cu_k=cu_k)
            batch, (sq, sk) = len(lengths), np.array(lengths).max(0)
            q, k, rows = (cu_q[-1], heads), (cu_k[-1], kv_heads), (heads, cu_q[-1])
        call.update(q=normal(*q, d), k=normal(*k, d), v=normal(*k, dv))
        sizes = (batch, heads, sq, sk)
        rank = lambda axes: max(2, 4 - "bhqk".index(axes[0]))
        plane = lambda axes: tuple(n if axis in axes else 1 for axis, n in zip("bhqk", sizes))[-rank(axes):]
        if mask is not None:
            call["attn_mask"] = rng.random(plane(mask)) < mask_share
        if bias is not None:
            values = rng.standard_normal(plane(bias))
            call["bias"] = np.where(rng.random(values.shape) < bias_inf, -np.inf, values).astype(
                self.dtype if bias_dtype == "query" else native.DTYPES[bias_dtype])
        if alibi is not None:
            call["alibi_slopes"] = rng.random((batch, heads) if alibi == "bh" else heads).astype(np.float32)
        if sinks is not None:
            call["sinks"] = normal(heads, of=self.dtype if sinks == "query" else native.DTYPES[sinks])
        if drop_mask is not None:
            call["drop_mask"] = (rng.random(plane(drop_mask)) < 0.6).astype(np.uint8)
        names = {"dropout": "dropout_p", "fill": "mask_fill"}
        call.update({names.get(name, name): value for name, value in options.items()
                     if name not in ("block_m", "block_n")})
        self.call = call
        self.dout, self.dlse = normal(*q, dv), normal(*rows, of=np.float32)
        self.nan = nan
        if nan:
            self._poison_unseen()

    def _poison_unseen(self):
        """NaN in what nobody sees, and Inf in one key and one value that some queries see and others do not."""
        reference, call = flash_rule.reference, self._prepared()
        prepared = reference._prepare(**call)
        for b in range(prepared["q"].shape[0]):
            for h in range(prepared["k"].shape[1]):
                heads = range(h * prepared["group"], (h + 1) * prepared["group"])
                allowed = np.concatenate([reference._softmax(
                    prepared, b, n, prepared["q"][b, n], prepared["k"][b, h])["allowed"] for n in heads])
                seen, by_all = allowed.any(0), allowed.all(0)
                self.call["k"][b, h, ~seen] = np.nan
                self.call["v"][b, h, ~seen] = np.nan
                some = np.flatnonzero(seen & ~by_all)
                if self.nan == "seen by some" and len(some):
                    self.call["k" if b else "v"][b, h, some[len(some) // 2], 0] = np.nan

    def _prepared(self):
        absent = dict.fromkeys(("attn_mask", "bias", "alibi_slopes", "sinks", "drop_mask", "cu_q", "cu_k", "scale",
                                "mask_fill", "rounding"))
        return {**absent, "left": -1, "right": -1, "align": "bottom_right", "softcap": 0.0, "dropout_p": 0.0, "seed": 0,
                "offset": 0, **self.call}

    def inputs(self):
        call, layout = self.call, self.layout
        give = (lambda x: x) if layout == "TND" else (lambda x: native.to_layout(x, layout))
        if self.packed:
            inputs = {"query": give(np.concatenate([call["q"], call["k"], call["v"]], axis=1))}
        else:
            inputs = {"query": give(call["q"]), "key": give(call["k"]), "value": give(call["v"])}
        for name in ("attn_mask", "bias", "alibi_slopes", "sinks", "drop_mask", "cu_q", "cu_k"):
            if call.get(name) is not None:
                inputs[name] = call[name]
        return inputs

    def spec(self):
        heads, kv_heads = self.call["q"].shape[1], self.call["k"].shape[1]
        options = dict(self.options, layout=self.layout, packed=self.packed)
        if self.packed or self.layout in ("BSH", "SBH"):
            options.update(heads=heads, kv_heads=kv_heads)
        return options

    def back(self, x, heads):
        return x if self.layout == "TND" else native.from_layout(x, self.layout, heads)

    def forward(self, lib=None):
        return ascend.forward(self.inputs(), lib, **self.spec())

    def backward(self, lib=None, forward=None):
        """Gradients of the kernel's own forward."""
        dout = self.dout if self.layout == "TND" else native.to_layout(self.dout, self.layout)
        return ascend.backward(self.inputs(), forward or self.forward(lib), dout, self.dlse, lib, **self.spec())

    def check_forward(self, lib=None):
        result = self.forward(lib)
        exact = flash_rule.evaluate(self.call, None)
        naive = flash_rule.evaluate(self.call, None, rounding=self.dtype)
        got = {"out": self.back(result["out"], self.call["q"].shape[1]), "lse": result["lse"]}
        flash_rule.check(got, exact, naive)
        return result

    def check_backward(self, lib=None):
        forward = self.forward(lib)
        grads = self.backward(lib, forward)
        exact = flash_rule.evaluate(self.call, self.dout, self.dlse)
        naive = flash_rule.evaluate(self.call, self.dout, self.dlse, rounding=self.dtype)
        heads, kv_heads = self.call["q"].shape[1], self.call["k"].shape[1]
        if self.packed:
            whole = self.back(grads["dq"], heads + 2 * kv_heads)
            got = dict(zip(("dq", "dk", "dv"), np.split(whole, [heads, heads + kv_heads], axis=1)))
        else:
            got = {name: self.back(grads[name], heads if name == "dq" else kv_heads) for name in ("dq", "dk", "dv")}
        got.update((name, grads[name]) for name in ("dsinks", "dbias") if name in grads)
        out = self.back(forward["out"], heads)
        flash_rule.check(got, exact, naive, flash_rule.unavoidable(self.call, self.dout, self.dlse, out))
        return grads


FEATURES = {
    "full": {},
    "causal": {"right": 0},
    "causal top left": {"right": 0, "align": "top_left", "sq": 50, "sk": 77},
    "causal more queries": {"right": 0, "sq": 77, "sk": 50},
    "causal top left more queries": {"right": 0, "align": "top_left", "sq": 77, "sk": 50},
    "window": {"left": 13, "right": 6, "sq": 100, "sk": 100},
    "window causal": {"left": 20, "right": 0, "sq": 90, "sk": 150},
    "window top left": {"left": 5, "right": 0, "align": "top_left", "sq": 90, "sk": 150},
    "window nobody sees": {"left": 2, "right": 2, "align": "top_left", "sq": 120, "sk": 40},
    "mask": {"mask": "bhqk"},
    "mask of keys": {"mask": "bk", "batch": 2},
    "mask of queries": {"mask": "hq"},
    "mask for all": {"mask": "qk", "mask_share": 0.9},
    "mask everything": {"mask": "qk", "mask_share": 1.0},
    "fill": {"mask": "bhqk", "fill": -1e4},
    "fill and causal": {"mask": "qk", "fill": 0.5, "right": 0},
    "bias": {"bias": "bhqk"},
    "bias half": {"bias": "hqk", "bias_dtype": "query"},
    "bias of keys": {"bias": "k"},
    "bias of queries": {"bias": "hq", "bias_inf": 0.2},
    "bias of queries, causal": {"bias": "hq", "bias_inf": 0.2, "right": 0},
    "mask of queries, window": {"mask": "hq", "left": 20, "right": 3, "softcap": 2.0},
    "bias is mask": {"bias": "qk", "bias_inf": 0.4},
    "bias for all, window": {"bias": "qk", "batch": 2, "heads": 4, "kv_heads": 2, "left": 30, "right": 9, "sq": 150},
    "bias of one number": {"bias": "b", "batch": 2, "sq": 90},
    "bias per head, softcap, dropout": {"bias": "h", "batch": 2, "softcap": 2.0, "dropout": 0.2, "sinks": "query"},
    "bias and fill": {"bias": "bhqk", "mask": "qk", "fill": -1.5, "softcap": 4.0, "right": 0},
    "bias of keys, two blocks": {"bias": "bk", "bias_dtype": "query", "batch": 2, "sq": 600, "sk": 530, "heads": 1},
    "bias, drop mask, d 40": {"bias": "hqk", "d": 40, "dv": 24, "drop_mask": "bqk", "dropout": 0.3, "batch": 2},
    "alibi": {"alibi": "h"},
    "alibi per batch, causal": {"alibi": "bh", "batch": 2, "right": 0},
    "softcap": {"softcap": 1.5},
    "softcap large": {"softcap": 50.0, "scale": 3.0},
    "groups": {"heads": 6, "kv_heads": 2, "sq": 130},
    "one kv head": {"heads": 4, "kv_heads": 1, "right": 0, "sq": 90},
    "packed heads": {"heads": 8, "kv_heads": 2, "sq": 1, "sk": 200},
    "packed heads, causal": {"heads": 8, "kv_heads": 2, "sq": 3, "sk": 200, "right": 0},
    "packed heads, all pieces": {"heads": 4, "kv_heads": 2, "sq": 5, "sk": 150, "bias": "hqk", "mask": "qk",
                                 "alibi": "h", "sinks": "float32"},
    "sinks": {"sinks": "query"},
    "sinks and masked rows": {"sinks": "float32", "mask": "qk", "mask_share": 0.95},
    "negative scale": {"scale": -0.3},
    "scale 0": {"scale": 0.0},
    "lengths": {"lengths": [(5, 7), (0, 3), (40, 90), (33, 0), (130, 17)]},
    "lengths causal": {"lengths": [(70, 70), (1, 40), (40, 1)], "right": 0},
    "lengths mask": {"lengths": [(70, 70), (1, 40)], "mask": "qk"},
    "drop mask": {"drop_mask": "bhqk", "dropout": 0.4},
    "dropout": {"dropout": 0.25, "seed": 11, "offset": 3},
    "dropout causal": {"dropout": 0.5, "seed": 2**63 - 5, "offset": 2**40 + 1, "right": 0, "sq": 90, "sk": 90},
    "dropout lengths": {"dropout": 0.1, "seed": 3, "lengths": [(30, 30), (50, 20)]},
    "d 16": {"d": 16}, "d 48": {"d": 48, "sq": 33}, "d 80": {"d": 80}, "d 128": {"d": 128}, "d 144": {"d": 144},
    "d 192": {"d": 192}, "d 256": {"d": 256},
    "d 40": {"d": 40}, "d 5, dv 33": {"d": 5, "dv": 33, "right": 0},
    "d 24, lengths": {"d": 24, "lengths": [(9, 70), (3, 5)]},
    "d 8, packed QKV": {"d": 8, "packed": True, "layout": "BSND", "batch": 2},
    "dv differs": {"d": 64, "dv": 32}, "dv larger": {"d": 32, "dv": 160},
    "one query": {"sq": 1, "sk": 65}, "one key": {"sq": 65, "sk": 1}, "one of each": {"sq": 1, "sk": 1},
    "odd lengths": {"sq": 37, "sk": 203}, "no keys": {"sq": 20, "sk": 0},
    "two stacks": {"sq": 40, "sk": 600, "heads": 1}, "four stacks": {"sq": 20, "sk": 700, "heads": 1, "block_n": 128},
    "three row blocks": {"sq": 300, "sk": 90, "heads": 1},
    "small blocks": {"sq": 100, "sk": 300, "block_m": 32, "block_n": 64, "right": 0},
    "BSND": {"layout": "BSND", "batch": 2}, "BSH": {"layout": "BSH", "batch": 2},
    "SBH": {"layout": "SBH", "batch": 2},
    "packed QKV": {"packed": True, "layout": "BSH", "batch": 2},
    "everything": {"heads": 4, "kv_heads": 2, "sq": 70, "sk": 110, "right": 0, "left": 60, "mask": "bhqk",
                   "bias": "hqk", "alibi": "h", "softcap": 3.0, "sinks": "float32", "dropout": 0.2},
}


NANS = {
    "causal": {"right": 0, "sq": 40, "sk": 200}, "top left": {"right": 0, "align": "top_left", "sq": 40, "sk": 200},
    "window": {"left": 10, "right": 3, "sq": 150, "sk": 150}, "mask": {"mask": "bqk", "mask_share": 0.9, "batch": 2},
    "mask of keys": {"mask": "bk", "batch": 2}, "bias": {"bias": "qk", "bias_inf": 0.8},
    "groups": {"heads": 4, "kv_heads": 2, "mask": "bk", "batch": 2}, "d 80, dv 32": {"d": 80, "dv": 32, "mask": "bk"},
    "d 256": {"d": 256, "mask": "bk"}, "packed heads": {"heads": 8, "kv_heads": 2, "sq": 2, "mask": "bk"},
}


@pytest.fixture(autouse=True, scope="module")
def _two_cores():
    with ascend.Settings(cores=2):
        yield


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FEATURES)
def test_forward(name, dtype):
    Case(len(name), dtype=dtype, **FEATURES[name]).check_forward()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FEATURES)
def test_backward(name, dtype):
    Case(len(name), dtype=dtype, **FEATURES[name]).check_backward()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NANS)
def test_nan_in_excluded_keys_and_values_does_not_leak(name, dtype):
    case = Case(len(name), dtype=dtype, nan="unseen", **NANS[name])
    case.check_forward()
    case.check_backward()


@pytest.mark.parametrize("name", ["causal", "window", "mask"])
def test_nan_reaches_those_who_see_it_and_nobody_else(name):
    case = Case(len(name), nan="seen by some", **NANS[name])
    result = ascend.forward(case.inputs(), **case.spec())
    exact = flash_rule.evaluate(case.call, None)
    clean = np.isfinite(exact["out"]).all(-1)
    assert not clean.all() and clean.any()
    assert np.isfinite(result["out"][clean].astype(np.float64)).all()
    assert np.isnan(result["out"][~clean].astype(np.float64)).any(-1).all()


UNSEEING = {
    "causal": {"right": 0, "sq": 77, "sk": 50},
    "window": {"left": 2, "right": 2, "align": "top_left", "sq": 120, "sk": 40},
    "mask": {"mask": "qk", "mask_share": 0.97, "heads": 4, "kv_heads": 2}, "mask of queries": {"mask": "hq", "d": 40},
    "bias": {"bias": "hq", "bias_inf": 0.2, "softcap": 2.0}, "sinks": {"mask": "hq", "sinks": "float32"},
    "sinks of the query's dtype": {"mask": "hq", "sinks": "query", "right": 0, "sq": 77, "sk": 50, "dropout": 0.2},
    "several blocks": {"right": 0, "sq": 700, "sk": 600, "heads": 1}, "d 256": {"mask": "hq", "d": 256},
    "lengths": {"lengths": [(70, 70), (1, 40), (40, 1)], "right": 0},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", UNSEEING)
def test_nan_in_the_gradient_of_rows_without_keys_does_not_leak(name, dtype):
    """What comes back to a row that sees no key, dlse of its -inf too, changes no gradient."""
    case = Case(len(name), dtype=dtype, **UNSEEING[name])
    forward = case.forward()
    empty = np.isneginf(flash_rule.evaluate({**case.call, "sinks": None}, None)["lse"])
    assert empty.any() and not empty.all()
    results = []
    for value in (0, np.nan, np.inf):
        case.dout[empty if case.dout.ndim == 4 else empty.T] = value
        if "sinks" not in case.call:
            case.dlse[empty] = value
        results.append(case.backward(forward=forward))
    for other in results[1:]:
        for grad, array in other.items():
            np.testing.assert_array_equal(array, results[0][grad], err_msg=grad)


def assert_same(a, b):
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


SPLIT = [{"sq": 200, "sk": 1500, "heads": 1, "d": 64}, {"sq": 300, "sk": 900, "heads": 4, "kv_heads": 2, "right": 0},
         {"sq": 1, "sk": 3333, "heads": 8, "kv_heads": 2, "d": 64}, {"lengths": [(70, 900), (300, 300)], "right": 0}]


@pytest.mark.parametrize("case", SPLIT, ids=["long", "causal", "decoding", "lengths"])
def test_results_are_bit_equal_for_any_number_of_cores_and_order(case):
    case = Case(7, **case)
    results = []
    for cores, reverse in ((1, 0), (3, 0), (3, 1), (20, 0)):
        with ascend.Settings(cores=cores, reverse=reverse):
            results.append({**case.forward(), **case.backward()})
    for other in results[1:]:
        assert_same(results[0], other)


@pytest.mark.parametrize("case", SPLIT[:2], ids=["long", "causal"])
def test_atomic_accumulation(case):
    with ascend.Settings(cores=3, atomic=1):
        Case(8, **case).check_backward()


DECODING = {
    "one query": {"sq": 1, "sk": 2100, "heads": 4, "kv_heads": 1, "d": 128},
    "four queries, causal": {"sq": 4, "sk": 1800, "heads": 8, "kv_heads": 2, "right": 0},
    "sixteen queries": {"sq": 16, "sk": 1300, "heads": 4, "kv_heads": 2, "sinks": "float32"},
    "no groups": {"sq": 1, "sk": 1700, "heads": 2, "mask": "bk", "mask_share": 0.99},
    "lengths": {"lengths": [(1, 900), (1, 33), (1, 1700)], "heads": 4, "kv_heads": 2},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", DECODING)
def test_decoding(name, dtype):
    case = Case(len(name), dtype=dtype, **DECODING[name])
    case.check_forward()
    case.check_backward()


@pytest.mark.parametrize("stack_n,depth", [(128, 1), (128, 3), (256, 2), (1024, 2)])
def test_any_stack_and_depth(stack_n, depth):
    with ascend.Settings(stack_n=stack_n, depth=depth):
        case = Case(stack_n + depth, sq=150, sk=700, right=0, heads=1)
        case.check_forward()
        case.check_backward()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"right": 0}, {"left": 500, "right": 0}], ids=["full", "causal", "window"])
def test_3333_by_3333(options):
    with ascend.Settings(cores=4):
        case = Case(3333, heads=1, sq=3333, sk=3333, d=128, **options)
        case.check_forward()
        case.check_backward()
