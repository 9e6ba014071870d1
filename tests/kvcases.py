"""Random calls over a cache of keys and values, what must come out, and the native op. No MindSpore.

Everything is (B, N, S, D) here. Truth is attention over the concatenation of what each sequence has in the cache and
what it appends, so it shares no code with the reference backend. Every row of a cache that holds no token is NaN, and
table entries behind those in use name no block.
"""
from __future__ import annotations

from dataclasses import dataclass

import flash_rule
import native
import numpy as np

SLOTS = ("query", "k_cache", "v_cache", "k", "v", "cache_seqlens", "block_table", "rotary_cos", "rotary_sin",
         "alibi_slopes", "sinks")
_CACHES = ("query", "k_cache", "v_cache", "k", "v")


@dataclass
class Case:
    """One call: inputs by slot in BNSD, options of flash_attention_with_kvcache, and the tokens before it."""

    inputs: dict
    options: dict
    past: list                      # (keys, values) of each sequence, (Nk, length, D)
    interleaved: bool = False

    def laid_out(self, layout):
        """Inputs in `layout`, copied: a call writes into two of them."""
        return {name: None if x is None else native.to_layout(x, layout).copy() if name in _CACHES else x.copy()
                for name, x in ((slot, self.inputs.get(slot)) for slot in SLOTS)}


