"""Small nets in the shapes of real ones: each entry gives (net, inputs, free axes), and options where it needs some."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import Normal, initializer

import ms_flash

DIM, HEADS, VOCAB = 32, 4, 37
IDS = {"ids": {0: "batch", 1: "length"}}
NETS = {}


def entry(function):
    """Registers a function that gives (net, inputs, dynamic_axes) or (net, inputs, dynamic_axes, options)."""
    NETS[function.__name__] = function
    return function


def build(name):
    """(net, inputs, options of export_onnx)."""
    net, inputs, axes, *more = NETS[name]()
    return net, inputs, {"dynamic_axes": axes, **(more[0] if more else {})}


def ids(batch=2, length=9, seed=0):
    return Tensor(np.random.default_rng(seed).integers(0, VOCAB, (batch, length)), ms.int32)


def floats(*shape, dtype=ms.float32, seed=0):
    return Tensor(np.random.default_rng(seed).standard_normal(shape), dtype)


def parameter(shape, name, scale=0.1):
    return Parameter(initializer(Normal(scale), shape, ms.float32), name=name)


# ---- GPT-2: Conv1D projections, one packed QKV, a triangle of ones, -1e4 --------------------------------------------
class Conv1D(nn.Cell):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = parameter((n_in, n_out), "weight")
        self.bias = parameter((n_out,), "bias")

    def construct(self, x):
        shape = x.shape[:-1] + (self.weight.shape[1],)
        return (ops.matmul(x.reshape(-1, x.shape[-1]), self.weight) + self.bias).reshape(shape)


class Gpt2Attention(nn.Cell):
    def __init__(self, longest=64):
        super().__init__()
        self.qkv, self.proj = Conv1D(DIM, 3 * DIM), Conv1D(DIM, DIM)
        self.triangle = Tensor(np.tril(np.ones((1, 1, longest, longest), bool)))

    def construct(self, x):
        batch, length, _ = x.shape
        q, k, v = ops.split(self.qkv(x), DIM, axis=2)
        q, k, v = (t.reshape(batch, length, HEADS, DIM // HEADS).transpose(0, 2, 1, 3) for t in (q, k, v))
        scores = ops.matmul(q, k.transpose(0, 1, 3, 2)) / math.sqrt(DIM // HEADS)
        scores = ops.where(self.triangle[:, :, :length, :length], scores, Tensor(-1e4, ms.float32))
        out = ops.matmul(ops.softmax(scores, -1), v)
        return self.proj(out.transpose(0, 2, 1, 3).reshape(batch, length, DIM))


class Gpt2Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((DIM,), epsilon=1e-5), nn.LayerNorm((DIM,), epsilon=1e-5)
        self.attention = Gpt2Attention()
        self.up, self.down = Conv1D(DIM, 4 * DIM), Conv1D(4 * DIM, DIM)
        self.dropout = nn.Dropout(p=0.1)

    def construct(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        h = self.up(self.norm2(x))
        h = 0.5 * h * (1.0 + ops.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * ops.pow(h, 3.0))))
        return x + self.down(h)


@entry
def gpt2():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
            self.blocks = nn.CellList([Gpt2Block() for _ in range(2)])
            self.norm = nn.LayerNorm((DIM,))

        def construct(self, ids):
            x = self.tokens(ids) + self.places(ops.arange(ids.shape[1]))
            for block in self.blocks:
                x = block(x)
            return ops.matmul(self.norm(x), self.tokens.embedding_table.T)

    return Net(), [ids()], IDS


# ---- BERT: token types, (1 - mask) * -10000, pooler -----------------------------------------------------------------
class BertLayer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Dense(DIM, DIM) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm((DIM,), epsilon=1e-12), nn.LayerNorm((DIM,), epsilon=1e-12)
        self.up, self.down = nn.Dense(DIM, 4 * DIM), nn.Dense(4 * DIM, DIM)
        self.gelu = nn.GELU(approximate=False)
        self.dropout = nn.Dropout(p=0.1)

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], HEADS, DIM // HEADS).swapaxes(1, 2)

    def construct(self, x, bias):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        scores = ops.matmul(q, k.swapaxes(-1, -2)) / (DIM // HEADS) ** 0.5 + bias
        weights = self.dropout(ops.softmax(scores, axis=-1))
        out = ops.matmul(weights, v).swapaxes(1, 2)
        x = self.norm1(x + self.o(out.reshape(out.shape[0], out.shape[1], DIM)))
        return self.norm2(x + self.down(self.gelu(self.up(x))))


@entry
def bert():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.words, self.places, self.kinds = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM), nn.Embedding(2, DIM)
            self.norm = nn.LayerNorm((DIM,), epsilon=1e-12)
            self.layers = nn.CellList([BertLayer() for _ in range(2)])
            self.pooler = nn.Dense(DIM, DIM, activation="tanh")

        def construct(self, ids, attention_mask, token_type_ids):
            bias = (1.0 - attention_mask.expand_dims(1).expand_dims(2).astype(ms.float32)) * -10000.0
            places = ops.arange(ids.shape[1]).expand_dims(0)
            x = self.norm(self.words(ids) + self.places(places) + self.kinds(token_type_ids))
            for layer in self.layers:
                x = layer(x, bias)
            return x, self.pooler(x[:, 0])

    rng = np.random.default_rng(1)
    mask, kinds = (Tensor(rng.integers(0, 2, (2, 9)), ms.int32) for _ in range(2))
    axes = {name: {0: "batch", 1: "length"} for name in ("ids", "attention_mask", "token_type_ids")}
    return Net(), [ids(), mask, kinds], axes


@entry
def minilm_pooled():
    """Sentence embedding: mean over the kept tokens, then unit length."""
    encoder = bert()[0]

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.encoder = encoder

        def construct(self, ids, attention_mask):
            x, _ = self.encoder(ids, attention_mask, ops.zeros_like(ids))
            kept = attention_mask.expand_dims(-1).astype(ms.float32)
            mean = (x * kept).sum(1) / ops.clamp(kept.sum(1), min=1e-9)
            return mean / ops.norm(mean, dim=-1, keepdim=True)

    mask = Tensor(np.tril(np.ones((2, 9)), 5), ms.int32)
    return Net(), [ids(), mask], {name: {0: "batch", 1: "length"} for name in ("ids", "attention_mask")}


# ---- ViT: patches by Conv2d, class token, packed QKV by one reshape -------------------------------------------------
class PackedAttention(nn.Cell):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Dense(DIM, 3 * DIM), nn.Dense(DIM, DIM)

    def construct(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, HEADS, DIM // HEADS).transpose(2, 0, 3, 1, 4)
        q, k, v = ops.unstack(qkv, axis=0)
        q = q * (DIM // HEADS) ** -0.5
        weights = ops.softmax(ops.bmm(q.reshape(-1, length, DIM // HEADS),
                                      k.reshape(-1, length, DIM // HEADS).transpose(0, 2, 1)), -1)
        out = ops.bmm(weights, v.reshape(-1, length, DIM // HEADS)).reshape(batch, HEADS, length, DIM // HEADS)
        return self.proj(out.transpose(0, 2, 1, 3).reshape(batch, length, DIM))


@entry
def vit():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.patches = nn.Conv2d(3, DIM, 4, stride=4, pad_mode="valid", has_bias=True)
            self.cls, self.places = parameter((1, 1, DIM), "cls"), parameter((1, 17, DIM), "places")
            self.norm, self.attention = nn.LayerNorm((DIM,)), PackedAttention()
            self.mlp = nn.SequentialCell(nn.Dense(DIM, 64), nn.GELU(), nn.Dense(64, DIM))
            self.head = nn.Dense(DIM, 10)

        def construct(self, image):
            x = self.patches(image)
            x = x.reshape(x.shape[0], DIM, -1).swapaxes(1, 2)
            x = ops.concat((ops.tile(self.cls, (x.shape[0], 1, 1)), x), 1) + self.places
            x = x + self.attention(self.norm(x))
            x = x + self.mlp(self.norm(x))
            return self.head(x[:, 0])

    return Net(), [floats(2, 3, 16, 16)], {"image": {0: "batch"}}


def shifted(x, n):
    """ops.roll over both axes, which MindSpore has no CPU kernel for."""
    x = ops.concat((x[:, n:], x[:, :n]), 1)
    return ops.concat((x[:, :, n:], x[:, :, :n]), 2)


@entry
def swin():
    """Window attention with a relative position bias, shifted windows and their mask."""
    window, side = 4, 8

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            coords = np.stack(np.meshgrid(np.arange(window), np.arange(window), indexing="ij")).reshape(2, -1)
            relative = (coords[:, :, None] - coords[:, None, :]).transpose(1, 2, 0) + window - 1
            self.index = Tensor((relative[..., 0] * (2 * window - 1) + relative[..., 1]).reshape(-1), ms.int32)
            self.table = parameter(((2 * window - 1) ** 2, HEADS), "table")
            image = np.zeros((1, side, side, 1))
            for number, (h, w) in enumerate((h, w) for h in (slice(0, -4), slice(-4, -2), slice(-2, None))
                                            for w in (slice(0, -4), slice(-4, -2), slice(-2, None))):
                image[:, h, w] = number
            parts = image.reshape(side // window, window, side // window, window).transpose(0, 2, 1, 3)
            parts = parts.reshape(-1, window * window)
            self.mask = Tensor(np.where(parts[:, None] != parts[:, :, None], -100.0, 0.0), ms.float32)
            self.qkv, self.proj, self.norm = nn.Dense(DIM, 3 * DIM), nn.Dense(DIM, DIM), nn.LayerNorm((DIM,))

        def construct(self, x):
            batch = x.shape[0]
            y = shifted(self.norm(x), 2)
            y = y.reshape(batch, side // window, window, side // window, window, DIM).transpose(0, 1, 3, 2, 4, 5)
            y = y.reshape(-1, window * window, DIM)
            qkv = self.qkv(y).reshape(-1, window * window, 3, HEADS, DIM // HEADS).transpose(2, 0, 3, 1, 4)
            q, k, v = qkv[0] * (DIM // HEADS) ** -0.5, qkv[1], qkv[2]
            scores = ops.matmul(q, k.swapaxes(-2, -1))
            bias = ops.gather(self.table, self.index, 0).reshape(window * window, window * window, HEADS)
            scores = scores + bias.transpose(2, 0, 1).expand_dims(0)
            windows = self.mask.shape[0]
            scores = scores.reshape(-1, windows, HEADS, window * window, window * window)
            scores = (scores + self.mask.expand_dims(1).expand_dims(0)).reshape(-1, HEADS, window ** 2, window ** 2)
            y = ops.matmul(ops.softmax(scores, -1), v).swapaxes(1, 2).reshape(-1, window * window, DIM)
            y = self.proj(y).reshape(batch, side // window, side // window, window, window, DIM)
            y = y.transpose(0, 1, 3, 2, 4, 5).reshape(batch, side, side, DIM)
            return x + shifted(y, -2)

    return Net(), [floats(2, side, side, DIM)], {"x": {0: "batch"}}


# ---- Llama: RoPE, RMSNorm, SwiGLU, grouped heads, cache -------------------------------------------------------------
class RmsNorm(nn.Cell):
    def __init__(self, epsilon=1e-6):
        super().__init__()
        self.weight = parameter((DIM,), "weight", 1.0)
        self.epsilon = epsilon

    def construct(self, x):
        wide = x.astype(ms.float32)
        wide = wide * ops.rsqrt(ops.pow(wide, 2).mean(-1, keep_dims=True) + self.epsilon)
        return self.weight * wide.astype(x.dtype)


def rotate_half(x):
    half = x.shape[-1] // 2
    return ops.concat((-x[..., half:], x[..., :half]), -1)


class LlamaAttention(nn.Cell):
    def __init__(self, kv_heads=2, flash=True):
        super().__init__()
        size = DIM // HEADS
        self.size, self.kv_heads, self.flash = size, kv_heads, flash
        self.q, self.o = nn.Dense(DIM, DIM, has_bias=False), nn.Dense(DIM, DIM, has_bias=False)
        self.k, self.v = (nn.Dense(DIM, kv_heads * size, has_bias=False) for _ in range(2))
        self.frequencies = Tensor(10000.0 ** (-np.arange(0, size, 2) / size), ms.float32)

    def rope(self, x, positions):
        angles = positions.astype(ms.float32).expand_dims(-1) * self.frequencies
        angles = ops.concat((angles, angles), -1).expand_dims(0).expand_dims(0)
        return x * ops.cos(angles).astype(x.dtype) + rotate_half(x) * ops.sin(angles).astype(x.dtype)

    def construct(self, x, past_key=None, past_value=None):
        batch, length, _ = x.shape
        q = self.q(x).reshape(batch, length, HEADS, self.size).swapaxes(1, 2)
        k = self.k(x).reshape(batch, length, self.kv_heads, self.size).swapaxes(1, 2)
        v = self.v(x).reshape(batch, length, self.kv_heads, self.size).swapaxes(1, 2)
        past = 0 if past_key is None else past_key.shape[2]
        positions = ops.arange(past, past + length)
        q, k = self.rope(q, positions), self.rope(k, positions)
        if past_key is not None:
            k, v = ops.concat((past_key, k), 2), ops.concat((past_value, v), 2)
        if self.flash:
            out = ms_flash.flash_attention(q, k, v, causal=True)
        else:
            group = HEADS // self.kv_heads
            kk, vv = ops.repeat_interleave(k, group, 1), ops.repeat_interleave(v, group, 1)
            scores = ops.matmul(q, kk.swapaxes(2, 3)) / math.sqrt(self.size)
            after = ops.arange(k.shape[2]).expand_dims(0) > (positions.expand_dims(1))
            scores = ops.masked_fill(scores, after, Tensor(-1e30, ms.float32))
            out = ops.matmul(ops.softmax(scores, -1), vv)
        out = self.o(out.swapaxes(1, 2).reshape(batch, length, DIM))
        return out, k, v


class LlamaBlock(nn.Cell):
    def __init__(self, flash):
        super().__init__()
        self.norm1, self.norm2, self.attention = RmsNorm(), RmsNorm(), LlamaAttention(flash=flash)
        self.gate, self.up = nn.Dense(DIM, 48, has_bias=False), nn.Dense(DIM, 48, has_bias=False)
        self.down = nn.Dense(48, DIM, has_bias=False)

    def construct(self, x, past_key=None, past_value=None):
        out, key, value = self.attention(self.norm1(x), past_key, past_value)
        x = x + out
        h = self.norm2(x)
        return x + self.down(ops.silu(self.gate(h)) * self.up(h)), key, value


class Llama(nn.Cell):
    def __init__(self, flash=True, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, DIM, embedding_table=Normal(1.0))
        self.blocks = nn.CellList([LlamaBlock(flash) for _ in range(layers)])
        self.norm, self.head = RmsNorm(), nn.Dense(DIM, VOCAB, has_bias=False)

    def construct(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x, _, _ = block(x)
        return self.head(self.norm(x))


@entry
def llama():
    return Llama(), [ids()], IDS


@entry
def llama_naive():
    return Llama(flash=False), [ids()], IDS


class LlamaDecoder(Llama):
    """With past keys and values in and out: one graph for the prompt (a past of length 0) and for every step."""

    def construct(self, ids, past):
        x, present = self.tokens(ids), ()
        for i, block in enumerate(self.blocks):
            x, key, value = block(x, past[2 * i], past[2 * i + 1])
            present += (key, value)
        return self.head(self.norm(x)), present


def past(batch=2, length=5, layers=2):
    return tuple(floats(batch, 2, length, DIM // HEADS, seed=i) for i in range(2 * layers))


@entry
def llama_decoder():
    axes = {"ids": {0: "batch", 1: "length"}, **{f"past_{i}": {0: "batch", 2: "past"} for i in range(4)}}
    return LlamaDecoder(), [ids(2, 3), past()], axes


# ---- T5: relative bias in buckets, no scale, RMSNorm ----------------------------------------------------------------
@entry
def t5():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Dense(DIM, DIM, has_bias=False) for _ in range(4))
            self.bias, self.norm = nn.Embedding(16, HEADS), RmsNorm()
            self.up, self.down = nn.Dense(DIM, 64, has_bias=False), nn.Dense(64, DIM, has_bias=False)

        def buckets(self, q_len, k_len):
            relative = ops.arange(k_len).expand_dims(0) - ops.arange(q_len).expand_dims(1)
            side = (relative > 0).astype(ms.int32) * 8
            distance = ops.abs(relative)
            far = 4 + (ops.log(distance.astype(ms.float32) / 4 + 1e-6) / math.log(4) * 4).astype(ms.int32)
            far = ops.minimum(far, ops.full_like(far, 7))
            return side + ops.where(distance < 4, distance.astype(ms.int32), far)

        def heads(self, x):
            return x.reshape(x.shape[0], -1, HEADS, DIM // HEADS).transpose(0, 2, 1, 3)

        def construct(self, x):
            h = self.norm(x)
            q, k, v = self.heads(self.q(h)), self.heads(self.k(h)), self.heads(self.v(h))
            scores = ops.matmul(q, k.transpose(0, 1, 3, 2))
            scores = scores + self.bias(self.buckets(x.shape[1], x.shape[1])).transpose(2, 0, 1).expand_dims(0)
            out = ops.matmul(ops.softmax(scores, -1), v).transpose(0, 2, 1, 3)
            x = x + self.o(out.reshape(out.shape[0], -1, DIM))
            return x + self.down(ops.relu(self.up(self.norm(x))))

    return Net(), [floats(2, 9, DIM)], {"x": {0: "batch", 1: "length"}}


# ---- cross attention ------------------------------------------------------------------------------------------------
class CrossAttention(nn.Cell):
    def __init__(self, flash):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Dense(DIM, DIM) for _ in range(4))
        self.flash = flash

    def construct(self, x, memory):
        q, k, v = (f(t).reshape(t.shape[0], t.shape[1], HEADS, -1) for f, t in (
            (self.q, x), (self.k, memory), (self.v, memory)))
        if self.flash:
            out = ms_flash.flash_attention(q, k, v, layout="BSND")
        else:
            q, k, v = (t.transpose(0, 2, 1, 3) * s for t, s in ((q, 8 ** -0.25), (k, 8 ** -0.25), (v, 1.0)))
            out = ops.matmul(ops.softmax(ops.matmul(q, k.transpose(0, 1, 3, 2)), -1), v).transpose(0, 2, 1, 3)
        return self.o(out.reshape(x.shape[0], x.shape[1], DIM))


@entry
def whisper_decoder():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCAB, DIM), parameter((40, DIM), "places")
            self.inner, self.cross = LlamaAttention(kv_heads=HEADS, flash=False), CrossAttention(False)
            self.norm = nn.LayerNorm((DIM,))

        def construct(self, ids, audio):
            x = self.tokens(ids) + self.places[:ids.shape[1]]
            x = x + self.inner(self.norm(x))[0]
            return x + self.cross(self.norm(x), audio)

    axes = {"ids": {0: "batch", 1: "length"}, "audio": {0: "batch", 1: "frames"}}
    return Net(), [ids(), floats(2, 13, DIM)], axes


@entry
def whisper_encoder():
    """Two 1-D convolutions with GELU in front."""
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv1d(8, DIM, 3, pad_mode="pad", padding=1, has_bias=True)
            self.second = nn.Conv1d(DIM, DIM, 3, stride=2, pad_mode="pad", padding=1, has_bias=True)
            self.gelu, self.attention = nn.GELU(approximate=False), PackedAttention()

        def construct(self, mel):
            x = self.gelu(self.second(self.gelu(self.first(mel)))).swapaxes(1, 2)
            return x + self.attention(x)

    return Net(), [floats(2, 8, 20)], {"mel": {0: "batch"}}


@entry
def detr_decoder():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.queries, self.cross = parameter((5, DIM), "queries", 1.0), CrossAttention(True)
            self.backbone = nn.SequentialCell(nn.Conv2d(3, DIM, 3, stride=2, pad_mode="same"), nn.BatchNorm2d(DIM),
                                              nn.ReLU(), nn.MaxPool2d(2, 2))
            self.boxes = nn.SequentialCell(nn.Dense(DIM, 16), nn.ReLU(), nn.Dense(16, 4), nn.Sigmoid())

        def construct(self, image):
            memory = self.backbone(image)
            memory = memory.reshape(memory.shape[0], DIM, -1).transpose(0, 2, 1)
            x = ops.broadcast_to(self.queries.expand_dims(0), (image.shape[0], 5, DIM))
            return self.boxes(self.cross(x, memory))

    return Net(), [floats(2, 3, 16, 12)], {"image": {0: "batch"}}


# ---- mint -----------------------------------------------------------------------------------------------------------
@entry
def mint_block():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj = mint.nn.Linear(DIM, 3 * DIM), mint.nn.Linear(DIM, DIM)
            self.norm = nn.LayerNorm((DIM,))      # mint's has no CPU kernel
            self.up, self.down = mint.nn.Linear(DIM, 64), mint.nn.Linear(64, DIM)
            self.keep = Tensor(np.tril(np.ones((32, 32))), ms.float32)

        def construct(self, x):
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm(x))
            q, k, v = mint.split(qkv, DIM, -1)
            q, k, v = (mint.transpose(mint.reshape(t, (batch, length, HEADS, DIM // HEADS)), 1, 2) for t in (q, k, v))
            scores = mint.div(mint.matmul(q, mint.transpose(k, 2, 3)), math.sqrt(DIM // HEADS))
            keep = self.keep[:length, :length]
            scores = scores.masked_fill(keep == 0, -1e9)
            out = mint.matmul(mint.nn.functional.softmax(scores, -1), v)
            out = mint.reshape(mint.transpose(out, 1, 2), (batch, length, DIM))
            x = mint.add(x, self.proj(out))
            return x + self.down(mint.nn.functional.silu(self.up(self.norm(x))))

    return Net(), [floats(2, 9, DIM)], {"x": {0: "batch", 1: "length"}}


@entry
def mint_misc():
    class Net(nn.Cell):
        def construct(self, x):
            a = mint.permute(x, (0, 2, 1))
            b = mint.cat((x, x * 2), 1).sum(dim=1)
            c = mint.mean(mint.cat((x.unsqueeze(0), -x.unsqueeze(0)), 0), 0)
            d = mint.chunk(x, 2, -1)[1]
            e = mint.where(x > 0, x, -x) + mint.clamp(x, -1.0, 1.0)
            f = mint.pow(x, 2) + mint.rsqrt(mint.abs(x) + 1)
            g = mint.flatten(x, 1)
            h = mint.narrow(x, 1, 1, 3)
            i = mint.nn.functional.silu(x) + mint.sigmoid(x) + mint.erf(x)
            j = mint.max(x, -1)[0] - mint.mean(x, -1)
            k = mint.squeeze(mint.unsqueeze(x, 1), 1).view(x.shape[0], -1)
            n = mint.select(x, 1, 2)
            return a, b, c, d, e, f, g, h, i, j, k, n

    return Net(), [floats(2, 6, 8)], {"x": {0: "batch"}}


# ---- the calls ------------------------------------------------------------------------------------------------------
@entry
def flash_everything():
    """All options of the call that a node or ops around it have to express."""
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.slopes = Tensor(2.0 ** -np.arange(1, 5), ms.float32)
            self.sinks = parameter((4,), "sinks", 1.0)

        def construct(self, q, k, v, mask, bias):
            a = ms_flash.flash_attention(q, k, v, mask, bias=bias, softcap=2.0, softmax_scale=0.3)
            b, lse = ms_flash.flash_attention(q, k, v, window_size=(2, 1), causal_align="top_left", return_lse=True)
            c = ms_flash.flash_attention(q, k, v, causal=True, alibi_slopes=self.slopes, sinks=self.sinks)
            d = ms_flash.flash_attention(q, k, v, mask, window_size=(3, -1), softmax_scale=0)
            return a, b, lse, c, d

    q, k, v = floats(2, 4, 5, 8), floats(2, 2, 7, 8, seed=1), floats(2, 2, 7, 6, seed=2)
    mask = Tensor(np.random.default_rng(3).random((2, 1, 5, 7)) < 0.4)
    axes = {"q": {0: "batch", 2: "queries"}, "k": {0: "batch", 2: "keys"}, "v": {0: "batch", 2: "keys"},
            "mask": {0: "batch", 2: "queries", 3: "keys"}, "bias": {2: "queries", 3: "keys"}}
    return Net(), [q, k, v, mask, floats(1, 4, 5, 7, seed=4)], axes


@entry
def flash_layouts():
    class Net(nn.Cell):
        def construct(self, x, y):
            a = ms_flash.flash_attention(x, y, y, layout="BSH", num_heads=4, causal=True)
            first, other = x.swapaxes(0, 1), y.swapaxes(0, 1)
            b = ms_flash.flash_attention(first, other, other, layout="SBH", num_heads=4)
            c = ms_flash.flash_attention(x, layout="BSH", num_heads=2, num_kv_heads=1, causal=True)
            return a, b, c

    axes = {"x": {0: "batch", 1: "queries"}, "y": {0: "batch", 1: "keys"}}
    return Net(), [floats(2, 5, DIM), floats(2, 7, DIM, seed=1)], axes


@entry
def flash_varlen():
    class Net(nn.Cell):
        def construct(self, q, k, v, cu_q, cu_k):
            return ms_flash.flash_attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True)

    cu_q, cu_k = (Tensor(x, ms.int32) for x in ([0, 3, 3, 7], [0, 4, 6, 11]))
    tensors = [floats(8, 4, 8), floats(12, 2, 8, seed=1), floats(12, 2, 8, seed=2)]
    other = [Tensor(x, ms.int32) for x in ([0, 0, 6, 8], [0, 2, 9, 12])]
    return Net(), [*tensors, cu_q, cu_k], {}, {"verify": [(*tensors, cu_q, cu_k), (*tensors, *other)]}


@entry
def score_call():
    class Net(nn.Cell):
        def construct(self, q, k, v):
            return ops.flash_attention_score(q, k, v, HEADS, input_layout="BSH", scalar_value=0.35)

    q, k, v = floats(2, 9, DIM), floats(2, 9, DIM, seed=1), floats(2, 9, DIM, seed=2)
    return Net(), [q, k, v], {name: {0: "batch", 1: "length"} for name in ("q", "k", "v")}


@entry
def score_causal():
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.mask = Tensor(np.triu(np.ones((2048, 2048)), 1), ms.uint8)

        def construct(self, q, k, v):
            return ops.flash_attention_score(q, k, v, HEADS, attn_mask=self.mask, input_layout="BNSD",
                                             scalar_value=0.35, sparse_mode=3)

    q, k, v = floats(2, HEADS, 5, 16), floats(2, HEADS, 7, 16, seed=1), floats(2, HEADS, 7, 16, seed=2)
    return Net(), [q, k, v], {"q": {2: "queries"}, "k": {2: "keys"}, "v": {2: "keys"}}


@entry
def multihead():
    attention = ms_flash.nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def construct(self, x, padding):
            return self.attention(x, x, x, key_padding_mask=padding)

    padding = Tensor(np.arange(9)[None, :] >= np.array([[7], [9]]))
    return Net(), [floats(2, 9, DIM), padding], {name: {0: "batch", 1: "length"} for name in ("x", "padding")}


@entry
def mindspore_encoder():
    """MindSpore's own transformer layers."""
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 64, batch_first=True)
    net = nn.TransformerEncoder(layer, 2)

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.encoder = net

        def construct(self, x):
            return self.encoder(x)

    return Net(), [floats(2, 9, DIM)], {}


