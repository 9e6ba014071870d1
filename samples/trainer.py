"""The text, the optimiser and one compiled training step."""
from __future__ import annotations

import contextlib
import math
from pydoc_data.topics import topics

import mindspore as ms
import numpy as np
from gpt import GPT, NextTokenLoss
from mindspore import Tensor, nn, ops
from mindspore.amp import StaticLossScaler

import ms_flash

DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}


class Text:
    """The Python language reference as the standard library ships it, one token per character."""

    def __init__(self):
        text = "\n".join(topics[name] for name in sorted(topics))
        self.vocabulary = sorted(set(text))
        index = {char: i for i, char in enumerate(self.vocabulary)}
        self.index = index
        self.ids = np.array([index[char] for char in text], np.int32)

    def batch(self, rng: np.random.Generator, size: int, length: int) -> tuple[Tensor, Tensor]:
        """Ids and the ids that follow them, both (size, length) int32, from random places."""
        starts = rng.integers(0, len(self.ids) - length, size)
        rows = np.stack([self.ids[start : start + length + 1] for start in starts])
        return Tensor(rows[:, :-1].copy()), Tensor(rows[:, 1:].copy())


def cosine_schedule(peak: float, steps: int, warmup: int = 10) -> list[float]:
    """Learning rate per step: linear warm-up, then half a cosine down to a tenth of the peak."""
    warmup = min(warmup, steps)
    rates = [peak * (i + 1) / warmup for i in range(warmup)]
    for i in range(steps - warmup):
        rates.append(peak * (0.55 + 0.45 * math.cos(math.pi * i / (steps - warmup))))
    return rates


class Trainer:
    """A GPT with AdamW (cosine schedule, clipped gradients), its whole step compiled into one graph."""

    def __init__(self, vocab: int, attention: str, args):
        dtype = DTYPES[args.dtype]
        ms.set_seed(args.seed)  # the same weights for every attention
        self.net = GPT(vocab, args.context, args.dim, args.layers, attention, dtype)
        params = self.net.trainable_params()
        matrices = [p for p in params if p.ndim > 1]
        vectors = [p for p in params if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0},
                  {"order_params": params}]
        optimizer = nn.AdamWeightDecay(groups, cosine_schedule(args.learning_rate, args.steps), beta2=0.95)
        loss_net = NextTokenLoss(self.net)
        # float16 gradients of a mean over thousands of tokens would fall below its smallest number.
        scaler = StaticLossScaler(1024 if dtype == ms.float16 else 1)

        def forward(ids, targets):
            return scaler.scale(loss_net(ids, targets))

        value_and_grad = ms.value_and_grad(forward, None, optimizer.parameters)

        @ms.jit
        def step(ids, targets):
            loss, grads = value_and_grad(ids, targets)
            optimizer(ops.clip_by_global_norm(scaler.unscale(grads), 1.0))
            return scaler.unscale(loss)

        self._step = step
        self.report = None      # of the fusion
        self._fusion = ms_flash.fusion if attention == "fused" else contextlib.nullcontext

    def step(self, ids: Tensor, targets: Tensor) -> float:
        """Trains on one batch and returns its loss in nats per character."""
        with self._fusion() as report:
            loss = self._step(ids, targets)
        self.report = self.report or report
        return float(loss.asnumpy())


def generate(net: GPT, text: Text, prompt: str, count: int, temperature: float = 0.7, seed: int = 0) -> str:
    """`prompt` continued by `count` characters; together they must fit the context."""
    rng = np.random.default_rng(seed)
    logits_of = ms.jit(net)
    # One shape for all calls, so one graph: what stands behind the last character is unseen, the model is causal.
    ids = np.zeros((1, len(prompt) + count), np.int32)
    ids[0, : len(prompt)] = [text.index[char] for char in prompt]
    for at in range(len(prompt), ids.shape[1]):
        logits = logits_of(Tensor(ids)).asnumpy()[0, at - 1].astype(np.float64) / temperature
        weights = np.exp(logits - logits.max())
        ids[0, at] = rng.choice(weights.size, p=weights / weights.sum())
    return "".join(text.vocabulary[i] for i in ids[0])
