"""flash_attention_with_kvcache and merge_attention through MindSpore, in PyNative mode and in graphs."""

from __future__ import annotations

import gc

import flash_rule
import kvcases
import mindspore as ms
import native
import numpy as np
import pytest
from mindspore import nn, ops
from public_api import array, numpy_of, tensor

from ms_flash import flash_attention, flash_attention_with_kvcache, merge_attention, op_table
from ms_flash.kvcache_resolve import resolve_kvcache

pytestmark = pytest.mark.ops("MsFlashKvCache", "MsFlashMerge")
OTHERS = ("k", "v", "cache_seqlens", "block_table", "rotary_cos", "rotary_sin", "alibi_slopes", "sinks")


class Net(nn.Cell):
    """The op with its caches as Parameters, for a graph."""

    def __init__(self, k_cache, v_cache, options):
        super().__init__()
        self.k_cache = ms.Parameter(k_cache, name="k_cache", requires_grad=False)
        self.v_cache = ms.Parameter(v_cache, name="v_cache", requires_grad=False)
        self.options = options

    def construct(self, query, k, v, cache_seqlens, block_table, rotary_cos, rotary_sin, alibi_slopes, sinks):
        return flash_attention_with_kvcache(
            query, self.k_cache, self.v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin, alibi_slopes=alibi_slopes, sinks=sinks, return_lse=True,
            **self.options)


def results(case, out, lse, caches, layout):
    """As kvcases.check takes them."""
    heads, kv_heads = case.inputs["query"].shape[1], case.inputs["k_cache"].shape[1]
    got = {"out": native.from_layout(numpy_of(out), layout, heads), "lse": lse.asnumpy()}
    return got, [np.ascontiguousarray(native.from_layout(numpy_of(cache), layout, kv_heads)) for cache in caches]


def draw(seed, dtype, backend, **fixed):
    """A random case that the backend takes."""
    if "high" not in op_table.table()["backends"][backend].get("precision", ["high"]):
        fixed["precision"] = "default"
    return kvcases.draw(np.random.default_rng(seed), dtype, **fixed)


def check(case, got, caches, backend):
    kvcases.check(case, got, caches, narrow=backend == "ascend-twin")


def pynative(case, layout, backend, kind=ms.Parameter):
    arrays = {name: tensor(x) for name, x in case.laid_out(layout).items()}
    caches = [kind(arrays[name]) for name in ("k_cache", "v_cache")]
    out, lse = flash_attention_with_kvcache(arrays["query"], *caches, **{name: arrays[name] for name in OTHERS},
                                            layout=layout, return_lse=True, backend=backend, **case.options)
    return results(case, out, lse, caches, layout)


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_random_ragged_calls(backend, layout, dtype):
    for seed in range(60):
        case = draw((seed, 7, layout == "BSND", len(dtype)), dtype, backend)
        kind = ms.Parameter if seed % 2 else ms.Tensor
        try:
            check(case, *pynative(case, layout, backend, kind), backend)
        except AssertionError as error:
            raise AssertionError(f"case {seed}: {error}\n{case.options}") from error


