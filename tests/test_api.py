"""The public functions and the Cell in PyNative mode: forms of a call that mean the same, options, results."""

from __future__ import annotations

import copy
import inspect
import threading

import mindspore as ms
import numpy as np
import pytest
from mindspore import ops
from public_api import array, tensor

import ms_flash
from ms_flash import flash_attention, flash_attention_varlen, op_table
from ms_flash.functional import attention
from ms_flash.spec import OPTIONS, Arg, AttentionSpec

B, N, NK, SQ, SK, D, DV = 2, 4, 2, 6, 9, 8, 8
RNG = np.random.default_rng(0)
Q, K, V, DO = (RNG.standard_normal(s).astype(np.float32) for s in (
    (B, N, SQ, D), (B, NK, SK, D), (B, NK, SK, DV), (B, N, SQ, DV)))
MASK = RNG.random((B, 1, SQ, SK)) < 0.4
BIAS = RNG.standard_normal((1, N, SQ, SK)).astype(np.float32)
TO = {"BNSD": lambda x: x, "BSND": lambda x: x.transpose(0, 2, 1, 3),
      "BSH": lambda x: x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1),
      "SBH": lambda x: x.transpose(2, 0, 1, 3).reshape(x.shape[2], x.shape[0], -1)}


def close(a, b, atol=1e-5):
    a, b = (array(x) if isinstance(x, ms.Tensor) else x for x in (a, b))
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)


def same(a, b):
    np.testing.assert_array_equal(array(a), array(b))


def gradients(run, *inputs, position=None):
    """Gradients of sum(out * DO) for the inputs."""
    def loss(*inputs):
        out = run(*inputs)
        return (out.astype(ms.float32) * tensor(DO if out.shape == DO.shape else DO.reshape(out.shape))).sum()

    return ms.grad(loss, grad_position=position or tuple(range(len(inputs))))(*inputs)


# ---------------------------------------------------------------------------------------------------------------------
# Signatures
# ---------------------------------------------------------------------------------------------------------------------
def test_names_of_the_source_articles():
    x = tensor(Q)
    cell = ms_flash.nn.FlashAttention(causal=True, softmax_scale=0.5, block_m=128, block_n=64, precision_mode="high")
    close(cell(x, x, x), flash_attention(x, x, x, causal=True, softmax_scale=0.5))
    close(flash_attention(x, x, x, attn_mask=None, dropout_p=0.0, softmax_scale=1.0),
          flash_attention(x, x, x, None, softmax_scale=1))
    close(flash_attention(x, x, x, attn_mask=(2, 0)), flash_attention(x, x, x, window_size=(2, 0)))


def test_public_parameters_have_one_set_of_names():
    function = set(inspect.signature(flash_attention).parameters)
    varlen = set(inspect.signature(flash_attention_varlen).parameters)
    assert varlen - function == {"cu_seqlens_q", "cu_seqlens_k"}
    assert function - varlen == {"layout", "num_heads", "num_kv_heads"}
    cell = set(inspect.signature(ms_flash.nn.FlashAttention.__init__).parameters) - {"self"}
    call = set(inspect.signature(ms_flash.nn.FlashAttention.construct).parameters) - {"self"}
    assert cell | call | {"training"} == function


def test_every_public_name_is_documented():
    for name in ms_flash.__all__:
        if callable(getattr(ms_flash, name)):
            text = getattr(ms_flash, name).__doc__
            assert "Supported Platforms:" in text and ">>> " in text, name


