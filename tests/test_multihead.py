"""MultiheadAttention against mindspore.nn.MultiheadAttention, and against its formula in float64 numpy."""
from __future__ import annotations

import copy
import inspect
import subprocess
import sys
import textwrap

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from public_api import array, tensor

from ms_flash.nn import MultiheadAttention

E, H = 16, 4                # width and heads
L, S, N = 5, 7, 2           # queries, keys, batch
KEEP = np.array([[0, 0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 1, 1]], bool)     # key_padding_mask


def formula(weights, query, key, value, padding=None, need_weights=True, mask=None, average=True, batch_first=False,
            add_zero_attn=False, causal=False, keep=None):
    """The layer in float64. `weights`: parameters by name; `keep`: factors of the attention weights (dropout)."""
    def linear(x, w, b):
        return x @ w.T + (0 if b is None else b)

    w = {name: x.astype(np.float64) for name, x in weights.items()}
    query, key, value = (x.astype(np.float64) for x in (query, key, value))
    batched = query.ndim == 3
    if not batched:
        query, key, value = query[None], key[None], value[None]
        padding = None if padding is None else padding[None]
    elif not batch_first:
        query, key, value = (x.swapaxes(0, 1) for x in (query, key, value))
    width = query.shape[-1]
    if "in_proj_weight" in w:
        w_q, w_k, w_v = np.split(w["in_proj_weight"], 3)
    else:
        w_q, w_k, w_v = w["q_proj_weight"], w["k_proj_weight"], w["v_proj_weight"]
    b_q, b_k, b_v = np.split(w["in_proj_bias"], 3) if "in_proj_bias" in w else (None, None, None)
    q, k, v = linear(query, w_q, b_q), linear(key, w_k, b_k), linear(value, w_v, b_v)
    batch, q_len = q.shape[:2]
    added = 0
    if "bias_k" in w:
        k, v = (np.concatenate([x, np.repeat(w[b], batch, 0)], 1) for x, b in ((k, "bias_k"), (v, "bias_v")))
        added += 1
    if add_zero_attn:
        k, v = (np.concatenate([x, np.zeros((batch, 1, width))], 1) for x in (k, v))
        added += 1
    q, k, v = (x.reshape(batch, -1, H, width // H).swapaxes(1, 2) for x in (q, k, v))
    score = q @ k.swapaxes(-1, -2) * (width // H) ** -0.5
    for m in (mask if mask is None or mask.ndim == 2 else mask.reshape(batch, H, *mask.shape[1:]),
              None if padding is None else padding[:, None, None]):
        if m is not None:
            m = np.pad(np.where(m, -np.inf, 0.0) if m.dtype in (bool, np.uint8) else m.astype(np.float64),
                       [(0, 0)] * (m.ndim - 1) + [(0, added)])
            score = score + m
    if causal:
        score = np.where(np.arange(k.shape[2]) > np.arange(q_len)[:, None] + k.shape[2] - q_len, -np.inf, score)
    top = score.max(-1, keepdims=True)
    p = np.exp(score - np.where(np.isneginf(top), 0, top))
    total = p.sum(-1, keepdims=True)
    p = p / np.where(total == 0, 1, total)
    if keep is not None:
        p = p * keep
    out = linear((p @ v).swapaxes(1, 2).reshape(batch, q_len, width), w["out_proj.weight"], w.get("out_proj.bias"))
    p = p.mean(1) if average else p
    if not batched:
        out, p = out[0], p[0]
    elif not batch_first:
        out = out.swapaxes(0, 1)
    return (out, p) if need_weights else (out,)


def randn(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(dtype)


def weights_of(cell):
    return {p.name: p.asnumpy() for p in cell.get_parameters()}


def randomised(cell, seed=0):
    """Biases are initialised with zeros, which would hide mistakes."""
    rng = np.random.default_rng(seed)
    for p in cell.get_parameters():
        p.set_data(tensor((rng.standard_normal(p.shape) * 0.4).astype(p.asnumpy().dtype)))
    return cell


CONSTRUCTORS = {
    "plain": {}, "batch_first": {"batch_first": True}, "no bias": {"has_bias": False},
    "kdim vdim": {"kdim": 6, "vdim": 10}, "bias_kv": {"add_bias_kv": True}, "zero_attn": {"add_zero_attn": True},
    "all": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 6, "batch_first": True, "has_bias": False},
}
MASK2, MASK3 = np.random.default_rng(3).random((L, S)) < 0.3, np.random.default_rng(4).random((N * H, L, S)) < 0.3
CALLS = {   # arguments after query, key, value: key_padding_mask, need_weights, attn_mask, average_attn_weights
    "default": (), "no weights": (None, False), "weights per head": (None, True, None, False), "padding": (KEEP,),
    "float padding": (randn(N, S),), "mask": (None, True, MASK2), "uint8 mask": (None, True, MASK2.astype(np.uint8)),
    "mask per head": (None, True, MASK3, False), "float mask": (None, True, randn(L, S)),
    "float mask per head": (None, False, randn(N * H, L, S)), "padding and mask": (KEEP, True, MASK2),
    "padding and mask, no weights": (KEEP, False, MASK2), "padding and mask per head": (KEEP, True, MASK3),
    "float padding and float mask": (randn(N, S), True, randn(L, S)),
    "-inf mask": (None, True, np.where(MASK2, -np.inf, 0).astype(np.float32)),
}
MIXED = {   # MindSpore adds True as 1, or takes every float but 0 as masked out: only the formula says what is right
    "padding and float mask": (KEEP, True, randn(L, S)), "float padding and mask": (randn(N, S), True, MASK2),
    "padding and float mask per head": (KEEP, False, randn(N * H, L, S)),
}


def inputs(constructor, dtype=np.float32):
    options = CONSTRUCTORS[constructor]
    shapes = [(L, N, E), (S, N, options.get("kdim", E)), (S, N, options.get("vdim", E))]
    xs = [randn(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    return [x.swapaxes(0, 1).copy() for x in xs] if options.get("batch_first") else xs


def expected(cell, constructor, xs, call, **more):
    options = {name: x for name, x in CONSTRUCTORS[constructor].items() if name in ("batch_first", "add_zero_attn")}
    return formula(weights_of(cell), *xs, *call, **options, **more)


@pytest.fixture
def graph_mode():
    ms.set_context(mode=ms.GRAPH_MODE)


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", {**CALLS, **MIXED})
@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_results_are_those_of_the_formula(constructor, call, backend):
    cell = randomised(MultiheadAttention(E, H, **CONSTRUCTORS[constructor], backend=backend))
    xs, call = inputs(constructor), {**CALLS, **MIXED}[call]
    got = cell(*map(tensor, xs), *[tensor(x) if isinstance(x, np.ndarray) else x for x in call])
    exact = expected(cell, constructor, xs, call)
    assert len(got) == len(exact)
    for x, y in zip(got, exact):
        assert x.dtype == ms.float32
        np.testing.assert_allclose(array(x), y, atol=5e-6 * max(1, np.abs(y).max()))


@pytest.mark.parametrize("constructor, call", [
    ("plain", "default"), ("plain", "float mask"), ("all", "padding and mask"), ("batch_first", "mask per head"),
    ("kdim vdim", "no weights")])
def test_results_and_gradients_are_those_of_mindspore_in_a_graph(constructor, call, backend, graph_mode):
    options, call = CONSTRUCTORS[constructor], CALLS[call]
    theirs = randomised(nn.MultiheadAttention(E, H, **options))
    ours = MultiheadAttention(E, H, **options, backend=backend)
    assert ms.load_param_into_net(ours, theirs.parameters_dict(), strict_load=True) == ([], [])
    xs = [tensor(x) for x in inputs(constructor)]
    call = [tensor(x) if isinstance(x, np.ndarray) else x for x in call]

    class Loss(nn.Cell):
        def __init__(self, attention):
            super().__init__()
            self.attention = attention

        def construct(self, query, key, value):
            results = self.attention(query, key, value, *call)
            loss = (results[0] ** 2).sum()
            if len(results) > 1:
                loss = loss + (results[1] ** 3).sum()
            return loss, results

    def run(attention):
        loss = Loss(attention)
        (_, results), (grads, of_weights) = ops.value_and_grad(loss, (0, 1, 2), loss.trainable_params(),
                                                               has_aux=True)(*xs)
        return [array(x) for x in (*results, *grads, *of_weights)]

    got, exact = run(ours), run(theirs)
    assert len(got) == len(exact)
    for x, y in zip(got, exact):
        np.testing.assert_allclose(x, y, atol=1e-5 * max(1, np.abs(y).max()))


@pytest.mark.parametrize("call", ["default", "no weights", "float mask", "padding and mask", "padding and float mask"])
@pytest.mark.parametrize("constructor", ["plain", "all"])
def test_gradients_are_slopes_of_the_formula(constructor, call, backend):
    cell = randomised(MultiheadAttention(E, H, **CONSTRUCTORS[constructor], backend=backend))
    xs, call = inputs(constructor), {**CALLS, **MIXED}[call]
    float_mask = len(call) > 2 and call[2].dtype == np.float32
    params, fixed = cell.trainable_params(), weights_of(cell)
    names = [p.name for p in params]

    def loss_of(results):
        return (results[0] ** 2).sum() + ((results[1] ** 3).sum() if len(results) > 1 else 0)

    def loss(query, key, value, mask):
        padding, need = (tensor(call[0]) if call and call[0] is not None else None), call[1] if call else True
        return loss_of(cell(query, key, value, padding, need, mask))

    mask = tensor(call[2]) if len(call) > 2 else None
    positions = (0, 1, 2, 3) if float_mask else (0, 1, 2)
    grads, of_weights = ms.grad(loss, positions, params)(*map(tensor, xs), mask)
    got = [array(g) for g in (*grads, *of_weights)]

    base = [*xs, *([call[2]] if float_mask else []), *[fixed[n] for n in names]]
    rng, step = np.random.default_rng(7), 1e-5
    direction = [rng.standard_normal(x.shape) for x in base]

    def shifted(t):
        moved = [x.astype(np.float64) + t * d for x, d in zip(base, direction)]
        args = list(call) or [None]
        if float_mask:
            args[2] = moved[3]
        count = len(positions)
        options = {n: x for n, x in CONSTRUCTORS[constructor].items() if n in ("batch_first", "add_zero_attn")}
        return loss_of(formula(dict(zip(names, moved[count:])), *moved[:3], *args, **options))

    slope = (shifted(step) - shifted(-step)) / (2 * step)
    along = sum((g * d).sum() for g, d in zip(got, direction))
    assert abs(along - slope) < 1e-4 * max(1, abs(slope)), (along, slope)


@pytest.mark.parametrize("dtype, eps", [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_low_precision(dtype, eps, mode, backend):
    cell = MultiheadAttention(E, H, add_bias_kv=True, add_zero_attn=True, dtype=getattr(ms, dtype), backend=backend)
    *xs, mask = [ms.Tensor(x).astype(getattr(ms, dtype)) for x in (*inputs("plain"), randn(L, S))]
    got = cell(*xs, tensor(KEEP), True, mask)
    exact = formula({p.name: array(p) for p in cell.get_parameters()}, *map(array, xs), KEEP, True, array(mask),
                    add_zero_attn=True)
    for x, y in zip(got, exact):
        assert x.dtype == getattr(ms, dtype)
        np.testing.assert_allclose(array(x), y, atol=8 * eps * max(1, np.abs(y).max()))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padding, mask", [(True, None), (False, bool), (False, np.float32), (True, bool)])
def test_a_query_without_keys_gives_the_bias_of_the_output_and_no_nan(padding, mask, need_weights, backend):
    cell = randomised(MultiheadAttention(E, H, backend=backend))
    xs = inputs("plain")
    hidden, attn = np.zeros((N, S), bool), np.zeros((L, S), bool)
    if padding:
        hidden[1] = True
    attn[2] = True
    attn = {None: None, bool: attn, np.float32: np.where(attn, -np.inf, 0).astype(np.float32)}[mask]
    call = (hidden if padding else None, need_weights, attn)
    results = cell(*map(tensor, xs), *[tensor(x) if isinstance(x, np.ndarray) else x for x in call])
    for got, exact in zip(results, formula(weights_of(cell), *xs, *call)):
        np.testing.assert_allclose(array(got), exact, atol=2e-6)
    empty = array(results[0])[:, 1] if padding else array(results[0])[2]
    np.testing.assert_allclose(empty, np.broadcast_to(weights_of(cell)["out_proj.bias"], empty.shape), atol=1e-6)

    def loss(query, key, value):
        return sum((x**2).sum() for x in cell(query, key, value, *[
            tensor(x) if isinstance(x, np.ndarray) else x for x in call]))

    grads, of_weights = ms.grad(loss, (0, 1, 2), cell.trainable_params())(*map(tensor, xs))
    assert all(np.isfinite(array(g)).all() for g in (*grads, *of_weights))
    assert not (array(grads[0])[:, 1] if padding else array(grads[0])[2]).any()


@pytest.mark.parametrize("call", ["padding", "padding and mask", "padding and float mask", "padding and mask per head"])
def test_nan_in_a_masked_key_stays_there(call, backend):
    cell = randomised(MultiheadAttention(E, H, backend=backend))
    xs, call = inputs("plain"), {**CALLS, **MIXED}[call]
    exact = formula(weights_of(cell), *xs, *call)
    for x in xs[1:]:
        x[KEEP.T] = np.nan
    results = cell(*map(tensor, xs), *[tensor(x) if isinstance(x, np.ndarray) else x for x in call])
    for got, right in zip(results, exact):
        np.testing.assert_allclose(array(got), right, atol=5e-6)


@pytest.mark.parametrize("call", [(), (KEEP[0],), (None, True, MASK2), (KEEP[1], True, MASK3[:H], False),
                                  (KEEP[1], False, randn(L, S))])
@pytest.mark.parametrize("batch_first", [False, True])
def test_without_a_batch(batch_first, call, backend):
    cell = randomised(MultiheadAttention(E, H, batch_first=batch_first, backend=backend))
    xs = [randn(L, E), randn(S, E), randn(S, E, seed=1)]
    got = cell(*map(tensor, xs), *[tensor(x) if isinstance(x, np.ndarray) else x for x in call])
    for x, y in zip(got, formula(weights_of(cell), *xs, *call)):
        np.testing.assert_allclose(array(x), y, atol=2e-6)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 6), (6, 4)])
def test_causal(lengths, need_weights, backend):
    cell = randomised(MultiheadAttention(E, H, batch_first=True, causal=True, backend=backend))
    xs = [randn(N, lengths[0], E), randn(N, lengths[1], E), randn(N, lengths[1], E, seed=1)]
    got = cell(*map(tensor, xs), need_weights=need_weights)
    exact = formula(weights_of(cell), *xs, None, need_weights, batch_first=True, causal=True)
    for x, y in zip(got, exact):
        np.testing.assert_allclose(array(x), y, atol=2e-6)


def test_masks_of_another_float_dtype(backend):
    cell = randomised(MultiheadAttention(E, H, backend=backend))
    xs, half = inputs("plain"), randn(L, S, dtype=np.float16)
    got = cell(*map(tensor, xs), None, True, tensor(half))
    for x, y in zip(got, formula(weights_of(cell), *xs, None, True, half)):
        np.testing.assert_allclose(array(x), y, atol=2e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Dropout
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch_first", [False, True])
def test_weights_after_dropout_are_those_that_made_the_output(batch_first, mode, backend):
    cell = randomised(MultiheadAttention(E, H, dropout=0.4, batch_first=batch_first, backend=backend))
    xs, call = inputs("batch_first" if batch_first else "plain"), (None, True, None, False)
    cell.set_train(True)
    out, dropped = (array(x) for x in cell(*map(tensor, xs), *call))
    plain = formula(weights_of(cell), *xs, *call, batch_first=batch_first)[1]
    keep = np.where(np.abs(dropped) > 0, 1 / 0.6, 0.0)
    assert 0.4 < (keep > 0).mean() < 0.8
    np.testing.assert_allclose(dropped, plain * keep, atol=2e-6)
    exact = formula(weights_of(cell), *xs, *call, batch_first=batch_first, keep=keep)
    np.testing.assert_allclose(out, exact[0], atol=5e-6)
    cell.set_train(False)
    np.testing.assert_allclose(array(cell(*map(tensor, xs), *call)[1]), plain, atol=2e-6)


def test_dropout_is_active_in_training_only_and_follows_the_seed(backend):
    cell = MultiheadAttention(E, H, dropout=0.5, backend=backend)
    xs = [tensor(x) for x in inputs("plain")]

    def run(seed, train):
        ms.set_seed(seed)
        cell.set_train(train)
        return array(cell(*xs, need_weights=False)[0])

    assert (run(1, True) == run(1, True)).all() and (run(1, True) != run(2, True)).any()
    assert (run(1, False) == run(2, False)).all()


# ---------------------------------------------------------------------------------------------------------------------
# A drop-in
# ---------------------------------------------------------------------------------------------------------------------
def test_constructor_and_inputs_are_those_of_mindspore():
    for name in ("__init__", "construct"):
        ours, theirs = (inspect.signature(getattr(c, name)).parameters.values() for c in
                        (MultiheadAttention, nn.MultiheadAttention))
        extra = [p for p in ours if p.kind == p.KEYWORD_ONLY]
        assert [(p.name, p.default) for p in ours if p not in extra] == [(p.name, p.default) for p in theirs]
        assert all(p.default is not p.empty for p in extra)
    assert isinstance(MultiheadAttention(E, H), nn.MultiheadAttention)


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_parameters_and_their_initialisation_are_those_of_mindspore(constructor):
    ms.set_seed(5)
    theirs = nn.MultiheadAttention(E, H, **CONSTRUCTORS[constructor])
    ms.set_seed(5)
    ours = MultiheadAttention(E, H, **CONSTRUCTORS[constructor])
    assert [(p.name, p.shape, p.dtype) for p in ours.get_parameters()] == [(p.name, p.shape, p.dtype) for p in
                                                                          theirs.get_parameters()]
    for a, b in zip(ours.get_parameters(), theirs.get_parameters()):
        assert (a.asnumpy() == b.asnumpy()).all(), a.name


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_checkpoints_load_both_ways(constructor, tmp_path, backend):
    class Net(nn.Cell):
        def __init__(self, attention):
            super().__init__()
            self.first, self.attention = nn.Dense(E, E), attention

    def ours():
        return Net(MultiheadAttention(E, H, **CONSTRUCTORS[constructor], backend=backend))

    def theirs():
        return Net(nn.MultiheadAttention(E, H, **CONSTRUCTORS[constructor]))

    for source, target in ((ours(), theirs()), (theirs(), ours())):
        ms.save_checkpoint(source, str(tmp_path / "net.ckpt"))
        loaded = ms.load_checkpoint(str(tmp_path / "net.ckpt"))
        assert ms.load_param_into_net(target, loaded, strict_load=True) == ([], [])
        for name, p in source.parameters_dict().items():
            assert (target.parameters_dict()[name].asnumpy() == p.asnumpy()).all()


def test_inside_the_encoder_layer_of_mindspore(mode, backend):
    theirs, ours = (nn.TransformerEncoderLayer(E, H, dim_feedforward=32, batch_first=True).set_train(False)
                    for _ in range(2))
    ours.self_attn = MultiheadAttention(E, H, batch_first=True, backend=backend)
    assert ms.load_param_into_net(ours, theirs.parameters_dict(), strict_load=True) == ([], [])
    x, mask = tensor(randn(N, L, E)), tensor(np.triu(np.ones((L, L), bool), 1))
    np.testing.assert_allclose(array(ours(x, mask)), array(theirs(x, mask)), atol=1e-5)


def test_trains_in_a_compiled_step_as_mindspore_does(backend, graph_mode):
    class Net(nn.Cell):
        def __init__(self, attention):
            super().__init__()
            self.attention, self.out = attention, nn.Dense(E, 1, weight_init="ones", has_bias=False)

        def construct(self, x, y):
            return ((self.out(self.attention(x, x, x, None, False)[0]) - y) ** 2).mean()

    def losses(attention):
        net = Net(randomised(attention))
        step = nn.TrainOneStepCell(net, nn.Adam(net.trainable_params(), 1e-2)).set_train()
        return [float(step(tensor(randn(L, N, E)), tensor(randn(L, N, 1))).asnumpy()) for _ in range(10)]

    ours, theirs = losses(MultiheadAttention(E, H, backend=backend)), losses(nn.MultiheadAttention(E, H))
    assert ours[-1] < 0.8 * ours[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_the_same_graph_serves_inputs_that_are_one_object_and_those_that_are_not(backend, graph_mode):
    cell = randomised(MultiheadAttention(E, H, backend=backend))
    x, y, z = (tensor(randn(L, N, E, seed=i)) for i in range(3))
    for xs in ((x, x, x), (x, y, y), (x, y, z), (x, x, x)):
        exact = formula(weights_of(cell), *map(array, xs))
        np.testing.assert_allclose(array(cell(*xs)[0]), exact[0], atol=2e-6)


def test_copies_and_keyword_arguments(backend):
    cell = randomised(MultiheadAttention(E, H, backend=backend))
    xs = [tensor(x) for x in inputs("plain")]
    expected_out = array(cell(*xs)[0])
    twin = copy.deepcopy(cell)
    assert (array(twin(*xs)[0]) == expected_out).all()
    twin.in_proj_bias.set_data(twin.in_proj_bias + 1)
    assert (array(cell(*xs)[0]) == expected_out).all()
    assert (array(cell(query=xs[0], key=xs[1], value=xs[2])[0]) == expected_out).all()


class Projected(nn.Cell):
    """Here, because O1 rewrites the source of a class that it must find in its module."""

    def __init__(self, backend):
        super().__init__()
        self.first, self.attention = nn.Dense(E, E), MultiheadAttention(E, H, backend=backend)

    def construct(self, x):
        x = self.first(x)
        return self.attention(x, x, x)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_automatic_mixed_precision(level, mode, backend):
    net, x = Projected(backend), tensor(randn(L, N, E))
    y = array(x) @ net.first.weight.asnumpy().T.astype(np.float64) + net.first.bias.asnumpy()
    weights = {name.split(".", 1)[1]: w for name, w in weights_of(net).items() if name.startswith("attention.")}
    exact = formula(weights, y, y, y)
    for got, right in zip(ms.amp.auto_mixed_precision(net, level)(x), exact):
        np.testing.assert_allclose(array(got), right, atol=1e-2)


def test_memory_does_not_grow_with_the_square_of_the_length(backend):
    if backend == "reference":
        pytest.skip("the reference holds the score matrix")
    script = textwrap.dedent(f"""
        import resource
        import numpy as np, mindspore as ms
        from mindspore import ops
        from ms_flash.nn import MultiheadAttention

        def step(length):
            x = ms.Tensor(np.random.randn(length, 1, 32).astype(np.float32))
            hide = ms.Tensor(np.zeros((1, length), bool))
            loss = lambda x: (cell(x, x, x, hide, False)[0] ** 2).sum()
            return ms.grad(loss, 0, cell.trainable_params())(x)[0].asnumpy()

        cell = MultiheadAttention(32, 8, dropout=0.1, backend={backend!r})
        step(64)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step(8192)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    megabytes = float(done.stdout.split()[-1])
    assert megabytes < 200, megabytes            # one (8, 8192, 8192) float32 matrix is 2048


# ---------------------------------------------------------------------------------------------------------------------
# What it refuses
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options, error, text", [
    ({"embed_dim": 18}, ValueError, "'embed_dim' must be divisible by 'num_heads' 4, but got 18"),
    ({"embed_dim": 16.0}, TypeError, "type of 'embed_dim' must be int, but got float"),
    ({"num_heads": 0}, ValueError, "'num_heads' must be 1 or greater, but got 0"),
    ({"num_heads": True}, TypeError, "type of 'num_heads' must be int, but got bool"),
    ({"dropout": 1.0}, ValueError, r"'dropout' must be in the range \[0, 1\), but got 1.0"),
    ({"dropout": "0.1"}, TypeError, "type of 'dropout' must be float, but got str"),
    ({"kdim": 0}, ValueError, "'kdim' must be 1 or greater"),
    ({"batch_first": 1}, TypeError, "type of 'batch_first' must be bool, but got int"),
    ({"dtype": ms.float64}, TypeError, "'dtype' must be one of float32"),
    ({"causal": True, "add_bias_kv": True}, ValueError, "'causal' must be False with 'add_bias_kv'"),
    ({"causal": True, "add_zero_attn": True}, ValueError, "'causal' must be False with 'add_zero_attn'"),
])
def test_wrong_constructors(options, error, text):
    with pytest.raises(error, match="For 'MultiheadAttention', .*" + text):
        MultiheadAttention(**{"embed_dim": E, "num_heads": H, **options})


def _of(*shape, dtype=np.float32):
    return tensor(np.zeros(shape, dtype))


WRONG = [
    ({"query": np.zeros((L, N, E))}, TypeError, "type of 'query' must be Tensor, but got ndarray"),
    ({"query": _of(L, N, E, dtype=np.float64)}, TypeError, "dtype of 'query' must be one of.*float64"),
    ({"key": _of(S, N, E, dtype=np.float16)}, TypeError, "dtype of 'key' must be equal to that of 'query' float32"),
    ({"query": _of(1, L, N, E)}, ValueError, "rank of 'query' must be 3"),
    ({"key": _of(S, E)}, ValueError, "rank of 'key' must be equal to that of 'query' 3, but got 2"),
    ({"value": _of(S, N, E + 1)}, ValueError, "last axis of 'value' must be 'vdim' 16, but got 17"),
    ({"query": _of(L, N, 8)}, ValueError, "last axis of 'query' must be 'embed_dim' 16, but got 8"),
    ({"value": _of(S + 1, N, E)}, ValueError, "length of 'value' must be equal to that of 'key' 7, but got 8"),
    ({"key": _of(S, 3, E), "value": _of(S, 3, E)}, ValueError, "batch size of 'key'.* 2, but got 3.*batch_first"),
    ({"key_padding_mask": _of(S, N, dtype=np.bool_)}, ValueError, r"'key_padding_mask' must be \(N, S\) = \(2, 7\)"),
    ({"key_padding_mask": _of(N, S, dtype=np.int32)}, TypeError, "dtype of 'key_padding_mask'.*int32.*cast it to bool"),
    ({"key_padding_mask": _of(N, S, dtype=np.uint8)}, TypeError, "dtype of 'key_padding_mask'.*uint8"),
    ({"key_padding_mask": True}, TypeError, "type of 'key_padding_mask' must be Tensor or None, but got bool"),
    ({"attn_mask": _of(S, L, dtype=np.bool_)}, ValueError, r"\(5, 7\) or \(8, 5, 7\), but got \(7, 5\)"),
    ({"attn_mask": _of(N, L, S, dtype=np.bool_)}, ValueError, r"\(5, 7\) or \(8, 5, 7\), but got \(2, 5, 7\)"),
    ({"attn_mask": _of(L, S, dtype=np.float64)}, TypeError, "dtype of 'attn_mask'.*float64"),
    ({"attn_mask": _of(L, S, dtype=np.int64)}, TypeError, "dtype of 'attn_mask'.*int64"),
    ({"need_weights": 1}, TypeError, "type of 'need_weights' must be bool, but got int"),
    ({"average_attn_weights": None}, TypeError, "type of 'average_attn_weights' must be bool, but got NoneType"),
]


@pytest.mark.parametrize("change, error, text", WRONG, ids=range(len(WRONG)))
def test_wrong_calls_are_refused_and_the_next_one_works(change, error, text, backend):
    cell = MultiheadAttention(E, H, backend=backend)
    good = {"query": _of(L, N, E), "key": _of(S, N, E), "value": _of(S, N, E)}
    with pytest.raises(error, match="For 'MultiheadAttention', .*" + text):
        cell(**{**good, **change})
    assert cell(**good)[0].shape == (L, N, E)


def test_wrong_calls_are_refused_while_a_graph_is_compiled(backend, graph_mode):
    cell = MultiheadAttention(E, H, backend=backend)
    with pytest.raises(ValueError, match="batch size of 'key'"):
        cell(_of(L, N, E), _of(S, 3, E), _of(S, 3, E))
    assert cell(_of(L, N, E), _of(S, N, E), _of(S, N, E))[0].shape == (L, N, E)


def test_unknown_backend():
    with pytest.raises(ValueError, match="'backend' must be one of"):
        MultiheadAttention(E, H, backend="abacus")(_of(L, N, E), _of(S, N, E), _of(S, N, E))