GRAPHS = [
    {"block_size": 16, "new_len": 1, "sq": 1},
    {"block_size": 0, "new_len": 1, "sq": 1, "rotary": "half"},
    {"block_size": 16, "new_len": 9, "sq": 9, "rotary": "interleaved", "sinks": True},
    {"block_size": 32, "new_len": 0, "sq": 1, "alibi": True},
    {"block_size": 0, "new_len": 4, "sq": 2, "window": (5, 0), "softcap": 2.0},
]


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("index", range(len(GRAPHS)))
def test_one_graph_for_all_lengths(backend, index, dtype, monkeypatch):
    """Lengths and blocks vary from call to call; the graph is compiled once."""
    ms.set_context(mode=ms.GRAPH_MODE)
    compiled = []
    function = resolve_kvcache._function
    monkeypatch.setattr(resolve_kvcache, "_function", lambda *args: (compiled.append(1), function(*args))[1])
    fixed = {"batch": 3, "kv_heads": 2, "group": 2, "d": 16, "dv": 8, "scale": None, "rotary": None, "alibi": False,
             "sinks": False, "window": (-1, -1), "softcap": 0.0, "num_splits": 0, "precision": "default",
             "causal": True, "int": np.int32, "pairs": 8}
    fixed.update(GRAPHS[index])
    net = first = None
    for seed in range(6):
        case = draw((seed, index), dtype, backend, **fixed)
        case = one_size(case, fixed)
        arrays = {name: tensor(x) for name, x in case.laid_out("BSND").items()}
        if net is None:
            net = Net(arrays["k_cache"], arrays["v_cache"], {**case.options, "backend": backend})
        else:
            net.k_cache.set_data(arrays["k_cache"])
            net.v_cache.set_data(arrays["v_cache"])
        out, lse = net(arrays["query"], *(arrays[name] for name in OTHERS))
        check(case, *results(case, out, lse, (net.k_cache, net.v_cache), "BSND"), backend)
        first = first or len(compiled)
        assert len(compiled) == first, "compiled again"


def one_size(case, fixed):
    """The same case with caches, tables and masks of one size for all lengths."""
    inputs = case.inputs
    blocks, width, positions = (24, 9, 100) if fixed["block_size"] else (3, 0, 100)
    for slot in ("k_cache", "v_cache"):
        shape = list(inputs[slot].shape)
        grown = np.full((blocks, shape[1], fixed["block_size"] or 100, shape[3]), np.nan, inputs[slot].dtype)
        grown[:shape[0], :, :shape[2]] = inputs[slot]
        inputs[slot] = grown
    if width:
        table = np.full((3, width), -1, np.int32)
        table[:, :inputs["block_table"].shape[1]] = inputs["block_table"]
        inputs["block_table"] = table
    for slot in ("rotary_cos", "rotary_sin"):
        if slot in inputs:
            grown = np.zeros((positions, inputs[slot].shape[1]), np.float32)
            grown[:len(inputs[slot])] = inputs[slot]
            inputs[slot] = grown
    if "alibi_slopes" in inputs:
        inputs["alibi_slopes"] = np.array(inputs["alibi_slopes"].reshape(-1)[:4], np.float32)
    if "sinks" in inputs:
        inputs["sinks"] = inputs["sinks"].astype(np.float32)
    return case


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("paged", [False, True])
def test_generation_step_by_step_is_causal_attention(mode, paged, dtype, backend):
    """Prefill, then one token at a time: every row is that of one causal attention over the whole."""
    rng = np.random.default_rng(3)
    length, prefill, heads, kv_heads, d = 40, 11, 6, 2, 16
    q, k, v = (tensor(rng.standard_normal((2, length, n, d)).astype(dtype)) for n in (heads, kv_heads, kv_heads))
    whole = flash_attention(*(x.astype(ms.float32) for x in (q, k, v)), causal=True, layout="BSND").asnumpy()
    shape = (8, 16, kv_heads, d) if paged else (2, 64, kv_heads, d)
    table = tensor(np.array([[5, 0, 3], [1, 7, 2]], np.int32)) if paged else None
    net = Net(*(tensor(np.full(shape, np.nan, dtype)) for _ in range(2)), {"backend": backend})
    rows, at = [], 0
    while at < length:
        end = prefill if at == 0 else at + 1
        out, _ = net(*(x[:, at:end] for x in (q, k, v)), tensor(np.array([at, at], np.int32)), table, None, None, None,
                     None)
        rows.append(out.asnumpy())
        at = end
    np.testing.assert_allclose(np.concatenate(rows, 1), whole, atol=2e-6 if dtype == "float32" else 2e-3)


