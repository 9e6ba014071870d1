"""flash_attention_score: every layout and sparse mode against the float64 reference, and what it refuses."""
from __future__ import annotations

import inspect
import itertools

import flash_rule
import mindspore as ms
import native
import numpy as np
import pytest
from mindspore import nn, ops
from public_api import array, tensor

from ms_flash import flash_attention_score

LAYOUTS = ["BSH", "BNSD", "SBH", "BSND", "TND"]
TRIANGLE = np.triu(np.ones((2048, 2048), bool), 1)
INT_MAX = 2147483647


@pytest.fixture(autouse=True)
def chosen_backend(backend, monkeypatch):
    monkeypatch.setenv("MS_FLASH_BACKEND", backend)


class Problem:
    """Random q, k, v for a layout, and what each sequence of them may see, written out as masks."""

    def __init__(self, layout, lengths, n=4, nk=2, d=16, dtype="float32", seed=0):
        rng, self.layout, self.n, self.nk, self.lengths = np.random.default_rng(seed), layout, n, nk, lengths
        self.rng, self.dtype = rng, native.DTYPES[dtype]
        self.q, self.do = ([self.normal(n, s, d) for s, _ in lengths] for _ in range(2))
        self.k, self.v = ([self.normal(nk, s, d) for _, s in lengths] for _ in range(2))

    def normal(self, *shape):
        return self.rng.standard_normal(shape).astype(self.dtype)

    def laid_out(self, parts):
        if self.layout == "TND":
            return np.concatenate([x.transpose(1, 0, 2) for x in parts])
        return native.to_layout(np.stack(parts), self.layout)

    def parts(self, x, which):
        heads = self.nk if which else self.n
        if self.layout == "TND":
            ends = np.cumsum([lengths[which] for lengths in self.lengths])
            return [part.transpose(1, 0, 2) for part in np.split(x, ends[:-1])]
        return list(native.from_layout(x, self.layout, heads))

    def ends(self):
        if self.layout != "TND":
            return {}
        q_ends, k_ends = (np.cumsum([lengths[i] for lengths in self.lengths]).tolist() for i in (0, 1))
        return {"actual_seq_qlen": q_ends, "actual_seq_kvlen": tuple(k_ends)}

    def check(self, masks, scale=0.25, bias=None, keep=None, graph=False, wrong=False, **options):
        """Runs the call, holds output and gradients against the reference sequence by sequence; `masks`, `bias` and
        `keep` are lists of (N or 1, S1, S2) per sequence."""
        options = {"scalar_value": scale, "input_layout": self.layout, **self.ends(), **options}
        inputs = [tensor(self.laid_out(x)) for x in (self.q, self.k, self.v)]
        pse = options.pop("real_shift", None)
        got = score_and_gradients(inputs, pse, tensor(self.laid_out(self.do)), graph, head_num=self.n, **options)
        shapes = [0, 0, 1, 1]
        got = [self.parts(x, which) for x, which in zip(got[:4], shapes)] + [got[4:]]
        for b in range(len(self.lengths)):
            call = {"q": self.q[b][None], "k": self.k[b][None], "v": self.v[b][None], "scale": scale,
                    "attn_mask": None if masks is None else masks[b]}
            if bias is not None:
                call["bias"] = bias[b]
            if keep is not None:
                call.update(drop_mask=keep[b], dropout_p=1 - options["keep_prob"])
            exact = flash_rule.evaluate(call, self.do[b][None])
            naive = flash_rule.evaluate(call, self.do[b][None], rounding=self.dtype)
            flash_rule.check({name: x[b][None] for name, x in zip(("out", "dq", "dk", "dv"), got)}, exact, naive)
        return got[4][0] if pse is not None else None


