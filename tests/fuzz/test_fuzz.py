"""Random legal calls of the native CPU kernels against the float64 reference, forward and backward.

`MS_FLASH_FUZZ` sets the number of calls. Runs without MindSpore: `pytest --noconftest tests/fuzz`.
"""
from __future__ import annotations

import os

import flash_rule
import native
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 40, 63, 64, 65, 70, 97, 130, 0]
HEAD_DIMS = [8, 1, 2, 5, 16, 24, 33, 40, 64, 65, 72, 130]


def _sometimes(values):
    """None first: what a failing example shrinks to."""
    return st.one_of(st.none(), values)


def _plane(varlen=False):
    """Rank of a broadcastable operand and which of its axes are full."""
    rank = st.just(2) if varlen else st.integers(1, 4)
    return rank.flatmap(lambda r: st.tuples(*[st.booleans()] * r))


@st.composite
def specs(draw):
    """One legal call, as plain values: `build` turns it into arrays."""
    layout = draw(st.sampled_from(["BNSD", "BSND", "BSH", "SBH", "TND"]))
    varlen = layout == "TND"
    packed = not varlen and draw(st.sampled_from([False, False, False, True]))
    spec = {"layout": layout, "packed": packed, "dtype": draw(st.sampled_from(list(native.DTYPES))),
            "batch": draw(st.sampled_from([1, 2, 3, 1, 2, 0])) if not varlen else draw(st.integers(1, 4)),
            "kv_heads": draw(st.integers(1, 3)), "group": draw(st.integers(1, 3)),
            "d": draw(st.sampled_from(HEAD_DIMS))}
    spec["dv"] = spec["d"] if packed else draw(st.sampled_from([spec["d"], *HEAD_DIMS]))
    if varlen:
        spec["lengths"] = draw(st.lists(st.tuples(st.sampled_from(LENGTHS), st.sampled_from(LENGTHS)),
                                        min_size=spec["batch"], max_size=spec["batch"]))
        spec["tail"] = draw(st.sampled_from([(0, 0), (3, 0), (0, 2), (5, 70)]))
        spec["cu_dtype"] = draw(st.sampled_from(["int32", "int64"]))
    else:
        spec["sq"] = draw(st.sampled_from(LENGTHS))
        spec["sk"] = spec["sq"] if packed else draw(st.sampled_from(LENGTHS))
    spec["mask"] = draw(_sometimes(_plane(varlen)))
    spec["mask_dtype"] = draw(st.sampled_from(["bool", "uint8"]))
    spec["mask_share"] = draw(st.sampled_from([0.3, 0.3, 0.0, 0.9, 1.0]))
    spec["fill"] = draw(_sometimes(st.sampled_from([-1e4, 0.0, -1.5, 3.0]))) if spec["mask"] else None
    spec["bias"] = None if varlen else draw(_sometimes(_plane()))
    spec["bias_dtype"] = draw(st.sampled_from([spec["dtype"], "float32"]))
    spec["bias_inf"] = draw(st.sampled_from([0.0, 0.0, 0.0, 0.2, 1.0]))
    spec["alibi"] = draw(_sometimes(st.booleans()))                          # True: (B, N), False: (N,)
    spec["sinks"] = draw(_sometimes(st.sampled_from([spec["dtype"], "float32"])))
    spec["drop_mask"] = None if varlen else draw(_sometimes(_plane()))
    spec["dropout"] = draw(st.sampled_from([0.0, 0.0, 0.17, 0.9]))
    spec["seed"] = draw(st.one_of(st.integers(-2**63, 2**63 - 1), st.integers(0, 3)))
    spec["offset"] = draw(st.one_of(st.just(0), st.integers(0, 2**63 - 1)))
    spec["seed_tensor"] = draw(st.booleans())
    spec["scale"] = draw(_sometimes(st.sampled_from([1.0, 0.0, 0.3, -0.2, 1e-6, -3.0, 100.0])))
    spec["softcap"] = draw(st.sampled_from([0.0, 0.0, 0.5, 2.0, 50.0]))
    window = st.one_of(st.just(-1), st.integers(0, 20), st.sampled_from([0, 64, 2**31 - 1]))
    spec["left"], spec["right"] = draw(window), draw(window)
    spec["align"] = draw(st.sampled_from(["bottom_right", "top_left"]))
    spec["precision"] = draw(st.sampled_from(["default", "default", "high"]))
    spec["block_m"], spec["block_n"] = (draw(st.sampled_from([0, 0, 1, 16, 24, 64, 100])) for _ in range(2))
    spec["poison"] = draw(st.sampled_from([None, None, "unseen", "seen"]))
    spec["numbers"] = draw(st.integers(0, 10**6))
    return spec


