"""Caches of more than 2^31 elements, on the native library: no offset wraps.

They are sparse: memory that is reserved and not there until it is written or read, and a call touches little of it.
"""
from __future__ import annotations

import mmap
import resource

import flash_rule
import kvcases
import native
import numpy as np
import pytest

HEADS, KV_HEADS, D, NEW = 4, 2, 64, 3
MORE = 2**31 + 2**24        # elements
NORESERVE = 0x4000          # of Linux; Python names it from 3.13 on


def sparse(shape, dtype):
    """Zeros that take memory only where something is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    size = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(mmap.mmap(-1, size * dtype.itemsize, flags=flags), dtype).reshape(shape)


def caches(dtype, layout, first, rows):
    """Both caches, and views of them as (first axis, heads, row, channel)."""
    made = [sparse((first, KV_HEADS, rows, D) if layout == "BNSD" else (first, rows, KV_HEADS, D), dtype)
            for _ in range(2)]
    return made, [x if layout == "BNSD" else x.swapaxes(1, 2) for x in made]


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def check(dtype, layout, stored, views, places, table=None):
    """One call that appends. `places` holds for each sequence where its rows are that a query can see, all but the last
    NEW of which are in the cache before: pairs (first axis, row)."""
    rng = np.random.default_rng(len(places))
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)
    lengths, window = [n for n, _ in places], len(places[0][1]) - 1
    query, k, v = draw(len(places), HEADS, 1, D), *(draw(len(places), KV_HEADS, NEW, D) for _ in range(2))
    past = []
    for b, (_, rows) in enumerate(places):
        both = [np.concatenate([draw(KV_HEADS, len(rows) - NEW, D), new[b]], 1) for new in (k, v)]
        for view, values in zip(views, both):
            for i, (at, row) in enumerate(rows[:-NEW]):
                view[at, :, row] = values[:, i]
        past.append(both)
    given = {"query": query, "k_cache": stored[0], "v_cache": stored[1], "k": k, "v": v,
             "cache_seqlens": np.array(lengths, np.int64), "block_table": table}
    arrays = [native.to_layout(x, layout) if name in ("query", "k", "v") else x for name, x in
              ((slot, given.get(slot)) for slot in kvcases.SLOTS)]
    digits = "".join("0" if x is None else "1" for x in arrays)
    spec = f"inputs={digits};interleaved=0;splits=0|" + native.spec_text(
        {"query": 1, "key": 1, "value": 1}, layout=layout, left=window, right=0)
    out = native.Guarded(native.to_layout(query, layout).shape, dtype)
    lse = native.Guarded((len(places), HEADS, 1), np.float32)
    native.raw_call("kvcache", spec, [*arrays, out.array, lse.array])

    got = {"out": native.from_layout(out.array, layout, HEADS), "lse": lse.array}
    keys, values = (np.stack([both[part] for both in past]) for part in range(2))
    truths = [flash_rule.reference.forward(query, keys, values, rounding=rounding) for rounding in (None, dtype)]
    flash_rule.check(got, *({"out": out, "lse": lse} for out, lse, _ in truths))
    for view, new in zip(views, (k, v)):
        for b, (_, rows) in enumerate(places):
            for i, (at, row) in enumerate(rows[-NEW:]):
                assert (view[at, :, row] == new[b, :, i]).all(), f"token {i} of sequence {b}"


@pytest.mark.parametrize("dtype", native.DTYPES.values(), ids=list(native.DTYPES))
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_pool(layout, dtype):
    """The first block, the last, and those where a number of 31 or 32 bits would wrap."""
    before, size = peak_mib(), 16
    block = KV_HEADS * size * D
    count = MORE // block
    stored, views = caches(dtype, layout, count, size)
    table = np.array([[count - 1, 2**31 // block, 0], [2**30 // block, 2**31 // block - 1, count - 2]], np.int32)
    rows = lambda b, n: [(int(table[b, i // size]), i % size) for i in range(n)]
    check(dtype, layout, stored, views, [(n, rows(b, n + NEW)) for b, n in ((0, 40), (1, 40))], table)
    assert peak_mib() - before < 100


@pytest.mark.parametrize("dtype", native.DTYPES.values(), ids=list(native.DTYPES))
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_long_sequences(layout, dtype):
    """Two sequences whose caches are that large each, of which a query sees the last tokens; one is in use up to its
    end, the other up to where an offset is 2^31."""
    before, seen = peak_mib(), 37
    length = MORE // (KV_HEADS * D)
    stored, views = caches(dtype, layout, 2, length)
    rows = lambda b, n: [(b, i) for i in range(n + NEW - seen, n + NEW)]
    last, middle = length - NEW, 2**31 // (KV_HEADS * D) - 1
    check(dtype, layout, stored, views, [(last, rows(0, last)), (middle, rows(1, middle))])
    assert peak_mib() - before < 100