def score_and_gradients(inputs, pse, sens, graph, **options):
    """Output and the gradients of query, key, value (and real_shift), as float64 arrays."""
    options = {name: tensor(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    inputs = [*inputs, tensor(pse)] if pse is not None else inputs

    sens = sens.astype(ms.float32)

    def loss(query, key, value, real_shift=None):
        out = flash_attention_score(query, key, value, real_shift=real_shift, **options)
        return (out.astype(ms.float32) * sens).sum(), out

    if graph:
        loss = ms.jit(loss)
    (_, out), grads = ops.value_and_grad(loss, tuple(range(len(inputs))), has_aux=True)(*inputs)
    assert out.dtype == inputs[0].dtype and out.shape == inputs[0].shape
    return [array(x) for x in (out, *grads)]


def distance(lengths):
    return np.arange(lengths[1])[None, :] - np.arange(lengths[0])[:, None]


def hidden(mode, lengths, pre=INT_MAX, following=INT_MAX, prefix=0):
    """What the mode itself masks out of one sequence, from its description, (S1, S2)."""
    i, j = np.arange(lengths[0])[:, None], np.arange(lengths[1])[None, :]
    corner = lengths[1] - lengths[0]
    return {0: (j < i - pre) | (j > i + following), 1: (j < 0) & (i < 0), 2: j > i, 3: j > i + corner,
            4: (j < i + corner - pre) | (j > i + corner + following),
            5: (j > i + corner) & (j >= prefix)}[mode]


def case(layout, mode, lengths, dtype="float32", **options):
    """(problem, masks of the reference, arguments of the call) for a mode with everything it takes."""
    problem = Problem(layout, lengths, dtype=dtype, **options)
    rng, prefix = np.random.default_rng(1), [3, 7][:len(lengths)]
    band = {"pre_tokens": 2, "next_tokens": 1} if mode in (0, 4) else {}
    masks = [hidden(mode, s, *band.values(), prefix=p) if mode != 5 else hidden(5, s, prefix=p)
             for s, p in zip(lengths, prefix + [0] * 9)]
    arguments = {"sparse_mode": mode, **band}
    if mode in (2, 3, 4):
        arguments["attn_mask"] = TRIANGLE
    elif layout == "TND":
        user = rng.random(np.max(lengths, axis=0)) < 0.3
        masks = [m | user[:m.shape[0], :m.shape[1]] for m in masks]
        arguments["attn_mask"] = user
    else:
        user = rng.random((len(lengths), 1, *lengths[0])) < 0.3
        masks = [m | u for m, u in zip(masks, user)]
        arguments["attn_mask"] = user
    if mode == 5:
        arguments["prefix"] = prefix
    return problem, masks, arguments


DENSE, PACKED = [(6, 8), (6, 8)], [(3, 4), (0, 5), (8, 3), (7, 7)]


@pytest.mark.parametrize("dtype", list(native.DTYPES))
@pytest.mark.parametrize("layout, mode", [pair for pair in itertools.product(LAYOUTS, range(6)) if pair != ("TND", 5)])
def test_every_layout_and_mode(layout, mode, dtype):
    problem, masks, arguments = case(layout, mode, PACKED if layout == "TND" else DENSE, dtype)
    problem.check(masks, **arguments)


@pytest.mark.parametrize("layout, mode", [("BSH", 0), ("BNSD", 1), ("SBH", 2), ("BSND", 3), ("BNSD", 4), ("SBH", 5),
                                          ("TND", 0), ("TND", 3)])
def test_modes_in_a_graph(layout, mode):
    problem, masks, arguments = case(layout, mode, PACKED if layout == "TND" else DENSE)
    problem.check(masks, graph=True, **arguments)


@pytest.mark.parametrize("nk", [1, 2, 4])
@pytest.mark.parametrize("mode", [2, 3, 4, 5])
@pytest.mark.parametrize("layout", ["BSH", "BNSD", "SBH", "BSND"])
def test_more_queries_than_keys_and_groups(layout, mode, nk):
    problem, masks, arguments = case(layout, mode, [(9, 5), (9, 5)], nk=nk)
    if mode == 5:
        arguments["prefix"] = (2, 5)
        masks = [hidden(5, (9, 5), prefix=p) | u for p, u in zip((2, 5), arguments["attn_mask"])]
    problem.check(masks, **arguments)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_mask_mode_0_ignores_the_band(layout):
    problem = Problem(layout, PACKED if layout == "TND" else DENSE)
    problem.check(None, pre_tokens=0, next_tokens=0)


@pytest.mark.parametrize("mode, pre, following, graph", [
    *itertools.product([0, 4], [INT_MAX, 65536, 0, 2], [0, 65536, 3], [False]),
    *[(mode, *band, False) for mode in (0, 4) for band in ((5, -2), (-2, 5), (3, -3), (-1, 1))],
    (0, 5, -2, True), (4, -2, 5, True)])
def test_bands(mode, pre, following, graph):
    problem = Problem("BNSD", DENSE)
    mask = TRIANGLE if mode == 4 else np.zeros((6, 8), np.uint8)
    problem.check([hidden(mode, s, pre, following) for s in DENSE], sparse_mode=mode, attn_mask=mask, pre_tokens=pre,
                  next_tokens=following, graph=graph)


@pytest.mark.parametrize("mode", [1, 2, 3, 5])
def test_the_band_takes_no_effect(mode):
    problem, masks, arguments = case("BSH", mode, DENSE)
    problem.check(masks, pre_tokens=0, next_tokens=0, **arguments)


@pytest.mark.parametrize("dtype", [bool, np.uint8])
@pytest.mark.parametrize("shape", [(2, 4, 6, 8), (2, 1, 6, 8), (1, 1, 6, 8), (6, 8)])
@pytest.mark.parametrize("mode", [0, 1])
def test_shapes_of_masks(mode, shape, dtype):
    mask = np.random.default_rng(2).random(shape) < 0.4
    mask[..., 3, :] = True                                              # a row without keys
    full = np.broadcast_to(mask, (2, 4, 6, 8))
    Problem("BNSD", DENSE).check(list(full), sparse_mode=mode, attn_mask=mask.astype(dtype))


@pytest.mark.parametrize("kind, graph", [("list", False), ("tuple", False), ("int32", False), ("int64", False),
                                         ("list", True), ("int64", True)])
def test_prefix_and_lengths_of_any_kind(kind, graph):
    def as_kind(x):
        return {"list": list, "tuple": tuple}[kind](x) if kind in ("list", "tuple") else np.array(x, kind)

    problem, masks, arguments = case("BSH", 5, DENSE)
    problem.check(masks, graph=graph, **{**arguments, "prefix": as_kind(arguments["prefix"])})
    problem, masks, arguments = case("TND", 3, PACKED)
    problem.check(masks, graph=graph, **arguments, **{name: as_kind(x) for name, x in problem.ends().items()})


# ---------------------------------------------------------------------------------------------------------------------
# real_shift
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", list(native.DTYPES))
@pytest.mark.parametrize("layout", ["BSH", "BNSD", "SBH", "BSND"])
def test_real_shift_and_its_gradient(layout, dtype, batch):
    problem, masks, arguments = case(layout, 3, DENSE, dtype)
    pse = problem.normal(batch, 4, 6, 8)
    bias = list(np.broadcast_to(pse, (2, 4, 6, 8)))
    got = problem.check(masks, bias=bias, real_shift=pse, **arguments)
    exact = sum(flash_rule.evaluate({"q": problem.q[b][None], "k": problem.k[b][None], "v": problem.v[b][None],
                                     "scale": 0.25, "attn_mask": masks[b], "bias": bias[b][None]},
                                    problem.do[b][None])["dbias"] * (np.arange(2)[:, None, None, None] == b)
                for b in range(2))
    exact = exact.sum(0, keepdims=True) if batch == 1 else exact
    tolerance = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(got, exact, atol=tolerance * max(1, np.abs(exact).max()))


def test_real_shift_is_added_after_the_scaling():
    """MindSpore's own test multiplies it by the scale as well: that is real_shift * scalar_value here."""
    problem = Problem("BNSD", DENSE)
    pse = problem.normal(2, 4, 6, 8)
    problem.check(None, real_shift=pse, bias=list(pse))
    scaled = np.float32(0.25) * pse
    out = flash_attention_score(*[tensor(problem.laid_out(x)) for x in (problem.q, problem.k, problem.v)], 4,
                                tensor(scaled), scalar_value=0.25, input_layout="BNSD")
    q, k, v = (np.stack(x).astype(np.float64) for x in (problem.q, problem.k, problem.v))
    score = 0.25 * (q @ k.repeat(2, 1).swapaxes(-1, -2) + pse)
    p = np.exp(score - score.max(-1, keepdims=True))
    np.testing.assert_allclose(array(out), p / p.sum(-1, keepdims=True) @ v.repeat(2, 1), atol=1e-6)


def alibi(lengths, slopes):
    return (np.array(slopes)[:, None, None] * distance(lengths)).astype(np.float32)


@pytest.mark.parametrize("mode, graph", [(2, False), (3, False), (3, True)])
def test_real_shift_of_the_last_1024_rows(mode, graph):
    s = 1100
    problem = Problem("BNSD", [(s, s)], n=2, nk=1, d=8)
    full = alibi((s, s), (0.01, 0.002))
    got = problem.check([hidden(mode, (s, s))], bias=[full], real_shift=full[None, :, -1024:], sparse_mode=mode,
                        attn_mask=TRIANGLE, graph=graph)
    assert got.shape == (1, 2, 1024, s) and np.isfinite(got).all() and np.abs(got).max() > 0


@pytest.mark.parametrize("batch, graph", [(1, False), (2, False), (2, True)])
def test_real_shift_of_sequences_end_to_end(batch, graph):
    lengths = [(5, 5), (1040, 1040)]
    problem = Problem("TND", lengths, n=2, nk=2, d=8)
    slopes = [(0.01, 0.002)] if batch == 1 else [(0.01, 0.002), (0.003, 0.02)]
    pse = np.stack([alibi((1040, 1040), s)[:, -1024:] for s in slopes])
    bias = [alibi(s, slopes[b if batch > 1 else 0]) for b, s in enumerate(lengths)]
    problem.check([hidden(3, s) for s in lengths], bias=bias, real_shift=pse, sparse_mode=3, attn_mask=TRIANGLE,
                  graph=graph)


# ---------------------------------------------------------------------------------------------------------------------
# drop_mask
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout, mode, graph", [*itertools.product(LAYOUTS, [0, 3], [False]), ("BSH", 0, True),
                                                 ("TND", 3, True)])
