"""Projections, attention and output projection in one launch of the Ascend kernels, on the host twin."""
from __future__ import annotations

import ascend
import flash_rule
import native
import numpy as np
import pytest


def make(numbers, batch=2, sq=40, sk=None, embed=64, k_embed=None, heads=4, kv_heads=2, d=16, out=48, dtype="float16",
         biases=True, output=True, mask=False):
    rng = np.random.default_rng(numbers)
    dtype = native.DTYPES[dtype]
    normal = lambda *shape, scale=1.0: (rng.standard_normal(shape) * scale).astype(dtype)
    weight = lambda rows, columns: normal(rows, columns, scale=columns ** -0.5)
    k_embed = k_embed or embed
    inputs = {"x": normal(batch, sq, embed), "w_q": weight(heads * d, embed), "w_k": weight(kv_heads * d, k_embed),
              "w_v": weight(kv_heads * d, k_embed)}
    if sk:
        inputs["context"] = normal(batch, sk, k_embed)
    if biases:
        inputs.update(b_q=normal(heads * d), b_k=normal(kv_heads * d), b_v=normal(kv_heads * d))
    if output:
        inputs["w_o"] = weight(out, heads * d)
        if biases:
            inputs["b_o"] = normal(out)
    if mask:
        inputs["attn_mask"] = rng.random((batch, 1, 1, sk or sq)) < 0.3
    return inputs


def expected(inputs, heads, kv_heads, rounding=None, **options):
    """The block in float64, or with every intermediate rounded."""
    rnd = (lambda x: x) if rounding is None else (lambda x: x.astype(rounding).astype(np.float64))
    wide = {name: x.astype(np.float64) for name, x in inputs.items() if name != "attn_mask"}
    context = wide.get("context", wide["x"])

    def project(x, name):
        return rnd(x @ wide["w_" + name].T + wide.get("b_" + name, 0.0))

    split = lambda x, n: x.reshape(*x.shape[:2], n, -1).transpose(0, 2, 1, 3)
    q, k, v = (split(project(x, name), n) for x, name, n in (
        (wide["x"], "q", heads), (context, "k", kv_heads), (context, "v", kv_heads)))
    out, lse, _ = flash_rule.reference.forward(q, k, v, attn_mask=inputs.get("attn_mask"), rounding=rounding, **options)
    merged = out.transpose(0, 2, 1, 3).reshape(*wide["x"].shape[:2], -1)
    return {"out": project(merged, "o") if "w_o" in wide else merged, "lse": lse}


CASES = {
    "plain": {}, "causal": {"options": {"right": 0}}, "no biases": {"biases": False}, "no output": {"output": False},
    "cross attention": {"sk": 70, "k_embed": 96}, "odd lengths": {"sq": 37, "batch": 1}, "mask": {"mask": True},
    "odd embedding": {"embed": 72, "out": 40}, "several tiles": {"sq": 150, "embed": 160, "heads": 10, "kv_heads": 10,
                                                                 "out": 160},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_block(name, dtype):
    case = dict(CASES[name])
    options = case.pop("options", {})
    heads, kv_heads = case.get("heads", 4), case.get("kv_heads", 2)
    inputs = make(len(name), dtype=dtype, **case)
    with ascend.Settings(cores=2):
        got = ascend.block(inputs, heads, kv_heads, **options)
    exact = expected(inputs, heads, kv_heads, **options)
    naive = expected(inputs, heads, kv_heads, rounding=inputs["x"].dtype, **options)
    reason = flash_rule.broken("out", got["y"], exact["out"], naive["out"])
    assert reason is None, reason
    # the scores come from rounded projections, and so does what is summed
    assert np.abs(got["lse"] - exact["lse"]).max() <= 2 * np.abs(naive["lse"] - exact["lse"]).max() + 1e-4


def test_block_is_bit_equal_for_any_number_of_cores():
    inputs = make(1, sq=150, embed=160, out=160)
    results = []
    for cores in (1, 3, 20):
        with ascend.Settings(cores=cores):
            results.append(ascend.block(inputs, 4, 2, right=0)["y"].tobytes())
    assert len(set(results)) == 1