class TwoLayers(nn.Cell):
    """Two ops that append to one cache, one after the other, around what else a graph does with it."""

    def __init__(self, cache, backend):
        super().__init__()
        self.k_cache, self.v_cache = (ms.Parameter(x, name=name, requires_grad=False)
                                      for x, name in zip(cache, ("k_cache", "v_cache")))
        self.backend = backend

    def construct(self, x, y, lengths):
        before = self.v_cache.sum()
        first = flash_attention_with_kvcache(x, self.k_cache, self.v_cache, x, x, cache_seqlens=lengths,
                                             backend=self.backend)
        between = self.v_cache.sum()
        second = flash_attention_with_kvcache(x, self.k_cache, self.v_cache, y, y, cache_seqlens=lengths + 1,
                                              backend=self.backend)
        return before, first, between, second, self.v_cache.sum()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_writes_and_reads_of_a_cache_keep_their_order(mode, dtype, backend):
    """What a graph reads of the cache is what was there at that point."""
    x, y = (tensor(np.full((1, 1, 1, 4), n, dtype)) for n in (1, 10))
    for _ in range(4):
        net = TwoLayers([tensor(np.zeros((1, 4, 1, 4), dtype)) for _ in range(2)], backend)
        for start, total in ((0, 0.0), (2, 44.0)):
            before, first, between, second, after = net(x, y, tensor(np.array([start], np.int32)))
            assert [float(n.asnumpy()) for n in (before, between, after)] == [total, total + 4, total + 44]
            if start == 0:
                assert (first.asnumpy() == 1).all() and (second.asnumpy() > 9.9).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_unused_output_still_appends(mode, dtype, backend):
    """The write is an effect of its own: a graph that drops the output appends all the same."""
    class Fill(TwoLayers):
        def construct(self, x, y, lengths):
            flash_attention_with_kvcache(x, self.k_cache, self.v_cache, y, y, cache_seqlens=lengths,
                                         backend=self.backend)
            return x

    net = Fill([tensor(np.zeros((1, 4, 1, 4), dtype)) for _ in range(2)], backend)
    x = tensor(np.ones((1, 1, 1, 4), dtype))
    net(x, x * 3, tensor(np.array([2], np.int32)))
    assert net.k_cache.asnumpy()[0, :, 0, 0].tolist() == [0, 0, 3, 0]


def test_memory_is_flat():
    """Steps keep no memory."""
    import resource

    case = kvcases.draw(np.random.default_rng(0), "float32", block_size=16, new_len=1, sq=1)
    for step in range(600):
        pynative(case, "BSND", "cpu")
        if step == 100:
            gc.collect()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gc.collect()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000     # KiB


# ---------------------------------------------------------------------------------------------------------------------
# Wrong calls
# ---------------------------------------------------------------------------------------------------------------------
def t(*shape, dtype=ms.float32):
    return ms.Tensor(np.ones(shape, np.float32)).astype(dtype)


def ints(*values, dtype=np.int32):
    return ms.Tensor(np.array(values, dtype))


def good():
    """A paged call that works: 2 sequences of 4 blocks of 16, 2 tokens to append."""
    k_cache, v_cache = (ms.Parameter(t(8, 16, 2, n), requires_grad=False) for n in (8, 6))
    return {"query": t(2, 2, 4, 8), "k_cache": k_cache, "v_cache": v_cache, "k": t(2, 2, 2, 8),
            "v": t(2, 2, 2, 6), "cache_seqlens": ints(3, 17),
            "block_table": ints([0, 1, 2, 3], [4, 5, 6, 7]), "rotary_cos": t(40, 4), "rotary_sin": t(40, 4)}


def empty_call(batch, sq, new, paged):
    """A call without queries or without sequences, with random tokens to append."""
    some = lambda *shape: tensor(np.random.default_rng(sq).standard_normal(shape).astype(np.float32))
    call = {**good(), "query": some(batch, sq, 4, 8), "cache_seqlens": tensor(np.full(batch, 3, np.int32)),
            "k": some(batch, new, 2, 8) if new else None, "v": some(batch, new, 2, 6) if new else None,
            "block_table": tensor(np.arange(batch * 4, dtype=np.int32).reshape(batch, 4)) if paged else None}
    if not paged:
        call.update(k_cache=ms.Parameter(t(batch, 16, 2, 8)), v_cache=ms.Parameter(t(batch, 16, 2, 6)))
    return call