# ---------------------------------------------------------------------------------------------------------------------
# Forms that mean the same
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["BSND", "BSH", "SBH"])
def test_layouts_agree(layout, backend):
    heads = {"num_heads": N, "num_kv_heads": NK} if layout in ("BSH", "SBH") else {}
    options = {"attn_mask": tensor(MASK), "bias": tensor(BIAS), "backend": backend}
    expected = flash_attention(tensor(Q), tensor(K), tensor(V), **options)
    inputs = [tensor(TO[layout](x)) for x in (Q, K, V)]
    close(flash_attention(*inputs, layout=layout, **heads, **options), TO[layout](array(expected)))

    def loss(layout, heads, do):
        return lambda q, k, v: (flash_attention(q, k, v, layout=layout, **heads, **options) * tensor(do)).sum()

    exact = ms.grad(loss("BNSD", {}, DO), (0, 1, 2))(tensor(Q), tensor(K), tensor(V))
    got = ms.grad(loss(layout, heads, TO[layout](DO)), (0, 1, 2))(*inputs)
    for a, b in zip(got, exact):
        close(a, TO[layout](array(b)))


@pytest.mark.parametrize("layout, heads", [("BNSD", (4, 2)), ("BSND", (4, 4)), ("BSH", (4, 1)), ("SBH", (4, 2))])
def test_packed_qkv(layout, heads, backend):
    n, nk = heads
    qkv = RNG.standard_normal((B, n + 2 * nk, SQ, D)).astype(np.float32)
    options = {"causal": True, "backend": backend}
    parts = [tensor(np.ascontiguousarray(x)) for x in np.split(qkv, (n, n + nk), axis=1)]
    close(flash_attention(tensor(TO[layout](qkv)), layout=layout, num_heads=n, num_kv_heads=nk, **options),
          TO[layout](array(flash_attention(*parts, **options))))

    def packed(x):
        out = flash_attention(x, layout=layout, num_heads=n, num_kv_heads=nk, **options)
        return (out * tensor(TO[layout](DO))).sum()

    exact = gradients(lambda q, k, v: flash_attention(q, k, v, **options), *parts)
    close(ms.grad(packed)(tensor(TO[layout](qkv))), TO[layout](np.concatenate([array(x) for x in exact], 1)))


def test_packed_qkv_of_five_axes(backend):
    qkv = RNG.standard_normal((B, SQ, 3, N, D)).astype(np.float32)
    close(flash_attention(tensor(qkv), layout="BSND", backend=backend),
          flash_attention(*[tensor(qkv[:, :, i]) for i in range(3)], layout="BSND", backend=backend))
    grad = ms.grad(lambda x: (flash_attention(x, layout="BSND", backend=backend) * tensor(TO["BSND"](DO))).sum())
    assert grad(tensor(qkv)).shape == qkv.shape


def test_head_counts_may_be_repeated(backend):
    inputs = [tensor(x) for x in (Q, K, V)]
    same(flash_attention(*inputs, num_heads=N, num_kv_heads=NK, backend=backend),
         flash_attention(*inputs, backend=backend))


def test_masks_of_every_rank_and_dtype(backend):
    inputs = [tensor(x) for x in (Q, K, V)]
    for shape in [(SK,), (SQ, SK), (1, SK), (SQ, 1), (1, SQ, SK), (N, SQ, SK), (B, 1, 1, SK), (1, N, 1, SK),
                  (B, N, SQ, SK)]:
        masked = RNG.random(shape) < 0.4
        full = np.ascontiguousarray(np.broadcast_to(masked, (B, N, SQ, SK)))
        for dtype in (bool, np.uint8):
            close(flash_attention(*inputs, tensor(masked.astype(dtype)), backend=backend),
                  flash_attention(*inputs, tensor(full), backend=backend))


def test_inputs_need_not_be_contiguous(backend):
    inputs = [tensor(TO["BSND"](x)).transpose(0, 2, 1, 3) for x in (Q, K, V)]
    same(flash_attention(*inputs, backend=backend), flash_attention(*[tensor(x) for x in (Q, K, V)], backend=backend))
    wide = tensor(np.repeat(Q, 2, -1))
    same(flash_attention(wide[..., ::2], *inputs[1:], backend=backend), flash_attention(*inputs, backend=backend))


