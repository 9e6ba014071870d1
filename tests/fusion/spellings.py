"""Attention as public MindSpore models write it: one small cell per spelling.

Every cell takes x (B, S, E), context (B, C, E) and pad (B, S), True where a key is padding, and returns a Tensor.
`SPELLINGS` holds (name, class, mask kind of the report); the kind is part of what is tested.
"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

BATCH, LENGTH, CONTEXT, HIDDEN, HEADS = 2, 11, 7, 24, 3
DIM = HIDDEN // HEADS
SPELLINGS = []


def spelling(mask="none", sites=1, **options):
    """Registers a cell with the kind of mask that its sites should be reported with."""
    def register(cls):
        SPELLINGS.append((cls.__name__, cls, {"mask": mask, "sites": sites, **options}))
        return cls
    return register


def causal(fill, queries=LENGTH, keys=LENGTH):
    """(queries, keys), `fill` where a key comes after the query, else 0."""
    return np.triu(np.full((queries, keys), fill, np.float32), 1 + keys - queries)


class Projections(nn.Cell):
    """query, key, value and output projections, and the usual head split."""

    def __init__(self, heads=HEADS, kv_heads=HEADS, bias=True):
        super().__init__()
        self.q = nn.Dense(HIDDEN, heads * DIM, has_bias=bias)
        self.k = nn.Dense(HIDDEN, kv_heads * DIM, has_bias=bias)
        self.v = nn.Dense(HIDDEN, kv_heads * DIM, has_bias=bias)
        self.o = nn.Dense(heads * DIM, HIDDEN, has_bias=bias)

    def split(self, x, heads=HEADS):
        """(B, S, N*D) to (B, N, S, D)."""
        batch, length, _ = x.shape
        return x.reshape(batch, length, heads, DIM).transpose(0, 2, 1, 3)

    def merge(self, x):
        """(B, N, S, D) to (B, S, N*D)."""
        batch, heads, length, dim = x.shape
        return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * dim)


@spelling("bias")
class Bert(Projections):
    """transpose_for_scores, division by sqrt(head_dim), extended mask (1 - m) * -10000."""

    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(axis=-1)
        self.dropout = nn.Dropout(p=0.0)

    def construct(self, x, context, pad):
        mask = (1.0 - ops.logical_not(pad).astype(x.dtype)).expand_dims(1).expand_dims(1) * -10000.0
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2))
        scores = scores / ops.sqrt(Tensor(float(DIM), ms.float32)).astype(scores.dtype)
        probs = self.dropout(self.softmax(scores + mask))
        return self.o(self.merge(ops.matmul(probs, self.split(self.v(x)))))


@spelling("bias")
class BertPrimitives(Projections):
    """The model zoo's BERT: BatchMatMul with a flag, Mul by a constant Tensor, Sub and Mul for the mask."""

    def __init__(self):
        super().__init__()
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.context = ops.BatchMatMul()
        self.multiply, self.add, self.sub = ops.Mul(), ops.Add(), ops.Sub()
        self.softmax = nn.Softmax()
        self.scale = Tensor([1.0 / math.sqrt(DIM)], ms.float32)
        self.low = Tensor([-10000.0], ms.float32)

    def construct(self, x, context, pad):
        scores = self.scores(self.split(self.q(x)), self.split(self.k(x)))
        scores = self.multiply(scores, self.scale.astype(scores.dtype))
        keep = ops.expand_dims(ops.expand_dims(ops.cast(ops.logical_not(pad), scores.dtype), 1), 1)
        adder = self.multiply(self.sub(Tensor([1.0], ms.float32).astype(scores.dtype), keep),
                              self.low.astype(scores.dtype))
        probs = self.softmax(self.add(adder, scores))
        return self.o(self.merge(self.context(probs, self.split(self.v(x)))))


@spelling("bias")
class PanGu(Projections):
    """Key born transposed, both operands divided by the fourth root, softmax over a 3-D reshape."""

    def __init__(self):
        super().__init__()
        self.factor = Tensor(math.sqrt(math.sqrt(DIM)), ms.float32)
        self.softmax_3d = ops.Softmax(-1)
        self.batch_matmul = ops.BatchMatMul()

    def construct(self, x, context, pad):
        batch, length, _ = x.shape
        query = ops.transpose(self.q(x).reshape(batch, length, HEADS, DIM), (0, 2, 1, 3))
        key = ops.transpose(self.k(x).reshape(batch, length, HEADS, DIM), (0, 2, 3, 1))
        query = ops.div(query, self.factor.astype(query.dtype))
        key = ops.div(key, self.factor.astype(key.dtype))
        score = self.batch_matmul(query, key)
        keep = 1 - pad.astype(score.dtype)
        adder = (1 - keep.reshape(batch, 1, 1, length)) * -10000
        score = score + adder
        shape = score.shape
        probs = self.softmax_3d(score.reshape(shape[0], -1, shape[-1])).reshape(shape)
        return self.o(self.merge(self.batch_matmul(probs, self.split(self.v(x)))))