def called(call, backend):
    """Output, LSE and both caches after a call through Net."""
    net = Net(call["k_cache"], call["v_cache"], {"backend": backend})
    out, lse = net(call["query"], *(call.get(slot) for slot in OTHERS))
    return [x.asnumpy() for x in (out, lse, net.k_cache, net.v_cache)]


@pytest.mark.parametrize("paged", [False, True], ids=["plain", "paged"])
@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("batch, sq", [(2, 0), (0, 2), (0, 0)])
def test_no_query_or_no_sequence(mode, backend, batch, sq, new, paged):
    """Nothing comes out, and what there is to append is in the caches as after a call with queries."""
    out, lse, *caches = called(empty_call(batch, sq, new, paged), backend)
    assert out.shape == (batch, sq, 4, 6) and out.dtype == np.float32
    assert lse.shape == (batch, 4, sq) and lse.dtype == np.float32
    wanted = empty_call(batch, sq, new, paged)
    if batch:
        wanted["query"] = t(2, 1, 4, 8)
        _, _, *wanted_caches = called(wanted, "cpu")
    else:
        wanted_caches = [wanted[name].asnumpy() for name in ("k_cache", "v_cache")]
    for got, cache in zip(caches, wanted_caches):
        np.testing.assert_allclose(got, cache, rtol=1e-6)
        assert (got != 1).any() == bool(batch and new)


def test_one_graph_with_and_without_queries():
    """Sizes that a graph learns when it runs may be 0 as well."""
    ms.set_context(mode=ms.GRAPH_MODE)
    call = empty_call(2, 2, 2, True)
    net = Net(call["k_cache"], call["v_cache"], {"backend": "cpu"})
    free = lambda *shape, dtype=ms.float32: ms.Tensor(shape=shape, dtype=dtype)
    net.set_inputs(free(None, None, 4, 8), free(None, None, 2, 8), free(None, None, 2, 6), free(None, dtype=ms.int32),
                   free(None, 4, dtype=ms.int32), call["rotary_cos"], call["rotary_sin"], None, None)
    for batch, sq in ((2, 2), (2, 0), (0, 2), (1, 1), (0, 0)):
        call = empty_call(batch, sq, 2, True)
        wanted = called({**call, "k_cache": net.k_cache.clone(), "v_cache": net.v_cache.clone()}, "reference")
        out, lse = net(call["query"], *(call.get(slot) for slot in OTHERS))
        assert out.shape == (batch, sq, 4, 6) and lse.shape == (batch, 4, sq)
        for got, expected in zip((out, lse, net.k_cache, net.v_cache), wanted):
            np.testing.assert_allclose(got.asnumpy(), expected, atol=1e-5)