def test_varlen_is_a_loop_over_sequences(backend):
    ends_q, ends_k = [0, 3, 3, 7], [0, 4, 6, 9]
    q, k, v = (RNG.standard_normal(s).astype(np.float32) for s in ((8, N, D), (10, NK, D), (10, NK, DV)))
    cu = [ms.Tensor(np.array(ends), ms.int32) for ends in (ends_q, ends_k)]
    out, lse = flash_attention_varlen(tensor(q), tensor(k), tensor(v), *cu, causal=True, return_lse=True,
                                      backend=backend)
    assert out.shape == (8, N, DV) and lse.shape == (N, 8) and lse.dtype == ms.float32
    for (a, b), (c, d) in zip(zip(ends_q, ends_q[1:]), zip(ends_k, ends_k[1:])):
        if a < b:
            parts = [tensor(np.ascontiguousarray(x.transpose(1, 0, 2)[None])) for x in (q[a:b], k[c:d], v[c:d])]
            one, one_lse = flash_attention(*parts, causal=True, return_lse=True, backend=backend)
            close(array(out)[a:b].transpose(1, 0, 2)[None], one)
            close(array(lse)[None, :, a:b], one_lse)
    assert (array(out)[7:] == 0).all() and np.isneginf(array(lse)[:, 7:]).all()


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------------
def test_gradients_have_the_shapes_and_dtypes_of_their_inputs(backend):
    sinks = tensor(np.zeros(N, np.float32))
    inputs = [tensor(x).astype(ms.float16) for x in (Q, K, V)] + [tensor(BIAS), sinks]
    grads = gradients(lambda q, k, v, bias, sinks: flash_attention(q, k, v, bias=bias, sinks=sinks, backend=backend),
                      *inputs)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in inputs]


def test_gradient_through_lse(backend):
    """sum(lse) of one head: its gradient for a bias is the softmax itself."""
    inputs = [tensor(x) for x in (Q, K, V)]

    def total(bias):
        return flash_attention(*inputs, bias=bias, return_lse=True, backend=backend)[1].sum()

    grad = array(ms.grad(total)(tensor(np.broadcast_to(BIAS, (B, N, SQ, SK)))))
    close(grad.sum(-1), np.ones((B, N, SQ)))
    close(ms.grad(total)(tensor(BIAS)), grad.sum(0, keepdims=True))


def test_masks_and_slopes_have_no_gradient(backend):
    slopes = tensor(np.full(N, 0.1, np.float32))
    grads = gradients(lambda q, s: flash_attention(q, tensor(K), tensor(V), tensor(MASK), alibi_slopes=s,
                                                   backend=backend), tensor(Q), slopes)
    assert (array(grads[1]) == 0).all()


def test_second_order_is_an_error(backend):
    def first(q):
        return ms.grad(lambda q: (flash_attention(q, tensor(K), tensor(V), backend=backend) ** 2).sum())(q).sum()

    first(tensor(Q))
    with pytest.raises(RuntimeError, match="second order and forward-mode gradients are not supported"):
        ms.grad(first)(tensor(Q))


# ---------------------------------------------------------------------------------------------------------------------
# Nothing to attend to
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("b, sq, sk", [(0, 6, 9), (2, 0, 9), (2, 6, 0), (2, 0, 0), (0, 0, 0)])
def test_zero_sizes(b, sq, sk, mode, backend):
    q, k, v = (ms.ops.zeros(s, ms.float16) for s in ((b, N, sq, D), (b, NK, sk, D), (b, NK, sk, 5)))

    def run(q, k, v):
        return flash_attention(q, k, v, causal=True, return_lse=True, backend=backend)

    out, lse = ms.jit(run)(q, k, v) if mode == "graph" else run(q, k, v)
    assert out.shape == (b, N, sq, 5) and out.dtype == ms.float16
    assert lse.shape == (b, N, sq) and lse.dtype == ms.float32
    assert (array(out) == 0).all() and np.isneginf(array(lse)).all()

    def loss(q, k, v):
        out, lse = run(q, k, v)
        return out.sum().astype(ms.float32) + ops.exp(lse).sum()

    grads = ms.grad(ms.jit(loss) if mode == "graph" else loss, (0, 1, 2))(q, k, v)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert all((array(g) == 0).all() for g in grads)


