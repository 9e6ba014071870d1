"""Random legal calls of the native block op against the float64 reference. Runs without MindSpore, as test_fuzz.py."""
from __future__ import annotations

import os

import flash_rule
import native
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SIZES = [1, 2, 3, 7, 8, 15, 16, 17, 33, 40, 49, 64, 65, 97, 130]


@st.composite
def specs(draw):
    """Sizes and options of one call, as plain values."""
    pick = lambda *values: draw(st.sampled_from(values))
    spec = {"dtype": pick(*native.DTYPES), "layout": pick("BSH", "SBH"), "pack": pick("none", "kv", "qkv"),
            "batch": pick(1, 2, 3), "kv_heads": pick(1, 2, 3), "group": pick(1, 1, 2), "d": pick(8, 1, 5, 16, 33, 64),
            "sq": draw(st.sampled_from(SIZES)), "sk": draw(st.sampled_from(SIZES)), "e": draw(st.sampled_from(SIZES)),
            "out": draw(st.sampled_from(SIZES)), "cross": draw(st.booleans()), "biases": draw(st.booleans()),
            "w_o": pick(True, True, False), "recompute": draw(st.booleans()), "mask": draw(st.booleans()),
            "transposed": tuple(draw(st.booleans()) for _ in range(4)), "right": pick(-1, 0, 3),
            "dropout": pick(0.0, 0.0, 0.3), "numbers": draw(st.integers(0, 10**6))}
    spec["interleaved"] = spec["group"] == 1 and draw(st.booleans())
    return spec


def build(spec):
    """Inputs by slot name, options of the op, channels of its results."""
    rng, dtype = np.random.default_rng(spec["numbers"]), native.DTYPES[spec["dtype"]]
    normal = lambda *shape, scale=1.0: (rng.standard_normal(shape) * scale).astype(dtype)
    heads, kv_heads, d, e = spec["kv_heads"] * spec["group"], spec["kv_heads"], spec["d"], spec["e"]
    cross = spec["cross"] and spec["pack"] != "qkv"
    sk = spec["sk"] if cross else spec["sq"]
    inputs = {"x": normal(spec["batch"], spec["sq"], e)}
    if cross:
        inputs["context"] = normal(spec["batch"], sk, e)
    rows = {"q": heads * d, "k": kv_heads * d, "v": kv_heads * d}
    if spec["pack"] == "kv":
        rows = {"q": rows["q"], "k": 2 * rows["k"]}
    elif spec["pack"] == "qkv":
        rows = {"q": rows["q"] + 2 * rows["k"]}
    shapes = {name: (out, e) for name, out in rows.items()}
    if spec["w_o"]:
        shapes["o"] = (spec["out"], heads * d)
    for name, shape in shapes.items():
        turned = spec["transposed"]["qkvo".index(name)]
        inputs["w_" + name] = normal(*(shape[::-1] if turned else shape), scale=shape[1] ** -0.5)
        if spec["biases"]:
            inputs["b_" + name] = normal(shape[0])
    if spec["mask"]:
        inputs["attn_mask"] = rng.random((spec["batch"], 1, 1, sk)) < 0.3
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "transposed": spec["transposed"], "right": spec["right"],
               "interleaved": spec["interleaved"], "seed": spec["numbers"]}
    channels = (spec["out"] if spec["w_o"] else heads * d, heads * d, kv_heads * d, kv_heads * d, heads * d)
    return inputs, options, channels


@settings(max_examples=int(os.environ.get("MS_FLASH_FUZZ", "60")), deadline=None, derandomize=True,
          suppress_health_check=list(HealthCheck))
@given(specs())
def test_block_op(spec):
    inputs, options, channels = build(spec)
    dy = np.random.default_rng(spec["numbers"] + 1).standard_normal((*inputs["x"].shape[:2], channels[0]))
    dy = dy.astype(inputs["x"].dtype)
    native_options = {**options, "channels": channels, "layout": spec["layout"], "recompute": spec["recompute"],
                      "dropout": spec["dropout"]}
    saved = native.mha_forward(inputs, **native_options)
    got = {"out": saved["y"], **native.mha_backward(inputs, saved, dy, **native_options)}
    runs = []
    for rounding in (None, inputs["x"].dtype):
        y, kept = flash_rule.reference.mha_forward(inputs, **options, dropout_p=spec["dropout"], rounding=rounding)
        runs.append({"out": y, **flash_rule.reference.mha_backward(dy, kept)})
    exact, naive = runs
    reasons = [flash_rule.broken(name, got[name], exact[name], naive[name], margin(name, exact, dy)) for name in got]
    assert not any(reasons), "\n".join(filter(None, reasons))


def margin(name, exact, dy):
    """What rounding the gradients of q, k and v to 16 bit may add where a sum over tokens cancels."""
    if dy.dtype == np.float32 or not name.startswith(("db", "dw", "dx", "dc")):
        return 0.0
    return flash_rule._half_ulp(dy.dtype) * max(np.abs(grad).max() for grad in exact.values())
