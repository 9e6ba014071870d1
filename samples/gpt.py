"""A small character-level GPT in plain MindSpore; its attention is one small cell that can be swapped."""
from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common.initializer import Normal

from ms_flash import flash_attention

HEAD_DIM = 64
ATTENTIONS = {"naive": "MindSpore ops (naive)", "fused": "naive, fused", "flash": "ms_flash op"}


class NaiveAttention(nn.Cell):
    """Causal attention written out with MindSpore's ops: the S x S scores exist in memory.

    query, key and value are (batch, heads, length, head_dim) in `dtype`, and so is the result.
    """

    def __init__(self, length: int, dtype: ms.dtype = ms.float32):
        super().__init__()
        self.scale = HEAD_DIM**-0.5
        self.mask = Tensor(np.triu(np.full((1, 1, length, length), -1e4, np.float32), 1), dtype)

    def construct(self, query, key, value):
        length = query.shape[2]
        mask = self.mask if length == self.mask.shape[2] else self.mask[:, :, :length, :length]
        scores = ops.matmul(query, key.swapaxes(-1, -2)) * self.scale + mask
        return ops.matmul(ops.softmax(scores, axis=-1), value)


class FlashAttention(nn.Cell):
    """The same through ms_flash: no scores in memory, and the masked half is never computed."""

    def construct(self, query, key, value):
        return flash_attention(query, key, value, causal=True)


def make_attention(kind: str, length: int, dtype: ms.dtype = ms.float32) -> nn.Cell:
    """The attention cell of that name in ATTENTIONS. What is fused is the naive one, as it stands."""
    return FlashAttention() if kind == "flash" else NaiveAttention(length, dtype)


class Rotary(nn.Cell):
    """Rotary position embedding of (batch, heads, n, head_dim): pairs of features turn with the position."""

    def __init__(self, length: int):
        super().__init__()
        angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM))
        self.cos = Tensor(np.cos(angles), ms.float32)
        self.sin = Tensor(np.sin(angles), ms.float32)

    def construct(self, x):
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        first, second = ops.chunk(x, 2, -1)
        return ops.concat((first * cos - second * sin, second * cos + first * sin), -1)


class Block(nn.Cell):
    """Pre-norm transformer block: attention, then a GELU MLP, both residual."""

    def __init__(self, dim: int, rotary: Rotary, attention: nn.Cell, dtype: ms.dtype):
        super().__init__()
        self.heads, self.dtype = dim // HEAD_DIM, dtype
        self.norm1 = nn.LayerNorm((dim,))
        # Rotary turns a constant in query and key into a preference for near positions: a fresh model starts by
        # looking at the last few characters, and learns from them several times sooner than from an even average.
        near = Tensor(np.repeat([1, 1, 0], dim), ms.float32)
        self.qkv = nn.Dense(dim, 3 * dim, bias_init=near)
        self.rotary = rotary
        self.attention = attention
        self.proj = nn.Dense(dim, dim)
        self.norm2 = nn.LayerNorm((dim,))
        self.up = nn.Dense(dim, 4 * dim)
        self.gelu = nn.GELU(approximate=False)
        self.down = nn.Dense(4 * dim, dim)

    def attend(self, x):
        batch, length, dim = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, HEAD_DIM).transpose(2, 0, 3, 1, 4)
        query, key, value = self.rotary(qkv[0]), self.rotary(qkv[1]), qkv[2]
        out = self.attention(query.astype(self.dtype), key.astype(self.dtype), value.astype(self.dtype))
        return self.proj(out.astype(x.dtype).swapaxes(1, 2).reshape(batch, length, dim))

    def construct(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class GPT(nn.Cell):
    """Token ids (batch, n) int32, n <= length -> logits (batch, n, vocab) float32."""

    def __init__(self, vocab: int, length: int, dim: int, layers: int, attention: str, dtype: ms.dtype = ms.float32):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim, embedding_table=Normal(0.5))
        rotary = Rotary(length)
        self.blocks = nn.CellList(
            [Block(dim, rotary, make_attention(attention, length, dtype), dtype) for _ in range(layers)])
        self.norm = nn.LayerNorm((dim,))
        self.head = nn.Dense(dim, vocab, has_bias=False)

    def construct(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NextTokenLoss(nn.Cell):
    """(ids, targets), both (batch, n) int32 -> mean cross entropy, a float32 scalar."""

    def __init__(self, net: GPT):
        super().__init__()
        self.net = net
        self.cross_entropy = nn.CrossEntropyLoss()

    def construct(self, ids, targets):
        logits = self.net(ids)
        return self.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
