"""Everything a MindSpore graph can do with the op: compiled or not, the result is that of a plain PyNative call."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from public_api import array, tensor

import ms_flash
from ms_flash import flash_attention, flash_attention_varlen, op_table

B, N, NK, SQ, SK, D = 2, 4, 2, 6, 9, 8
RNG = np.random.default_rng(1)
Q, K, V, DO = (tensor(RNG.standard_normal(s).astype(np.float32)) for s in (
    (B, N, SQ, D), (B, NK, SK, D), (B, NK, SK, D), (B, N, SQ, D)))
MASK = tensor(RNG.random((B, 1, SQ, SK)) < 0.4)
BIAS = tensor(RNG.standard_normal((N, SQ, SK)).astype(np.float32))
SINKS = tensor(RNG.standard_normal(N).astype(np.float32))


class Attention(nn.Cell):
    def __init__(self, backend, **options):
        super().__init__()
        self.backend, self.options = backend, options

    def construct(self, query, key, value, attn_mask=None, bias=None, sinks=None):
        return flash_attention(query, key, value, attn_mask, bias=bias, sinks=sinks, return_lse=True,
                               backend=self.backend, **self.options)


class Loss(nn.Cell):
    """Both results count, with different weights for every position."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def construct(self, query, key, value, attn_mask=None, bias=None, sinks=None):
        out, lse = self.attention(query, key, value, attn_mask, bias, sinks)
        return (out.astype(ms.float32) * DO).sum() + (lse * DO[:, :, :, 0]).sum()


def close(got, expected, atol=1e-5):
    for a, b in zip(got, expected):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(array(a), array(b), atol=atol, rtol=1e-5)


def plain(backend, *inputs, **options):
    """(out, lse), and gradients of Loss for query, key, value, in PyNative."""
    mode = ms.get_context("mode")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        attention = Attention(backend, **options)
        return attention(*inputs), ms.grad(Loss(attention), (0, 1, 2))(*inputs)
    finally:
        ms.set_context(mode=mode)


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window_size": (2, 1), "causal_align": "top_left"}, {"softmax_scale": 0.1, "softcap": 3.0},
    {"dropout_p": 0.3, "seed": 5}, {"precision_mode": "high"}, {"block_m": 16, "block_n": 32}],
    ids=lambda o: "-".join(o) or "default")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_graph_mode(options, dtype, backend):
    inputs = [x.astype(getattr(ms, dtype)) for x in (Q, K, V)] + [MASK]
    precision = options.get("precision_mode", "default")
    if precision not in op_table.table()["backends"][backend].get("precision", (precision,)):
        with pytest.raises(ValueError, match=f"'precision_mode' must be 'default' for the backend '{backend}'"):
            plain(backend, *inputs, **options)
        return
    out, grads = plain(backend, *inputs, **options)
    ms.set_context(mode=ms.GRAPH_MODE)
    attention = Attention(backend, **options)
    close(attention(*inputs), out)
    close(ms.grad(Loss(attention), (0, 1, 2))(*inputs), grads)


def test_gradients_of_bias_and_sinks(mode, backend):
    inputs = Q, K, V, None, BIAS, SINKS
    grads = ms.grad(Loss(Attention(backend)), (0, 4, 5))(*inputs)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    close(grads, ms.grad(Loss(Attention("reference")), (0, 4, 5))(*inputs), atol=1e-4)


def test_weights_as_inputs(mode, backend):
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.query, self.sinks = ms.Parameter(Q, name="query"), ms.Parameter(SINKS, name="sinks")
            self.bias = ms.Parameter(BIAS, name="bias")

        def construct(self, key, value):
            return (flash_attention(self.query, key, value, bias=self.bias, sinks=self.sinks, backend=backend)
                    * DO).sum()

    net = Net()
    grads = ms.grad(net, None, net.trainable_params())(K, V)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    close(grads, ms.grad(lambda q, s, b: (flash_attention(q, K, V, bias=b, sinks=s, backend=backend) * DO).sum(),
                         (0, 1, 2))(Q, SINKS, BIAS))