BAD = {
    "query is an array": (TypeError, "'query' must be Tensor, but got ndarray", {"query": np.ones((2, 2, 4, 8))}),
    "no cache": (TypeError, "'k_cache' must be Tensor, but got NoneType", {"k_cache": None}),
    "no lengths": (TypeError, "'cache_seqlens' must be Tensor, but got NoneType", {"cache_seqlens": None}),
    "lengths are a list": (TypeError, "'cache_seqlens' must be Tensor, but got list", {"cache_seqlens": [3, 17]}),
    "float lengths": (TypeError, "the dtype of 'cache_seqlens' must be one of int32, int64, but got float32",
                      {"cache_seqlens": t(2)}),
    "float table": (TypeError, "the dtype of 'block_table' must be one of int32, int64", {"block_table": t(2, 4)}),
    "k without v": (ValueError, "but 'v' is None", {"v": None}),
    "cos without sin": (ValueError, "but 'rotary_sin' is None", {"rotary_sin": None}),
    "another dtype of the cache": (TypeError, "the dtype of 'k_cache' must be equal to that of 'query' float32",
                                   {"k_cache": ms.Parameter(t(8, 16, 2, 8, dtype=ms.float16))}),
    "another dtype of k": (TypeError, "the dtype of 'k' must be equal to that of 'query'",
                           {"k": t(2, 2, 2, 8, dtype=ms.bfloat16)}),
    "float64": (TypeError, "the dtype of 'query' must be one of float32, float16, bfloat16",
                {"query": t(2, 2, 4, 8, dtype=ms.float64)}),
    "rank of query": (ValueError, "the rank of 'query' must be 4 (B, S, N, D) for layout 'BSND', but got 3",
                      {"query": t(2, 4, 8)}),
    "rank of v_cache": (ValueError, "the rank of 'v_cache' must be 4", {"v_cache": ms.Parameter(t(8, 16, 6))}),
    "head_dim of the cache": (ValueError, "the 'head_dim' of 'k_cache' must be equal to that of 'query' 8, but got 7",
                              {"k_cache": ms.Parameter(t(8, 16, 2, 7))}),
    "head_dim of k": (ValueError, "the 'head_dim' of 'k' must be equal to that of 'k_cache' 8", {"k": t(2, 2, 2, 4)}),
    "head_dim of v": (ValueError, "the 'head_dim' of 'v' must be equal to that of 'v_cache' 6", {"v": t(2, 2, 2, 8)}),
    "heads of v_cache": (ValueError, "the number of heads of 'v_cache' must be equal to that of 'k_cache' 2",
                         {"v_cache": ms.Parameter(t(8, 16, 1, 6))}),
    "heads of k": (ValueError, "the number of heads of 'k' must be equal to that of 'k_cache' 2", {"k": t(2, 2, 4, 8)}),
    "heads of query": (ValueError, "must be a multiple of that of 'k_cache' 2, but got 3", {"query": t(2, 2, 3, 8)}),
    "block size of v_cache": (ValueError, "the length of 'v_cache' must be equal to that of 'k_cache' 16",
                              {"v_cache": ms.Parameter(t(8, 8, 2, 6))}),
    "blocks of v_cache": (ValueError, "the first axis of 'v_cache' must be equal to that of 'k_cache' 8",
                          {"v_cache": ms.Parameter(t(9, 16, 2, 6))}),
    "batch of k": (ValueError, "the batch size of 'k' must be equal to that of 'query' 2", {"k": t(1, 2, 2, 8)}),
    "batch of a plain cache": (ValueError, "the batch size of 'k_cache' must be equal to that of 'query' 2",
                               {"block_table": None}),
    "length of v": (ValueError, "the length of 'v' must be equal to that of 'k' 2", {"v": t(2, 3, 2, 6)}),
    "nothing to append": (ValueError, "the length of 'k' must be 1 or greater", {"k": t(2, 0, 2, 8),
                                                                               "v": t(2, 0, 2, 6)}),
    "no blocks": (ValueError, "the number of blocks of 'k_cache' must be 1 or greater",
                  {"k_cache": ms.Parameter(t(0, 16, 2, 8)), "v_cache": ms.Parameter(t(0, 16, 2, 6))}),
    "no rows": (ValueError, "the length of 'k_cache' must be 1 or greater",
                {"k_cache": ms.Parameter(t(8, 0, 2, 8)), "v_cache": ms.Parameter(t(8, 0, 2, 6))}),
    "shape of lengths": (ValueError, "the shape of 'cache_seqlens' must be (batch,) = (2,), but got (3,)",
                         {"cache_seqlens": ints(3, 17, 1)}),
    "shape of the table": (ValueError, "the shape of 'block_table' must be (batch, blocks)",
                           {"block_table": ints(0, 1)}),
    "rotary too wide": (ValueError, "the shape of 'rotary_cos' must be (positions, at most head_dim / 2 = 4)",
                        {"rotary_cos": t(40, 5), "rotary_sin": t(40, 5)}),
    "sin of another shape": (ValueError, "the shape of 'rotary_sin' must be that of 'rotary_cos'",
                             {"rotary_sin": t(40, 3)}),
    "interleaved nothing": (ValueError, "'rotary_interleaved' must be False without 'rotary_cos'",
                            {"rotary_cos": None, "rotary_sin": None, "rotary_interleaved": True}),
    "interleaved is an int": (TypeError, "'rotary_interleaved' must be bool, but got int", {"rotary_interleaved": 1}),
    "causal is an int": (TypeError, "'causal' must be bool, but got int", {"causal": 1}),
    "layout": (ValueError, "'layout' must be one of 'BSND', 'BNSD', but got 'BSH'", {"layout": "BSH"}),
    "negative splits": (ValueError, "'num_splits' must be 0 or greater, but got -1", {"num_splits": -1}),
    "splits is a bool": (TypeError, "'num_splits' must be int, but got bool", {"num_splits": True}),
    "softcap": (ValueError, "'softcap' must be 0 (none) or greater", {"softcap": -1.0}),
    "scale": (ValueError, "'softmax_scale' must be finite", {"softmax_scale": float("nan")}),
    "window": (TypeError, "'window_size' must be a tuple", {"window_size": 3}),
    "slopes": (ValueError, "the shape of 'alibi_slopes' must be (num_heads,)", {"alibi_slopes": t(3)}),
    "sinks": (ValueError, "the shape of 'sinks' must be (num_heads,)", {"sinks": t(3)}),
    "return_lse is an int": (TypeError, "'return_lse' must be bool, but got int", {"return_lse": 1}),
    "backend": (ValueError, "must be one of", {"backend": "gpu"}),
}

