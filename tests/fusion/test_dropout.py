"""Dropout on the weights: other numbers than MindSpore's, the same distribution, one mask per step and site."""

from __future__ import annotations

import contextlib
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from dropouts import DROPOUTS, RATE, Dropped
from mindspore import nn, ops
from routes import inputs

import ms_flash


class Twice(nn.Cell):
    """Two sites with equal parameters: their difference shows whether they drop alike."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Dropped(), Dropped()
        for one, other in zip(self.first.get_parameters(), self.second.get_parameters()):
            other.set_data(one.value())

    def construct(self, x, context, pad):
        return self.first(x, context, pad) - self.second(x, context, pad)


class Recomputed(nn.Cell):
    """Attention that the backward pass computes again."""

    def __init__(self):
        super().__init__()
        self.attention = Dropped()
        self.attention.recompute()

    def construct(self, x, context, pad):
        return self.attention(x, context, pad)


class Loss(nn.Cell):
    """A number to differentiate."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, x, context, pad):
        out = self.net(x, context, pad)
        return (out * ops.cos(out)).sum()


def steps(cls, seed, count=1, shift=None, fused=True, **options):
    """Losses of some steps of a fresh model and graph, the gradients of the last, and the sites."""
    ms.set_seed(7)
    np.random.seed(7)
    net = Loss(cls())
    net.set_train()
    for parameter, change in zip(net.trainable_params(), shift or ()):
        parameter.set_data(ms.Tensor(parameter.asnumpy() + change))
    ms.set_seed(seed)
    ms.set_context(mode=ms.GRAPH_MODE)
    gradient = ms.value_and_grad(net, None, net.trainable_params())

    @ms.jit
    def step(x, context, pad):
        return gradient(x, context, pad)

    losses = []
    with ms_flash.fusion(**options) if fused else contextlib.nullcontext() as report:
        for _ in range(count):
            loss, grads = step(*inputs())
            losses.append(float(loss))
    return losses, [grad.asnumpy() for grad in grads], report.sites if fused else []


@pytest.mark.parametrize("cls", DROPOUTS)
def test_fused(cls):
    losses, _, sites = steps(cls, 1, 3)
    assert [site["fused"] for site in sites] == [True]
    assert sites[0]["dropout"] == pytest.approx(RATE)
    assert len(set(losses)) == 3            # every step drops others


def test_repeatable_after_set_seed():
    assert steps(Dropped, 1, 2)[0] == steps(Dropped, 1, 2)[0] != steps(Dropped, 2, 2)[0]


def test_sites_drop_differently():
    losses, _, sites = steps(Twice, 1)
    assert [site["fused"] for site in sites] == [True, True]
    assert abs(losses[0]) > 1e-3


@pytest.mark.parametrize("memory", ["keep", "recompute"])
@pytest.mark.parametrize("cls", [Dropped, Twice])
def test_block_level_drops_what_layout_drops(cls, memory):
    losses, grads, _ = steps(cls, 1, 2, level="layout")
    block_losses, block_grads, sites = steps(cls, 1, 2, level="block", memory=memory)
    assert {site["level"] for site in sites} == {"block"}
    np.testing.assert_allclose(block_losses, losses, rtol=1e-5, atol=1e-5)
    largest = max(np.abs(grad).max() for grad in grads)
    for block, grad in zip(block_grads, grads):
        np.testing.assert_allclose(block, grad, rtol=1e-5, atol=1e-5 * largest)


def test_switched_off():
    _, _, sites = steps(Dropped, 1, dropout=False)
    assert [site["code"] for site in sites] == ["dropout_off"]


@pytest.mark.parametrize("options", [{}, {"dropout": False, "level": "block", "memory": "recompute"}])
@pytest.mark.parametrize("cls", DROPOUTS)
def test_rate_zero_is_no_dropout(cls, options):
    """Fused without a draw, the same numbers as written, also where fusion of dropout is switched off."""
    losses, grads, _ = steps(partial(cls, rate=0.0), 1, fused=False)
    fused_losses, fused_grads, sites = steps(partial(cls, rate=0.0), 1, **options)
    assert [(site["fused"], site["dropout"] or 0.0) for site in sites] == [(True, 0.0)]
    np.testing.assert_allclose(fused_losses, losses, rtol=1e-5, atol=1e-4)
    largest = max(np.abs(grad).max() for grad in grads)
    for fused, grad in zip(fused_grads, grads):
        np.testing.assert_allclose(fused, grad, rtol=1e-4, atol=1e-5 * largest)


def test_gradient_is_that_of_the_drawn_mask():
    """Along a random direction, against the difference of two losses under the same seed."""
    rng = np.random.default_rng()
    _, grads, _ = steps(Dropped, 5)
    direction = [rng.normal(size=grad.shape).astype(np.float32) for grad in grads]
    slope = sum(float((grad * d).sum()) for grad, d in zip(grads, direction))
    size, scale = 1e-3, sum(float(np.abs(grad * d).sum()) for grad, d in zip(grads, direction))
    high, low = (steps(Dropped, 5, shift=[sign * size * d for d in direction])[0][0] for sign in (1, -1))
    assert abs((high - low) / (2 * size) - slope) < 2e-3 * scale


def test_recomputed_with_the_mask_of_the_forward():
    losses, grads, _ = steps(Dropped, 3)
    again, recomputed, sites = steps(Recomputed, 3)
    assert [(site["fused"], site["kind"]) for site in sites] == [(True, "forward"), (True, "forward and backward")]
    assert again == losses
    for one, other in zip(recomputed, grads):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(grads[0]).max())