@pytest.mark.parametrize("capture", ["ast", "bytecode"])
def test_jit_in_pynative(capture, backend):
    out, grads = plain(backend, Q, K, V, causal=True)

    def run(q, k, v):
        return flash_attention(q, k, v, causal=True, return_lse=True, backend=backend)

    def loss(q, k, v):
        o, lse = flash_attention(q, k, v, causal=True, return_lse=True, backend=backend)
        return (o * DO).sum() + (lse * DO[:, :, :, 0]).sum()

    def grad_of(q, k, v):
        return ms.grad(loss, (0, 1, 2))(q, k, v)

    close(ms.jit(run, capture_mode=capture)(Q, K, V), out)
    close(ms.grad(ms.jit(loss, capture_mode=capture), (0, 1, 2))(Q, K, V), grads)
    close(ms.jit(grad_of, capture_mode=capture)(Q, K, V), grads)


class Squares(nn.Cell):
    def __init__(self, backend):
        super().__init__()
        self.attention = Attention(backend, causal=True)

    def construct(self, query, key, value):
        out, lse = self.attention(query, key, value)
        return (out * out).sum() + ops.exp(lse).sum()


class Gradient(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net, self.grad = net, ops.GradOperation(get_all=True)

    def construct(self, query, key, value):
        return self.grad(self.net)(query, key, value)


@pytest.mark.parametrize("shapes", [([None, N, None, D], [None, NK, None, D]), ([None] * 4, [None] * 4), (None, None)],
                         ids=["lengths", "all", "rank"])
def test_dynamic_shapes(shapes, kernel_backend):
    """One compiled graph for several shapes, empty ones included."""
    nets = Attention(kernel_backend, causal=True), Gradient(Squares(kernel_backend))
    for net in nets:
        net.set_inputs(*[ms.Tensor(shape=shapes[i], dtype=ms.float32) for i in (0, 1, 1)])
    for sq, sk in [(6, 9), (1, 9), (4, 4), (11, 3), (5, 0), (0, 4)]:
        inputs = [tensor(RNG.standard_normal(s).astype(np.float32)) for s in (
            (B, N, sq, D), (B, NK, sk, D), (B, NK, sk, D))]
        ms.set_context(mode=ms.PYNATIVE_MODE)
        expected = (Attention(kernel_backend, causal=True)(*inputs),
                    ms.grad(Squares(kernel_backend), (0, 1, 2))(*inputs))
        ms.set_context(mode=ms.GRAPH_MODE)
        for net, result in zip(nets, expected):
            close(net(*inputs), result)


def test_dynamic_shapes_on_the_reference_are_refused():
    ms.set_context(mode=ms.GRAPH_MODE)
    attention = Attention("reference")
    attention.set_inputs(*[ms.Tensor(shape=[B, NK, None, D], dtype=ms.float32)] * 3)
    with pytest.raises(ValueError, match="the backend 'reference' needs shapes that are known when a graph is comp"):
        attention(K, K, K)


def test_varlen_in_a_graph(mode, backend):
    cu_q, cu_k = (ms.Tensor(np.array(ends), ms.int32) for ends in ([0, 2, 6], [0, 5, 9]))
    inputs = [x[0].swapaxes(0, 1) for x in (Q, K, V)]

    def run(q, k, v, cu_q, cu_k):
        return flash_attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True, backend=backend)

    def loss(q, k, v, cu_q, cu_k):
        return (flash_attention_varlen(q, k, v, cu_q, cu_k, causal=True, backend=backend) ** 2).sum()

    expected = run(*inputs, cu_q, cu_k), ms.grad(loss, (0, 1, 2))(*inputs, cu_q, cu_k)
    close(ms.jit(run)(*inputs, cu_q, cu_k), expected[0])
    close(ms.grad(ms.jit(loss), (0, 1, 2))(*inputs, cu_q, cu_k), expected[1])