@spelling("causal")
class Gpt2(nn.Cell):
    """Conv1D weights (in, out), packed c_attn split in three, where() with a tril buffer and finfo.min."""

    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(1).normal
        self.c_attn = Parameter(Tensor(draw(size=(HIDDEN, 3 * HIDDEN)) * 0.3, ms.float32))
        self.c_bias = Parameter(Tensor(draw(size=3 * HIDDEN) * 0.1, ms.float32))
        self.c_proj = Parameter(Tensor(draw(size=(HIDDEN, HIDDEN)) * 0.3, ms.float32))
        self.tril = Tensor(np.tril(np.ones((1, 1, 2 * LENGTH, 2 * LENGTH), bool)))

    def construct(self, x, context, pad):
        batch, length, _ = x.shape
        packed = ops.matmul(x, self.c_attn.astype(x.dtype)) + self.c_bias.astype(x.dtype)
        q, k, v = ops.split(packed, HIDDEN, axis=2)
        q = q.view(batch, length, HEADS, DIM).permute(0, 2, 1, 3)
        k = k.view(batch, length, HEADS, DIM).permute(0, 2, 1, 3)
        v = v.view(batch, length, HEADS, DIM).permute(0, 2, 1, 3)
        weights = ops.matmul(q, k.swapaxes(-1, -2)) / (DIM ** 0.5)
        weights = ops.where(self.tril[:, :, :length, :length], weights, Tensor(-6.5e4, weights.dtype)
                            if weights.dtype == ms.float16 else Tensor(-3e38, weights.dtype))
        out = ops.matmul(ops.softmax(weights, axis=-1), v)
        out = out.permute(0, 2, 1, 3).view(batch, length, HIDDEN)
        return ops.matmul(out, self.c_proj.astype(out.dtype))


@spelling()
class Vit(nn.Cell):
    """One projection, reshape to (B, S, 3, N, D), permute, index; scale on the query."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Dense(HIDDEN, 3 * HIDDEN), nn.Dense(HIDDEN, HIDDEN)

    def construct(self, x, context, pad):
        batch, length, hidden = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q = q * DIM ** -0.5
        attn = ops.softmax(q @ k.transpose(0, 1, 3, 2), axis=-1)
        return self.proj((attn @ v).transpose(0, 2, 1, 3).reshape(batch, length, hidden))


@spelling()
class VitUnstack(nn.Cell):
    """The same with Unstack, and the scale on the scores."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Dense(HIDDEN, 3 * HIDDEN, has_bias=False), nn.Dense(HIDDEN, HIDDEN)
        self.matmul, self.matmul_t = ops.BatchMatMul(), ops.BatchMatMul(transpose_b=True)

    def construct(self, x, context, pad):
        batch, length, hidden = x.shape
        qkv = ops.transpose(ops.reshape(self.qkv(x), (batch, length, 3, HEADS, DIM)), (2, 0, 3, 1, 4))
        q, k, v = ops.unstack(qkv, axis=0)
        attn = ops.mul(self.matmul_t(q, k), DIM ** -0.5)
        attn = ops.softmax(attn, axis=-1)
        out = ops.transpose(self.matmul(attn, v), (0, 2, 1, 3)).reshape(batch, length, hidden)
        return self.proj(out)


@spelling()
class TntPackedQk(nn.Cell):
    """Query and key from one projection, value from another."""

    def __init__(self):
        super().__init__()
        self.qk, self.v = nn.Dense(HIDDEN, 2 * HIDDEN), nn.Dense(HIDDEN, HIDDEN)

    def construct(self, x, context, pad):
        batch, length, hidden = x.shape
        qk = self.qk(x).reshape(batch, length, 2, HEADS, DIM).permute(2, 0, 3, 1, 4)
        q, k = qk[0], qk[1]
        v = self.v(x).reshape(batch, length, HEADS, -1).permute(0, 2, 1, 3)
        attn = ops.softmax((q @ k.transpose(0, 1, 3, 2)) * 0.3, axis=-1)
        return (attn @ v).transpose(0, 2, 1, 3).reshape(batch, length, hidden)


@spelling("bias")
class Swin(nn.Cell):
    """Windows as batch, a learned table of relative positions, a constant shift mask added window by window."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Dense(HIDDEN, 3 * HIDDEN), nn.Dense(HIDDEN, HIDDEN)
        rng = np.random.default_rng(2)
        self.table = Parameter(Tensor(rng.normal(size=(2 * LENGTH - 1, HEADS)), ms.float32))
        grid = np.arange(LENGTH)
        self.index = Tensor((grid[:, None] - grid[None] + LENGTH - 1).reshape(-1), ms.int32)
        self.shift = Tensor(np.where(rng.random((2, LENGTH, LENGTH)) < 0.3, -100.0, 0.0), ms.float32)

    def construct(self, x, context, pad):
        x = ops.concat((x, x * 0.5), 0)      # two windows per image
        windows, length, hidden = x.shape
        qkv = self.qkv(x).reshape(windows, length, 3, HEADS, DIM).transpose(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * DIM ** -0.5, qkv[1], qkv[2]
        attn = ops.matmul(q, k.swapaxes(-2, -1))
        bias = ops.gather(self.table, self.index, 0).reshape(length, length, HEADS).transpose(2, 0, 1)
        attn = attn + bias.expand_dims(0).astype(attn.dtype)
        attn = attn.view(windows // 2, 2, HEADS, length, length) + self.shift.astype(attn.dtype).reshape(
            1, 2, 1, length, length)
        attn = ops.softmax(attn.view(-1, HEADS, length, length), axis=-1)
        out = ops.matmul(attn, v).swapaxes(1, 2).reshape(windows, length, hidden)
        return self.proj(out)


@spelling()
class Pvt(nn.Cell):
    """Keys and values from a shorter sequence, packed in one projection."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.proj = nn.Dense(HIDDEN, HIDDEN), nn.Dense(HIDDEN, 2 * HIDDEN), nn.Dense(HIDDEN, HIDDEN)

    def construct(self, x, context, pad):
        batch, length, hidden = x.shape
        q = self.q(x).reshape(batch, length, HEADS, DIM).permute(0, 2, 1, 3)
        kv = self.kv(context).reshape(batch, -1, 2, HEADS, DIM).permute(2, 0, 3, 1, 4)
        k, v = kv[0], kv[1]
        attn = ops.softmax((q @ k.permute(0, 1, 3, 2)) * DIM ** -0.5, axis=-1)
        return self.proj((attn @ v).permute(0, 2, 1, 3).reshape(batch, length, hidden))


