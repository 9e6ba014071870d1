"""What looks like attention and is not, or may not be fused: one cell each, with the code of the expected reason."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from spellings import BATCH, DIM, HEADS, HIDDEN, LENGTH, Projections, causal

NEGATIVES = []


def negative(*codes):
    """Registers a cell with the reason codes of its sites, in their order."""
    def register(cls):
        NEGATIVES.append((cls.__name__, cls, codes))
        return cls
    return register


class Attention(Projections):
    """Attention whose pieces the cells below replace."""

    def scores(self, x, pad):
        """(B, N, S, S)."""
        return ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) / math.sqrt(DIM)

    def weights(self, scores, x, pad):
        """Softmax, or what stands for it."""
        return ops.softmax(scores, axis=-1)

    def output(self, weights, x, pad):
        """Product with the values, and the projection."""
        return self.o(self.merge(ops.matmul(weights, self.split(self.v(x)))))

    def construct(self, x, context, pad):
        return self.output(self.weights(self.scores(x, pad), x, pad), x, pad)


@negative("softmax_axis")
class AxisOfQueries(Attention):
    """Softmax over the queries."""

    def weights(self, scores, x, pad):
        return ops.softmax(scores, axis=2)


@negative("softmax_axis")
class AxisOfHeads(Attention):
    """Softmax over the heads."""

    def weights(self, scores, x, pad):
        return ops.softmax(scores, axis=1)


@negative("softmax_axis")
class AxisOfBatch(Attention):
    """Softmax over the batch, given as a negative axis."""

    def weights(self, scores, x, pad):
        return nn.Softmax(axis=-4)(scores)


@negative("scale_not_constant")
class Temperature(Attention):
    """XCA and others: a learned temperature per head."""

    def __init__(self):
        super().__init__()
        self.temperature = Parameter(Tensor(np.full((HEADS, 1, 1), 0.7), ms.float32))

    def scores(self, x, pad):
        return super().scores(x, pad) * self.temperature


@negative("scale_not_constant")
class CrossCovariance(Attention):
    """XCA: attention over channels, normalised, with a temperature."""

    def __init__(self):
        super().__init__()
        self.temperature = Parameter(Tensor(np.ones((HEADS, 1, 1)), ms.float32))

    def construct(self, x, context, pad):
        q = self.split(self.q(x)).swapaxes(-1, -2)
        k = self.split(self.k(x)).swapaxes(-1, -2)
        q = q / ops.sqrt((q * q).sum(-1, keepdims=True) + 1e-6)
        k = k / ops.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        weights = ops.softmax(ops.matmul(q, k.swapaxes(-1, -2)) * self.temperature, axis=-1)
        out = ops.matmul(weights, self.split(self.v(x)).swapaxes(-1, -2)).swapaxes(-1, -2)
        return self.o(self.merge(out))


@negative("scale_not_constant")
class ClippedTemperature(Attention):
    """SwinV2: cosine scores times the exponential of a clipped parameter."""

    def __init__(self):
        super().__init__()
        self.logit_scale = Parameter(Tensor(np.full((HEADS, 1, 1), 2.0), ms.float32))

    def scores(self, x, pad):
        scale = ops.exp(ops.clamp(self.logit_scale, max=math.log(100.0)))
        return super().scores(x, pad) * scale


@negative("scale_not_constant")
class DivisorFromInput(Attention):
    """Divided by a number that the input decides."""

    def scores(self, x, pad):
        return super().scores(x, pad) / (1.0 + ops.abs(x).mean())


@negative("multiplied_mask")
class MultipliedMask(Attention):
    """Scores times a mask of zeros and ones."""

    def scores(self, x, pad):
        return super().scores(x, pad) * ops.logical_not(pad).astype(ms.float32).reshape(BATCH, 1, 1, LENGTH)


@negative("multiplied_mask")
class Gpt1Mask(Attention):
    """w * b - 10000 * (1 - b) with a constant triangle."""

    def __init__(self):
        super().__init__()
        self.tril = Tensor(1.0 + causal(-1.0), ms.float32)

    def scores(self, x, pad):
        return super().scores(x, pad) * self.tril + -1e4 * (1 - self.tril)


@negative("probs_used")
class ReturnedWeights(Attention):
    """The weights are a part of the result."""

    def construct(self, x, context, pad):
        weights = self.weights(self.scores(x, pad), x, pad)
        return self.output(weights, x, pad).sum() + (weights * weights).sum()


@negative("probs_used")
class WeightsOfTwoProducts(Attention):
    """The weights multiply two tensors of values."""

    def output(self, weights, x, pad):
        return super().output(weights, x, pad) + self.merge(ops.matmul(weights, self.split(self.k(x))))


@negative("probs_used")
class AveragedWeights(Attention):
    """nn.MultiheadAttention with need_weights: the mean over the heads is returned too."""

    def construct(self, x, context, pad):
        weights = self.weights(self.scores(x, pad), x, pad)
        return self.output(weights, x, pad) * weights.mean(axis=1).max()


@negative("scores_used")
class ScoresInLoss(Attention):
    """The scores are regularised."""

    def construct(self, x, context, pad):
        scores = self.scores(x, pad)
        return self.output(self.weights(scores, x, pad), x, pad).sum() + 0.1 * ops.square(scores).sum()


@negative("scores_used")
class MaskedScoresUsed(Attention):
    """So are the masked scores."""

    def construct(self, x, context, pad):
        scores = self.scores(x, pad).masked_fill(pad.reshape(BATCH, 1, 1, LENGTH), -3.0)
        return self.output(self.weights(scores, x, pad), x, pad).sum() + ops.sin(scores).sum()


@negative("dropout_on_scores")
class DropoutOnScores(Attention):
    """Dropout before the softmax."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(p=0.5)

    def scores(self, x, pad):
        return self.drop(super().scores(x, pad))