def _shape(full_axes, sizes):
    return tuple(size if full else 1 for full, size in zip(full_axes, sizes[len(sizes) - len(full_axes):]))


def build(spec):
    """The call as the reference takes it, dense in BNSD, and gradients of its two results."""
    rng = np.random.default_rng(spec["numbers"])
    dtype, varlen = native.DTYPES[spec["dtype"]], spec["layout"] == "TND"
    batch, kv_heads = spec["batch"], spec["kv_heads"]
    heads = kv_heads * spec["group"]
    call = {}
    if varlen:
        lengths = np.array(spec["lengths"]).T
        cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(spec["cu_dtype"]) for x in lengths)
        sq, sk = lengths.max(1)
        rows, keys = cu_q[-1] + spec["tail"][0], cu_k[-1] + spec["tail"][1]
        shapes = (rows, heads), (keys, kv_heads)
        call.update(cu_q=cu_q, cu_k=cu_k)
    else:
        sq, sk = spec["sq"], spec["sk"]
        shapes = (batch, heads, sq), (batch, kv_heads, sk)

    def normal(*shape, of=dtype):
        return rng.standard_normal(shape).astype(of)

    call.update(q=normal(*shapes[0], spec["d"]), k=normal(*shapes[1], spec["d"]), v=normal(*shapes[1], spec["dv"]))
    dout = normal(*shapes[0], spec["dv"])
    dlse = normal(*((heads, rows) if varlen else shapes[0]), of=np.float32)
    sizes = (batch, heads, sq, sk)
    if spec["mask"]:
        shape = _shape(spec["mask"], sizes)
        call["attn_mask"] = (rng.random(shape) < spec["mask_share"]).astype(spec["mask_dtype"])
        if spec["mask_dtype"] == "uint8":
            call["attn_mask"] *= rng.integers(1, 256, shape, np.uint8)
    if spec["bias"]:
        shape = _shape(spec["bias"], sizes)
        bias = np.where(rng.random(shape) < spec["bias_inf"], -np.inf, rng.standard_normal(shape))
        call["bias"] = bias.astype(native.DTYPES[spec["bias_dtype"]])
    if spec["alibi"] is not None:
        call["alibi_slopes"] = rng.random((batch, heads) if spec["alibi"] else heads).astype(np.float32)
    if spec["sinks"]:
        call["sinks"] = normal(heads, of=native.DTYPES[spec["sinks"]])
    if spec["drop_mask"]:
        call["drop_mask"] = (rng.random(_shape(spec["drop_mask"], sizes)) < 0.6).astype(np.uint8)
    call.update({name: spec[name] for name in ("scale", "left", "right", "align", "softcap", "seed", "offset")},
                dropout_p=spec["dropout"], mask_fill=spec["fill"])
    _poison(spec["poison"], call, dout, dlse, rng)
    return call, dout, dlse