# these only a running op can see in a graph
BAD_VALUES = {
    "negative length": ("'cache_seqlens' must be 0 or greater, but got -1 for sequence 1",
                        {"cache_seqlens": ints(3, -1)}),
    "too long": ("the cache of sequence 0 has room for 64 tokens, but got 'cache_seqlens' 63 and 2 more",
                 {"cache_seqlens": ints(63, 17), "rotary_cos": t(99, 4), "rotary_sin": t(99, 4)}),
    "no such block": ("range [0, 8), but got 8 for sequence 1, block 1", {"block_table": ints([0, 1, 2, 3],
                                                                                            [4, 8, 6, 7])}),
    "negative block": ("but got -1 for sequence 0, block 0", {"block_table": ints([-1, 1, 2, 3], [4, 5, 6, 7])}),
    "one block for two": ("used once in 'block_table', but got block 5 twice",
                          {"block_table": ints([5, 1, 2, 3], [4, 5, 6, 7])}),
    "appends to what another reads": ("used once in 'block_table', but got block 4 twice",
                                      {"block_table": ints([4, 1, 2, 3], [4, 5, 6, 7])}),
    "beyond the rotary table": ("'rotary_cos' has 18 positions, but sequence 1 has 19",
                                {"rotary_cos": t(18, 4), "rotary_sin": t(18, 4)}),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_calls(name, backend):
    error, text, change = BAD[name]
    call = {**good(), "backend": backend, **change}
    with pytest.raises(error) as caught:
        flash_attention_with_kvcache(**call)
    assert str(caught.value).startswith("For 'flash_attention_with_kvcache', ") and text in str(caught.value)
    works(backend)


@pytest.mark.parametrize("name", BAD_VALUES)
def test_wrong_values(name, backend):
    text, change = BAD_VALUES[name]
    call = {**good(), "backend": backend, **change}
    with pytest.raises(ValueError) as caught:
        flash_attention_with_kvcache(**call)
    assert str(caught.value).startswith("For 'flash_attention_with_kvcache', ") and text in str(caught.value)
    assert (call["k_cache"].asnumpy() == 1).all() and (call["v_cache"].asnumpy() == 1).all()
    works(backend)


def works(backend):
    out = flash_attention_with_kvcache(**good(), backend=backend)
    np.testing.assert_allclose(out.asnumpy(), 1, rtol=1e-6)


@pytest.mark.parametrize("name", ["negative length", "one block for two"])
def test_wrong_values_in_a_graph(name, backend):
    """The op itself tells, before it writes."""
    ms.set_context(mode=ms.GRAPH_MODE)
    text, change = BAD_VALUES[name]
    call = {**good(), **change}
    net = Net(call["k_cache"], call["v_cache"], {"backend": backend})
    with pytest.raises(RuntimeError) as caught:
        net(call["query"], *(call.get(slot) for slot in OTHERS))[0].asnumpy()
    assert text in str(caught.value)
    assert (net.k_cache.asnumpy() == 1).all()
    call = good()
    net = Net(call["k_cache"], call["v_cache"], {"backend": backend})
    out, _ = net(call["query"], *(call.get(slot) for slot in OTHERS))
    np.testing.assert_allclose(out.asnumpy(), 1, rtol=1e-6)


VIEWS = {
    "with gaps": lambda x: ops.concat((x, x), 2)[:, :, ::2],
    "a layer": lambda x: ops.stack((x, x))[1],
    "the first rows": lambda x: ops.concat((x, x))[:8],
    "another shape": lambda x: x.view(64, -1).view(x.shape),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_views_as_caches_are_refused(cache, name):
    """MindSpore hands an op a copy of a view, so what is appended would be lost without a word."""
    call = good()
    view = VIEWS[name](ms.Tensor(call[cache].asnumpy()))
    for kind in (lambda x: x, lambda x: (call[cache].set_data(x), call[cache])[1]):
        with pytest.raises(ValueError, match=f"'{cache}' must have memory of its own"):
            flash_attention_with_kvcache(**{**call, cache: kind(view)}, backend="cpu")
    works("cpu")


def test_one_tensor_for_both_caches_is_refused(backend):
    call = good()
    call.update(v_cache=call["k_cache"], v=call["k"])
    with pytest.raises(ValueError, match="must be two Tensors"):
        flash_attention_with_kvcache(**call, backend=backend)


class Plain(nn.Cell):
    """Caches that are inputs."""

    def construct(self, x, k_cache, v_cache, lengths):
        return flash_attention_with_kvcache(x, k_cache, v_cache, x, x, cache_seqlens=lengths)


class Cast(Net):
    """A copy in the place of a Parameter, as mixed precision makes it."""

    def construct(self, x, lengths):
        return flash_attention_with_kvcache(x, self.k_cache.astype(ms.float16), self.v_cache, x, x,
                                            cache_seqlens=lengths)


def test_only_parameters_are_written_in_a_graph():
    """What is written into anything else would be lost without a word."""
    ms.set_context(mode=ms.GRAPH_MODE)
    half = lambda *shape: t(*shape, dtype=ms.float16)
    with pytest.raises(ValueError, match="'k_cache' must be a Parameter in a graph"):
        Plain()(t(1, 1, 2, 4), t(1, 8, 2, 4), t(1, 8, 2, 4), ints(3))
    with pytest.raises(ValueError, match="'k_cache' must be a Parameter in a graph"):
        Cast(t(1, 8, 2, 4), half(1, 8, 2, 4), {})(half(1, 1, 2, 4), ints(3))


def test_there_is_no_gradient(backend):
    call = good()
    query = call.pop("query")
    # the second: the reference changes the cache with an op of MindSpore, which refuses by itself
    with pytest.raises(RuntimeError, match=r"gradients are not supported|modified by an inplace operation"):
        ms.grad(lambda x: flash_attention_with_kvcache(x, **call, backend=backend).sum())(query).asnumpy()


# ---------------------------------------------------------------------------------------------------------------------
# Merge
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("stacked", [False, True])
def test_merge_of_parts_is_the_whole(mode, stacked, layout, dtype, backend):
    rng = np.random.default_rng(1)
    normal = lambda *shape: rng.standard_normal(shape).astype(native.DTYPES[dtype])
    q, k, v = normal(2, 4, 5, 16), normal(2, 2, 50, 16), normal(2, 2, 50, 8)
    cuts = [0, 1, 20, 50]
    parts = [flash_attention(*(tensor(native.to_layout(x, layout)) for x in (q, k[:, :, a:b], v[:, :, a:b])),
                             layout=layout, return_lse=True) for a, b in zip(cuts, cuts[1:])]
    outs, lses = [p[0] for p in parts], [p[1] for p in parts]

    class Merge(nn.Cell):
        def construct(self, outs, lses):
            return merge_attention(outs, lses, layout=layout, backend=backend)

    class MergeList(nn.Cell):
        def construct(self, a, b, c, x, y, z):
            return merge_attention([a, b, c], (x, y, z), layout=layout, backend=backend)

    if stacked:
        outs, lses = (tensor(np.stack([numpy_of(x) for x in group])) for group in (outs, lses))
        out, lse = Merge()(outs, lses)
    else:
        out, lse = MergeList()(*outs, *lses)
    exact, exact_lse, _ = flash_rule.reference.forward(q, k, v)
    eps = float(flash_rule.ml_dtypes.finfo(native.DTYPES[dtype]).eps)
    np.testing.assert_allclose(native.from_layout(array(out), layout, 4), exact, atol=max(2 * eps, 2e-6))
    np.testing.assert_allclose(lse.asnumpy(), exact_lse, atol=2e-6)
    assert str(out.dtype).lower() == dtype


MERGE_BAD = {
    "an array": (TypeError, "'outs' must be Tensor, or a list or tuple of Tensors, but got ndarray",
                 (np.ones((2, 1, 1, 1, 4)), t(2, 1, 1, 1))),
    "rank": (ValueError, "the rank of 'outs' must be 5", (t(1, 2, 3, 4), t(1, 2, 3))),
    "lse of another shape": (ValueError, "the shape of 'lses' must be (parts, B, N, S) = (2, 1, 3, 5), but got",
                             (t(2, 1, 3, 5, 4), t(2, 1, 5, 3))),
    "dtype of lses": (TypeError, "the dtype of 'lses' must be float32, but got float16",
                      (t(2, 1, 3, 5, 4), t(2, 1, 3, 5, dtype=ms.float16))),
    "no parts": (ValueError, "every axis of 'outs' must be 1 or greater", (t(0, 1, 3, 5, 4), t(0, 1, 3, 5))),
}


@pytest.mark.parametrize("name", MERGE_BAD)
def test_wrong_merges(name, backend):
    error, text, (outs, lses) = MERGE_BAD[name]
    with pytest.raises(error) as caught:
        merge_attention(outs, lses, backend=backend)
    assert str(caught.value).startswith("For 'merge_attention', ") and text in str(caught.value)
    assert merge_attention(t(2, 1, 1, 1, 1), t(2, 1, 1, 1), backend=backend)[0].asnumpy().item() == 1


PARTS = {
    "shapes": (ValueError, "the parts of 'outs' must have one shape, but got (1, 1, 2, 4) and, of part 1, (1, 1, 3, 4)",
               [t(1, 1, 2, 4), t(1, 1, 3, 4)], [t(1, 1, 2), t(1, 1, 2)]),
    "dtypes": (TypeError, "the parts of 'outs' must have one dtype, but got float32 and float16",
               [t(1, 1, 2, 4), t(1, 1, 2, 4, dtype=ms.float16)], [t(1, 1, 2), t(1, 1, 2)]),
    "none": (ValueError, "'outs' must hold one part or more", [], []),
    "an array": (TypeError, "'lses' must hold Tensors, but got ndarray", [t(1, 1, 2, 4)], [np.ones((1, 1, 2))]),
    "fewer lses": (ValueError, "the shape of 'lses' must be (parts, B, N, S) = (2, 1, 1, 2)", [t(1, 1, 2, 4)] * 2,
                   [t(1, 1, 2)]),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_list_of_unequal_parts_is_refused(name, mode):
    error, text, outs, lses = PARTS[name]

    class Merge(nn.Cell):
        def construct(self):
            return merge_attention(outs, lses)

    with pytest.raises(error) as caught:
        Merge()() if mode == "graph" and name in ("shapes", "none") else merge_attention(outs, lses)
    assert f"For 'merge_attention', {text}" in str(caught.value)


def test_merge_has_no_gradient(backend):
    with pytest.raises(RuntimeError, match="gradients are not supported"):
        ms.grad(lambda x: merge_attention(x, t(2, 1, 1, 1), backend=backend)[0].sum())(t(2, 1, 1, 1, 4)).asnumpy()