@spelling("mask")
class Detr(Projections):
    """Length first, heads folded into the batch, bmm, a key padding mask by masked_fill on a 4-D view."""

    def construct(self, x, context, pad):
        source = x.transpose(1, 0, 2)
        length, batch, _ = source.shape
        q = (self.q(source) * DIM ** -0.5).reshape(length, batch * HEADS, DIM).transpose(1, 0, 2)
        k = self.k(source).reshape(length, batch * HEADS, DIM).transpose(1, 0, 2)
        v = self.v(source).reshape(length, batch * HEADS, DIM).transpose(1, 0, 2)
        attn = ops.bmm(q, k.transpose(0, 2, 1)).view(batch, HEADS, length, length)
        attn = attn.masked_fill(pad.expand_dims(1).expand_dims(2), float("-inf"))
        attn = ops.softmax(attn.view(batch * HEADS, length, length), axis=-1)
        out = ops.bmm(attn, v).transpose(1, 0, 2).reshape(length, batch, HIDDEN)
        return self.o(out).transpose(1, 0, 2)


def rotate(x, cos, sin):
    """Rotary positions, by halves."""
    half = x.shape[-1] // 2
    return x * cos + ops.concat((-x[..., half:], x[..., :half]), -1) * sin


class Llama(Projections):
    """Rotary positions, grouped key heads, an additive causal mask of finfo.min, softmax in float32."""

    def __init__(self, bias=None):
        super().__init__(6, 2, bias=False)
        self.mask = Tensor(causal(np.finfo(np.float32).min)[None, None])
        angles = np.arange(LENGTH)[:, None] / 10 ** (np.arange(DIM // 2) / 2)
        self.cos = Tensor(np.cos(np.tile(angles, 2)), ms.float32)
        self.sin = Tensor(np.sin(np.tile(angles, 2)), ms.float32)

    def repeat(self, x):
        """Key heads to query heads."""
        batch, heads, length, dim = x.shape
        x = ops.broadcast_to(x[:, :, None, :, :], (batch, heads, 3, length, dim))
        return x.reshape(batch, heads * 3, length, dim)

    def construct(self, x, context, pad):
        q = rotate(self.split(self.q(x), 6), self.cos.astype(x.dtype), self.sin.astype(x.dtype))
        k = rotate(self.split(self.k(x), 2), self.cos.astype(x.dtype), self.sin.astype(x.dtype))
        k, v = self.repeat(k), self.repeat(self.split(self.v(x), 2))
        scores = ops.matmul(q, k.swapaxes(2, 3)) / math.sqrt(DIM)
        scores = scores.astype(ms.float32) + self.mask
        probs = ops.softmax(scores, axis=-1, dtype=ms.float32).astype(q.dtype)
        return self.o(self.merge(ops.matmul(probs, v)))


spelling("causal")(Llama)


@spelling("causal")
class LlamaRepeatInterleave(Llama):
    """Grouped heads by repeat_interleave."""

    def repeat(self, x):
        return ops.repeat_interleave(x, 3, axis=1)


@spelling("causal")
class LlamaTile(Llama):
    """Grouped heads by tile on a new axis."""

    def repeat(self, x):
        batch, heads, length, dim = x.shape
        return ops.tile(ops.expand_dims(x, 2), (1, 1, 3, 1, 1)).reshape(batch, heads * 3, length, dim)


@spelling("causal")
class TileHeads(Llama):
    """Heads repeated as a whole, another map than grouped heads: keys go in as they are written."""

    def repeat(self, x):
        return ops.tile(x, (1, 3, 1, 1))


@spelling()
class GroupedProduct(Projections):
    """Grouped heads by a broadcast inside the product."""

    def __init__(self):
        super().__init__(6, 2)

    def construct(self, x, context, pad):
        batch, length, _ = x.shape
        q = self.q(x).reshape(batch, length, 2, 3, DIM).transpose(0, 2, 3, 1, 4)
        k = self.split(self.k(x), 2).expand_dims(2)
        v = self.split(self.v(x), 2).expand_dims(2)
        probs = ops.softmax(ops.matmul(q, k.swapaxes(-1, -2)) * 0.25, axis=-1)
        out = ops.matmul(probs, v)
        return self.o(out.transpose(0, 3, 1, 2, 4).reshape(batch, length, 6 * DIM))


@spelling()
class MultiQuery(Projections):
    """One key head for all, broadcast inside the product."""

    def __init__(self):
        super().__init__(HEADS, 1)

    def construct(self, x, context, pad):
        k, v = self.k(x).expand_dims(1), self.v(x).expand_dims(1)
        probs = ops.softmax(ops.matmul(self.split(self.q(x)), k.swapaxes(-1, -2)) / math.sqrt(DIM), axis=-1)
        return self.o(self.merge(ops.matmul(probs, v)))


@spelling()
class SharedValue(Projections):
    """Temporal fusion transformer: one value head for all, tiled, while keys have their own heads."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Dense(HIDDEN, DIM)

    def construct(self, x, context, pad):
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, DIM).permute((0, 2, 1, 3))
        k = self.k(x).view(batch, length, HEADS, DIM).permute((0, 2, 3, 1))
        v = ops.tile(self.shared(x).unsqueeze(1), (1, HEADS, 1, 1))
        probs = ops.softmax(ops.mul(ops.matmul(q, k), DIM ** -0.5), axis=3)
        return ops.mean(ops.matmul(probs, v), axis=1)


@spelling("causal")
class Glm(nn.Cell):
    """Length first, baddbmm with a buffer that beta=0 ignores, masked_fill of -10000."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Dense(HIDDEN, 3 * HIDDEN)
        self.mask = Tensor(np.triu(np.ones((1, 1, LENGTH, LENGTH), bool), 1))

    def construct(self, x, context, pad):
        source = self.qkv(x.swapaxes(0, 1))
        length, batch, _ = source.shape
        q, k, v = ops.split(source.reshape(length, batch, HEADS, 3 * DIM), DIM, axis=-1)
        q = q.reshape(length, batch * HEADS, DIM)
        k = k.reshape(length, batch * HEADS, DIM)
        buffer = ops.zeros((batch * HEADS, length, length), q.dtype)
        scores = ops.baddbmm(buffer, q.swapaxes(0, 1), k.swapaxes(0, 1).swapaxes(1, 2), beta=0,
                             alpha=1.0 / math.sqrt(DIM))
        scores = scores.reshape(batch, HEADS, length, length)
        scores = ops.masked_fill(scores, self.mask, -10000.0)
        probs = ops.softmax(scores, axis=-1).reshape(batch * HEADS, length, length)
        v = v.reshape(length, batch * HEADS, DIM)
        out = ops.bmm(probs, v.swapaxes(0, 1)).reshape(batch, HEADS, length, DIM)
        return out.permute(2, 0, 1, 3).reshape(length, batch, HIDDEN)


@spelling("bias")
class T5(Projections):
    """No scale; a learned bias by bucket, one per head."""

    def __init__(self):
        super().__init__(bias=False)
        self.relative = nn.Embedding(8, HEADS)
        grid = np.arange(LENGTH)
        self.buckets = Tensor(np.abs(grid[:, None] - grid[None]) % 8, ms.int32)

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(3, 2))
        bias = self.relative(self.buckets).permute(2, 0, 1).expand_dims(0)
        scores += bias.astype(scores.dtype)
        probs = ops.softmax(scores.astype(ms.float32), axis=-1).astype(scores.dtype)
        return self.o(self.merge(ops.matmul(probs, self.split(self.v(x)))))


@spelling("bias")
class T5Padded(T5):
    """The learned bias and a mask of the keys, added up before the scores."""

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(3, 2))
        bias = self.relative(self.buckets).permute(2, 0, 1).expand_dims(0)
        bias = bias + pad.astype(ms.float32).reshape(BATCH, 1, 1, LENGTH) * -1e4
        probs = ops.softmax((scores + bias.astype(scores.dtype)).astype(ms.float32), axis=-1).astype(scores.dtype)
        return self.o(self.merge(ops.matmul(probs, self.split(self.v(x)))))