# ---------------------------------------------------------------------------------------------------------------------
# Transformations of the graph
# ---------------------------------------------------------------------------------------------------------------------
class Block(nn.Cell):
    """A transformer's attention, as users write it."""

    def __init__(self, backend, dropout_p=0.0, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Dense(width, 3 * width), nn.Dense(width, width)
        self.attention = ms_flash.nn.FlashAttention(causal=True, dropout_p=dropout_p, layout="BSH", num_heads=heads,
                                                    backend=backend)

    def construct(self, x):
        q, k, v = ops.split(self.qkv(x), x.shape[-1], -1)
        return self.out(self.attention(q, k, v))


class Model(nn.Cell):
    def __init__(self, backend, dropout_p=0.0):
        super().__init__()
        self.first, self.second = Block(backend, dropout_p), Block(backend, dropout_p)

    def construct(self, x):
        return self.second(x + self.first(x))


X = tensor(RNG.standard_normal((2, 5, 16)).astype(np.float32))


def model(backend, **options):
    ms.set_seed(11)
    return Model(backend, **options)


def weight_gradients(net, x=X):
    net.set_train()
    weights = net.trainable_params()

    def loss(x):
        return (net(x).astype(ms.float32) ** 2).sum()

    value, grads = ms.value_and_grad(loss, None, weights)(x)
    return (value, *grads)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_recompute(dropout_p, mode, backend):
    """Two steps: the second draws other dropout masks, and each recomputation those of its own forward."""
    if backend == "reference" and mode == "pynative":
        pytest.skip("MindSpore runs a Python op wrongly when PyNative recomputes it")
    results = []
    for recompute in (False, True):
        net = model(backend, dropout_p=dropout_p)
        if recompute:
            net.first.recompute()
            net.second.recompute()
        results.append([weight_gradients(net) for _ in range(2)])
    for plain_step, recomputed in zip(*results):
        close(recomputed, plain_step, atol=1e-4)
    if dropout_p:
        assert float(results[0][0][0]) != float(results[0][1][0])


def test_dropout_in_a_graph_is_repeatable(backend):
    ms.set_context(mode=ms.GRAPH_MODE)
    runs = []
    for seed in (3, 3, 4):
        net = ms_flash.nn.FlashAttention(dropout_p=0.4, backend=backend).set_train()
        ms.set_seed(seed)
        runs.append([array(net(Q, K, V)) for _ in range(3)])
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0][0] != runs[0][1]).any() and (runs[0][1] != runs[0][2]).any() and (runs[0][0] != runs[2][0]).any()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(3)
    pynative = [array(flash_attention(Q, K, V, dropout_p=0.4, backend=backend)) for _ in range(3)]
    np.testing.assert_allclose(runs[0], pynative, atol=1e-6)


def test_seed_tensor_varies_a_compiled_step(backend):
    @ms.jit
    def run(seed):
        return flash_attention(Q, K, V, dropout_p=0.4, seed=seed, backend=backend)

    first, again, other = (array(run(ms.Tensor(s, ms.int64))) for s in ([1, 2], [1, 2], [1, 3]))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_vmap(mode, backend):
    stack = ops.stack((Q, Q + 1, Q * 2))

    def run(q, k, v):
        return flash_attention(q, k, v, causal=True, backend=backend)

    def grads(q, k, v):
        return ms.grad(run, (0, 1, 2))(q, k, v)

    out = ms.vmap(run, in_axes=(0, None, None))(stack, K, V)
    got = ms.vmap(grads, in_axes=(0, None, None))(stack, K, V)
    cell = ms.vmap(Attention(backend, causal=True), in_axes=(0, None, None))(stack, K, V)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    expected = ops.stack([run(q, K, V) for q in stack])
    close([out, cell[0]], [expected, expected])
    for i, q in enumerate(stack):
        close([g[i] for g in got], grads(q, K, V))


def test_vmap_with_dropout(kernel_backend):
    """One seed, one mask for all; drawing a seed is a side effect, which MindSpore's vmap refuses."""
    stack = ops.stack((Q, Q + 1))

    def run(q):
        return flash_attention(q, K, V, dropout_p=0.3, seed=4, backend=kernel_backend)

    def draw(q):
        return flash_attention(q, K, V, dropout_p=0.3, backend=kernel_backend)

    close([ms.vmap(run)(stack)], [ops.stack([run(q) for q in stack])])
    with pytest.raises(ValueError, match="vmap"):
        ms.vmap(draw)(stack)


@pytest.mark.parametrize("level", ["O0", "auto", "O1", "O2", "O3"])
def test_amp(level, mode, backend):
    exact = weight_gradients(model(backend))
    net = ms.amp.auto_mixed_precision(model(backend), level, dtype=ms.float16)
    for a, b in zip(weight_gradients(net), exact):
        assert a.dtype == ms.float32
        np.testing.assert_allclose(array(a), array(b), atol=0.02 * max(1, np.abs(array(b)).max()))


def test_cell_in_bfloat16(mode, backend):
    """MindSpore's CPU matrix product has no bfloat16, so a Cell of attention alone."""
    cell = ms_flash.nn.FlashAttention(backend=backend).to_float(ms.bfloat16)
    out = cell(Q, K, V)
    assert out.dtype in (ms.bfloat16, ms.float32)
    np.testing.assert_allclose(array(out), array(ms_flash.nn.FlashAttention(backend=backend)(Q, K, V)), atol=0.02)


