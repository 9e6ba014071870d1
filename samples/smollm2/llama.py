"""Llama as one writes it in MindSpore, attention in plain ops, keys and values of the past in and out."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from checkpoint import Checkpoint, Config
from mindspore import Parameter, Tensor, nn, ops


def dense(inputs: int, outputs: int) -> nn.Dense:
    return nn.Dense(inputs, outputs, weight_init="zeros", has_bias=False)     # random weights would cost seconds


class RMSNorm(nn.Cell):
    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.weight = Parameter(Tensor(np.ones(width), ms.float32))

    def construct(self, x):
        return x * ops.rsqrt(ops.mean(x * x, -1, True) + self.epsilon) * self.weight


def rotary_tables(config: Config) -> tuple[Tensor, Tensor]:
    """Cosine and sine by which each pair of features turns at each position: (context, head_dim / 2)."""
    frequencies = config.rotary_base ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.outer(np.arange(config.context), frequencies)
    return Tensor(np.cos(angles), ms.float32), Tensor(np.sin(angles), ms.float32)


def rotate(x, cos, sin):
    """x (batch, heads, n, head_dim) with feature i and i + head_dim / 2 turned; cos and sin (n, head_dim / 2)."""
    first, second = ops.chunk(x, 2, -1)
    return ops.concat((first * cos - second * sin, second * cos + first * sin), -1)


def repeat_heads(x, group: int):
    """Each of the (batch, heads, n, head_dim) `group` times, for the query heads that share it."""
    batch, heads, length, head_dim = x.shape
    wide = ops.broadcast_to(x.reshape(batch, heads, 1, length, head_dim), (batch, heads, group, length, head_dim))
    return wide.reshape(batch, heads * group, length, head_dim)


def attend(query, key, value, hidden):
    """softmax(Q Kᵀ / √D) V. query (batch, heads, n, D), key and value with fewer heads; `hidden` (n, m) is masked."""
    group = query.shape[1] // key.shape[1]
    key, value = repeat_heads(key, group), repeat_heads(value, group)
    scores = ops.matmul(query, key.swapaxes(2, 3)) * query.shape[3] ** -0.5
    return ops.matmul(ops.softmax(ops.masked_fill(scores, hidden, float("-inf")), -1), value)


class Attention(nn.Cell):
    """Grouped-query attention. x (batch, n, width), past_key and past_value (batch, kv_heads, m, head_dim) -> the
    same as x, and key and value with m + n."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        self.query = dense(config.width, config.heads * config.head_dim)
        self.key, self.value = (dense(config.width, config.kv_heads * config.head_dim) for _ in range(2))
        self.output = dense(config.heads * config.head_dim, config.width)

    def project(self, x):
        """Query, key and value, (batch, n, heads, head_dim)."""
        shape = (*x.shape[:2], -1, self.head_dim)
        return self.query(x).reshape(shape), self.key(x).reshape(shape), self.value(x).reshape(shape)

    def merge(self, mixed):
        """The result of the heads (batch, n, heads, head_dim), projected."""
        return self.output(mixed.reshape(*mixed.shape[:2], -1))

    def construct(self, x, cos, sin, hidden, past_key, past_value):
        query, key, value = self.project(x)
        query, key = rotate(query.swapaxes(1, 2), cos, sin), rotate(key.swapaxes(1, 2), cos, sin)
        key, value = ops.concat((past_key, key), 2), ops.concat((past_value, value.swapaxes(1, 2)), 2)
        return self.merge(attend(query, key, value, hidden).swapaxes(1, 2)), key, value


class FeedForward(nn.Cell):
    """SwiGLU."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate, self.up = dense(config.width, config.inner), dense(config.width, config.inner)
        self.down = dense(config.inner, config.width)

    def construct(self, x):
        return self.down(ops.silu(self.gate(x)) * self.up(x))


class Block(nn.Cell):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config.width, config.epsilon), Attention(config)
        self.feed_norm, self.feed = RMSNorm(config.width, config.epsilon), FeedForward(config)

    def construct(self, x, cos, sin, hidden, past_key, past_value):
        mixed, key, value = self.attention(self.attention_norm(x), cos, sin, hidden, past_key, past_value)
        x = x + mixed
        return x + self.feed(self.feed_norm(x)), key, value


class Llama(nn.Cell):
    """ids (batch, n) int32 and past, a tuple of (batch, kv_heads, m, head_dim) key and value per block -> logits
    (batch, n, vocabulary) and a tuple like past with m + n.

    Args:
        config (Config): Its sizes.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width, embedding_table="zeros")
        self.blocks = nn.CellList([Block(config) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width, config.epsilon)
        self.project = ops.MatMul(transpose_b=True)
        self.cos, self.sin = rotary_tables(config)

    def logits(self, x):
        """Of states (batch, n, width); the embedding is the last projection, too."""
        flat = self.project(self.norm(x).reshape(-1, self.config.width), self.embedding.embedding_table)
        return flat.reshape(*x.shape[:2], self.config.vocabulary)

    def read(self, ids, past):
        """States (batch, n, width), and keys and values."""
        start, length = past[0].shape[2], ids.shape[1]
        end = start + length
        cos, sin = self.cos[start:end], self.sin[start:end]
        hidden = ops.arange(end) > ops.arange(start, end).reshape(length, 1)
        x, present = self.embedding(ids), ()
        for i, block in enumerate(self.blocks):
            x, key, value = block(x, cos, sin, hidden, past[2 * i], past[2 * i + 1])
            present += (key, value)
        return x, present

    def construct(self, ids, past):
        x, present = self.read(ids, past)
        return self.logits(x), present

    def no_past(self, batch: int = 1) -> tuple[Tensor, ...]:
        """Keys and values of a text that has not begun."""
        shape = (batch, self.config.kv_heads, 0, self.config.head_dim)
        return tuple(ops.zeros(shape, ms.float32) for _ in range(2 * self.config.layers))


def load(checkpoint: Checkpoint) -> Llama:
    """The network with the weights of `checkpoint`, for inference."""
    net, weights = Llama(checkpoint.config), checkpoint.weights()
    for name, parameter in net.parameters_dict().items():
        parameter.set_data(Tensor(weights.pop(name)))
        parameter.requires_grad = False
    if weights:
        raise ValueError(f"the network has no place for {', '.join(weights)}")
    return net.set_train(False)