def test_drop_mask(layout, mode, graph):
    problem, masks, arguments = case(layout, mode, [(6, 8), (2, 16), (3, 24)] if layout == "TND" else DENSE)
    keep = [problem.rng.random((4, *s)) < 0.7 for s in problem.lengths]
    bits = np.concatenate([x.ravel() for x in keep]) if layout == "TND" else np.stack(keep)
    problem.check(masks, keep=keep, drop_mask=np.packbits(bits, axis=-1, bitorder="little"), keep_prob=0.7,
                  graph=graph, **arguments)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_drop_mask_with_real_shift_in_low_precision(dtype):
    problem, masks, arguments = case("SBH", 4, DENSE, dtype)
    keep, pse = [problem.rng.random((4, *s)) < 0.5 for s in DENSE], problem.normal(2, 4, 6, 8)
    problem.check(masks, keep=keep, bias=list(pse), real_shift=pse, keep_prob=0.5,
                  drop_mask=np.packbits(np.stack(keep), axis=-1, bitorder="little"), **arguments)


# ---------------------------------------------------------------------------------------------------------------------
# What it is, and what it refuses
# ---------------------------------------------------------------------------------------------------------------------
def test_signature_is_that_of_mindspore():
    ours, theirs = (inspect.signature(f).parameters for f in (flash_attention_score, ops.flash_attention_score))
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [(p.name, p.default, p.kind) for p in
                                                                     theirs.values()]


