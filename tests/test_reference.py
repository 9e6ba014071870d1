"""The float64 reference against finite differences, an independent one-row formula, and its own contract."""
import importlib.util
import itertools
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

_FILE = Path(__file__).resolve().parents[1] / "ms_flash" / "reference.py"
_SPEC = importlib.util.spec_from_file_location("ms_flash_reference", _FILE)
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)

B, N, NK, SQ, SK, D, DV = 2, 4, 2, 5, 7, 3, 4
TENSORS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "sinks": "dsinks"}


def _masked(rng, *shape):
    return rng.random(shape) < 0.3


def _with_minus_inf(x):
    x.reshape(-1)[::6] = -np.inf
    return x


FEATURES = {
    "scale": lambda rng: {"scale": -0.7},
    "softcap": lambda rng: {"softcap": 1.5},
    "causal": lambda rng: {"right": 0},
    "window top_left": lambda rng: {"left": 2, "right": 1, "align": "top_left"},
    "mask": lambda rng: {"attn_mask": _masked(rng, B, N, SQ, SK)},
    "mask of keys": lambda rng: {"attn_mask": _masked(rng, B, 1, 1, SK)},
    "mask filled": lambda rng: {"attn_mask": _masked(rng, SQ, SK), "mask_fill": -0.5},
    "bias": lambda rng: {"bias": rng.standard_normal((B, N, SQ, SK))},
    "bias per head": lambda rng: {"bias": rng.standard_normal((N, 1, SK))},
    "bias with -inf": lambda rng: {"bias": _with_minus_inf(rng.standard_normal((B, 1, SQ, SK)))},
    "bias scalar": lambda rng: {"bias": rng.standard_normal(())},
    "alibi": lambda rng: {"alibi_slopes": rng.random((B, N))},
    "alibi top_left": lambda rng: {"alibi_slopes": rng.random(N), "align": "top_left"},
    "sinks": lambda rng: {"sinks": rng.standard_normal(N)},
    "dropout": lambda rng: {"dropout_p": 0.3, "seed": 5, "offset": 2},
    "drop mask": lambda rng: {"drop_mask": rng.random((B, N, SQ, SK)) < 0.7, "dropout_p": 0.25},
}
COMBINED = {
    "all but fill": ["softcap", "causal", "mask of keys", "bias with -inf", "alibi", "sinks", "dropout"],
    "all with fill": ["scale", "softcap", "window top_left", "mask filled", "bias per head", "alibi", "sinks",
                      "drop mask"],
}


def _inputs(rng, batch=B, sq=SQ, sk=SK):
    return {"q": rng.standard_normal((batch, N, sq, D)), "k": rng.standard_normal((batch, NK, sk, D)),
            "v": rng.standard_normal((batch, NK, sk, DV))}


def _problem(name):
    rng = np.random.default_rng(3)
    options = {}
    for feature in COMBINED.get(name, [name]):
        options.update(FEATURES[feature](rng))
    return {**_inputs(rng), **options}, rng


