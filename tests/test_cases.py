"""Small inputs on which attention kernels in the field have failed, and their siblings, through the public call.

Empty rows, shapes and alignment, numerics. The float64 reference says what is right, FlashAttention's rule how exactly.
"""
from __future__ import annotations

import flash_rule
import mindspore as ms
import native
import numpy as np
import pytest
from flash_rule import reference
from mindspore import nn, ops
from public_api import array, attention, tensor

import ms_flash
from ms_flash import op_table

DTYPES = list(native.DTYPES)
LAYOUTS = ["BNSD", "BSND", "BSH", "SBH"]


def _problem(b=2, n=2, sq=4, sk=4, d=8, nk=None, dv=None, dtype="float32", seed=0, **options):
    """Random call of the reference, gradients of its output and LSE, and the generator for more."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(native.DTYPES[dtype])

    nk, dv = nk or n, dv or d
    call = {"q": normal(b, n, sq, d), "k": normal(b, nk, sk, d), "v": normal(b, nk, sk, dv), **options}
    return call, normal(b, n, sq, dv), rng.standard_normal((b, n, sq)).astype(np.float32)


def _agree(call, backend, dout=None, dlse=None, **options):
    """Runs the call, holds every result against the reference, and returns (got, exact)."""
    exact = flash_rule.evaluate(call, dout, dlse)
    naive = flash_rule.evaluate(call, dout, dlse, rounding=call["q"].dtype)
    got = attention(call, backend, dout, dlse, **options)
    flash_rule.check(got, exact, naive)
    return got, exact


def _big(backend):
    if backend == "reference":
        pytest.skip("too long for numpy, and the reference would only meet itself")


# ---------------------------------------------------------------------------------------------------------------------
# Empty rows
# ---------------------------------------------------------------------------------------------------------------------
def _row_one_masked(shape):
    masked = np.zeros(shape, bool)
    masked[0, :, 1] = True
    return masked


EMPTY_ROW = {  # way to empty row 1 of batch 0: options of the call, from its dtype
    "bool mask": lambda dtype: {"attn_mask": _row_one_masked((2, 1, 4, 4))},
    "uint8 mask": lambda dtype: {"attn_mask": _row_one_masked((2, 2, 4, 4)).astype(np.uint8)},
    "-inf bias": lambda dtype: {"bias": np.where(_row_one_masked((2, 1, 4, 4)), -np.inf, 0).astype(dtype)},
    "mask and -inf bias": lambda dtype: {"attn_mask": np.arange(4) < 2, "bias": np.where(
        _row_one_masked((2, 1, 4, 4)) & (np.arange(4) >= 2), -np.inf, 0).astype(dtype)},
    "causal and mask": lambda dtype: {"right": 0, "attn_mask": _row_one_masked((2, 1, 4, 4)) & (np.arange(4) < 2)},
    "window and mask": lambda dtype: {"left": 0, "right": 1, "attn_mask": _row_one_masked((2, 1, 4, 4))
                                      & np.array([False, True, True, False])},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", EMPTY_ROW)
def test_b01_row_without_keys_is_zero(way, dtype, layout, backend):
    call, dout, dlse = _problem(dtype=dtype, **EMPTY_ROW[way](native.DTYPES[dtype]))
    got, _ = _agree(call, backend, dout, dlse, layout=layout)
    assert (got["out"][0, :, 1] == 0).all() and np.isneginf(got["lse"][0, :, 1]).all()
    assert (got["dq"][0, :, 1] == 0).all()
    assert all(np.isfinite(got[name]).all() for name in ("out", "dq", "dk", "dv"))


def test_b01_every_row_empty(backend):
    call, dout, dlse = _problem(attn_mask=np.ones((4, 4), bool))
    got, _ = _agree(call, backend, dout, dlse)
    assert np.isneginf(got["lse"]).all()
    assert all((got[name] == 0).all() for name in ("out", "dq", "dk", "dv"))


def test_b01_window_that_leaves_the_last_rows_empty(backend):
    call, dout, dlse = _problem(sq=6, sk=3, left=1, right=0, align="top_left")
    got, _ = _agree(call, backend, dout, dlse)
    assert np.isneginf(got["lse"][:, :, 4:]).all() and (got["out"][:, :, 4:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sq, sk, d", [(5, 2, 16), (512, 256, 64), (799, 3, 64), (239, 1, 64)])
def test_b02_causal_with_more_queries_than_keys(sq, sk, d, dtype, backend):
    call, dout, dlse = _problem(b=1, sq=sq, sk=sk, d=d, right=0, dtype=dtype)
    got, _ = _agree(call, backend, dout, dlse)
    assert (got["out"][:, :, :sq - sk] == 0).all() and (got["dq"][:, :, :sq - sk] == 0).all()
    assert np.isneginf(got["lse"][:, :, :sq - sk]).all() and np.isfinite(got["lse"][:, :, sq - sk:]).all()


def test_b02_varlen_with_more_queries_than_keys(backend):
    call, dout, dlse = _varlen(lengths=[(5, 2), (0, 3), (3, 0), (4, 4)], right=0)
    got, _ = _agree(call, backend, dout, dlse)
    assert np.isneginf(got["lse"][:, [0, 1, 2, 5, 6, 7]]).all()


def test_b03_parts_of_the_keys_merge_by_their_lse(backend):
    masked = np.zeros((4, 8), bool)
    masked[1, :4] = True                             # this row has keys in the second half only
    masked[2] = True                                 # and this one nowhere
    call, _, _ = _problem(sk=8, attn_mask=masked)
    _, exact = _agree(call, backend)
    parts = [attention({**call, "k": call["k"][:, :, s], "v": call["v"][:, :, s], "attn_mask": masked[:, s]}, backend)
             for s in (slice(0, 4), slice(4, 8))]
    lses = np.stack([part["lse"] for part in parts])
    assert np.isneginf(lses[0, :, :, 1]).all()
    top = lses.max(0)
    weights = np.exp(lses - np.where(np.isneginf(top), 0, top))
    merged = sum(w[..., None] * part["out"] for w, part in zip(weights, parts))
    merged = merged / np.where(weights.sum(0) == 0, 1, weights.sum(0))[..., None]
    np.testing.assert_allclose(merged, exact["out"], atol=1e-6)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(top + np.log(weights.sum(0)), exact["lse"], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", ["-1e4", "lowest"])
@pytest.mark.parametrize("where", ["one row", "everywhere", "one key"])
def test_b05_finite_bias_is_arithmetic(where, value, dtype, backend):
    number = -1e4 if value == "-1e4" else float(np.finfo(np.float32).min if dtype == "float32"
                                                else -65504 if dtype == "float16" else -3.38e38)
    bias = np.zeros((4, 4))
    bias[{"one row": np.s_[1], "everywhere": np.s_[:], "one key": np.s_[:, 2]}[where]] = number
    call, dout, dlse = _problem(bias=bias.astype(native.DTYPES[dtype]), dtype=dtype)
    got, _ = _agree(call, backend, dout, dlse)
    assert np.isfinite(got["lse"]).all()
    if where == "one row" and value == "lowest" and dtype == "float32":
        np.testing.assert_allclose(got["out"][:, :, 1], call["v"].mean(2), atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_b06_poison_in_masked_keys_never_leaks(poison, dtype, backend):
    call, dout, _ = _problem(b=1, n=1, sq=2, sk=2, d=4, dtype=dtype, attn_mask=np.array([[False, True], [False, True]]))
    call["k"][:, :, 1], call["v"][:, :, 1] = poison, poison
    got, _ = _agree(call, backend, dout)
    np.testing.assert_array_equal(got["out"], np.broadcast_to(call["v"][:, :, :1].astype(float), got["out"].shape))
    assert (got["dk"][:, :, 1] == 0).all() and (got["dv"][:, :, 1] == 0).all()
    assert all(np.isfinite(grad).all() for grad in got.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b06_poisoned_tail_of_keys(layout, backend):
    """Padding as it is in practice: the last keys of a batch entry, more than one block of them."""
    call, dout, dlse = _problem(sq=70, sk=200, d=16, nk=1, attn_mask=np.arange(200)[None, None, None] >= 61)
    call["k"][:, :, 61:], call["v"][:, :, 61:] = np.nan, np.inf
    got, _ = _agree(call, backend, dout, dlse, layout=layout)
    assert all(np.isfinite(got[name]).all() for name in got)
    assert (got["dk"][:, :, 61:] == 0).all() and (got["dv"][:, :, 61:] == 0).all()


@pytest.mark.parametrize("where", ["k", "v"])
def test_b06_poisoned_key_under_causal_reaches_only_later_rows(where, backend):
    call, dout, dlse = _problem(sq=100, sk=100, d=16, right=0)
    clean = attention(call, backend, dout, dlse)
    call[where][:, :, 41] = np.nan
    got = attention(call, backend, dout, dlse)
    for name in ("out", "dq"):
        np.testing.assert_allclose(got[name][:, :, :41], clean[name][:, :, :41], atol=2e-6)
        assert np.isnan(got[name][:, :, 41:]).all()
    np.testing.assert_allclose(got["lse"][:, :, :41], clean["lse"][:, :, :41], atol=2e-6)


def test_b06_poisoned_row_does_not_reach_keys_it_does_not_see(backend):
    """Rows 9 to 12 are spoilt by key 9; with a window of 3 the keys before 6 and after 12 must not notice."""
    call, dout, dlse = _problem(sq=40, sk=40, left=3, right=0)
    call["k"][:, :, 9] = np.nan
    got, _ = _agree(call, backend, dout, dlse)
    for name in ("dk", "dv"):
        assert np.isfinite(np.delete(got[name], np.s_[6:13], axis=2)).all()


def test_b06_poisoned_key_under_minus_infinity_bias(backend):
    call, dout, dlse = _problem(sk=40, bias=np.where(np.arange(40) >= 7, -np.inf, 0).astype(np.float32))
    call["k"][:, :, 7:], call["v"][:, :, 7:] = np.nan, np.nan
    got, _ = _agree(call, backend, dout, dlse)
    assert all(np.isfinite(got[name]).all() for name in got)


def test_b06_poisoned_query_and_gradient_of_an_empty_row(backend):
    call, dout, dlse = _problem(sq=40, attn_mask=(np.arange(40) == 9)[:, None])
    call["q"][:, :, 9], dout[:, :, 9], dlse[:, :, 9] = np.nan, np.nan, np.nan
    got, _ = _agree(call, backend, dout, dlse)
    assert all(np.isfinite(got[name]).all() for name in got if name != "lse")


def _varlen(lengths, tail=(0, 0), n=2, nk=1, d=8, dtype="float32", **options):
    rng = np.random.default_rng(0)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in np.array(lengths).T)
    rows, keys = cu_q[-1] + tail[0], cu_k[-1] + tail[1]

    def normal(*shape):
        return rng.standard_normal(shape).astype(native.DTYPES[dtype])

    call = {"q": normal(rows, n, d), "k": normal(keys, nk, d), "v": normal(keys, nk, d), "cu_q": cu_q, "cu_k": cu_k}
    return {**call, **options}, normal(rows, n, d), rng.standard_normal((n, rows)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b06_poisoned_rows_after_the_last_sequence(dtype, backend):
    call, dout, dlse = _varlen([(3, 5), (40, 33), (0, 2)], tail=(6, 70), dtype=dtype)
    call["q"][43:], call["k"][40:], call["v"][40:], dout[43:], dlse[:, 43:] = (np.nan,) * 5
    got, _ = _agree(call, backend, dout, dlse)
    assert all(np.isfinite(got[name]).all() for name in got if name != "lse")
    assert (got["out"][43:] == 0).all() and np.isneginf(got["lse"][:, 43:]).all() and (got["dq"][43:] == 0).all()
    assert (got["dk"][40:] == 0).all() and (got["dv"][40:] == 0).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("b, sq, sk", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
def test_b08_sizes_of_zero(b, sq, sk, layout, backend):
    call, dout, dlse = _problem(b=b, sq=sq, sk=sk)
    got, exact = _agree(call, backend, dout, dlse, layout=layout)
    assert {name: x.shape for name, x in got.items()} == {name: x.shape for name, x in exact.items()}


def test_b08_no_keys_but_sinks(backend):
    call, dout, dlse = _problem(sk=0, sinks=np.array([0.5, -1], np.float32))
    got, _ = _agree(call, backend, dout, dlse)
    np.testing.assert_allclose(got["lse"], np.broadcast_to([[0.5], [-1]], (2, 2, 4)))


@pytest.mark.parametrize("change, argument", [({"d": 0}, "query"), ({"nk": 0}, "key")])
def test_b08_no_channels_or_no_key_heads_is_an_error(change, argument, backend):
    sizes = {"n": 2, "nk": 2, "d": 8, **change}
    query = ms.Tensor(np.zeros((1, 2, 3, sizes["d"]), np.float32))
    key = ms.Tensor(np.zeros((1, sizes["nk"], 3, sizes["d"]), np.float32))
    with pytest.raises(ValueError, match=argument):
        ms_flash.flash_attention(query, key, key, backend=backend)


# ---------------------------------------------------------------------------------------------------------------------
# Shapes and alignment
# ---------------------------------------------------------------------------------------------------------------------
def _visible(backend, sq, sk, **options):
    """Which keys each query uses: with the identity as values the output is the probabilities."""
    call, _, _ = _problem(b=1, n=1, sq=sq, sk=sk, dv=sk)
    call["v"] = np.eye(sk, dtype=np.float32)[None, None]
    return (attention(call, backend, **options)["out"][0, 0] > 0).astype(int).tolist()


def test_b09_causal_alignment(backend):
    assert _visible(backend, 2, 5, causal=True) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert _visible(backend, 2, 5, causal=True, causal_align="top_left") == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert _visible(backend, 1, 8, causal=True) == [[1] * 8]
    assert _visible(backend, 1, 8, causal=True, causal_align="top_left") == [[1] + [0] * 7]
    assert _visible(backend, 3, 2, causal=True) == [[0, 0], [1, 0], [1, 1]]


LENGTHS = [1, 2, 3, 15, 17, 63, 65, 97, 113, 127, 129, 1023, 1025]
PAIRS = [(113, 203), (108, 256), (1023, 1024), (3, 799), (1, 17), (17, 1), (65, 63), (129, 127)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sq, sk", [(s, s) for s in LENGTHS] + PAIRS)
def test_b10_lengths_that_no_block_divides(sq, sk, causal, backend):
    if max(sq, sk) > 900:
        _big(backend)
    dtype = DTYPES[(sq + sk) % 3]
    call, dout, dlse = _problem(b=1, n=2, nk=1, sq=sq, sk=sk, d=64, right=0 if causal else -1, dtype=dtype)
    _agree(call, backend, dout, dlse)


@pytest.mark.parametrize("causal", [False, True])
def test_b10_length_3333(causal, backend):
    _big(backend)
    call, dout, _ = _problem(b=1, n=1, sq=3333, sk=3333, d=64, right=0 if causal else -1)
    _agree(call, backend, dout)


@pytest.mark.parametrize("d", [1, 5, 8, 15, 33, 40, 59, 72, 80, 96, 111, 120, 125, 160, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_b12_any_head_dim(d, dtype, backend):
    call, dout, dlse = _problem(b=1, n=2, nk=1, sq=19, sk=37, d=d, dtype=dtype)
    got, _ = _agree(call, backend, dout, dlse)
    assert got["out"].shape[-1] == d
    explicit = attention({**call, "scale": d**-0.5}, backend)               # of this head_dim, not of a padded one
    np.testing.assert_array_equal(explicit["out"], got["out"])


def test_b12_head_dim_200_in_bsnd_half_precision(backend):
    call, dout, dlse = _problem(b=1, n=2, nk=1, sq=64, sk=64, d=200, dtype="float16")
    _agree(call, backend, dout, dlse, layout="BSND")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d, dv", [(320, 320), (512, 512), (8, 10), (10, 8), (192, 128), (1, 300), (576, 512)])
def test_b13_large_head_dim_and_other_value_dim(d, dv, dtype, backend):
    call, dout, dlse = _problem(b=1, n=2, nk=1, sq=21, sk=70, d=d, dv=dv, dtype=dtype, right=0)
    most = op_table.table()["backends"][backend].get("head_dim", max(d, dv))
    if max(d, dv) > most:
        with pytest.raises(ValueError, match=f"must be at most {most} for the backend '{backend}', but got"):
            attention(call, backend)
    else:
        _agree(call, backend, dout, dlse)


@pytest.mark.parametrize("view", ["transposed", "every other channel", "broadcast", "slice"])
def test_b14_views_equal_their_copies(view, backend):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return tensor(rng.standard_normal(shape).astype(np.float32))

    b, n, s, d = (1, 16, 62, 128) if view == "transposed" else (2, 4, 30, 16)
    make = {"transposed": lambda: normal(b, s, n, d).transpose(0, 2, 1, 3),
            "every other channel": lambda: normal(b, n, s, 2 * d)[..., ::2],
            "broadcast": lambda: ops.broadcast_to(normal(1, 1, s, d), (b, n, s, d)),
            "slice": lambda: normal(b, n, s + 3, d)[:, :, 2:-1]}[view]
    views = [make() for _ in range(3)]
    copies = [ms.Tensor(x.asnumpy().copy()) for x in views]
    weight = normal(b, n, s, d)

    def loss(query, key, value):
        return (ms_flash.flash_attention(query, key, value, causal=True, backend=backend) * weight).sum()

    results = [(ms_flash.flash_attention(*x, causal=True, backend=backend), *ms.grad(loss, (0, 1, 2))(*x))
               for x in (views, copies)]
    for got, expected in zip(*results):
        np.testing.assert_array_equal(got.asnumpy(), expected.asnumpy())


@pytest.mark.parametrize("sk", [32, 15, 43])
@pytest.mark.parametrize("shape", ["k", "qk", "1k", "q1", "nqk", "n1k", "n11", "b11k", "1n1k", "bnqk", "b1q1", "11qk",
                                   "b1qk", "1nqk", "bn11", "1111"])
def test_b15_masks_and_bias_broadcast_from_the_right(shape, sk, backend):
    sizes = {"b": 3, "n": 4, "q": 20, "k": sk, "1": 1}
    call, dout, dlse = _problem(b=3, n=4, sq=20, sk=sk, d=16)
    full, shape = (3, 4, 20, sk), tuple(sizes[letter] for letter in shape)
    rng = np.random.default_rng(1)
    masked, bias = rng.random(shape) < 0.4, rng.standard_normal(shape).astype(np.float32)
    for name, x in (("attn_mask", masked), ("bias", bias)):
        got, _ = _agree({**call, name: x}, backend, dout, dlse)
        expanded = attention({**call, name: np.ascontiguousarray(np.broadcast_to(x, full))}, backend)
        np.testing.assert_array_equal(got["out"], expanded["out"])
    _agree({**call, "attn_mask": masked, "bias": bias}, backend, dout, dlse)


@pytest.mark.parametrize("name", ["attn_mask", "bias"])
@pytest.mark.parametrize("shape", [(33,), (3, 1, 1, 32), (8, 1, 64, 31), (64, 1, 1), (1, 8, 8, 64, 32), (2, 64, 32),
                                   (32, 64)])
def test_b15_shapes_that_do_not_broadcast_are_refused(shape, name, backend):
    call, _, _ = _problem(b=8, n=8, sq=64, sk=32, d=64)
    call[name] = np.zeros(shape, bool if name == "attn_mask" else np.float32)
    with pytest.raises(ValueError) as error:
        attention(call, backend)
    wanted = "[1, 4]" if len(shape) > 4 else "(8, 8, 64, 32)"
    assert all(text in str(error.value) for text in (name, str(shape), wanted))


@pytest.mark.parametrize("left, right, same_as", [
    (0, 0, "diagonal"), (2, 0, None), (15, 0, "causal"), (16, 0, "causal"), (-1, 0, "causal"), (-1, -1, "full"),
    (1, 2, None), (2**31 - 1, 2**31 - 1, "full"), (-1, 2**31 - 1, "full"), (0, -1, None)])
def test_b17_window_edges(left, right, same_as, backend):
    call, dout, dlse = _problem(sq=16, sk=16)
    got, _ = _agree({**call, "left": left, "right": right}, backend, dout, dlse)
    if same_as == "causal":
        np.testing.assert_array_equal(got["out"], attention({**call, "causal": True}, backend)["out"])
    if same_as == "full":
        np.testing.assert_array_equal(got["out"], attention(call, backend)["out"])
    if same_as == "diagonal":
        np.testing.assert_array_equal(got["out"], call["v"].astype(float))
    as_mask = ms_flash.flash_attention(*(tensor(call[name]) for name in "qkv"), (left, right), backend=backend)
    np.testing.assert_array_equal(got["out"], array(as_mask))


@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
@pytest.mark.parametrize("sq, sk, left, right", [
    (7, 4, 4, 2**31 - 1), (129, 64, 32, 64), (129, 64, 32, 4), (64, 129, 3, 0), (1, 200, 5, 5), (200, 1, 7, 0),
    (130, 130, 64, 64), (70, 70, 0, 65)])
def test_b17_windows_of_unequal_lengths(sq, sk, left, right, align, backend):
    call, dout, dlse = _problem(sq=sq, sk=sk, left=left, right=right, align=align)
    got, _ = _agree(call, backend, dout, dlse)
    shift = sk - sq if align == "bottom_right" else 0
    allowed = [[i + shift - left <= j <= i + shift + right for j in range(sk)] for i in range(sq)]
    np.testing.assert_array_equal(np.isneginf(got["lse"][0, 0]), ~np.any(allowed, 1))
    if (sq, sk) == (7, 4) and align == "bottom_right":
        np.testing.assert_array_equal(got["out"], attention({**call, "left": -1, "right": -1}, backend)["out"])


# ---------------------------------------------------------------------------------------------------------------------
# Numerics
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_b21_accumulation_over_4096_keys(dtype, backend):
    _big(backend)
    call, _, _ = _problem(b=1, n=1, sq=64, sk=4096, d=128, dtype=dtype)
    call["v"] = (1 + 1e-2 * np.random.default_rng(1).standard_normal(call["v"].shape)).astype(native.DTYPES[dtype])
    _agree(call, backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("s", [1, 3333, 4096])
def test_b21_probabilities_sum_to_one(s, dtype, backend):
    if s > 1:
        _big(backend)
    call, _, _ = _problem(b=1, n=1, sq=min(s, 70), sk=s, d=128, dtype=dtype)
    call["v"] = np.ones_like(call["v"])
    out = attention(call, backend)["out"]
    assert np.abs(out - 1).max() <= (2e-6 if dtype == "float32" else float(np.spacing(np.float16(1)))
                                     if dtype == "float16" else 2.0**-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b22_equal_queries_and_keys(dtype, backend):
    call, dout, _ = _problem(sq=33, sk=65, d=32, dtype=dtype)
    call["q"][:], call["k"][:] = call["q"][:, :, :1], call["k"][:, :, :1]
    got, _ = _agree(call, backend, dout)
    mean = np.broadcast_to(call["v"].astype(float).mean(2, keepdims=True), got["out"].shape)
    np.testing.assert_allclose(got["out"], mean, atol=1e-6 if dtype == "float32" else 4e-3)
    assert np.abs(got["dq"]).max() <= (8e-3 if dtype == "bfloat16" else 1e-3)
    zero = attention(call, backend, np.zeros_like(dout))
    assert all((zero[name] == 0).all() for name in ("dq", "dk", "dv"))


@pytest.mark.parametrize("scale", [None, 0.0, 0, 1, -0.25, -1e4, 1e4, 1e-30])
def test_b23_any_finite_scale(scale, backend):
    call, dout, dlse = _problem(scale=scale)
    if scale and abs(scale) > 1e3:    # one-hot softmax: what is left of the gradients is rounding times the scale
        _agree(call, backend)
        got, exact = attention(call, backend, dout), flash_rule.evaluate(call, dout)
        for name in ("dq", "dk", "dv"):
            np.testing.assert_allclose(got[name], exact[name], rtol=1e-5, atol=4e-6 * abs(scale))
        return
    got, _ = _agree(call, backend, dout, dlse)
    if scale == 0:
        mean = np.broadcast_to(call["v"].mean(2, keepdims=True), got["out"].shape)
        np.testing.assert_allclose(got["out"], mean, atol=1e-6)
        assert (got["dq"] == 0).all() and (got["dk"] == 0).all()
    if scale is None:
        np.testing.assert_array_equal(got["out"], attention({**call, "scale": 8**-0.5}, backend)["out"])


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_b23_scale_that_is_no_number_is_refused(scale, backend):
    with pytest.raises(ValueError, match="softmax_scale"):
        attention(_problem()[0] | {"scale": scale}, backend)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.5, 2.0, 50.0])
def test_b24_softcap_before_the_mask(softcap, dtype, backend):
    bias = np.where(np.random.default_rng(5).random((30, 40)) < 0.3, -np.inf, 0)
    call, dout, dlse = _problem(sq=30, sk=40, d=16, dtype=dtype, softcap=softcap, right=0, scale=1.0,
                                bias=bias.astype(native.DTYPES[dtype]))
    call["q"] = (call["q"] * 10).astype(native.DTYPES[dtype])               # logits up to about 168
    assert np.abs(call["q"].astype(float) @ call["k"].astype(float).swapaxes(2, 3)).max() > 100
    got, _ = _agree(call, backend, dout, dlse)
    masked = attention({**call, "bias": None, "attn_mask": np.isneginf(bias)}, backend)
    # scores near the cap of 50 are rounded in other units with a bias than without: 4e-6 each, relative in the output
    slack = {"float32": 1e-5, "float16": 2.0 ** -9, "bfloat16": 2.0 ** -6}[dtype]
    np.testing.assert_allclose(got["out"].astype(float), masked["out"].astype(float), rtol=0, atol=slack)


@pytest.mark.parametrize("sink", [50.0, 3e9, 1e12, 1e30, 3e38])
def test_a_huge_finite_sink_takes_all_the_weight(sink, backend):
    call, dout, _ = _problem(sq=4, sk=5, d=8)
    call["sinks"] = np.full(call["q"].shape[1], sink, np.float32)
    dlse = np.ones((*call["q"].shape[:3],), np.float32)
    got = attention(call, backend, dout, dlse)
    np.testing.assert_allclose(got["out"], 0, atol=1e-6)
    np.testing.assert_allclose(got["lse"], sink, rtol=1e-6)
    np.testing.assert_allclose(got["dsinks"], call["q"].shape[0] * 4, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e10, -1e12])
def test_high_precision_bears_scores_beyond_float32_integers(scale, kernel_backend):
    call, dout, dlse = _problem(sq=4, sk=8, d=8, scale=scale)
    exact = flash_rule.evaluate(call, dout, dlse)
    got = attention({**call, "precision_mode": "high"}, kernel_backend, dout, dlse)
    np.testing.assert_allclose(got["out"], exact["out"], atol=1e-6)
    assert all(np.isfinite(x).all() for x in got.values())


def test_b26_lse_is_the_natural_logarithm(backend):
    from scipy.special import logsumexp

    call, _, _ = _problem(sq=9, sk=20, right=0)
    scores = call["q"].astype(float) @ call["k"].astype(float).swapaxes(2, 3) / np.sqrt(8)
    scores = np.where(np.arange(20) <= np.arange(9)[:, None] + 11, scores, -np.inf)
    np.testing.assert_allclose(attention(call, backend)["lse"], logsumexp(scores, axis=-1), rtol=1e-6)


def test_b28_bias_is_added_after_the_scale(backend):
    bias = np.random.default_rng(3).standard_normal((2, 2, 4, 4)).astype(np.float32)
    call, dout, dlse = _problem(scale=0.25, bias=bias)
    got, _ = _agree(call, backend, dout, dlse)
    before = flash_rule.evaluate({**call, "bias": 0.25 * call["bias"]}, None)
    assert np.abs(got["out"] - before["out"]).max() > 0.01


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n, nk", [(6, 2), (9, 3), (8, 1), (4, 4)])
def test_b29_grouped_queries(n, nk, layout, backend):
    call, dout, dlse = _problem(n=n, nk=nk, sq=5, sk=7, d=16)
    got, _ = _agree(call, backend, dout, dlse, layout=layout)
    expanded = {**call, "k": call["k"].repeat(n // nk, 1), "v": call["v"].repeat(n // nk, 1)}
    repeated = attention(expanded, backend, dout, dlse)
    np.testing.assert_allclose(got["out"], repeated["out"], atol=1e-6)
    for name in ("dk", "dv"):
        np.testing.assert_allclose(got[name], repeated[name].reshape(2, nk, n // nk, 7, 16).sum(2), atol=1e-5)


@pytest.mark.parametrize("n, nk", [(6, 4), (2, 4), (5, 3)])
def test_b29_heads_that_do_not_divide_are_refused(n, nk, backend):
    with pytest.raises(ValueError, match=f"(?s)(?=.*{n})(?=.*{nk})"):
        attention(_problem(n=n, nk=nk)[0], backend)


@pytest.fixture(name="dropped")
def _dropped():
    return _problem(b=2, n=2, sq=128, sk=128, d=64, dropout_p=0.17, seed=0)[0] | {"seed": 1234}, \
        np.random.default_rng(9).standard_normal((2, 2, 128, 64)).astype(np.float32)


def test_b30_dropout_is_a_function_of_the_seed(dropped, backend):
    call, dout = dropped
    first, _ = _agree(call, backend, dout)
    second = attention(call, backend, dout)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    other = attention({**call, "seed": 1235}, backend)
    assert np.abs(other["out"] - first["out"]).max() > 0.01
    as_tensor = attention({**call, "seed": tensor(np.array([1234, 0], np.int64))}, backend)
    np.testing.assert_array_equal(as_tensor["out"], first["out"])
    moved = {**call, "seed": tensor(np.array([1234, 7], np.int64))}
    exact = reference.forward(**{**call, "offset": 7})[0]
    np.testing.assert_allclose(attention(moved, backend)["out"], exact, atol=1e-5)


def test_b30_dropout_keeps_the_right_share(backend):
    call, _, _ = _problem(b=1, n=2, sq=128, sk=200, d=8, dv=200, scale=0.0, dropout_p=0.17)
    call["v"] = np.broadcast_to(np.eye(200, dtype=np.float32), (1, 2, 200, 200))
    kept = attention({**call, "seed": 3}, backend)["out"] > 0
    np.testing.assert_array_equal(kept, reference.keep_mask(0.17, 3, 0, 1, 2, 128, 200))
    assert abs(kept.mean() - 0.83) < 0.01


def test_b30_dropout_does_not_depend_on_blocks_or_threads(dropped, backend):
    call, dout = dropped
    expected, _ = _agree(call, backend, dout)
    for block_m, block_n in ((16, 16), (32, 100), (64, 24), (128, 128)):
        _agree(call, backend, dout, block_m=block_m, block_n=block_n)
    before = ms_flash.get_num_threads()
    try:
        for threads in (1, 2, 3):
            ms_flash.set_num_threads(threads)
            got = attention(call, backend, dout)
            for name in got:
                np.testing.assert_array_equal(got[name], expected[name])
    finally:
        ms_flash.set_num_threads(before)


def test_b30_dropout_is_unbiased(backend):
    call, _, _ = _problem(b=1, n=1, sq=8, sk=16, d=8)
    mean = np.mean([attention({**call, "dropout_p": 0.17, "seed": seed}, backend)["out"] for seed in range(512)], 0)
    assert np.abs(mean - attention(call, backend)["out"]).max() < 0.1


def test_b30_without_a_seed_the_generator_of_mindspore_decides(dropped, backend):
    call, _ = dropped
    runs = []
    for _ in range(2):
        ms.set_seed(11)
        runs.append([attention({**call, "seed": None}, backend)["out"] for _ in range(2)])
    np.testing.assert_array_equal(runs[0], runs[1])
    assert np.abs(runs[0][0] - runs[0][1]).max() > 0.01


class _Block(nn.Cell):
    def __init__(self, backend, recompute):
        super().__init__()
        self.attention = ms_flash.nn.FlashAttention(causal=True, dropout_p=0.17, backend=backend)
        if recompute:
            self.attention.recompute()

    def construct(self, query, key, value):
        return self.attention(query, key, value)


def test_b30_recompute_draws_the_same_mask(dropped, backend):
    call, dout = dropped
    inputs, weight, grads = [tensor(call[name]) for name in "qkv"], tensor(dout), []
    for recompute in (False, True):
        block = _Block(backend, recompute).set_train()
        ms.set_seed(5)
        grads.append(ops.GradOperation(get_all=True, sens_param=True)(block)(*inputs, weight))
    for plain, recomputed in zip(*grads):
        np.testing.assert_array_equal(plain.asnumpy(), recomputed.asnumpy())


def test_b31_no_dropout_outside_training(dropped, backend):
    call, _ = dropped
    expected = attention({**call, "dropout_p": 0.0}, backend)["out"]
    np.testing.assert_array_equal(attention({**call, "training": False}, backend)["out"], expected)
    cell = ms_flash.nn.FlashAttention(dropout_p=0.17, seed=1234, backend=backend)
    inputs = [tensor(call[name]) for name in "qkv"]
    np.testing.assert_array_equal(array(cell.set_train(False)(*inputs)), expected)
    np.testing.assert_array_equal(array(cell.set_train(True)(*inputs)), attention(call, backend)["out"])


def test_b31_no_dropout_draws_no_random_number(backend):
    call, _, _ = _problem()
    draws = []
    for use in (False, True):
        ms.set_seed(21)
        if use:
            attention({**call, "dropout_p": 0.0, "seed": None}, backend)
            attention({**call, "dropout_p": 0.5, "seed": None, "training": False}, backend)
            attention({**call, "dropout_p": 0.5, "seed": 4}, backend)
        draws.append(ops.rand(8).asnumpy())
    np.testing.assert_array_equal(*draws)


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_b31_dropout_outside_zero_to_one_is_refused(p, backend):
    with pytest.raises(ValueError, match="dropout_p"):
        attention({**_problem()[0], "dropout_p": p}, backend)


def test_b32_fifty_runs_are_bit_equal(backend):
    bias = np.random.default_rng(2).standard_normal((1, 1, 70, 130)).astype(np.float32)
    call, dout, dlse = _problem(n=4, nk=2, sq=70, sk=130, d=40, right=0, bias=bias, sinks=np.ones(4, np.float32))
    first = attention(call, backend, dout, dlse)
    for _ in range(49 if backend != "reference" else 1):
        again = attention(call, backend, dout, dlse)
        for name in first:
            np.testing.assert_array_equal(first[name], again[name], err_msg=name)
