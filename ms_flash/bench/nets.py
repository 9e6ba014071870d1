"""Training steps of plain MindSpore models that know nothing of ms_flash."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from .cases import Net


class _Attention(nn.Cell):
    def __init__(self, net: Net):
        super().__init__()
        self.heads, self.head_dim, self.packed = net.heads, net.width // net.heads, net.packed
        self.attention = net.attention
        if net.packed:
            self.qkv = nn.Dense(net.width, 3 * net.width)
        else:
            self.query, self.key, self.value = (nn.Dense(net.width, net.width) for _ in range(3))
        self.output = nn.Dense(net.width, net.width)
        self.later = None
        if net.mask == "causal":
            self.later = Tensor(np.triu(np.ones((1, 1, net.length, net.length), bool), 1))

    def split(self, x):
        batch, length, _ = x.shape
        return x.reshape(batch, length, self.heads, self.head_dim).transpose(0, 2, 1, 3)

    def construct(self, x, padding):
        if self.packed:
            query, key, value = ops.chunk(self.qkv(x), 3, axis=-1)
        else:
            query, key, value = self.query(x), self.key(x), self.value(x)
        if not self.attention:
            return self.output(query + key + value)     # a use of all three, or their projections would be left out too
        query, key, value = self.split(query), self.split(key), self.split(value)
        scores = ops.matmul(query, key.swapaxes(-1, -2)) * self.head_dim**-0.5
        if self.later is not None:
            scores = ops.masked_fill(scores, self.later, -3.4028234663852886e38)
        if padding is not None:
            scores = scores + padding
        mixed = ops.matmul(ops.softmax(scores, -1), value)
        return self.output(mixed.transpose(0, 2, 1, 3).reshape(x.shape))


class _Layer(nn.Cell):
    def __init__(self, net: Net):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((net.width,)), nn.LayerNorm((net.width,))
        self.attention = _Attention(net)
        self.up, self.down = nn.Dense(net.width, 4 * net.width), nn.Dense(4 * net.width, net.width)

    def construct(self, x, padding):
        x = x + self.attention(self.norm1(x), padding)
        return x + self.down(ops.gelu(self.up(self.norm2(x))))


class _Loss(nn.Cell):
    """Mean square of the difference to a target, of hidden states sent through all layers."""

    def __init__(self, net: Net):
        super().__init__()
        self.layers = nn.CellList([_Layer(net) for _ in range(net.layers)])
        self.padded = net.mask == "padding"

    def construct(self, x, tokens, target):
        padding = None
        if self.padded:
            padding = (1.0 - tokens) * -10000.0
        for layer in self.layers:
            x = layer(x, padding)
        return ops.square(x - target).mean()


def training_step(net: Net):
    """A function that makes one training step (AdamW), compiled at its first call, and returns the loss."""
    rng = np.random.default_rng(0)
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    loss = _Loss(net)
    for parameter in loss.get_parameters():   # the same for every implementation
        if parameter.ndim == 2:
            parameter.set_data(Tensor(rng.standard_normal(parameter.shape, np.float32) * parameter.shape[1] ** -0.5))
    x, target = (Tensor(rng.standard_normal((net.batch, net.length, net.width), np.float32)) for _ in range(2))
    lengths = rng.integers(net.length // 2, net.length + 1, net.batch)
    tokens = Tensor((np.arange(net.length) < lengths[:, None])[:, None, None].astype(np.float32))
    step = nn.TrainOneStepCell(loss, nn.AdamWeightDecay(loss.trainable_params(), learning_rate=1e-4))
    step.set_train()
    return lambda: float(step(x, tokens, target).asnumpy())