def test_copies_of_a_model(mode, backend):
    net = model(backend)
    expected = weight_gradients(net)
    close(weight_gradients(copy.deepcopy(net)), expected)
    cells = nn.CellList([copy.deepcopy(net.first) for _ in range(2)])
    close([cells[1](X)], [net.first(X)])


def test_train_one_step(mode, backend):
    class WithLoss(nn.Cell):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def construct(self, x):
            return (self.net(x) ** 2).mean()

    net = WithLoss(model(backend))
    step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), learning_rate=0.5)).set_train()
    losses = [float(step(X).asnumpy()) for _ in range(5)]
    assert losses[-1] < 0.7 * losses[0] and sorted(losses, reverse=True) == losses


def test_mindir(kernel_backend, tmp_path):
    ms.set_context(mode=ms.GRAPH_MODE)
    net = model(kernel_backend)
    net.set_train(False)
    expected = net(X)
    ms.export(net, X, file_name=str(tmp_path / "model"), file_format="MINDIR")
    loaded = nn.GraphCell(ms.load(str(tmp_path / "model.mindir")))
    close([loaded(X)], [expected])


def test_second_order_in_a_graph(backend):
    ms.set_context(mode=ms.GRAPH_MODE)

    def loss(q):
        return (flash_attention(q, K, V, backend=backend) ** 2).sum()

    def first(q):
        return ms.grad(loss)(q).sum()

    with pytest.raises(RuntimeError, match="second order and forward-mode gradients are not supported"):
        ms.grad(first)(Q)


@pytest.mark.parametrize("position, used", [((0, 1, 2), False), ((0, 4), True)])
def test_unused_bias_gradient_is_not_computed(position, used, kernel_backend, tmp_path):
    """In a graph the gradient of bias is an op of its own, which goes where nobody asks for it."""
    ms.set_context(mode=ms.GRAPH_MODE, save_graphs=1, save_graphs_path=str(tmp_path))
    try:
        ms.grad(Loss(Attention(kernel_backend)), position)(Q, K, V, None, BIAS, None)
    finally:
        ms.set_context(save_graphs=0)
    final = "".join(path.read_text() for path in tmp_path.glob("*_execute_*.ir"))
    assert "MsFlashBwd" in final and ("MsFlashBiasGrad" in final) == used


def test_mode_can_change_between_calls(backend):
    out, _ = plain(backend, Q, K, V)
    for graph in (True, False, True):
        ms.set_context(mode=ms.GRAPH_MODE if graph else ms.PYNATIVE_MODE)
        close(Attention(backend)(Q, K, V), out)


AFTER_OTHER_GRAPHS = """
import numpy as np
import mindspore as ms
from mindspore import Tensor, nn, ops


class LookedUpBias(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table, self.at = nn.Embedding(8, 2), Tensor(np.arange(49).reshape(7, 7) % 8, ms.int32)

    def construct(self, x):
        scores = ops.matmul(x, x.swapaxes(3, 2))
        scores += self.table(self.at).permute(2, 0, 1).expand_dims(0)
        return ops.matmul(ops.softmax(scores.astype(ms.float32), axis=-1), x).sum()


class Indexed(nn.Cell):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Dense(8, 24)

    def construct(self, x):
        batch, heads, length, dim = x.shape
        parts = self.qkv(x).reshape(batch, heads, length, 3, dim).permute(3, 0, 1, 2, 4)
        return (parts[0] * parts[1] * parts[2]).sum()


x = Tensor(np.random.randn(2, 2, 7, 8), ms.float32)
for net in (LookedUpBias(), Indexed()):
    gradient = ms.value_and_grad(net, None, net.trainable_params())

    @ms.jit
    def step(x):
        return gradient(x)

    step(x)

import ms_flash


@ms.jit
def attention(x):
    return ms_flash.flash_attention(x, x, x)


print(attention(x).shape)
"""


def test_graph_after_other_graphs(tmp_path):
    """Graphs without ms_flash in the same process: they once left MindSpore unable to compile those with it."""
    script = tmp_path / "script.py"
    script.write_text(AFTER_OTHER_GRAPHS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "(2, 2, 7, 8)"
