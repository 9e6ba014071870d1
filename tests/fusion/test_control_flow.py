"""Attention in loops and branches of the graph: fused in the graph it is in, never across."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from small_net import Attention, batch, fresh

import ms_flash


@pytest.fixture
def rng(request):
    ms.set_context(mode=ms.GRAPH_MODE)
    return fresh(request)


class Loop(nn.Cell):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def construct(self, x, count):
        i = 0 * count
        while i < count:
            x = self.attention(x)
            i = i + 1
        return x.sum()


class WeightsInABranch(nn.Cell):
    """The attention weights are needed by a branch: they have to exist."""

    def construct(self, query, flag):
        weights = ops.softmax(ops.matmul(query, query.swapaxes(-1, -2)), -1)
        out = ops.matmul(weights, query)
        if flag > 0:
            out = out + weights.sum()
        return out


def compare(net, *inputs):
    """As written and fused, value and gradients."""
    step = ms.value_and_grad(net, 0, net.trainable_params() or None)

    def run():
        value, grads = step(*inputs)
        flat = [value]
        for grad in grads if isinstance(grads, tuple) else (grads,):
            flat += grad if isinstance(grad, tuple) else [grad]
        return [x.asnumpy() for x in flat]

    expected = run()
    with ms_flash.fusion() as report:
        got = run()
    largest = max(np.abs(x).max() for x in expected)
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * largest)
    return report


def test_a_loop_forward(rng):
    net, (x, _) = Loop(), batch(rng)
    expected = net(x, Tensor(3, ms.int32)).asnumpy()
    with ms_flash.fusion() as report:
        got = net(x, Tensor(3, ms.int32)).asnumpy()
    assert len(report.fused) == 1 and report.compiled == 1
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_loop_with_its_gradient(rng):
    report = compare(Loop(), batch(rng)[0], Tensor(2, ms.int32))
    assert report.sites


def test_weights_that_a_branch_needs(rng):
    query = Tensor(rng.normal(size=(2, 5, 4)).astype(np.float32))
    report = compare(WeightsInABranch(), query, Tensor(1, ms.int32))
    assert not report.fused and report.left