@spelling()
class Whisper(Projections):
    """Cross attention, the fourth root of the head_dim on query and key alike."""

    def construct(self, x, context, pad):
        scale = DIM ** -0.25
        q = self.split(self.q(x)) * scale
        k = self.split(self.k(context)).swapaxes(2, 3) * scale
        probs = ops.softmax((q @ k).astype(ms.float32), axis=-1).astype(q.dtype)
        return self.o(self.merge(probs @ self.split(self.v(context))))


@spelling()
class Diffusers(Projections):
    """head_to_batch_dim, baddbmm with an empty buffer, softmax in float32, bmm."""

    def heads(self, x):
        """(B, S, N*D) to (B*N, S, D)."""
        batch, length, hidden = x.shape
        x = x.reshape(batch, length, HEADS, hidden // HEADS)
        return x.permute(0, 2, 1, 3).reshape(batch * HEADS, length, hidden // HEADS)

    def construct(self, x, context, pad):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(context)), self.heads(self.v(context))
        empty = ops.zeros((q.shape[0], q.shape[1], k.shape[1]), q.dtype)
        scores = ops.baddbmm(empty, q, ops.transpose(k, (0, 2, 1)), beta=0, alpha=DIM ** -0.5)
        probs = ops.softmax(scores.astype(ms.float32), axis=-1).astype(q.dtype)
        out = ops.bmm(probs, v).reshape(BATCH, HEADS, LENGTH, DIM)
        return self.o(out.permute(0, 2, 1, 3).reshape(BATCH, LENGTH, HIDDEN))


@spelling("bias")
class DiffusersMasked(Diffusers):
    """The same with a mask as the buffer, beta=1."""

    def construct(self, x, context, pad):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        mask = (pad.astype(q.dtype) * -10000.0).expand_dims(1)
        mask = mask.repeat_interleave(HEADS, 0).broadcast_to((BATCH * HEADS, LENGTH, LENGTH))
        scores = ops.baddbmm(mask, q, k.swapaxes(1, 2), beta=1, alpha=DIM ** -0.5)
        out = ops.bmm(ops.softmax(scores, axis=-1), v).reshape(BATCH, HEADS, LENGTH, DIM)
        return self.o(out.permute(0, 2, 1, 3).reshape(BATCH, LENGTH, HIDDEN))


@spelling("bias")
class ScaledBuffer(Diffusers):
    """A learned buffer as large as the scores, by a factor of its own, and once more through mint.add with alpha=0."""

    def __init__(self):
        super().__init__()
        shape = (BATCH * HEADS, LENGTH, LENGTH)
        self.buffer = Parameter(Tensor(np.linspace(-1, 1, math.prod(shape)).reshape(shape).astype(np.float32)))

    def construct(self, x, context, pad):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        scores = ops.baddbmm(self.buffer.astype(q.dtype), q, k.swapaxes(1, 2), beta=-0.5, alpha=DIM ** -0.5)
        scores = mint.add(scores, self.buffer.astype(q.dtype), alpha=0)
        out = ops.bmm(ops.softmax(scores, axis=-1), v).reshape(BATCH, HEADS, LENGTH, DIM)
        return self.o(out.permute(0, 2, 1, 3).reshape(BATCH, LENGTH, HIDDEN))


@spelling("mask")
class Conformer(Projections):
    """mask == 0 filled with -inf before the softmax, and with 0 after it."""

    def construct(self, x, context, pad):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = ops.matmul(q, k.swapaxes(-2, -1)) / math.sqrt(DIM)
        drop = ops.equal(ops.logical_not(pad).astype(ms.float32).expand_dims(1).expand_dims(1), 0)
        scores = scores.masked_fill(drop, -float("inf"))
        attn = ops.softmax(scores, axis=-1).masked_fill(drop, 0.0)
        return self.o(self.merge(ops.matmul(attn, v)))


@spelling("bias")
class ConformerRelative(Projections):
    """A second product with position embeddings, added to the scores and scaled with them."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(3)
        self.pos = nn.Dense(HIDDEN, HIDDEN, has_bias=False)
        self.table = Tensor(rng.normal(size=(1, LENGTH, HIDDEN)), ms.float32)
        self.u = Parameter(Tensor(rng.normal(size=(HEADS, DIM)), ms.float32))
        self.w = Parameter(Tensor(rng.normal(size=(HEADS, DIM)), ms.float32))

    def construct(self, x, context, pad):
        q = self.q(x).reshape(BATCH, LENGTH, HEADS, DIM)
        k, v = self.split(self.k(x)), self.split(self.v(x))
        p = self.split(self.pos(self.table.astype(x.dtype)))
        with_u = (q + self.u.astype(q.dtype)).swapaxes(1, 2)
        with_w = (q + self.w.astype(q.dtype)).swapaxes(1, 2)
        scores = ops.matmul(with_u, k.swapaxes(-2, -1)) + ops.matmul(with_w, p.swapaxes(-2, -1))
        attn = ops.softmax(scores / math.sqrt(DIM), axis=-1)
        return self.o(self.merge(ops.matmul(attn, v)))


@spelling("bias")
class NnMultihead(nn.Cell):
    """mindspore.nn.MultiheadAttention, batch first, with a key padding mask."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def construct(self, x, context, pad):
        return self.attention(x, x, x, key_padding_mask=pad, need_weights=False)[0]


@spelling()
class NnMultiheadCross(nn.Cell):
    """mindspore.nn.MultiheadAttention, length first, keys and values of other sizes."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, kdim=HIDDEN, vdim=HIDDEN)

    def construct(self, x, context, pad):
        source = context.swapaxes(0, 1)
        return self.attention(x.swapaxes(0, 1), source, source, need_weights=False)[0]


@spelling()
class NnEncoderLayer(nn.Cell):
    """mindspore.nn.TransformerEncoderLayer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, dim_feedforward=32, dropout=0.0, batch_first=True)

    def construct(self, x, context, pad):
        return self.layer(x)