def test_no_keys_but_sinks(backend):
    q, k = tensor(Q), ms.ops.zeros((B, NK, 0, D), ms.float32)
    sinks = tensor(np.arange(N, dtype=np.float32))

    def lse(sinks):
        return flash_attention(q, k, k, sinks=sinks, return_lse=True, backend=backend)[1]

    close(lse(sinks), np.broadcast_to(np.arange(N)[None, :, None], (B, N, SQ)))
    close(ms.grad(lambda s: lse(s).sum())(sinks), np.full(N, B * SQ))


def test_varlen_of_nothing(backend):
    none = ms.Tensor(np.array([0, 0]), ms.int64)
    empty, some = ms.ops.zeros((0, N, D), ms.float32), tensor(RNG.standard_normal((3, N, D)).astype(np.float32))
    out = flash_attention_varlen(empty, some, some, none, ms.Tensor(np.array([0, 3]), ms.int64), backend=backend)
    assert out.shape == (0, N, D)
    sinks = tensor(np.ones(N, np.float32))
    out, lse = flash_attention_varlen(some, empty, empty, ms.Tensor(np.array([0, 2]), ms.int32), none, sinks=sinks,
                                      return_lse=True, backend=backend)
    assert (array(out) == 0).all()
    close(lse, np.broadcast_to([1, 1, -np.inf], (N, 3)))


# ---------------------------------------------------------------------------------------------------------------------
# Dropout
# ---------------------------------------------------------------------------------------------------------------------
def dropped(backend, **options):
    return array(flash_attention(tensor(Q), tensor(K), tensor(V), dropout_p=0.4, backend=backend, **options))


def test_seed_decides_the_dropout_mask(backend):
    first = dropped(backend, seed=7)
    np.testing.assert_array_equal(first, dropped(backend, seed=7))
    np.testing.assert_array_equal(first, dropped(backend, seed=ms.Tensor([7, 0], ms.int64)))
    assert (first != dropped(backend, seed=8)).any()
    assert (first != dropped(backend, seed=ms.Tensor([7, 1], ms.int64))).any()
    np.testing.assert_allclose(first, dropped("reference", seed=7), atol=1e-5)


def test_dropout_only_while_training(backend):
    plain = array(flash_attention(tensor(Q), tensor(K), tensor(V), backend=backend))
    np.testing.assert_array_equal(dropped(backend, training=False), plain)
    cell = ms_flash.nn.FlashAttention(dropout_p=0.4, backend=backend)
    inputs = [tensor(x) for x in (Q, K, V)]
    np.testing.assert_array_equal(array(cell.set_train(False)(*inputs)), plain)
    assert (array(cell.set_train(True)(*inputs)) != plain).any()


def test_set_seed_repeats_the_drawn_seeds(backend):
    runs = []
    for seed in (3, 3, 4):
        ms.set_seed(seed)
        runs.append([dropped(backend) for _ in range(3)])
    assert (runs[0][0] != runs[0][1]).any() and (runs[0][1] != runs[0][2]).any()
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0][0] != runs[2][0]).any()
    np.testing.assert_array_equal(runs[0][1], dropped(backend, seed=ms.Tensor([3, 1], ms.int64)))


def test_no_seed_is_drawn_without_need(backend):
    ms.set_seed(3)
    first = dropped(backend)
    ms.set_seed(3)
    inputs = [tensor(x) for x in (Q, K, V)]
    flash_attention(*inputs, backend=backend)
    flash_attention(*inputs, dropout_p=0.4, training=False, backend=backend)
    dropped(backend, seed=1)
    np.testing.assert_array_equal(first, dropped(backend))


