"""Random ragged calls of the native op over a cache, and of the merge, against attention over the concatenation.

Runs without MindSpore, as test_fuzz.py. MS_FLASH_FUZZ sets the number of cases.
"""
from __future__ import annotations

import ctypes
import mmap
import os
import sys

import flash_rule
import kvcases
import native
import numpy as np
import pytest

CASES = int(os.environ.get("MS_FLASH_FUZZ", "400"))


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_random_ragged_calls(layout, dtype):
    for seed in range(CASES // 6 + 1):
        case = kvcases.draw(np.random.default_rng((seed, layout == "BSND", len(dtype))), dtype)
        got, caches = kvcases.native_call(case, layout)
        try:
            kvcases.check(case, got, caches)
        except AssertionError as error:
            shapes = {name: x.shape for name, x in case.inputs.items()}
            raise AssertionError(f"case {seed}: {error}\n{shapes}\n{case.options}\n"
                                 f"{case.inputs['cache_seqlens']}") from error


@pytest.mark.parametrize("dtype", native.DTYPES)
def test_long_sequences(dtype):
    """Long enough for the automatic split, and for blocks of keys from many pages."""
    sizes = [(1, 0), (1, 16), (1, 48), (1, 256), (2, 16), (200, 16), (200, 0), (77, 256)]
    for seed, (sq, block_size) in enumerate(sizes):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(300, 1700, 2)
        case = kvcases.draw(rng, dtype, length=lengths, max_length=1700, sq=sq, new_len=sq, block_size=block_size,
                            batch=2, num_splits=0)
        kvcases.check(case, *kvcases.native_call(case, "BSND"))


def test_results_do_not_depend_on_threads():
    library = native.library()
    before = library.msflash_cpu_get_num_threads()
    try:
        for seed in range(12):
            case = kvcases.draw(np.random.default_rng(seed), "float32", length=[2000, 3, 700], batch=3, max_length=2000)
            results = []
            for threads in (1, 2, 5):
                library.msflash_cpu_set_num_threads(threads)
                got, caches = kvcases.native_call(case, "BSND")
                results.append([x.tobytes() for x in (got["out"], got["lse"], *caches)])
            assert results[0] == results[1] == results[2]
    finally:
        library.msflash_cpu_set_num_threads(before)


def test_pages_give_the_bits_of_a_contiguous_cache():
    """In decoding, pages are another way to find a row and nothing else."""
    for seed in range(20):
        paged = kvcases.draw(np.random.default_rng(seed), "float32", block_size=16, sq=1, new_len=1, shared=False)
        plain = kvcases.Case({name: x for name, x in paged.inputs.items() if name != "block_table"}, paged.options,
                             paged.past, paged.interleaved)
        for slot, part in (("k_cache", 0), ("v_cache", 1)):
            shape = paged.inputs[slot].shape
            cache = np.full((len(paged.past), shape[1], 90, shape[3]), np.nan, np.float32)
            for b, tokens in enumerate(paged.past):
                cache[b, :, :tokens[part].shape[1]] = tokens[part]
            plain.inputs[slot] = cache
        results = [kvcases.native_call(case, "BSND")[0] for case in (paged, plain)]
        for name in ("out", "lse"):
            np.testing.assert_allclose(results[0][name], results[1][name], rtol=2e-6, atol=2e-6)


def fenced(x):
    """A copy of an array with unmapped memory right behind it."""
    page = mmap.PAGESIZE
    size = -(-max(x.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) == 0
    copy = np.frombuffer(memory, x.dtype, x.size, size - x.nbytes).reshape(x.shape)
    copy[...] = x
    return copy


@pytest.mark.parametrize("dtype", native.DTYPES)
def test_reads_nothing_behind_its_inputs(dtype):
    """Not even where the value would not matter. In a child: a wrong read is the end of its process."""
    child = os.fork()
    if child == 0:
        try:
            for seed in range(80):
                case = kvcases.draw(np.random.default_rng((seed, 99)), dtype)
                arrays = {name: None if x is None else fenced(x) for name, x in case.laid_out("BSND").items()}
                case.laid_out = lambda layout, arrays=arrays: arrays
                kvcases.native_call(case, "BSND")
        finally:
            os._exit(0 if seed == 79 and sys.exc_info()[0] is None else 1)
    assert os.waitpid(child, 0)[1] == 0


BAD = {
    "negative length": ("'cache_seqlens' must be 0 or greater, but got -1 for sequence 1", "cache_seqlens", [3, -1]),
    "too long": ("room for 64 tokens, but got 'cache_seqlens' 63 and 2 more", "cache_seqlens", [3, 63]),
    "no such block": ("range [0, 8), but got 8 for sequence 1, block 0", "block_table", [[0, 1, 2, 3], [8, 5, 6, 7]]),
    "negative block": ("but got -1 for sequence 0, block 0", "block_table", [[-1, 1, 2, 3], [4, 5, 6, 7]]),
    "one block for two": ("used once in 'block_table', but got block 4 twice", "block_table",
                          [[4, 1, 2, 3], [4, 5, 6, 7]]),
    "appends to what another reads": ("but got block 4 twice", "block_table", [[4, 1, 2, 3], [4, 5, 6, 7]], [3, 17]),
    "one block twice in a sequence": ("but got block 5 twice", "block_table", [[0, 1, 2, 3], [5, 5, 6, 7]], [3, 17]),
    "beyond the rotary table": ("'rotary_cos' has 40 positions, but sequence 0 has 41", "cache_seqlens", [39, 3]),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_values_are_refused_before_anything_is_written(name):
    rng = np.random.default_rng(0)
    case = kvcases.draw(rng, "float32", length=[3, 5], batch=2, block_size=16, new_len=2, sq=2, rotary="half", d=8,
                        shared=False, window=(-1, -1))
    shape = case.inputs["k_cache"].shape
    for slot in ("k_cache", "v_cache"):
        case.inputs[slot] = np.full((8, shape[1], 16, case.inputs[slot].shape[3]), 0.5, np.float32)
    case.inputs["block_table"] = np.arange(8, dtype=np.int32).reshape(2, 4)
    for slot in ("rotary_cos", "rotary_sin"):
        case.inputs[slot] = np.ones((40, 4), np.float32)
    kvcases.native_call(case, "BNSD")
    text, slot, values, *lengths = BAD[name]
    case.inputs[slot] = np.array(values, case.inputs[slot].dtype)
    if lengths:
        case.inputs["cache_seqlens"] = np.array(lengths[0], np.int32)
    arrays = case.laid_out("BNSD")
    case.laid_out = lambda layout: arrays
    with pytest.raises(RuntimeError) as error:
        kvcases.native_call(case, "BNSD")
    assert str(error.value).startswith("For 'flash_attention_with_kvcache', ") and text in str(error.value)
    assert (arrays["k_cache"] == 0.5).all() and (arrays["v_cache"] == 0.5).all()


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_merge(layout, dtype):
    """Parts of the keys merged are all keys; a part without keys counts for nothing, NaN in its output or not."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        batch, heads, sq, dv = rng.integers(1, 4), rng.integers(1, 4), rng.integers(1, 5), rng.integers(1, 70)
        parts = int(rng.integers(1, 6))
        outs = rng.standard_normal((parts, batch, heads, sq, dv)).astype(native.DTYPES[dtype])
        lses = (rng.standard_normal((parts, batch, heads, sq)) * 10.0 ** rng.integers(0, 3)).astype(np.float32)
        lses[rng.random(lses.shape) < 0.2] = -np.inf
        exact_out, exact_lse = flash_rule.reference.merge(outs, lses)
        outs[np.isneginf(lses)] = np.nan
        stacked = outs if layout == "BNSD" else outs.transpose(0, 1, 3, 2, 4)
        shape = stacked.shape[1:]
        out, lse = native.call("merge", f"layout={layout}", [stacked, lses], [(shape, outs.dtype),
                                                                             (lses.shape[1:], np.float32)])
        out = native.from_layout(out, layout, heads)
        exact = {"out": exact_out, "lse": exact_lse}
        flash_rule.check({"out": out, "lse": lse}, exact, exact)
        assert not out[np.isneginf(exact_lse)].any()