@spelling("mask (fill -10000)")
class Mint(nn.Cell):
    """mindspore.mint throughout: views with side effects, masked_fill, softmax."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = mint.nn.Linear(HIDDEN, 3 * HIDDEN), mint.nn.Linear(HIDDEN, HIDDEN)

    def construct(self, x, context, pad):
        q, k, v = mint.split(self.qkv(x), HIDDEN, -1)
        q = mint.transpose(q.reshape(BATCH, LENGTH, HEADS, DIM), 1, 2)
        k = mint.transpose(k.reshape(BATCH, LENGTH, HEADS, DIM), 1, 2)
        v = mint.transpose(v.reshape(BATCH, LENGTH, HEADS, DIM), 1, 2)
        scores = mint.matmul(q, mint.transpose(k, -1, -2)) / math.sqrt(DIM)
        scores = scores.masked_fill(mint.unsqueeze(mint.unsqueeze(pad, 1), 1), -1e4)
        probs = mint.nn.functional.softmax(scores, dim=-1)
        return self.o(mint.transpose(mint.matmul(probs, v), 1, 2).reshape(BATCH, LENGTH, HIDDEN))


@spelling()
class MintBmm(nn.Cell):
    """mint.bmm in three dimensions, chunk, permute, mint.div."""

    def __init__(self):
        super().__init__()
        self.qkv = mint.nn.Linear(HIDDEN, 3 * HIDDEN)

    def construct(self, x, context, pad):
        q, k, v = mint.chunk(self.qkv(x), 3, -1)
        q = mint.permute(q.reshape(BATCH, LENGTH, HEADS, DIM), (0, 2, 1, 3)).reshape(-1, LENGTH, DIM)
        k = mint.permute(k.reshape(BATCH, LENGTH, HEADS, DIM), (0, 2, 1, 3)).reshape(-1, LENGTH, DIM)
        v = mint.permute(v.reshape(BATCH, LENGTH, HEADS, DIM), (0, 2, 1, 3)).reshape(-1, LENGTH, DIM)
        scores = mint.div(mint.bmm(q, mint.transpose(k, 1, 2)), math.sqrt(DIM))
        out = mint.bmm(mint.softmax(scores, -1), v).reshape(BATCH, HEADS, LENGTH, DIM)
        return mint.permute(out, (0, 2, 1, 3)).reshape(BATCH, LENGTH, HIDDEN)


@spelling("causal")
class Gemma(Projections):
    """Scores capped by tanh, then a causal mask of -inf made inside the graph."""

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) * 0.4
        scores = ops.tanh(scores / 2.5) * 2.5
        future = ops.triu(ops.ones((LENGTH, LENGTH), ms.float32), 1).astype(ms.bool_)
        probs = ops.softmax(scores.masked_fill(future, float("-inf")), axis=-1)
        return self.o(self.merge(ops.matmul(probs, self.split(self.v(x)))))


@spelling("bias")
class Alibi(Projections):
    """A constant bias that falls with the distance, and -inf for the future, in one Tensor."""

    def __init__(self):
        super().__init__()
        grid = np.arange(LENGTH)
        slopes = 2.0 ** -np.arange(1, HEADS + 1)
        bias = -slopes[:, None, None] * np.abs(grid[:, None] - grid[None]) + causal(-np.inf)
        self.bias = Tensor(bias, ms.float32)

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) / math.sqrt(DIM)
        probs = ops.softmax(scores + self.bias.astype(scores.dtype), axis=-1)
        return self.o(self.merge(ops.matmul(probs, self.split(self.v(x)))))


@spelling("causal + bias")
class AlibiCausal(Projections):
    """The distance as a bias, the future by masked_fill."""

    def __init__(self):
        super().__init__()
        grid = np.arange(LENGTH)
        self.bias = Tensor(-0.3 * np.abs(grid[:, None] - grid[None])[None, None], ms.float32)
        self.future = Tensor(np.triu(np.ones((LENGTH, LENGTH), bool), 1))

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) / math.sqrt(DIM)
        scores = (scores + self.bias.astype(scores.dtype)).masked_fill(self.future, float("-inf"))
        return self.o(self.merge(ops.matmul(ops.softmax(scores, axis=-1), self.split(self.v(x)))))


@spelling("window(3, 0)")
class SlidingWindow(Projections):
    """A constant band: the last four keys."""

    def __init__(self):
        super().__init__()
        grid = np.arange(LENGTH)
        gap = grid[:, None] - grid[None]
        self.mask = Tensor(np.where((gap >= 0) & (gap <= 3), 0.0, -np.inf)[None, None], ms.float32)

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) / math.sqrt(DIM)
        probs = ops.softmax(scores + self.mask.astype(scores.dtype), axis=-1)
        return self.o(self.merge(ops.matmul(probs, self.split(self.v(x)))))


@spelling("causal")
class CausalCross(Projections):
    """Fewer keys than queries cannot see all: a top-left causal mask by comparing positions."""

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(context)).swapaxes(-1, -2)) / math.sqrt(DIM)
        rows, columns = ops.arange(LENGTH).reshape(-1, 1), ops.arange(CONTEXT).reshape(1, -1)
        scores = scores.masked_fill(columns > rows, float("-inf"))
        return self.o(self.merge(ops.matmul(ops.softmax(scores, axis=-1), self.split(self.v(context)))))


@spelling("mask")
class WhereTensor(Projections):
    """where() with the fill as a full Tensor, the mask saying what goes."""

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) / math.sqrt(DIM)
        scores = ops.where(pad.reshape(BATCH, 1, 1, LENGTH), ops.full_like(scores, float("-inf")), scores)
        return self.o(self.merge(ops.matmul(ops.softmax(scores, axis=-1), self.split(self.v(x)))))


@spelling("mask (fill -1e+09)")
class SelectKeep(Projections):
    """select() with the mask saying what stays."""

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)).astype(ms.float32)
        scores = scores / math.sqrt(DIM)
        keep = ops.logical_not(pad).reshape(BATCH, 1, 1, LENGTH).broadcast_to(scores.shape)
        scores = ops.select(keep, scores, ops.ones_like(scores) * -1e9).astype(x.dtype)
        return self.o(self.merge(ops.matmul(ops.softmax(scores.astype(ms.float32), axis=-1).astype(x.dtype),
                                            self.split(self.v(x)))))


@spelling("mask")
class TwoMasks(Projections):
    """Padding and the future filled one after the other."""

    def __init__(self):
        super().__init__()
        self.future = Tensor(np.triu(np.ones((LENGTH, LENGTH), bool), 1))

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) / math.sqrt(DIM)
        scores = ops.masked_fill(scores, self.future, -3e4)
        scores = ops.masked_fill(scores, pad.reshape(BATCH, 1, 1, LENGTH), -3e4)
        return self.o(self.merge(ops.matmul(ops.softmax(scores, axis=-1), self.split(self.v(x)))))


SPELLINGS[-1][2]["mask"] = "mask (fill -30000)"


@spelling()
class FlatRows(Projections):
    """Softmax over a 2-D reshape, one row per query of every head."""

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2))
        scores = ops.mul(scores, Tensor(0.2, ms.float32).astype(scores.dtype))
        probs = ops.softmax(scores.reshape(-1, LENGTH), axis=-1).reshape(BATCH, HEADS, LENGTH, LENGTH)
        return self.o(self.merge(ops.matmul(probs, self.split(self.v(x)))))


@spelling()
class PowerScale(Projections):
    """The scale as a power of a constant Tensor and a reciprocal."""

    def construct(self, x, context, pad):
        q, k = self.split(self.q(x)), self.split(self.k(x))
        scale = ops.reciprocal(ops.pow(Tensor(float(DIM), ms.float32), 0.5)).astype(q.dtype)
        probs = ops.softmax(ops.matmul(q, k.swapaxes(-1, -2)) * scale, axis=-1)
        return self.o(self.merge(ops.matmul(probs, self.split(self.v(x)))))


@spelling()
class NegativeScale(Projections):
    """A divisor that is not the square root, and a minus sign."""

    def construct(self, x, context, pad):
        q, k = self.split(self.q(x)), self.split(self.k(x))
        probs = ops.softmax(-(ops.matmul(q, k.swapaxes(-1, -2)) / 3.0), axis=-1)
        return self.o(self.merge(ops.matmul(probs, self.split(self.v(x)))))


@spelling("bias")
class LearnedBias(Projections):
    """A parameter of (N, S, S), subtracted, then scaled with the scores."""

    def __init__(self):
        super().__init__()
        self.bias = Parameter(Tensor(np.random.default_rng(4).normal(size=(HEADS, LENGTH, LENGTH)), ms.float32))

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2))
        probs = ops.softmax((scores - self.bias.astype(scores.dtype)) * 0.5, axis=-1)
        return self.o(self.merge(ops.matmul(probs, self.split(self.v(x)))))


@spelling("bias")
class TriangleBias(Projections):
    """AlphaFold: a bias projected from the input, one per head, shared by the batch, and a gate on the output."""

    def __init__(self):
        super().__init__()
        self.pair, self.gate = nn.Dense(HIDDEN, HEADS), nn.Dense(HIDDEN, HIDDEN)

    def construct(self, x, context, pad):
        pairs = (x[0].expand_dims(0) + x[1].expand_dims(1)).reshape(LENGTH, LENGTH, HIDDEN)
        bias = self.pair(pairs).transpose(2, 0, 1)
        mask = 1e9 * (ops.logical_not(pad).astype(ms.float32).reshape(BATCH, 1, 1, LENGTH) - 1.0)
        scores = ops.matmul(self.split(self.q(x)) * DIM ** -0.5, self.split(self.k(x)).swapaxes(-1, -2))
        scores = scores.astype(ms.float32) + mask + bias.expand_dims(0).astype(ms.float32)
        probs = ops.softmax(scores, axis=-1).astype(x.dtype)
        out = self.merge(ops.matmul(probs, self.split(self.v(x))))
        return self.o(out * ops.sigmoid(self.gate(x)))


@spelling()
class Perceiver(Projections):
    """Learned latents as queries, the same for every batch entry."""

    def __init__(self):
        super().__init__()
        self.latents = Parameter(Tensor(np.random.default_rng(5).normal(size=(1, 5, HIDDEN)), ms.float32))

    def construct(self, x, context, pad):
        q = self.split(self.q(self.latents.astype(x.dtype)))
        probs = ops.softmax(ops.matmul(q, self.split(self.k(x)).swapaxes(-1, -2)) / math.sqrt(DIM), axis=-1)
        return self.o(self.merge(ops.matmul(probs, self.split(self.v(x)))))


@spelling()
class ClassToken(Projections):
    """One query for all keys."""

    def construct(self, x, context, pad):
        q = self.q(x[:, 0]).unsqueeze(1).reshape(BATCH, 1, HEADS, DIM).permute(0, 2, 1, 3) * DIM ** -0.5
        probs = ops.softmax(q @ self.split(self.k(x)).transpose(0, 1, 3, 2), axis=-1)
        return self.o((probs @ self.split(self.v(x))).transpose(0, 2, 1, 3).reshape(BATCH, 1, HIDDEN))


@spelling()
class WideValue(Projections):
    """A value head_dim of its own."""

    def __init__(self):
        super().__init__()
        self.wide, self.proj = nn.Dense(HIDDEN, HEADS * 5), nn.Dense(HEADS * 5, HIDDEN)

    def construct(self, x, context, pad):
        v = self.wide(x).reshape(BATCH, LENGTH, HEADS, 5).swapaxes(1, 2)
        probs = ops.softmax(ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) * 0.3, axis=-1)
        return self.proj(ops.matmul(probs, v).swapaxes(1, 2).reshape(BATCH, LENGTH, HEADS * 5))


@spelling()
class OneHead(nn.Cell):
    """No heads: three dimensions throughout, the input as its own value."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Dense(HIDDEN, DIM), nn.Dense(HIDDEN, DIM)

    def construct(self, x, context, pad):
        scores = ops.BatchMatMul(transpose_b=True)(self.q(x), self.k(context)) / DIM ** 0.5
        return ops.BatchMatMul()(nn.Softmax()(scores), context)


