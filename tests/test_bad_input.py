"""Wrong calls: each raises the documented error before any kernel runs, and the next call works."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

import ms_flash
from ms_flash import flash_attention, flash_attention_varlen

B, N, NK, SQ, SK, D = 2, 4, 2, 6, 5, 8


def t(*shape, dtype=ms.float32):
    return ms.Tensor(np.ones(shape, np.float32)).astype(dtype)


def lengths(*ends, dtype=ms.int32):
    return ms.Tensor(np.array(ends), dtype)


QUERY, KEY = t(B, N, SQ, D), t(B, NK, SK, D)
VARLEN = {"query": t(7, N, D), "key": t(9, NK, D), "value": t(9, NK, D), "cu_seqlens_q": lengths(0, 3, 7),
          "cu_seqlens_k": lengths(0, 4, 9)}
BSH = {"query": t(B, SQ, N * D), "key": t(B, SK, NK * D), "value": t(B, SK, NK * D), "layout": "BSH", "num_heads": N,
       "num_kv_heads": NK}

# name: (error, words of its text, what differs from a call that works)
BAD = {
    # types
    "query is an array": (TypeError, "'query' must be Tensor, but got ndarray", {"query": np.ones((2, 4, 6, 8))}),
    "query is None": (TypeError, "'query' must be Tensor, but got NoneType", {"query": None}),
    "key is a list": (TypeError, "'key' must be Tensor, but got list", {"key": [1.0]}),
    "value is a float": (TypeError, "'value' must be Tensor, but got float", {"value": 1.0}),
    "key without value": (ValueError, "'value' is None", {"value": None}),
    "value without key": (ValueError, "'key' is None", {"key": None}),
    "return_lse is an int": (TypeError, "'return_lse' must be bool, but got int", {"return_lse": 1}),
    "scale beyond float32": (ValueError, "'softmax_scale' must be finite", {"softmax_scale": 1e39}),
    "mask is a str": (TypeError, "'attn_mask' must be Tensor or a tuple (left, right), but got str",
                      {"attn_mask": "causal"}),
    "mask is a bool": (TypeError, "'attn_mask' must be Tensor or a tuple (left, right), but got bool",
                       {"attn_mask": True}),
    "bias is a float": (TypeError, "'bias' must be Tensor, but got float", {"bias": 0.5}),
    "slopes are a tuple": (TypeError, "'alibi_slopes' must be Tensor, but got tuple", {"alibi_slopes": (1.0, 0.5)}),
    "sinks are an int": (TypeError, "'sinks' must be Tensor, but got int", {"sinks": 1}),
    "causal is an int": (TypeError, "'causal' must be bool, but got int", {"causal": 1}),
    "causal is None": (TypeError, "'causal' must be bool, but got NoneType", {"causal": None}),
    "training is a str": (TypeError, "'training' must be bool, but got str", {"training": "yes"}),
    "deterministic is an int": (TypeError, "'deterministic' must be bool, but got int", {"deterministic": 0}),
    "scale is a str": (TypeError, "'softmax_scale' must be float or int, but got str", {"softmax_scale": "0.5"}),
    "scale is a bool": (TypeError, "'softmax_scale' must be float or int, but got bool", {"softmax_scale": True}),
    "scale is a Tensor": (TypeError, "'softmax_scale' must be float or int, but got Tensor",
                          {"softmax_scale": ms.Tensor(0.5)}),
    "softcap is None": (TypeError, "'softcap' must be float or int, but got NoneType", {"softcap": None}),
    "dropout is a bool": (TypeError, "'dropout_p' must be float or int, but got bool", {"dropout_p": True}),
    "window is an int": (TypeError, "'window_size' must be a tuple (left, right), but got int", {"window_size": 3}),
    "window of floats": (TypeError, "'window_size' must hold ints, but got float", {"window_size": (1.0, 0)}),
    "window of bools": (TypeError, "'window_size' must hold ints, but got bool", {"window_size": (True, False)}),
    "layout is an int": (TypeError, "'layout' must be str, but got int", {"layout": 4}),
    "block is a float": (TypeError, "'block_m' must be int, but got float", {"block_m": 64.0}),
    "head count is a float": (TypeError, "'num_heads' must be int, but got float", {**BSH, "num_heads": 4.0}),
    "seed is a float": (TypeError, "'seed' must be int, but got float", {"dropout_p": 0.1, "seed": 0.5}),
    "seed is a tuple": (TypeError, "'seed' must be int or Tensor, but got tuple", {"dropout_p": 0.1, "seed": (1, 2)}),
    "backend is an int": (TypeError, "'backend' must be str or None, but got int", {"backend": 1}),
    # dtypes
    "float64": (TypeError, "'query' must be one of float32, float16, bfloat16, but got float64",
                {"query": QUERY.astype(ms.float64)}),
    "int query": (TypeError, "'query' must be one of float32", {"query": QUERY.astype(ms.int32)}),
    "half query, float key": (TypeError, "'key' must be equal to that of 'query' float16, but got float32. Hint",
                              {"query": QUERY.astype(ms.float16)}),
    "half value": (TypeError, "'value' must be equal to that of 'query' float32, but got bfloat16",
                   {"value": KEY.astype(ms.bfloat16)}),
    "float mask": (TypeError, "a float mask is added to the scores: pass it as 'bias'", {"attn_mask": t(SQ, SK)}),
    "int mask": (TypeError, "a mask in which 1 means keep is inverted by attn_mask == 0",
                 {"attn_mask": t(SQ, SK, dtype=ms.int32)}),
    "bool bias": (TypeError, "a bool mask is 'attn_mask'", {"bias": t(SQ, SK, dtype=ms.bool_)}),
    "half bias with float query": (TypeError, "'bias' must be float32, but got float16",
                                   {"bias": t(SQ, SK, dtype=ms.float16)}),
    "half slopes": (TypeError, "'alibi_slopes' must be float32, but got float16",
                    {"alibi_slopes": t(N, dtype=ms.float16)}),
    "int sinks": (TypeError, "'sinks' must be float32, but got int32", {"sinks": t(N, dtype=ms.int32)}),
    "int32 seed": (TypeError, "'seed' must be int64, but got int32", {"dropout_p": 0.1, "seed": lengths(1, 2)}),
    # values
    "scale is NaN": (ValueError, "'softmax_scale' must be finite, but got nan", {"softmax_scale": float("nan")}),
    "scale is infinite": (ValueError, "'softmax_scale' must be finite, but got inf", {"softmax_scale": float("inf")}),
    "negative softcap": (ValueError, "'softcap' must be 0 (none) or greater, but got -1.0", {"softcap": -1.0}),
    "dropout of 1": (ValueError, "'dropout_p' must be in the range [0, 1), but got 1.0", {"dropout_p": 1.0}),
    "negative dropout": (ValueError, "'dropout_p' must be in the range [0, 1), but got -0.1", {"dropout_p": -0.1}),
    "dropout is NaN": (ValueError, "'dropout_p' must be finite", {"dropout_p": float("nan")}),
    "window of three": (ValueError, "'window_size' must hold two numbers (left, right), but got 3",
                        {"window_size": (1, 2, 3)}),
    "window below -1": (ValueError, "or -1 for no limit, but got (-2, 0)", {"window_size": (-2, 0)}),
    "mask tuple of one": (ValueError, "'attn_mask' must hold two numbers", {"attn_mask": (3,)}),
    "two windows": (ValueError, "a window is given twice: 'attn_mask' (3, 0) and 'window_size' (2, 0)",
                    {"attn_mask": (3, 0), "window_size": (2, 0)}),
    "unknown layout": (ValueError, "'layout' must be one of 'BNSD', 'BSND', 'BSH', 'SBH', but got 'NBSD'",
                       {"layout": "NBSD"}),
    "layout in lower case": (ValueError, "did you mean 'BNSD'?", {"layout": "bnsd"}),
    "TND": (ValueError, "use 'flash_attention_varlen'", {"layout": "TND"}),
    "unknown alignment": (ValueError, "'causal_align' must be one of 'bottom_right', 'top_left', but got 'top-left'",
                          {"causal_align": "top-left"}),
    "unknown precision": (ValueError, "'precision_mode' must be one of 'default', 'high', but got 'fp32'",
                          {"precision_mode": "fp32"}),
    "block of 0": (ValueError, "'block_n' must be 1 or greater, but got 0", {"block_n": 0}),
    "seed too large": (ValueError, "'seed' must be in the range", {"dropout_p": 0.1, "seed": 2**63}),
    "unknown backend": (ValueError, "but got 'gpu'. Not available here: ", {"backend": "gpu"}),
    "backend that is not here": (ValueError, "'ascend': the device target is CPU, not Ascend", {"backend": "ascend"}),
    # shapes
    "rank 3 as BNSD": (ValueError, "use layout='BSH' and 'num_heads'", {"query": t(N, SQ, D)}),
    "rank 5": (ValueError, "the rank of 'query' must be 4 (B, N, S, D) for layout 'BNSD', but got 5",
               {"query": t(1, B, N, SQ, D)}),
    "rank 4 as BSH": (ValueError, "for a 4-D tensor use layout='BNSD' or 'BSND'", {**BSH, "query": QUERY}),
    "batch sizes": (ValueError, "the batch size of 'key' must be equal to that of 'query' 2, but got 3",
                    {"key": t(3, NK, SK, D)}),
    "head_dim": (ValueError, "the 'head_dim' of 'key' must be equal to that of 'query' 8, but got 16",
                 {"key": t(B, NK, SK, 16)}),
    "lengths of key and value": (ValueError, "the length of 'value' must be equal to that of 'key' 5, but got 6",
                                 {"value": t(B, NK, 6, D)}),
    "heads of key and value": (ValueError, "the number of heads of 'value' must be equal to that of 'key' 2, but got 4",
                               {"value": t(B, 4, SK, D)}),
    "heads that do not divide": (ValueError, "must be a multiple of that of 'key' 3, but got 4",
                                 {"key": t(B, 3, SK, D), "value": t(B, 3, SK, D)}),
    "BSND passed as BNSD": (ValueError, "if heads and length are swapped, pass layout='BSND'",
                            {"query": t(B, SQ, N, D), "key": t(B, SK, N, D), "value": t(B, SK, N, D)}),
    "BNSD passed as BSND": (ValueError, "if heads and length are swapped, pass layout='BNSD'",
                            {"query": t(B, N, SQ, D), "key": t(B, N, SK, D), "value": t(B, N, SK, D),
                             "layout": "BSND"}),
    "SBH passed as BSH": (ValueError, "if batch and length are swapped, pass layout='SBH'",
                          {**BSH, "query": t(SQ, B, 32), "key": t(SK, B, 16), "value": t(SK, B, 16)}),
    "head_dim 0": (ValueError, "'head_dim' of 'query' must be 1 or greater, but got 0",
                   {"query": t(B, N, SQ, 0), "key": t(B, NK, SK, 0)}),
    "no value head_dim": (ValueError, "'head_dim' of 'value' must be 1 or greater", {"value": t(B, NK, SK, 0)}),
    "no key heads": (ValueError, "'num_kv_heads' of 'key' must be 1 or greater",
                     {"key": t(B, 0, SK, D), "value": t(B, 0, SK, D)}),
    "num_heads against the shape": (ValueError, "'num_heads' must be equal to the number of heads of 'query' 4",
                                    {"num_heads": 8}),
    "BSH without num_heads": (ValueError, "'num_heads' must be given for layout 'BSH'", {**BSH, "num_heads": None}),
    "num_heads does not divide": (ValueError, "must be divisible by 'num_heads' 3, but got 32",
                                  {**BSH, "num_heads": 3, "num_kv_heads": 3}),
    "num_heads is the length": (ValueError, "6 is the sequence length; 'num_heads' is the number of attention heads",
                                {**BSH, "num_heads": 6, "num_kv_heads": 6}),
    "BSH without num_kv_heads": (ValueError, "for grouped-query attention give num_kv_heads=2",
                                 {**BSH, "num_kv_heads": None}),
    "packed without num_heads": (ValueError, "'num_heads' must be given for packed QKV",
                                 {"query": t(B, 12, SQ, D), "key": None, "value": None}),
    "packed with wrong heads": (ValueError, "num_heads + 2 * num_kv_heads = 12, but got 4",
                                {"key": None, "value": None, "num_heads": 4}),
    "packed with 4 parts": (ValueError, "must be 3, but got 4",
                            {"query": t(B, SQ, 4, N, D), "key": None, "value": None, "layout": "BSND"}),
    "mask of 5 axes": (ValueError, "the rank of 'attn_mask' must be in the range [1, 4], but got 5",
                       {"attn_mask": t(1, 1, 1, SQ, SK, dtype=ms.bool_)}),
    "mask transposed": (ValueError, "the last two axes look swapped", {"attn_mask": t(SK, SQ, dtype=ms.bool_)}),
    "key padding mask": (ValueError, "has to be reshaped to (B, 1, 1, Sk)", {"attn_mask": t(B, SK, dtype=ms.bool_)}),
    "mask per batch": (ValueError, "has to be reshaped to (B, 1, 6, 5)", {"attn_mask": t(B, SQ, SK, dtype=ms.bool_)}),
    "mask too narrow": (ValueError, "broadcastable to (B, N, Sq, Sk) = (2, 4, 6, 5), but got (6, 4)",
                        {"attn_mask": t(SQ, 4, dtype=ms.bool_)}),
    "bias of the kv heads": (ValueError, "the shape of 'bias' must be broadcastable", {"bias": t(1, NK, SQ, SK)}),
    "slopes of the kv heads": (ValueError, "(num_heads,) = (4,) or (batch, num_heads) = (2, 4), but got (2,)",
                               {"alibi_slopes": t(NK)}),
    "sinks of rank 2": (ValueError, "the shape of 'sinks' must be (num_heads,) = (4,), but got (1, 4)",
                        {"sinks": t(1, N)}),
    "seed of three": (ValueError, "the shape of 'seed' must be (seed, offset) = (2,), but got (3,)",
                      {"dropout_p": 0.1, "seed": lengths(1, 2, 3, dtype=ms.int64)}),
}
BAD_VARLEN = {
    "no lengths": (TypeError, "'cu_seqlens_q' must be Tensor, but got NoneType",
                   {"cu_seqlens_q": None, "cu_seqlens_k": None}),
    "lengths as a list": (TypeError, "'cu_seqlens_k' must be Tensor, but got list", {"cu_seqlens_k": [0, 4, 9]}),
    "float lengths": (TypeError, "'cu_seqlens_q' must be one of int32, int64, but got float32",
                      {"cu_seqlens_q": lengths(0, 3, 7, dtype=ms.float32)}),
    "lengths of two batches": (ValueError, "the shape of 'cu_seqlens_k' must be equal to that of 'cu_seqlens_q' (3,)",
                               {"cu_seqlens_k": lengths(0, 9)}),
    "lengths of rank 2": (ValueError, "the shape of 'cu_seqlens_q' must be (batch + 1,), but got (1, 3)",
                          {"cu_seqlens_q": ms.Tensor([[0, 3, 7]], ms.int32)}),
    "padded query": (ValueError, "for sequences of one length use 'flash_attention'", {"query": t(B, SQ, N, D)}),
    "varlen bias": (ValueError, "a bias is not supported for variable lengths", {"bias": t(4, 5)}),
    "varlen mask of rank 4": (ValueError, "the rank of 'attn_mask' must be 2",
                              {"attn_mask": t(1, 1, 4, 5, dtype=ms.bool_)}),
    "varlen slopes": (ValueError, "(batch, num_heads) = (2, 4), but got (3, 4)", {"alibi_slopes": t(3, N)}),
    "varlen heads": (ValueError, "must be a multiple of that of 'key' 3", {"key": t(9, 3, D), "value": t(9, 3, D)}),
}
# What a graph says in its own words before flash_attention is asked: objects it cannot hold.
NOT_IN_GRAPH = {"query is an array", "seed too large"}


def call(changes):
    arguments = {"query": QUERY, "key": KEY, "value": KEY, **changes}
    return flash_attention(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)


def call_varlen(changes):
    arguments = {**VARLEN, **changes}
    return flash_attention_varlen(*[arguments.pop(name) for name in VARLEN], **arguments)


@pytest.fixture(autouse=True)
def _no_kernel(monkeypatch):
    """Fails where a wrong call gets as far as the op."""
    def forward(self, spec):
        raise AssertionError(f"the call was accepted: {spec}")

    monkeypatch.setattr("ms_flash.backends.base.Backend.forward", forward)
    yield
    monkeypatch.undo()
    assert call({"backend": "reference"}).shape == QUERY.shape


def check(error, text, run):
    with pytest.raises(error) as caught:
        run()
    message = str(caught.value)
    assert type(caught.value) is error
    assert message.startswith("For 'flash_attention")
    assert text in message


@pytest.mark.parametrize("name", BAD)
def test_bad_call(name):
    error, text, changes = BAD[name]
    check(error, text, lambda: call(changes))


@pytest.mark.parametrize("name", BAD_VARLEN)
def test_bad_varlen_call(name):
    error, text, changes = BAD_VARLEN[name]
    check(error, text, lambda: call_varlen(changes))


class Net(nn.Cell):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def construct(self, query, key, value):
        return flash_attention(query, key, value, **self.options)


@pytest.mark.parametrize("name", [name for name in BAD if name not in NOT_IN_GRAPH])
def test_bad_call_in_a_graph(name):
    error, text, changes = BAD[name]
    ms.set_context(mode=ms.GRAPH_MODE)
    arguments = {"query": QUERY, "key": KEY, "value": KEY, **changes}
    inputs = [arguments.pop(key) for key in ("query", "key", "value")]
    check(error, text, lambda: Net(arguments)(*inputs))


def test_environment_names_an_unknown_backend(monkeypatch):
    monkeypatch.setenv("MS_FLASH_BACKEND", "gpu")
    check(ValueError, "the environment variable MS_FLASH_BACKEND must be one of", lambda: call({}))
    monkeypatch.delenv("MS_FLASH_BACKEND")


def test_values_equal_to_good_ones_are_not_taken_from_the_cache(monkeypatch):
    """1 == True and 0.0 == False are one key to a dictionary."""
    monkeypatch.undo()
    call({"softcap": 0.0, "softmax_scale": 1, "causal": True, "window_size": (1, 0), "backend": "reference"})
    for changes in ({"softcap": False}, {"softmax_scale": True}, {"causal": 1}, {"window_size": (True, False)}):
        with pytest.raises(TypeError):
            call({"softcap": 0.0, "softmax_scale": 1, "causal": True, "window_size": (1, 0), "backend": "reference",
                  **changes})


def test_a_mask_shorter_than_the_longest_sequence_is_found_at_the_call(backend, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"'attn_mask' must be .* = \(4, 5\) at least, but got \(3, 5\)"):
        call_varlen({"attn_mask": t(3, 5, dtype=ms.bool_), "backend": backend})


@pytest.mark.parametrize("num_threads, error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_thread_count(num_threads, error):
    with pytest.raises(error, match="For 'set_num_threads'"):
        ms_flash.set_num_threads(num_threads)


@pytest.mark.parametrize("which, ends, text", [
    ("cu_seqlens_q", (1, 3, 7), "must start with 0, but got 1"),
    ("cu_seqlens_q", (0, 5, 4), "must not decrease, but got 5 followed by 4"),
    ("cu_seqlens_k", (0, 4, 10), "must be at most the number of rows 9, but got 10"),
])
@pytest.mark.parametrize("mode, error", [("pynative", ValueError), ("graph", RuntimeError)])
def test_bad_lengths_are_found_at_the_call_or_when_a_graph_runs(which, ends, text, mode, error, backend, monkeypatch):
    monkeypatch.undo()
    if mode == "graph":
        ms.set_context(mode=ms.GRAPH_MODE)

    class Net(ms.nn.Cell):
        def construct(self, query, key, value, cu_q, cu_k):
            return ms_flash.flash_attention_varlen(query, key, value, cu_q, cu_k, backend=backend)

    net, wrong = Net(), {**VARLEN, which: lengths(*ends)}
    with pytest.raises(error, match=f"'{which}' {text}"):
        net(*wrong.values()).asnumpy()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    assert call_varlen({"backend": backend}).asnumpy().shape == (7, N, D)