def _poison(kind, call, dout, dlse, rng):
    """NaN in everything that no result may depend on; or in one element, which may reach only those that see it."""
    if kind == "seen" and call["k"].size and call["v"].size:
        target = call["k" if rng.random() < 0.5 else "v"]
        target.reshape(-1)[rng.integers(target.size)] = np.nan
    if kind != "unseen":
        return
    reference = flash_rule.reference
    _, _, saved = reference.forward(**call)
    cu_q, cu_k = saved["cu_q"], saved["cu_k"]
    if cu_q is not None:
        for x, cu in ((call["q"], cu_q), (call["k"], cu_k), (call["v"], cu_k), (dout, cu_q), (dlse.T, cu_q)):
            x[cu[-1]:] = np.nan
    parts = [reference._sequences(x, cu) for x, cu in (
        (call["q"], cu_q), (call["k"], cu_k), (call["v"], cu_k), (dout, cu_q))]
    for b, (q, k, v, do, dl) in enumerate(zip(*parts, reference._row_sequences(dlse, cu_q))):
        for h in range(k.shape[0]):
            own = range(h * saved["group"], (h + 1) * saved["group"])
            seen = [reference._softmax(saved, b, n, q[n].astype(float), k[h].astype(float))["allowed"] for n in own]
            for n, allowed in zip(own, seen):
                empty = ~allowed.any(-1)
                q[n][empty], do[n][empty] = np.nan, np.nan
                if call.get("sinks") is None:
                    dl[n][empty] = np.nan
            unseen = ~np.logical_or.reduce(seen).any(0)
            k[h][unseen], v[h][unseen] = np.nan, np.inf


def run(spec, call, dout, dlse):
    """The same call through the native library; results in the reference's shapes."""
    layout, packed = spec["layout"], spec["packed"]
    heads, kv_heads = spec["kv_heads"] * spec["group"], spec["kv_heads"]
    tensors = {"query": call["q"], "key": call["k"], "value": call["v"]}
    if packed:
        tensors = {"query": np.concatenate([call["q"], call["k"], call["v"]], axis=1)}
    inputs = {slot: native.to_layout(x, layout) for slot, x in tensors.items()}
    inputs.update({slot: call[slot] for slot in native.SLOTS if slot != "seed" and slot in call})
    options = {name: spec[name] for name in (
        "layout", "packed", "scale", "left", "right", "align", "softcap", "dropout", "fill", "precision", "block_m",
        "block_n")}
    if packed or layout in ("BSH", "SBH"):
        options.update(heads=heads, kv_heads=kv_heads)
    if spec["seed_tensor"]:
        inputs["seed"] = np.array([spec["seed"], spec["offset"]], np.int64)
    else:
        options.update(seed=spec["seed"], offset=spec["offset"])
    saved = native.forward(inputs, **options)
    grads = native.backward(inputs, saved, native.to_layout(dout, layout), dlse, **options)
    got = {"out": native.from_layout(saved["out"], layout, heads), "lse": saved["lse"]}
    if packed:
        whole = native.from_layout(grads["dq"], layout, heads + 2 * kv_heads)
        grads["dq"], grads["dk"], grads["dv"] = np.split(whole, [heads, heads + kv_heads], axis=1)
    else:
        for name, count in (("dq", heads), ("dk", kv_heads), ("dv", kv_heads)):
            grads[name] = native.from_layout(grads[name], layout, count)
    return {**got, **grads}


@settings(max_examples=int(os.environ.get("MS_FLASH_FUZZ", "2000")), derandomize=True, deadline=None, database=None,
          print_blob=False, suppress_health_check=list(HealthCheck))
@given(specs())
def test_random_legal_calls(spec):
    call, dout, dlse = build(spec)
    got = run(spec, call, dout, dlse)
    exact = flash_rule.evaluate(call, dout, dlse)
    naive = flash_rule.evaluate(call, dout, dlse, rounding=native.DTYPES[spec["dtype"]])
    flash_rule.check(got, exact, naive, flash_rule.unavoidable(call, dout, dlse, got["out"]))