@negative("probs_modified")
class HeadMask(Attention):
    """BERT's head_mask multiplies the weights."""

    def __init__(self):
        super().__init__()
        self.head_mask = Tensor(np.array([1.0, 0.0, 0.5]).reshape(1, HEADS, 1, 1), ms.float32)

    def weights(self, scores, x, pad):
        return super().weights(scores, x, pad) * self.head_mask


@negative("scores_modified")
class TalkingHeads(Attention):
    """CaiT: heads are mixed between product and softmax."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Dense(HEADS, HEADS)

    def scores(self, x, pad):
        return self.mix(super().scores(x, pad).transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@negative("probs_modified")
class TalkingHeadsAfter(Attention):
    """The other half of CaiT: heads are mixed after the softmax."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Dense(HEADS, HEADS)

    def weights(self, scores, x, pad):
        return self.mix(super().weights(scores, x, pad).transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


@negative("scores_modified")
class RelativeShift(Attention):
    """Transformer-XL: a second product, shifted by padding and reshaping."""

    def __init__(self):
        super().__init__()
        self.table = Parameter(Tensor(np.random.default_rng(6).normal(size=(1, HEADS, DIM, LENGTH)), ms.float32))

    def scores(self, x, pad):
        moved = ops.matmul(self.split(self.q(x)), self.table)
        moved = ops.concat((ops.zeros((BATCH, HEADS, LENGTH, 1), ms.float32), moved), -1)
        moved = moved.reshape(BATCH, HEADS, LENGTH + 1, LENGTH)[:, :, 1:]
        return (super().scores(x, pad) + moved) * 0.5


@negative("not_attention")
class FactorAttention(Attention):
    """CoaT: softmax of the keys alone."""

    def construct(self, x, context, pad):
        keys = ops.softmax(self.split(self.k(x)), axis=-1)
        return self.o(self.merge(ops.matmul(self.split(self.q(x)), ops.matmul(keys.swapaxes(-1, -2),
                                                                             self.split(self.v(x))))))


@negative("not_attention")
class Classifier(Attention):
    """A softmax that is the result."""

    def construct(self, x, context, pad):
        return ops.softmax(self.q(x), axis=-1)


@negative("not_attention")
class MixtureGate(Attention):
    """Experts weighed by a softmax of a projection."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Dense(HIDDEN, 3)

    def construct(self, x, context, pad):
        gate = ops.softmax(self.gate(x), axis=-1)
        experts = ops.stack((self.q(x), self.k(x), self.v(x)), 2)
        return ops.matmul(gate.expand_dims(2), experts)


@negative("not_attention")
class OutlookAttention(Attention):
    """VOLO: the weights are projected from the input, without a product."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Dense(HIDDEN, HEADS * 9)

    def construct(self, x, context, pad):
        weights = ops.softmax(self.attn(x).reshape(BATCH, LENGTH, HEADS, 3, 3), axis=-1)
        values = self.v(x).reshape(BATCH, LENGTH, HEADS, 1, DIM).broadcast_to((BATCH, LENGTH, HEADS, 3, DIM))
        return ops.matmul(weights, values).sum(3).reshape(BATCH, LENGTH, HIDDEN)


@negative("scores_modified")
class ClampedScores(Attention):
    """OPT: scores are kept above a lowest number by a maximum."""

    def scores(self, x, pad):
        return ops.maximum(super().scores(x, pad), Tensor(-0.3, ms.float32))


@negative("scores_modified")
class ReluScores(Attention):
    """A nonlinearity that the kernel does not have."""

    def scores(self, x, pad):
        return ops.relu(super().scores(x, pad))


@negative("scores_modified")
class CapAfterMask(Attention):
    """Scores are capped after the bias, which makes it another function."""

    def scores(self, x, pad):
        bias = pad.astype(ms.float32).reshape(BATCH, 1, 1, LENGTH) * -2.0
        return ops.tanh(super().scores(x, pad) + bias) * 5.0


@negative("mask_order")
class BiasAfterMask(Attention):
    """A bias on top of scores that were masked with a finite number."""

    def scores(self, x, pad):
        bias = x.sum(-1).reshape(BATCH, 1, 1, LENGTH)
        return super().scores(x, pad).masked_fill(pad.reshape(BATCH, 1, 1, LENGTH), -3.0) + bias


@negative("mask_order")
class TwoFills(Attention):
    """Two masks with different finite numbers."""

    def scores(self, x, pad):
        mask = pad.reshape(BATCH, 1, 1, LENGTH)
        other = (x.sum(-1) > 0).reshape(BATCH, 1, LENGTH, 1)
        return super().scores(x, pad).masked_fill(mask, -3.0).masked_fill(other, -1.0)


@negative("fill_not_constant")
class FillFromInput(Attention):
    """The masked scores get a number from the input."""

    def scores(self, x, pad):
        return super().scores(x, pad).masked_fill(pad.reshape(BATCH, 1, 1, LENGTH), x.min())


@negative("fill_not_constant")
class SelectOfTwoScores(Attention):
    """where() between two kinds of scores."""

    def scores(self, x, pad):
        scores = super().scores(x, pad)
        return ops.where(pad.reshape(BATCH, 1, 1, LENGTH), ops.abs(x).sum() * 0.01, scores)


@negative("rows_not_kept")
class TransposedScores(Attention):
    """Scores of keys against queries, transposed."""

    def scores(self, x, pad):
        return ops.matmul(self.split(self.k(x)), self.split(self.q(x)).swapaxes(-1, -2)).swapaxes(-1, -2) * 0.4


@negative("rows_not_kept")
class WindowedScores(Attention):
    """Part of the keys is cut away after the product."""

    def scores(self, x, pad):
        return super().scores(x, pad)[:, :, :, :5]

    def output(self, weights, x, pad):
        return self.merge(ops.matmul(weights, self.split(self.v(x))[:, :, :5]))


@negative("probs_modified")
class Renormalised(Attention):
    """External attention: the weights are divided by their sum over the queries."""

    def weights(self, scores, x, pad):
        weights = super().weights(scores, x, pad)
        return weights / (1e-9 + weights.sum(axis=2, keepdims=True))


@negative("probs_modified")
class MaskedAfter(Attention):
    """Weights are masked after the softmax, scores are not."""

    def weights(self, scores, x, pad):
        return super().weights(scores, x, pad).masked_fill(pad.reshape(BATCH, 1, 1, LENGTH), 0.0)


@negative("scores_modified")
class SquaredScores(Attention):
    """Scores are multiplied by themselves."""

    def scores(self, x, pad):
        scores = super().scores(x, pad)
        return scores * scores


@negative("scores_modified")
class ScoresOfOneProduct(Attention):
    """Scores and what a nonlinearity makes of them, added up."""

    def scores(self, x, pad):
        scores = super().scores(x, pad)
        return scores + scores.masked_fill(pad.reshape(BATCH, 1, 1, LENGTH), -2.0)


@negative("bias_repeats")
class BiasBringsHeads(Attention):
    """One query and key head; the heads come with a learned bias."""

    def __init__(self):
        super().__init__()
        self.bias = Parameter(Tensor(np.random.default_rng(8).normal(size=(1, HEADS, LENGTH, LENGTH)), ms.float32))

    def scores(self, x, pad):
        return ops.matmul(self.q(x), self.k(x).swapaxes(-1, -2)).expand_dims(1) * 0.2 + self.bias


@negative("bias_repeats")
class MaskBringsHeads(Attention):
    """The same with a mask of every head."""

    def __init__(self):
        super().__init__()
        mask = np.random.default_rng(9).random((1, HEADS, LENGTH, LENGTH)) < 0.3
        mask[..., 0] = False
        self.mask = Tensor(mask)

    def scores(self, x, pad):
        scores = ops.matmul(self.q(x), self.k(x).swapaxes(-1, -2)).expand_dims(1)
        return ops.where(self.mask, Tensor(-1e9, ms.float32), scores)


@negative("weights_right")
class ValuesOnTheLeft(Attention):
    """v @ softmax: the sum runs over the queries."""

    def output(self, weights, x, pad):
        out = ops.matmul(self.split(self.v(x)).swapaxes(-1, -2), weights)
        return self.o(self.merge(out.swapaxes(-1, -2)))
