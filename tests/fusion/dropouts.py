"""Attention with dropout on the weights, and attention that is recomputed in the backward pass."""

from __future__ import annotations

import math

from mindspore import mint, nn, ops
from spellings import BATCH, DIM, HEADS, LENGTH, Projections

RATE = 0.25


class Dropped(Projections):
    """nn.Dropout."""

    def __init__(self, rate=RATE):
        super().__init__()
        self.drop = nn.Dropout(p=rate)

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) / math.sqrt(DIM)
        scores = scores.masked_fill(pad.reshape(BATCH, 1, 1, LENGTH), float("-inf"))
        weights = self.drop(ops.softmax(scores, axis=-1))
        return self.o(self.merge(ops.matmul(weights, self.split(self.v(x)))))


class DroppedByFunction(Dropped):
    """ops.dropout."""

    def __init__(self, rate=RATE):
        super().__init__()
        self.drop = Drop(rate)


class Drop(nn.Cell):
    """ops.dropout, when training."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def construct(self, x):
        return ops.dropout(x, p=self.rate, training=self.training)


class DroppedByPrimitive(Dropped):
    """ops.Dropout, whose argument is what is kept."""

    def __init__(self, rate=RATE):
        super().__init__()
        self.primitive = ops.Dropout(keep_prob=1 - rate)

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) / math.sqrt(DIM)
        weights, _ = self.primitive(ops.softmax(scores, axis=-1))
        return self.o(self.merge(ops.matmul(weights, self.split(self.v(x)))))


class DroppedByMint(Dropped):
    """mint.nn.Dropout, on three dimensions."""

    def __init__(self, rate=RATE):
        super().__init__()
        self.drop = mint.nn.Dropout(p=rate)

    def construct(self, x, context, pad):
        q = self.split(self.q(x)).reshape(BATCH * HEADS, LENGTH, DIM)
        k = self.split(self.k(x)).reshape(BATCH * HEADS, LENGTH, DIM)
        v = self.split(self.v(x)).reshape(BATCH * HEADS, LENGTH, DIM)
        weights = self.drop(mint.nn.functional.softmax(mint.bmm(q, mint.transpose(k, 1, 2)) * 0.3, dim=-1))
        return self.o(self.merge(mint.bmm(weights, v).reshape(BATCH, HEADS, LENGTH, DIM)))


DROPOUTS = [Dropped, DroppedByFunction, DroppedByPrimitive, DroppedByMint]