def test_positional_arguments_and_the_example_of_the_docstring():
    ones = ms.Tensor(np.ones([2, 4, 64]), ms.float16)
    out = flash_attention_score(ones, ones, ones, 4, None, None, None, None, None, None, None, 1.0, 0.125, 65536, 0, 0,
                                "BSH", 0)
    assert out.shape == (2, 4, 64) and out.dtype == ms.float16 and (array(out) == 1).all()


def test_a_mask_is_checked_once_and_a_wrong_one_every_time():
    problem = Problem("BSH", DENSE)
    inputs = [tensor(problem.laid_out(x)) for x in (problem.q, problem.k, problem.v)]
    good, wrong = tensor(TRIANGLE), tensor(~TRIANGLE)
    for _ in range(2):
        flash_attention_score(*inputs, 4, attn_mask=good, sparse_mode=3)
        with pytest.raises(ValueError, match="True above the diagonal"):
            flash_attention_score(*inputs, 4, attn_mask=wrong, sparse_mode=3)


def _zeros(*shape, dtype=np.float32):
    return tensor(np.zeros(shape, dtype))


BSH = {"query": _zeros(2, 6, 64), "key": _zeros(2, 8, 32), "value": _zeros(2, 8, 32), "head_num": 4}
BNSD = {"query": _zeros(2, 4, 6, 16), "key": _zeros(2, 2, 8, 16), "value": _zeros(2, 2, 8, 16), "head_num": 4,
        "input_layout": "BNSD"}