@entry
def gemma():
    """Softcap, a sliding window, GeGLU and tied embeddings."""
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(VOCAB, DIM, embedding_table=Normal(1.0))
            self.q, self.o = nn.Dense(DIM, DIM, has_bias=False), nn.Dense(DIM, DIM, has_bias=False)
            self.kv, self.norm = nn.Dense(DIM, 2 * DIM // HEADS, has_bias=False), RmsNorm()
            self.gate, self.down = nn.Dense(DIM, 96, has_bias=False), nn.Dense(48, DIM, has_bias=False)
            self.gelu = nn.GELU()

        def construct(self, ids):
            x = self.tokens(ids) * DIM ** 0.5
            h = self.norm(x)
            q = self.q(h).reshape(*h.shape[:2], HEADS, -1)
            k, v = ops.chunk(self.kv(h), 2, -1)
            out = ms_flash.flash_attention(q, k.expand_dims(2), v.expand_dims(2), causal=True, window_size=(3, -1),
                                           softcap=5.0, layout="BSND")
            x = x + self.o(out.reshape(*h.shape[:2], DIM))
            gate, up = ops.split(self.gate(self.norm(x)), 48, -1)
            x = self.norm(x + self.down(self.gelu(gate) * up))
            logits = ops.matmul(x, self.tokens.embedding_table.swapaxes(0, 1))
            return ops.tanh(logits / 30.0) * 30.0

    return Net(), [ids()], IDS


@entry
def bloom():
    """ALiBi, baddbmm, a fused QKV with interleaved heads."""
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.qkv, self.proj, self.norm = nn.Dense(DIM, 3 * DIM), nn.Dense(DIM, DIM), nn.LayerNorm((DIM,))
            self.slopes = Tensor(2.0 ** -np.arange(1, HEADS + 1), ms.float32)

        def construct(self, x):
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm(x)).reshape(batch, length, HEADS, 3, DIM // HEADS)
            q, k, v = (qkv[..., i, :].transpose(0, 2, 1, 3).reshape(batch * HEADS, length, -1) for i in range(3))
            alibi = self.slopes.reshape(HEADS, 1, 1) * ops.arange(length).astype(ms.float32).reshape(1, 1, length)
            alibi = ops.tile(alibi, (batch, 1, 1))
            scores = ops.baddbmm(alibi, q, k.transpose(0, 2, 1), beta=1.0, alpha=(DIM // HEADS) ** -0.5)
            hidden = ops.triu(ops.ones((length, length)), 1).astype(ms.bool_)
            weights = ops.softmax(scores.masked_fill(hidden, -3.4e38), -1)
            out = ops.bmm(weights, v).reshape(batch, HEADS, length, -1).transpose(0, 2, 1, 3)
            return x + self.proj(out.reshape(batch, length, DIM))

    return Net(), [floats(2, 9, DIM)], {"x": {0: "batch", 1: "length"}}


@entry
def unet_attention():
    """GroupNorm, 1 x 1 convolutions, attention over pixels, nearest upsampling."""
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.norm = nn.GroupNorm(4, DIM)
            self.q, self.k, self.v, self.o = (nn.Conv2d(DIM, DIM, 1, has_bias=True) for _ in range(4))
            self.pool = nn.AvgPool2d(2, 2)

        def construct(self, x):
            batch, _, height, width = x.shape
            h = ops.silu(self.norm(x))
            q, k, v = (f(h).reshape(batch, 1, DIM, height * width).swapaxes(2, 3) for f in (self.q, self.k, self.v))
            out = ms_flash.flash_attention(q, k, v)
            out = self.o(out.swapaxes(2, 3).reshape(batch, DIM, height, width))
            return self.pool(x + out)

    return Net(), [floats(2, DIM, 6, 4)], {"x": {0: "batch"}}


@entry
def branches():
    """A decision on a length that the graph computes."""
    class Net(nn.Cell):
        def construct(self, x):
            y = x * 2
            if x.shape[1] > 8:
                y = y - 1
            else:
                y = y + x.shape[1]
            return y.sum(1)

    return Net(), [floats(2, 9, DIM)], {"x": {0: "batch", 1: "length"}}


@entry
def indexing():
    class Net(nn.Cell):
        def construct(self, x, at):
            a = x[:, -1]
            b = x[:, ::2, 1:-1]
            c = x[..., None, 0]
            d = ops.gather_elements(x, 1, ops.broadcast_to(at.reshape(2, 3, 1), (2, 3, 8)))
            e = ops.one_hot(at, 6, Tensor(1.0), Tensor(0.0))
            f = ops.cumsum(x, 1)
            g, h = ops.topk(x, 3)
            i = x.argmax(-1)
            j = ops.tril(x) + ops.triu(x, 1)
            k = ops.flip(x, (1,))
            m = x[at[0]]
            n = ops.select(x > 0, x, -x) + ops.logical_not(x > 1).astype(ms.float32)
            return a, b, c, d, e, f, g, h, i, j, k, m, n, x.all(), x.max(), ops.amin(x, 1), ops.floor(x) + ops.round(x)

    at = Tensor([[0, 1, 1], [0, 0, 1]], ms.int32)
    return Net(), [floats(2, 6, 8), at], {}


@entry
def in_place():
    """Values changed after they were read."""
    class Net(nn.Cell):
        def construct(self, x):
            y = x * 2
            before = y * 5
            y += x
            between = y * 3
            y *= 2
            y[0] = 7.0
            return before, between, y + between

    return Net(), [floats(2, 3)], {}


import zoo_families  # noqa: E402, F401  (last: it uses what stands above)
