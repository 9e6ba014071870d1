"""A net of one attention layer, written with MindSpore's own ops, for tests of everything but the matching."""

from __future__ import annotations

import zlib

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

WIDTH, HEADS, LENGTH = 12, 3, 7


class Attention(nn.Cell):
    """Causal self-attention with a residual, dropout on its weights if `dropout` is not 0."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.split, self.scale = (LENGTH, HEADS, WIDTH // HEADS), (WIDTH // HEADS) ** 0.5   # AMP O1 sees no globals
        self.query, self.key, self.value, self.out = (nn.Dense(WIDTH, WIDTH) for _ in range(4))
        self.mask = Tensor(np.triu(np.full((1, 1, LENGTH, LENGTH), -np.inf, np.float32), 1))
        self.dropout = nn.Dropout(p=dropout) if dropout else None

    def heads(self, x):
        return x.reshape((x.shape[0],) + self.split).transpose(0, 2, 1, 3)

    def construct(self, x):
        query, key, value = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        scores = ops.matmul(query, key.swapaxes(-1, -2)) / self.scale
        weights = ops.softmax(scores + self.mask.astype(scores.dtype), -1)
        if self.dropout is not None:
            weights = self.dropout(weights)
        return x + self.out(ops.matmul(weights, value).transpose(0, 2, 1, 3).reshape(x.shape))


class Loss(nn.Cell):
    """Mean square of what the attention makes of x, less y."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.dtype = attention, ms.float32

    def construct(self, x, y):
        return ((self.attention(x) - y).astype(self.dtype) ** 2).mean()


def build(seed=0, dropout=0.0):
    """A Loss with random weights that depend on the seed alone."""
    rng = np.random.default_rng(seed)
    net = Loss(Attention(dropout))
    for parameter in net.trainable_params():
        parameter.set_data(Tensor(rng.normal(0, 0.4, parameter.shape).astype(np.float32)))
    return net


def batch(rng, size=2):
    """x and y, random."""
    return tuple(Tensor(rng.normal(size=(size, LENGTH, WIDTH)).astype(np.float32)) for _ in range(2))


def fresh(request):
    """A generator of its own for every test, the same in every run of it."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