def test_gradient_uses_the_mask_of_the_forward(backend):
    """Attention is linear in the value: with the same mask, <dv, v> is <do, out>."""
    def out(v):
        return flash_attention(tensor(Q), tensor(K), v, dropout_p=0.4, backend=backend)

    def loss(v):
        return (out(v) * tensor(DO)).sum()

    value, grad = ms.value_and_grad(loss)(tensor(V))
    np.testing.assert_allclose((array(grad) * V).sum(), array(value), rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Internal inputs
# ---------------------------------------------------------------------------------------------------------------------
def internal(backend, attn_mask=None, drop_mask=None, dropout_p=0.0, mask_fill=None, window_size=(-1, -1)):
    return attention("flash_attention", tensor(Q), tensor(K), tensor(V), attn_mask, None, None, None, None, drop_mask,
                     None, None, dropout_p, None, False, window_size, 0.0, "BNSD", "bottom_right", True, True,
                     "default", None, None, backend, None, None, mask_fill)


def test_mask_fill_is_a_score(backend):
    inputs = [tensor(x) for x in (Q, K, V)]
    scores = np.where(MASK, -3.0, Q @ np.repeat(K, 2, 1).swapaxes(-1, -2) * D ** -0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    close(internal(backend, tensor(MASK), mask_fill=-3.0)[0],
          weights / weights.sum(-1, keepdims=True) @ np.repeat(V, 2, 1))
    close(internal(backend, tensor(MASK))[0], flash_attention(*inputs, tensor(MASK), backend=backend))


def test_given_dropout_mask(backend):
    keep = np.zeros((B, N, SQ, SK), np.uint8)
    keep[..., :4] = 1
    scores = np.exp(Q @ np.repeat(K, 2, 1).swapaxes(-1, -2) * D ** -0.5)
    expected = scores / scores.sum(-1, keepdims=True) * keep / 0.5 @ np.repeat(V, 2, 1)
    close(internal(backend, drop_mask=tensor(keep), dropout_p=0.5)[0], expected)


# ---------------------------------------------------------------------------------------------------------------------
# Backends, the spec and the table
# ---------------------------------------------------------------------------------------------------------------------
def test_backends(monkeypatch):
    reasons = ms_flash.available_backends()
    assert list(reasons) == list(op_table.table()["backends"])
    assert reasons["reference"] == "" and "not Ascend" in reasons["ascend"]
    monkeypatch.setenv("MS_FLASH_BACKEND", "reference")
    inputs = [tensor(x) for x in (Q, K, V)]
    same(flash_attention(*inputs), flash_attention(*inputs, backend="reference"))


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setenv("MS_FLASH_CPU_LIB", "/nowhere/libms_flash_cpu.so")
    assert "/nowhere/libms_flash_cpu.so is missing" in ms_flash.available_backends()["cpu"]
    with pytest.raises(RuntimeError, match="is missing; build it"):
        ms_flash.get_num_threads()


QKV = (Arg((B, N, SQ, D), "float32"), Arg((B, NK, SK, D), "float32"), Arg((B, NK, SK, DV), "float32"))
DEFAULTS = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "softcap": 0.0, "layout": "BNSD",
            "causal_align": "bottom_right", "training": True, "deterministic": True, "precision_mode": "default",
            "block_m": None, "block_n": None, "num_heads": None, "num_kv_heads": None, "mask_fill": None}


def parse(inputs=QKV, window_size=(-1, -1), **options):
    assert tuple(DEFAULTS) == OPTIONS
    return AttentionSpec.parse("flash_attention", inputs + (None,) * 8, window_size,
                               tuple({**DEFAULTS, **options}.values()))


def test_spec_is_parsed_once():
    spec = parse(window_size=(3, -1), causal=True)
    assert spec is parse(window_size=[3, -1], causal=True)
    assert {spec: 1}[spec] and spec.out_shape == (B, N, SQ, DV) and spec.lse_shape == (B, N, SQ)
    assert spec.render() == (
        "layout=BNSD;heads=0;kv_heads=0;packed=0;scale=default;left=3;right=0;align=bottom_right;softcap=0x0.0p+0;"
        "dropout=0x0.0p+0;seed=0;offset=0;precision=default;block_m=0;block_n=0;present=11100000000")


def test_spec_knows_what_the_table_says():
    text = parse(softmax_scale=1.0, causal_align="top_left", precision_mode="high", mask_fill=-1e4).render()
    keys = dict(field.split("=") for field in text.split(";"))
    assert list(keys) == list(op_table.table()["attributes"])
    for name, attribute in op_table.table()["attributes"].items():
        assert "values" not in attribute or keys[name] in attribute["values"]


@pytest.mark.parametrize("shapes", [
    ((-1, -1, -1, -1),) * 3, (None, None, None), ((-1, N, -1, D), (-1, NK, -1, D), None), (None, (B, NK, -1, D), None)])
def test_unknown_lengths_are_no_errors(shapes):
    assert not parse(tuple(Arg(s, "float32") for s in shapes)).static


def test_known_lengths_beside_unknown_ones_are_checked():
    with pytest.raises(ValueError, match=r"must be a multiple of that of 'key' 3, but got 4: query \(\?, 4, \?, 8\)"):
        parse((Arg((-1, N, -1, D), "float32"), Arg((-1, 3, -1, D), "float32"), Arg(None, "float32")))


# ---------------------------------------------------------------------------------------------------------------------
# Options of the kernels, threads, copies
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("block_m, block_n", [(1, 1), (16, 64), (7, 33), (512, 512)])
def test_block_sizes_do_not_change_the_result(block_m, block_n, kernel_backend):
    inputs = [tensor(x) for x in (Q, K, V)]
    options = {"causal": True, "dropout_p": 0.2, "seed": 5, "backend": kernel_backend}
    close(flash_attention(*inputs, block_m=block_m, block_n=block_n, **options), flash_attention(*inputs, **options))


def test_high_precision_is_no_worse(kernel_backend):
    inputs = [tensor(x) for x in (Q, K, V)]
    exact = array(flash_attention(*inputs, backend="reference"))
    errors = [np.abs(array(flash_attention(*inputs, precision_mode=mode, backend=kernel_backend)) - exact).max()
              for mode in ("default", "high")]
    assert errors[1] <= max(errors[0], 1e-7)


def test_thread_count():
    if ms_flash.available_backends()["cpu"]:
        pytest.skip("the CPU backend is not here")
    before = ms_flash.get_num_threads()
    inputs = [tensor(RNG.standard_normal((2, 4, 200, 16)).astype(np.float32)) for _ in range(3)]
    try:
        results = []
        for count in (1, 2, 3):
            ms_flash.set_num_threads(count)
            assert ms_flash.get_num_threads() == count
            results.append([array(x) for x in ms.value_and_grad(
                lambda q, k, v: (flash_attention(q, k, v, backend="cpu") ** 2).sum(), (1, 2))(*inputs)[1]])
    finally:
        ms_flash.set_num_threads(before)
    for result in results[1:]:
        for a, b in zip(results[0], result):
            np.testing.assert_array_equal(a, b)


def test_callers_on_several_threads(backend):
    sizes = [(1, 2, s, 8) for s in range(1, 9)]
    inputs = [tensor(np.random.default_rng(i).standard_normal(s).astype(np.float32)) for i, s in enumerate(sizes)]
    expected = [array(flash_attention(x, x, x, causal=True, backend=backend)) for x in inputs]
    wrong = []

    def work(start):
        for turn in range(10):
            i = (start + turn) % len(inputs)
            got = array(flash_attention(inputs[i], inputs[i], inputs[i], causal=True, backend=backend))
            if (got != expected[i]).any():
                wrong.append((start, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_cells_can_be_copied(backend):
    cell = ms_flash.nn.FlashAttention(causal=True, backend=backend)
    inputs = [tensor(x) for x in (Q, K, V)]
    expected = cell(*inputs)
    same(copy.deepcopy(cell)(*inputs), expected)