def _check_gradients(call, rng):
    """Central differences in a random direction per input, through out and lse together."""
    out, lse, saved = reference.forward(**call)
    dout = rng.standard_normal(out.shape)
    dlse = np.where(np.isfinite(lse), rng.standard_normal(lse.shape), 0.0)
    grads = reference.backward(dout, dlse, saved)

    def loss(changed):
        out, lse, _ = reference.forward(**{**call, **changed})
        return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0.0) * dlse).sum()

    for name, grad_name in TENSORS.items():
        if call.get(name) is None:
            assert grads[grad_name] is None
            continue
        assert grads[grad_name].shape == np.shape(call[name])
        for _ in range(3):
            direction, step = rng.standard_normal(np.shape(call[name])), 1e-5
            ahead, behind = (loss({name: call[name] + sign * step * direction}) for sign in (1, -1))
            slope = (ahead - behind) / (2 * step)
            np.testing.assert_allclose((grads[grad_name] * direction).sum(), slope, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("name", [*FEATURES, *COMBINED])
def test_gradients_match_finite_differences(name):
    _check_gradients(*_problem(name))


@pytest.mark.parametrize("first, second", list(itertools.combinations(
    ["softcap", "causal", "mask filled", "bias with -inf", "alibi", "sinks", "dropout"], 2)))
def test_gradients_of_pairs_of_features(first, second):
    rng = np.random.default_rng(4)
    _check_gradients({**_inputs(rng), **FEATURES[first](rng), **FEATURES[second](rng)}, rng)


def _one_row(call, b, n, i):
    """out and lse of a single query, with Python floats only."""
    q, k, v = call["q"][b, n, i], call["k"][b, n // (N // NK)], call["v"][b, n // (N // NK)]
    shift = len(k) - SQ if call.get("align", "bottom_right") == "bottom_right" else 0
    scale, cap = call.get("scale", 1 / math.sqrt(D)), call.get("softcap", 0.0)
    left, right = call.get("left", -1), call.get("right", -1)

    def at(name, j):
        return np.broadcast_to(call[name], (B, N, SQ, len(k)))[b, n, i, j]

    logits = {}
    for j in range(len(k)):
        if (0 <= left < i + shift - j) or (0 <= right < j - i - shift):
            continue
        logit = scale * sum(float(x) * float(y) for x, y in zip(q, k[j]))
        logit = cap * math.tanh(logit / cap) if cap else logit
        logit += at("bias", j) if "bias" in call else 0.0
        if "alibi_slopes" in call:
            logit -= np.broadcast_to(call["alibi_slopes"], (B, N))[b, n] * abs(i + shift - j)
        if "attn_mask" in call and at("attn_mask", j):
            if "mask_fill" not in call:
                continue
            logit = call["mask_fill"]
        if logit > -math.inf:
            logits[j] = logit
    denominator = sum(math.exp(x) for x in logits.values())
    denominator += math.exp(call["sinks"][n]) if "sinks" in call else 0.0
    out = np.zeros(DV)
    for j, logit in logits.items():
        kept = 1.0
        if "drop_mask" in call:
            kept = at("drop_mask", j) / (1 - call["dropout_p"])
        elif "dropout_p" in call:
            kept = reference.keep_mask(call["dropout_p"], call["seed"], call["offset"], B, N, SQ, len(k))[b, n, i, j]
            kept = kept / (1 - call["dropout_p"])
        out += kept * math.exp(logit) / denominator * v[j]
    return out, math.log(denominator) if denominator else -math.inf


@pytest.mark.parametrize("name", [*FEATURES, *COMBINED])
def test_forward_matches_one_row_at_a_time(name):
    call, _ = _problem(name)
    out, lse, _ = reference.forward(**call)
    for b, n, i in itertools.product(range(B), range(N), range(SQ)):
        row, row_lse = _one_row(call, b, n, i)
        np.testing.assert_allclose(out[b, n, i], row, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(lse[b, n, i], row_lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["causal", "window top_left", "alibi", "sinks", "softcap", "mask filled"])
def test_varlen_equals_one_sequence_at_a_time(name):
    rng = np.random.default_rng(7)
    cu_q, cu_k = np.array([0, 3, 3, 8, 9]), np.array([0, 2, 6, 6, 13])
    tokens_q, tokens_k = 11, 15                                    # the last two of each belong to no sequence
    q, k, v = rng.standard_normal((tokens_q, N, D)), rng.standard_normal((tokens_k, NK, D)), \
        rng.standard_normal((tokens_k, NK, DV))
    q[9:], k[13:], v[13:] = np.nan, np.nan, np.nan
    options = FEATURES[name](rng)
    if "attn_mask" in options:
        options["attn_mask"] = _masked(rng, 5, 7)                  # longest query by longest key sequence
    if "alibi_slopes" in options:
        options["alibi_slopes"] = rng.random((4, N))
    out, lse, saved = reference.forward(q, k, v, cu_q=cu_q, cu_k=cu_k, **options)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    dout[9:] = np.nan
    grads = reference.backward(dout, dlse, saved)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = dict(options)
        if "attn_mask" in own:
            own["attn_mask"] = own["attn_mask"][:rows.stop - rows.start, :keys.stop - keys.start]
        if "alibi_slopes" in own:
            own["alibi_slopes"] = own["alibi_slopes"][b:b + 1]
        dense = (x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
        one, one_lse, one_saved = reference.forward(*dense, **own)
        one_grads = reference.backward(dout[rows].swapaxes(0, 1)[None], dlse[None, :, rows], one_saved)
        np.testing.assert_array_equal(out[rows].swapaxes(0, 1)[None], one)
        np.testing.assert_array_equal(lse[None, :, rows], one_lse)
        for grad, part in (("dq", rows), ("dk", keys), ("dv", keys)):
            np.testing.assert_array_equal(grads[grad][part].swapaxes(0, 1)[None], one_grads[grad])
    assert (out[9:] == 0).all() and np.isneginf(lse[:, 9:]).all()
    assert (grads["dq"][9:] == 0).all() and (grads["dk"][13:] == 0).all() and (grads["dv"][13:] == 0).all()


def test_varlen_dropout_counts_sequences_as_batches():
    rng = np.random.default_rng(8)
    call = _inputs(rng)
    out, _, _ = reference.forward(**call, dropout_p=0.4, seed=1)
    flat = {name: x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for name, x in call.items()}
    packed, _, _ = reference.forward(**flat, cu_q=[0, SQ, 2 * SQ], cu_k=[0, SK, 2 * SK], dropout_p=0.4, seed=1)
    np.testing.assert_array_equal(packed.reshape(B, SQ, N, DV).swapaxes(1, 2), out)


EMPTY_ROW = {  # every way to leave row 1 without keys
    "bool mask": {"attn_mask": np.arange(4)[:, None] == 1},
    "-inf bias": {"bias": np.where(np.arange(4)[:, None] == 1, -np.inf, 0.0)},
    "causal and mask": {"right": 0, "attn_mask": (np.arange(4)[:, None] == 1) & (np.arange(4) < 2)},
    "window and mask": {"left": 0, "right": 0, "attn_mask": np.eye(4, dtype=bool) & (np.arange(4)[:, None] == 1)},
}


@pytest.mark.parametrize("way", EMPTY_ROW)
def test_empty_row_is_zero_with_lse_minus_infinity(way):
    rng = np.random.default_rng(0)
    call = dict(_inputs(rng, sq=4, sk=4), **EMPTY_ROW[way])
    out, lse, saved = reference.forward(**call)
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    grads = reference.backward(dout, dlse, saved)
    assert (out[:, :, 1] == 0).all() and np.isneginf(lse[:, :, 1]).all() and (grads["dq"][:, :, 1] == 0).all()
    assert np.isfinite(np.delete(lse, 1, axis=2)).all()
    call["q"][:, :, 1], dout[:, :, 1], dlse[:, :, 1] = np.nan, np.inf, np.nan     # nothing of that row may matter
    _, _, saved = reference.forward(**call)
    for name, grad in reference.backward(dout, dlse, saved).items():
        if grad is not None:
            np.testing.assert_array_equal(grad, grads[name], err_msg=name)


def test_empty_row_with_sink_has_the_sink_as_lse():
    rng = np.random.default_rng(0)
    call = dict(_inputs(rng, sq=4, sk=4), sinks=rng.standard_normal(N), attn_mask=np.ones((4, 4), bool))
    out, lse, saved = reference.forward(**call)
    assert (out == 0).all()
    np.testing.assert_allclose(lse, np.broadcast_to(call["sinks"][:, None], lse.shape))
    dlse = rng.standard_normal(lse.shape)
    np.testing.assert_allclose(reference.backward(np.full(out.shape, np.nan), dlse, saved)["dsinks"], dlse.sum((0, 2)))


def test_causal_with_more_queries_than_keys_leaves_the_top_rows_empty():
    out, lse, _ = reference.forward(**_inputs(np.random.default_rng(0), sq=5, sk=2), right=0)
    assert (out[:, :, :3] == 0).all() and np.isneginf(lse[:, :, :3]).all() and np.isfinite(lse[:, :, 3:]).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_out_key_never_leaks(poison):
    rng = np.random.default_rng(1)
    call = dict(_inputs(rng), attn_mask=np.arange(SK) >= 4)
    clean, _, saved = reference.forward(**call)
    dout = rng.standard_normal(clean.shape)
    clean_grads = reference.backward(dout, None, saved)
    call["k"][:, :, 4:], call["v"][:, :, 5:] = poison, poison
    out, _, saved = reference.forward(**call)
    np.testing.assert_array_equal(out, clean)
    for name, grad in reference.backward(dout, None, saved).items():
        if grad is not None:
            np.testing.assert_array_equal(grad, clean_grads[name], err_msg=name)


def test_poisoned_key_reaches_only_rows_that_see_it():
    rng = np.random.default_rng(2)
    call = dict(_inputs(rng, sq=6, sk=6), right=0)
    clean, clean_lse, saved = reference.forward(**call)
    dout = rng.standard_normal(clean.shape)
    clean_grads = reference.backward(dout, None, saved)
    call["k"][:, :, 3], call["v"][:, :, 3, 1] = np.nan, np.inf
    out, lse, saved = reference.forward(**call)
    grads = reference.backward(dout, None, saved)
    np.testing.assert_array_equal(out[:, :, :3], clean[:, :, :3])
    np.testing.assert_array_equal(lse[:, :, :3], clean_lse[:, :, :3])
    assert np.isnan(out[:, :, 3:]).all()
    np.testing.assert_array_equal(grads["dq"][:, :, :3], clean_grads["dq"][:, :, :3])
    call["k"][:, :, 5] = np.nan                                    # only the last row sees the last key
    call["k"][:, :, 3], call["v"][:, :, 3, 1] = 1.0, 1.0
    _, _, saved = reference.forward(**call)
    grads = reference.backward(dout, None, saved)
    assert np.isnan(grads["dq"][:, :, 5]).all() and np.isfinite(grads["dq"][:, :, :5]).all()


def test_value_poison_stays_in_its_column():
    rng = np.random.default_rng(2)
    call = _inputs(rng)
    call["v"][:, :, 2, 1] = np.nan
    out, lse, _ = reference.forward(**call)
    assert np.isnan(out[..., 1]).all() and np.isfinite(np.delete(out, 1, -1)).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("left, right, same_as", [
    (-1, -1, "full"), (15, 0, "causal"), (16, 0, "causal"), (-1, 0, "causal"), (16, 2**31 - 1, "full"),
    (2**31 - 1, 2**31 - 1, "full")])
def test_windows_that_are_something_simpler(left, right, same_as):
    call = _inputs(np.random.default_rng(0), sq=16, sk=16)
    expected = reference.forward(**call, right=0 if same_as == "causal" else -1)[0]
    np.testing.assert_array_equal(reference.forward(**call, left=left, right=right)[0], expected)


def test_band_follows_the_alignment():
    assert reference.band(2, 5, -1, 0, "bottom_right").astype(int).tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert reference.band(2, 5, -1, 0, "top_left").astype(int).tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
    assert reference.band(1, 4, 0, 0, "bottom_right").tolist() == [[False, False, False, True]]
    assert reference.band(3, 4, 1, 1, "top_left").astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize("counter, key, expected", [   # known answers published with Random123
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_philox_known_answers(counter, key, expected):
    assert tuple(int(word) for word in reference.philox4x32(counter, key)) == expected


def test_philox_counter_layout():
    seed, offset = -3, 2**40 + 9
    drawn = reference.philox_uniform(seed, offset, 11, 3, 6)
    key = (seed % 2**32, ((seed % 2**64 >> 32) + 2**8) % 2**32)
    assert drawn[2, 5] == reference.philox4x32((1, 2, 11, 9), key)[1]
    np.testing.assert_array_equal(reference.philox_uniform(seed, offset, 11, 2, 3), drawn[:2, :3])


def test_keep_fraction_and_independence():
    keep = reference.keep_mask(0.17, 42, 0, 2, 3, 128, 130)
    assert abs(keep.mean() - 0.83) < 0.01
    for other in (reference.keep_mask(0.17, 43, 0, 2, 3, 128, 130), reference.keep_mask(0.17, 42, 1, 2, 3, 128, 130)):
        assert abs((keep == other).mean() - (0.83**2 + 0.17**2)) < 0.01
    assert abs(np.corrcoef(keep[0, 0].ravel(), keep[0, 1].ravel())[0, 1]) < 0.03


def test_dropout_is_unbiased():
    call = _inputs(np.random.default_rng(0))
    mean = np.mean([reference.forward(**call, dropout_p=0.17, seed=seed)[0] for seed in range(512)], axis=0)
    assert np.abs(mean - reference.forward(**call)[0]).max() < 0.1
    lse = reference.forward(**call, dropout_p=0.17)[1]
    np.testing.assert_array_equal(lse, reference.forward(**call)[1])               # dropout does not touch the LSE


def test_row_max_and_row_sum_give_the_lse():
    call = dict(_inputs(np.random.default_rng(0)), attn_mask=np.ones((SQ, SK), bool), mask_fill=-1e4)
    _, lse, saved = reference.forward(**call)
    np.testing.assert_array_equal(saved["row_max"], np.full(lse.shape, -1e4))
    np.testing.assert_array_equal(saved["row_sum"], np.full(lse.shape, float(SK)))
    np.testing.assert_allclose(lse, -1e4 + np.log(SK))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_low_precision_inputs_are_taken_exactly(dtype):
    call = {name: x.astype(dtype) for name, x in _inputs(np.random.default_rng(0)).items()}
    exact = {name: x.astype(np.float64) for name, x in call.items()}
    out = reference.forward(**call)[0]
    assert out.dtype == np.float64
    np.testing.assert_array_equal(out, reference.forward(**exact)[0])
    rounded = reference.forward(**exact, rounding=dtype)[0]
    np.testing.assert_array_equal(rounded, rounded.astype(dtype).astype(np.float64))
    assert 0 < np.abs(rounded - out).max() < 4 * float(ml_dtypes.finfo(dtype).eps)


@pytest.mark.parametrize("batch, sq, sk", [(0, 3, 3), (1, 0, 3), (1, 3, 0), (1, 0, 0)])
def test_zero_sized_inputs(batch, sq, sk):
    call = dict(_inputs(np.random.default_rng(0), batch, sq, sk), dropout_p=0.1, bias=np.zeros((sq, sk)))
    out, lse, saved = reference.forward(**call)
    assert out.shape == (batch, N, sq, DV) and (out == 0).all() and np.isneginf(lse).all()
    grads = reference.backward(out, None, saved)
    assert all((grads[grad] == 0).all() for grad in ("dq", "dk", "dv"))
    assert grads["dk"].shape == call["k"].shape


def test_inputs_that_do_not_fit_are_refused():
    call = _inputs(np.random.default_rng(0))
    with pytest.raises(ValueError, match="'head_dim' of 'key'"):
        reference.forward(**{**call, "k": call["k"][..., :2]})
    with pytest.raises(ValueError, match="multiple of the key heads"):
        reference.forward(**{**call, "q": call["q"][:, :3]})
    with pytest.raises(ValueError, match="'attn_mask' of shape"):
        reference.forward(**call, attn_mask=np.zeros((SQ, SK + 1), bool))
    with pytest.raises(ValueError, match="given together"):
        reference.forward(**call, cu_q=[0, 1])