TND = {"query": _zeros(6, 4, 16), "key": _zeros(8, 2, 16), "value": _zeros(8, 2, 16), "head_num": 4,
       "input_layout": "TND", "actual_seq_qlen": (2, 6), "actual_seq_kvlen": (3, 8)}
MASK, SMALL = _zeros(2048, 2048, dtype=np.uint8), _zeros(6, 8, dtype=np.bool_)
B156 = _zeros(2, 1, 6, 8, dtype=np.bool_)
WRONG = [
    (BSH, {"query": None}, TypeError, "type of 'query' must be Tensor, but got NoneType"),
    (BSH, {"key": np.zeros((2, 8, 32))}, TypeError, "type of 'key' must be Tensor, but got ndarray"),
    (BSH, {"query": _zeros(2, 6, 64, dtype=np.float64)}, TypeError, "dtype of 'query'.*float64"),
    (BSH, {"key": _zeros(2, 8, 32, dtype=np.float16)}, TypeError, "dtype of 'key' must be equal.*float16"),
    (BSH, {"value": _zeros(2, 8, 64)}, ValueError, r"shape of 'value' must be equal to that of 'key' \(2, 8, 32\)"),
    (BSH, {"query": _zeros(2, 4, 6, 16)}, ValueError, "rank of 'query' must be 3 .*but got 4"),
    (BSH, {"key": _zeros(3, 8, 32), "value": _zeros(3, 8, 32)}, ValueError, "batch size of 'key'.* 2, but got 3"),
    (BSH, {"head_num": 6}, ValueError, "multiple of 'head_num' 6, but got 64.*6 is the length"),
    (BSH, {"head_num": 0}, ValueError, "'head_num' must be 1 or greater, but got 0"),
    (BSH, {"head_num": 4.0}, TypeError, "type of 'head_num' must be int, but got float"),
    (BSH, {"key": _zeros(2, 8, 40), "value": _zeros(2, 8, 40)}, ValueError, "head_dim 16 times a factor"),
    (BSH, {"key": _zeros(2, 8, 48), "value": _zeros(2, 8, 48)}, ValueError, "head_dim 16 times a factor"),
    (BNSD, {"head_num": 6}, ValueError, "'head_num' must be equal to the number of heads of 'query' 4.*got 6.*length"),
    (BNSD, {"key": _zeros(2, 3, 8, 16), "value": _zeros(2, 3, 8, 16)}, ValueError, "heads.*multiple"),
    (BNSD, {"key": _zeros(2, 2, 8, 8), "value": _zeros(2, 2, 8, 8)}, ValueError, "'head_dim' of 'key'.*16.*got 8"),
    (BSH, {"input_layout": "BNS"}, ValueError, "'input_layout' must be one of 'BSH', .*but got 'BNS'"),
    (BSH, {"input_layout": 3}, TypeError, "type of 'input_layout' must be str, but got int"),
    (BSH, {"padding_mask": SMALL}, ValueError, "'padding_mask' is reserved"),
    (BSH, {"sparse_mode": 6}, ValueError, "'sparse_mode' 6 is not implemented"),
    (BSH, {"sparse_mode": 9}, ValueError, r"'sparse_mode' must be in the range \[0, 5\], but got 9"),
    (BSH, {"sparse_mode": True}, TypeError, "type of 'sparse_mode' must be int, but got bool"),
    (BSH, {"sparse_mode": 1}, ValueError, "'attn_mask' must be given with 'sparse_mode' 1"),
    (BSH, {"sparse_mode": 3}, ValueError, "'attn_mask' must be given with 'sparse_mode' 3, .*full attention"),
    (BSH, {"sparse_mode": 3, "attn_mask": SMALL}, ValueError, r"compressed mask.*\(2048, 2048\), but got \(6, 8\)"),
    (BSH, {"sparse_mode": 2, "attn_mask": MASK}, ValueError, "True above the diagonal"),
    (BSH, {"attn_mask": _zeros(6, 8)}, TypeError, "dtype of 'attn_mask' must be bool or uint8.*real_shift"),
    (BSH, {"attn_mask": _zeros(6, 8, dtype=np.int32)}, TypeError, "dtype of 'attn_mask'.*int32"),
    (BSH, {"attn_mask": _zeros(8, 6, dtype=np.bool_)}, ValueError, r"shape of 'attn_mask'.*\(6, 8\), but got \(8, 6\)"),
    (BSH, {"attn_mask": (2, 0)}, TypeError, "type of 'attn_mask' must be Tensor, but got tuple"),
    (BSH, {"attn_mask": SMALL, "pre_tokens": -1, "next_tokens": -1}, ValueError, "band .* must not be empty"),
    (BSH, {"attn_mask": SMALL, "pre_tokens": -3, "next_tokens": 2}, ValueError, "band .* must not be empty"),
    (BSH, {"attn_mask": SMALL, "pre_tokens": -8, "next_tokens": 9}, ValueError, "band .* must not be empty"),
    (BSH, {"attn_mask": SMALL, "pre_tokens": 9, "next_tokens": -6}, ValueError, "band .* must not be empty"),
    (BSH, {"attn_mask": SMALL, "pre_tokens": 1.5}, TypeError, "type of 'pre_tokens' must be int, but got float"),
    (BSH, {"prefix": (3, 3)}, ValueError, "'prefix' must be None with 'sparse_mode' 0"),
    (BSH, {"sparse_mode": 5, "attn_mask": B156}, ValueError, "'prefix' must be given"),
    (BSH, {"sparse_mode": 5, "prefix": (3, 3)}, ValueError, "'attn_mask' must be given with 'sparse_mode' 5"),
    (BSH, {"sparse_mode": 5, "attn_mask": SMALL, "prefix": (3, 3)}, ValueError, "shape of 'attn_mask'"),
    (BSH, {"sparse_mode": 5, "attn_mask": B156, "prefix": (3,)}, ValueError, "per batch entry, 2, but got 1"),
    (BSH, {"sparse_mode": 5, "attn_mask": B156, "prefix": (1, 3)}, ValueError, r"range \[2, 8\], but got \(1, 3\)"),
    (BSH, {"sparse_mode": 5, "attn_mask": B156, "prefix": tensor(np.array([3, 9]))}, ValueError, r"range \[2, 8\]"),
    (BSH, {"sparse_mode": 5, "attn_mask": B156, "prefix": _zeros(2)}, TypeError, "dtype of 'prefix'"),
    (BSH, {"sparse_mode": 5, "attn_mask": B156, "prefix": (3, 3.5)}, TypeError, "'prefix' must hold ints"),
    (BSH, {"actual_seq_qlen": (6,)}, ValueError, "'actual_seq_qlen' must be None with 'input_layout' 'BSH'"),
    (BSH, {"keep_prob": 0.5}, ValueError, "'drop_mask' must be given with 'keep_prob' 0.5"),
    (BSH, {"keep_prob": 0.0}, ValueError, r"'keep_prob' must be in the range \(0, 1\]"),
    (BSH, {"keep_prob": 1.5}, ValueError, r"'keep_prob' must be in the range \(0, 1\]"),
    (BSH, {"keep_prob": "1"}, TypeError, "type of 'keep_prob' must be float, but got str"),
    (BSH, {"drop_mask": _zeros(2, 4, 6, 1, dtype=np.uint8)}, ValueError, "'drop_mask' must be None with 'keep_prob' 1"),
    (BSH, {"drop_mask": _zeros(2, 4, 6, 8, dtype=np.uint8), "keep_prob": 0.5}, ValueError,
     r"shape of 'drop_mask' must be \(B, N1, S1, S2 // 8\) = \(2, 4, 6, 1\), but got \(2, 4, 6, 8\)"),
    (BSH, {"drop_mask": _zeros(2, 4, 6, 1, dtype=np.bool_), "keep_prob": 0.5}, TypeError, "dtype of 'drop_mask'"),
    (BSH, {"key": _zeros(2, 7, 32), "value": _zeros(2, 7, 32), "drop_mask": _zeros(2, 4, 6, 1, dtype=np.uint8),
           "keep_prob": 0.5}, ValueError, "multiple of 8 with 'drop_mask', but got 7"),
    (BSH, {"scalar_value": None}, TypeError, "type of 'scalar_value' must be float, but got NoneType"),
    (BSH, {"scalar_value": float("nan")}, ValueError, "'scalar_value' must be finite"),
    (BSH, {"inner_precise": "high"}, TypeError, "type of 'inner_precise' must be int, but got str"),
    (BSH, {"real_shift": _zeros(2, 4, 6, 8, dtype=np.float16)}, TypeError, "dtype of 'real_shift'.*float32.*float16"),
    (BSH, {"real_shift": _zeros(4, 6, 8)}, ValueError, "shape of 'real_shift'"),
    (BSH, {"real_shift": _zeros(2, 1, 6, 8)}, ValueError, "shape of 'real_shift'"),
    (BSH, {"real_shift": _zeros(2, 4, 1024, 8)}, ValueError, "shape of 'real_shift'"),
    (TND, {"actual_seq_qlen": None}, ValueError, "'actual_seq_qlen' must be given"),
    (TND, {"actual_seq_kvlen": (3, 7)}, ValueError, "last number of 'actual_seq_kvlen'.*8, but got 7"),
    (TND, {"actual_seq_qlen": (4, 2, 6), "actual_seq_kvlen": (1, 2, 8)}, ValueError, "do not decrease"),
    (TND, {"actual_seq_qlen": tensor(np.array([7, 6]))}, ValueError, "do not decrease"),
    (TND, {"actual_seq_qlen": (6,)}, ValueError, "'actual_seq_kvlen' must hold as many numbers as"),
    (TND, {"actual_seq_qlen": 6}, TypeError, "type of 'actual_seq_qlen'.* but got int"),
    (TND, {"actual_seq_qlen": _zeros(2)}, TypeError, "dtype of 'actual_seq_qlen'"),
    (TND, {"sparse_mode": 5, "prefix": (3, 3), "attn_mask": B156}, ValueError, "'sparse_mode' must not be 5 with"),
    (TND, {"sparse_mode": 4, "attn_mask": tensor(TRIANGLE), "pre_tokens": -1}, ValueError, "must not be negative"),
    (TND, {"real_shift": _zeros(2, 4, 1024, 8)}, ValueError, "with 'real_shift', 'input_layout' 'TND' needs"),
    (TND, {"drop_mask": _zeros(9, dtype=np.uint8), "keep_prob": 0.5}, ValueError, r"\(13,\), but got \(9,\)"),
]


@pytest.mark.parametrize("good, change, error, text", WRONG, ids=range(len(WRONG)))
def test_wrong_calls_are_refused_and_the_next_one_works(good, change, error, text):
    with pytest.raises(error, match="For 'flash_attention_score', .*" + text):
        flash_attention_score(**{**good, **change})
    assert flash_attention_score(**good).shape == good["query"].shape


def test_wrong_calls_are_refused_while_a_graph_is_compiled():
    class Score(nn.Cell):
        def construct(self, query, key, value, attn_mask):
            return flash_attention_score(query, key, value, 4, attn_mask=attn_mask, sparse_mode=3)

    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(ValueError, match=r"\(2048, 2048\), but got \(6, 8\)"):
        Score()(BSH["query"], BSH["key"], BSH["value"], SMALL)
    assert Score()(BSH["query"], BSH["key"], BSH["value"], tensor(TRIANGLE)).shape == (2, 6, 64)