def draw(rng, dtype, *, length=None, max_length=70, **fixed):
    """A random case; `fixed` sets what is not to be drawn."""
    pick = lambda name, *values: fixed[name] if name in fixed else values[rng.integers(len(values))]
    dtype = native.DTYPES[dtype]
    batch, kv_heads, group = pick("batch", 1, 2, 3), pick("kv_heads", 1, 2, 3), pick("group", 1, 1, 2, 3, 7)
    d, dv = pick("d", 8, 1, 5, 16, 33, 64, 80), pick("dv", 8, 3, 16, 33, 64)
    block_size = pick("block_size", 0, 0, 16, 16, 32, 64, 256, 1, 3, 10, 128)
    new_len = pick("new_len", 0, 1, 1, 1, 2, 5, 17)
    sq = pick("sq", new_len, new_len, 1, 2, 9, 30) or 1
    rotary = pick("rotary", None, None, "half", "interleaved") if d > 1 else None
    edges = [0, 1, 2, 7, 8, 9]
    edges += [block_size * n + e for n in (1, 2) for e in (-1, 0, 1)] if block_size else [15, 16, 17, 33]
    edges = [n for n in edges if 0 <= n <= max_length]
    lengths = [edges[rng.integers(len(edges))] if rng.random() < 0.6 else int(rng.integers(max_length + 1))
               for _ in range(batch)] if length is None else list(length)
    if rotary:                      # a query has a position
        lengths = [max(n, sq - new_len) for n in lengths]
    normal = lambda *shape: rng.standard_normal(shape).astype(dtype)
    past = [(normal(kv_heads, n, d), normal(kv_heads, n, dv)) for n in lengths]
    shared = _share(rng, past, lengths, block_size) if pick("shared", True, False) and block_size else 0
    inputs = {"query": normal(batch, kv_heads * group, sq, d),
              "cache_seqlens": np.array(lengths, pick("int", np.int32, np.int64))}
    if new_len:
        inputs["k"], inputs["v"] = normal(batch, kv_heads, new_len, d), normal(batch, kv_heads, new_len, dv)
    _caches(rng, inputs, past, [n + new_len for n in lengths], block_size, shared, dtype)
    options = {"causal": pick("causal", True, True, False), "window_size": pick("window", (-1, -1), (-1, -1), (5, 0),
                                                                              (20, 3), (0, 0)),
               "softcap": pick("softcap", 0.0, 0.0, 2.0), "softmax_scale": pick("scale", None, None, 0.3),
               "num_splits": pick("num_splits", 0, 0, 1, 3), "precision_mode": pick("precision", "default", "default",
                                                                                "high")}
    if rotary:
        pairs = pick("pairs", d // 2, d // 2, max(1, d // 4))
        positions = max(lengths) + new_len + int(rng.integers(3))
        angles = np.arange(positions)[:, None] * 0.7 ** np.arange(pairs)
        kind = dtype if rng.random() < 0.3 else np.float32
        inputs["rotary_cos"], inputs["rotary_sin"] = np.cos(angles).astype(kind), np.sin(angles).astype(kind)
        options["rotary_interleaved"] = rotary == "interleaved"
    heads = kv_heads * group
    if pick("alibi", False, False, True):
        inputs["alibi_slopes"] = rng.random((batch, heads) if rng.random() < 0.5 else heads).astype(np.float32)
    if pick("sinks", False, False, True):
        inputs["sinks"] = rng.standard_normal(heads).astype(dtype if rng.random() < 0.5 else np.float32)
    return Case(inputs, options, past, rotary == "interleaved")


def _share(rng, past, lengths, block_size):
    """Makes the first full blocks of all sequences the same; how many."""
    shared = min(lengths) // block_size
    shared = int(rng.integers(shared + 1))
    for keys, values in past[1:]:
        keys[:, :shared * block_size] = past[0][0][:, :shared * block_size]
        values[:, :shared * block_size] = past[0][1][:, :shared * block_size]
    return shared


def _caches(rng, inputs, past, totals, block_size, shared, dtype):
    """Caches that hold the past and NaN elsewhere."""
    batch, kv_heads = len(past), past[0][0].shape[0]
    rows = block_size or max(max(totals), 1) + int(rng.integers(3))
    used = [-(-total // rows) for total in totals]
    count = batch if not block_size else shared + sum(max(n - shared, 0) for n in used) + 1 + int(rng.integers(3))
    for slot, part in (("k_cache", 0), ("v_cache", 1)):
        inputs[slot] = np.full((count, kv_heads, rows, past[0][part].shape[2]), np.nan, dtype)
    if not block_size:
        for b, (keys, values) in enumerate(past):
            inputs["k_cache"][b, :, :keys.shape[1]], inputs["v_cache"][b, :, :keys.shape[1]] = keys, values
        return
    free = list(rng.permutation(count))
    prefix = [free.pop() for _ in range(shared)]
    width = max(max(used), 1) + int(rng.integers(2))
    table = rng.choice([-1, -7, count, 2**31 - 1], (batch, width)).astype(np.int32)
    for b, (keys, values) in enumerate(past):
        blocks = (prefix + [free.pop() for _ in range(used[b] - shared)])[:used[b]]
        table[b, :used[b]] = blocks
        for i in range(keys.shape[1]):
            inputs["k_cache"][blocks[i // rows], :, i % rows] = keys[:, i]
            inputs["v_cache"][blocks[i // rows], :, i % rows] = values[:, i]
    inputs["block_table"] = table if rng.random() < 0.8 else table.astype(np.int64)


def rotated(x, case, position):
    """(N, S, D), in float64."""
    x, cos, sin = (np.asarray(y).astype(np.float64) for y in (x, case.inputs["rotary_cos"], case.inputs["rotary_sin"]))
    pairs = cos.shape[1]
    cos, sin = cos[position:position + x.shape[1]], sin[position:position + x.shape[1]]
    turned = x.copy()
    for c in range(pairs):
        a, b = (2 * c, 2 * c + 1) if case.interleaved else (c, c + pairs)
        turned[..., a] = x[..., a] * cos[:, c] - x[..., b] * sin[:, c]
        turned[..., b] = x[..., b] * cos[:, c] + x[..., a] * sin[:, c]
    return turned


def appended(case, b):
    """Keys and values that sequence b appends, as they must be in the cache; None without."""
    if "k" not in case.inputs:
        return None
    keys = case.inputs["k"][b]
    if "rotary_cos" in case.inputs:
        keys = rotated(keys, case, case.past[b][0].shape[1]).astype(keys.dtype)
    return keys, case.inputs["v"][b]


def expected(case, rounding=None, query_dtype=None):
    """dict(out, lse), sequence by sequence over the concatenation; a rotated query is rounded to `query_dtype`."""
    query_dtype = query_dtype or rounding
    inputs, options = case.inputs, case.options
    outs, lses = [], []
    for b, (keys, values) in enumerate(case.past):
        new = appended(case, b)
        if new is not None:
            keys, values = np.concatenate([keys, new[0]], 1), np.concatenate([values, new[1]], 1)
        query = inputs["query"][b]
        if "rotary_cos" in inputs:
            query = rotated(query, case, keys.shape[1] - query.shape[1])
            query = query if query_dtype is None else query.astype(query_dtype)
        slopes = inputs.get("alibi_slopes")
        left, right = options["window_size"]
        out, lse, _ = flash_rule.reference.forward(
            query[None], keys[None], values[None], alibi_slopes=slopes if slopes is None or slopes.ndim == 1 else
            slopes[b], sinks=inputs.get("sinks"), scale=options["softmax_scale"], left=left,
            right=0 if options["causal"] else right, softcap=options["softcap"], rounding=rounding)
        outs.append(out)
        lses.append(lse)
    return {"out": np.concatenate(outs), "lse": np.concatenate(lses)}


def check(case, got, caches, narrow=False):
    """The results `got`, in BNSD, and both caches after the call. `narrow`: products take operands of the query's dtype
    alone, so that a rotated query is rounded once more, which the LSE shows."""
    dtype = case.inputs["query"].dtype
    exact, margins = expected(case), {}
    if narrow and "rotary_cos" in case.inputs:
        rounded = expected(case, query_dtype=dtype)["lse"]
        live = np.isfinite(exact["lse"])
        margins["lse"] = 2 * np.abs(rounded[live] - exact["lse"][live]).max(initial=0.0)
    flash_rule.check(got, exact, expected(case, rounding=dtype), margins)
    check_caches(case, caches)


def check_caches(case, caches):
    """The new tokens are where they belong, and no other bit has changed."""
    dtype = case.inputs["query"].dtype
    for slot, part, cache in (("k_cache", 0, caches[0]), ("v_cache", 1, caches[1])):
        wanted = case.inputs[slot].copy()
        turned = part == 0 and "rotary_cos" in case.inputs
        for b, (keys, _) in enumerate(case.past):
            new = appended(case, b)
            for i in range(0 if new is None else new[0].shape[1]):
                at = keys.shape[1] + i
                table = case.inputs.get("block_table")
                block, row = (b, at) if table is None else (table[b, at // wanted.shape[2]], at % wanted.shape[2])
                wanted[block, :, row] = new[part][:, i]
                if turned:      # float32 against float64: where terms cancel, what is off is a rounding of the terms
                    have, want = (x.astype(np.float64) for x in (cache[block, :, row], new[part][:, i]))
                    bound = 2 * float(flash_rule.ml_dtypes.finfo(dtype).eps) * np.abs(want).max()
                    assert np.abs(have - want).max() <= bound, f"{slot}: token {at} of sequence {b}"
                    wanted[block, :, row] = cache[block, :, row]
        bits = np.uint32 if dtype == np.float32 else np.uint16
        same = cache.view(bits) == wanted.view(bits)
        assert same.all(), f"{slot}: row {np.argwhere(~same)[0].tolist()} is not as expected"


def native_call(case, layout, call=native.raw_call):
    """The op of a native library, in `layout`: dict(out, lse) in BNSD, and both caches after it."""
    arrays, options = case.laid_out(layout), case.options
    heads, kv_heads = case.inputs["query"].shape[1], case.inputs["k_cache"].shape[1]
    left, right = options["window_size"]
    given = {"query": 1, "key": 1, "value": 1, **{name: arrays[name] for name in ("alibi_slopes", "sinks")}}
    digits = "".join("0" if arrays[slot] is None else "1" for slot in SLOTS)
    spec = (f"inputs={digits};interleaved={int(case.interleaved)};splits={options['num_splits']}|"
            + native.spec_text(given, layout=layout, scale=options["softmax_scale"], left=left,
                               right=0 if options["causal"] else right, softcap=options["softcap"],
                               precision=options["precision_mode"]))
    batch, _, sq, _ = case.inputs["query"].shape
    out = native.Guarded(native.to_layout(np.empty((batch, heads, sq, case.inputs["v_cache"].shape[3])), layout).shape,
                         arrays["query"].dtype)
    lse = native.Guarded((batch, heads, sq), np.float32)
    untouched = {name: x.copy() for name, x in arrays.items() if x is not None and name not in ("k_cache", "v_cache")}
    call("kvcache", spec, [*(arrays[slot] for slot in SLOTS), out.array, lse.array])
    assert out.intact() and lse.intact(), "wrote outside its outputs"
    assert all(arrays[name].tobytes() == x.tobytes() for name, x in untouched.items()), "wrote to another input"
    caches = [native.from_layout(arrays[name], layout, kv_heads) for name in ("k_cache", "v_cache")]
    return {"out": native.from_layout(out.array, layout, heads), "lse": lse.array}, caches