@spelling(sites=2)
class TwoLayers(nn.Cell):
    """Two layers, residual, layer norm; the second attends to the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Vit(), Whisper()
        self.norm = nn.LayerNorm((HIDDEN,))

    def construct(self, x, context, pad):
        hidden = self.norm(x + self.first(x, context, pad))
        return hidden + self.second(hidden, hidden, pad)


@spelling("bias")
class BiasLessScores(Projections):
    """Scores as distances, taken from a bias."""

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) * 0.3
        bias = pad.astype(scores.dtype).reshape(BATCH, 1, 1, LENGTH) * -4.0
        return self.o(self.merge(ops.matmul(ops.softmax(bias - scores, axis=-1), self.split(self.v(x)))))


@spelling()
class DoubledScores(Projections):
    """Scores added to themselves."""

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) * 0.2
        return self.o(self.merge(ops.matmul(ops.softmax(scores + scores, axis=-1), self.split(self.v(x)))))


@spelling(sites=2)
class SumOfTwo(Projections):
    """Two kinds of queries to the same keys and values, their outputs added: both share the gradient of the weights."""

    def __init__(self):
        super().__init__()
        self.other = nn.Dense(HIDDEN, HIDDEN)

    def construct(self, x, context, pad):
        k, v = self.split(self.k(x)), self.split(self.v(x))
        first = ops.softmax(ops.matmul(self.split(self.q(x)), k.swapaxes(-1, -2)) * 0.3, axis=-1)
        second = ops.softmax(ops.matmul(self.split(self.other(x)), k.swapaxes(-1, -2)) * 0.3, axis=-1)
        return self.o(self.merge(ops.matmul(first, v) + ops.matmul(second, v)))


@spelling("causal")
class BigCode(nn.Cell):
    """One packed projection of all query heads and one head of keys and values, broadcast inside the product."""

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Dense(HIDDEN, HIDDEN + 2 * DIM), nn.Dense(HIDDEN, HIDDEN)
        self.mask = Tensor(np.tril(np.ones((1, 1, LENGTH, LENGTH), bool)))

    def construct(self, x, context, pad):
        batch, length, _ = x.shape
        q, k, v = ops.split(self.c_attn(x), (HIDDEN, DIM, DIM), axis=-1)
        q = q.reshape(batch, length, HEADS, DIM).transpose(0, 2, 1, 3)
        scores = ops.matmul(q, k.expand_dims(1).swapaxes(-1, -2)) / math.sqrt(DIM)
        scores = ops.where(self.mask, scores, Tensor(-6e4, scores.dtype))
        out = ops.matmul(ops.softmax(scores, axis=-1), v.expand_dims(1))
        return self.c_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, HIDDEN))


@spelling()
class PackedGroups(nn.Cell):
    """One packed projection of six query heads and two heads of keys and values each, repeated."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Dense(HIDDEN, 10 * DIM), nn.Dense(6 * DIM, HIDDEN)

    def construct(self, x, context, pad):
        batch, length, _ = x.shape
        heads = self.qkv(x).reshape(batch, length, 10, DIM).transpose(0, 2, 1, 3)
        q, k, v = ops.split(heads, (6, 2, 2), axis=1)
        k, v = ops.repeat_interleave(k, 3, axis=1), ops.repeat_interleave(v, 3, axis=1)
        out = ops.matmul(ops.softmax(ops.matmul(q, k.swapaxes(-1, -2)) * DIM ** -0.5, axis=-1), v)
        return self.proj(out.transpose(0, 2, 1, 3).reshape(batch, length, 6 * DIM))
