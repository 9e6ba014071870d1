"""More small nets in the shapes of real ones; registered in zoo.NETS like those of zoo.py, which imports this file."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from zoo import DIM, HEADS, IDS, VOCAB, LlamaAttention, PackedAttention, RmsNorm, entry, floats, ids, parameter

import ms_flash

SIZE = DIM // HEADS


def heads(x):
    """(B, S, N * D) -> (B, N, S, D)."""
    return x.reshape(x.shape[0], -1, HEADS, SIZE).transpose(0, 2, 1, 3)


def joined(x):
    """The way back."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], -1, DIM)


class Projected(nn.Cell):
    """Attention in small ops; `hidden`, True = no key, broadcasts to the scores."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Dense(DIM, DIM) for _ in range(4))

    def construct(self, x, memory, hidden):
        q, k, v = heads(self.q(x)), heads(self.k(memory)), heads(self.v(memory))
        scores = ops.matmul(q, k.swapaxes(2, 3)) / math.sqrt(SIZE)
        scores = scores.masked_fill(hidden, -np.inf)
        return self.o(joined(ops.matmul(ops.softmax(scores, -1), v)))


@entry
def qwen2():
    """Biases on query, key and value alone, rotary of half of the channels in interleaved pairs, a sliding window."""
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.tokens, self.norm = nn.Embedding(VOCAB, DIM), RmsNorm()
            self.q, self.kv = nn.Dense(DIM, DIM), nn.Dense(DIM, 2 * 2 * SIZE)
            self.o, self.head = nn.Dense(DIM, DIM, has_bias=False), nn.Dense(DIM, VOCAB, has_bias=False)
            self.frequencies = Tensor(100.0 ** (-np.arange(SIZE // 4) / (SIZE // 4)), ms.float32)

        def rope(self, x):
            angles = ops.arange(x.shape[2]).astype(ms.float32).expand_dims(1) * self.frequencies
            turned, kept = x[..., :SIZE // 2], x[..., SIZE // 2:]
            even, odd = turned[..., ::2], turned[..., 1::2]
            cos, sin = ops.cos(angles).astype(x.dtype), ops.sin(angles).astype(x.dtype)
            turned = ops.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
            return ops.concat((turned.flatten(start_dim=-2), kept), -1)

        def construct(self, ids):
            x = self.tokens(ids)
            h = self.norm(x)
            batch, length, _ = h.shape
            k, v = ops.unstack(self.kv(h).reshape(batch, length, 2, 2, SIZE).transpose(2, 0, 3, 1, 4), axis=0)
            out = ms_flash.flash_attention(self.rope(heads(self.q(h))), self.rope(k), v, causal=True,
                                           window_size=(4, -1))
            return self.head(self.norm(x + self.o(joined(out))))

    return Net(), [ids()], IDS


@entry
def mixture():
    """Mixture of experts: every token goes to its two best of four."""
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.attention, self.norm = LlamaAttention(), RmsNorm()
            self.router = nn.Dense(DIM, 4, has_bias=False)
            self.up, self.down = parameter((4, DIM, 48), "up"), parameter((4, 48, DIM), "down")

        def construct(self, x):
            x = x + self.attention(self.norm(x))[0]
            tokens = self.norm(x).reshape(-1, DIM)
            best, which = ops.topk(ops.softmax(self.router(tokens), -1), 2)
            best = best / best.sum(-1, keepdims=True)
            gates = (ops.one_hot(which, 4, Tensor(1.0), Tensor(0.0)) * best.expand_dims(-1)).sum(1)
            out = ops.matmul(ops.silu(ops.matmul(tokens, self.up)), self.down)
            return x + (out * gates.swapaxes(0, 1).expand_dims(-1)).sum(0).reshape(x.shape)

    return Net(), [floats(2, 9, DIM)], {"x": {0: "batch", 1: "length"}}


@entry
def clip():
    """Two towers; the vector of a text is that of its highest id; the similarity of unit vectors."""
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, DIM, 4, stride=4, pad_mode="valid")
            self.tokens, self.norm = nn.Embedding(VOCAB, DIM), nn.LayerNorm((DIM,))
            self.see, self.read = PackedAttention(), LlamaAttention(flash=False)
            self.scale = parameter((1,), "scale", 1.0)

        def construct(self, image, ids):
            x = self.patches(image)
            x = self.norm(x.reshape(x.shape[0], DIM, -1).swapaxes(1, 2))
            pictures = (x + self.see(x)).mean(1)
            y = self.tokens(ids)
            y = self.norm(y + self.read(y)[0])
            at = ops.broadcast_to(ids.argmax(-1).reshape(-1, 1, 1), (ids.shape[0], 1, DIM))
            texts = ops.gather_elements(y, 1, at).squeeze(1)
            pictures = pictures / ops.norm(pictures, dim=-1, keepdim=True)
            texts = texts / ops.norm(texts, dim=-1, keepdim=True)
            return ops.exp(self.scale) * ops.matmul(pictures, texts.swapaxes(0, 1))

    return Net(), [floats(3, 3, 16, 12), ids()], {"image": {0: "pictures"}, "ids": {0: "texts", 1: "length"}}


@entry
def segformer():
    """Keys and values from a strided convolution of the image, a depthwise convolution inside the MLP."""
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Dense(DIM, DIM) for _ in range(4))
            self.reduce = nn.Conv2d(DIM, DIM, 2, stride=2, pad_mode="valid", has_bias=True)
            self.norm, self.small_norm = nn.LayerNorm((DIM,)), nn.LayerNorm((DIM,))
            self.up, self.down = nn.Dense(DIM, 48), nn.Dense(48, DIM)
            self.mix = nn.Conv2d(48, 48, 3, pad_mode="same", group=48)
            self.gelu = nn.GELU(approximate=False)

        def construct(self, image):
            batch, _, height, width = image.shape
            x = image.reshape(batch, DIM, -1).swapaxes(1, 2)
            h = self.norm(x)
            small = self.reduce(h.swapaxes(1, 2).reshape(batch, DIM, height, width))
            small = self.small_norm(small.reshape(batch, DIM, -1).swapaxes(1, 2))
            scores = ops.matmul(heads(self.q(h)), heads(self.k(small)).swapaxes(2, 3)) * SIZE ** -0.5
            x = x + self.o(joined(ops.matmul(ops.softmax(scores, -1), heads(self.v(small)))))
            h = self.up(self.norm(x)).swapaxes(1, 2).reshape(batch, 48, height, width)
            h = self.gelu(self.mix(h)).reshape(batch, 48, -1).swapaxes(1, 2)
            return x + self.down(h)

    return Net(), [floats(2, DIM, 8, 6)], {"image": {0: "batch"}}


@entry
def roberta():
    """Positions counted over the tokens that are no padding, which the net finds by itself."""
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
            self.norm, self.attention = nn.LayerNorm((DIM,)), Projected()

        def construct(self, ids):
            token = ops.not_equal(ids, 1)
            places = ops.cumsum(token.astype(ms.int32), 1) * token.astype(ms.int32) + 1
            x = self.norm(self.tokens(ids) + self.places(places))
            hidden = ops.logical_not(token).expand_dims(1).expand_dims(1)
            return self.norm(x + self.attention(x, x, hidden))

    return Net(), [ids()], IDS


@entry
def bart():
    """Encoder and decoder in one graph."""
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
            self.norm = nn.LayerNorm((DIM,))
            self.encoder, self.inner, self.cross = Projected(), Projected(), Projected()

        def embedded(self, ids):
            return self.norm(self.tokens(ids) + self.places(ops.arange(ids.shape[1]) + 2))

        def construct(self, source, target):
            padding = ops.equal(source, 1).reshape(source.shape[0], 1, 1, source.shape[1])
            memory = self.embedded(source)
            memory = self.norm(memory + self.encoder(memory, memory, padding))
            x = self.embedded(target)
            at = ops.arange(target.shape[1])
            x = self.norm(x + self.inner(x, x, at.expand_dims(0) > at.expand_dims(1)))
            x = self.norm(x + self.cross(x, memory, padding))
            return ops.matmul(x, self.tokens.embedding_table.T)

    return Net(), [ids(2, 11), ids(2, 6, seed=1)], {"source": {0: "batch", 1: "read"},
                                                    "target": {0: "batch", 1: "written"}}
