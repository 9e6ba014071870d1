"""A Llama that keeps keys and values in memory of fixed size, with attention in MindSpore's ops or by ms_flash."""
from __future__ import annotations

import mindspore as ms
from llama import Llama, attend, rotate
from mindspore import Parameter, Tensor, nn, ops

from ms_flash import flash_attention_with_kvcache


class Cached(nn.Cell):
    """ids (batch, n) int32 and how many tokens were read before, lengths (batch,) int32 -> logits (batch, vocabulary)
    of what follows.

    Args:
        net (Llama): The blocks, whose weights are shared.
        capacity (int): Tokens that there is room for.
        batch (int): Texts read side by side.
    """

    def __init__(self, net: Llama, capacity: int, batch: int = 1):
        super().__init__()
        self.net, self.capacity = net, capacity
        self.keys, self.values = (
            ms.ParameterTuple([self._memory(f"{kind}_{i}", batch) for i in range(net.config.layers)])
            for kind in ("keys", "values"))

    def _memory(self, name, batch):
        return Parameter(ops.zeros(self._shape(batch), ms.float32), name=name, requires_grad=False)

    def construct(self, ids, lengths):
        where = self.place(ids, lengths)
        x = self.net.embedding(ids)
        for i, block in enumerate(self.net.blocks):
            query, key, value = block.attention.project(block.attention_norm(x))
            x = x + block.attention.merge(self.mix(i, query, key, value, where))
            x = x + block.feed(block.feed_norm(x))
        return self.net.logits(x[:, -1:])[:, 0]


class Naive(Cached):
    """Attention written out, over the whole memory, of which the part that is not yet written is masked."""

    def _shape(self, batch):
        return self.capacity, batch, self.net.config.kv_heads, self.net.config.head_dim

    def place(self, ids, lengths):
        """(positions of the new tokens, cos, sin, what is masked), the same for every block. Equal lengths only."""
        positions = lengths[0] + ops.arange(ids.shape[1])
        hidden = ops.arange(self.capacity) > positions.reshape(-1, 1)
        return positions, self.net.cos[positions], self.net.sin[positions], hidden

    def mix(self, i, query, key, value, where):
        positions, cos, sin, hidden = where
        query, key = rotate(query.swapaxes(1, 2), cos, sin), rotate(key.swapaxes(1, 2), cos, sin)
        keys = ops.scatter_update(self.keys[i], positions, key.transpose(2, 0, 1, 3))
        values = ops.scatter_update(self.values[i], positions, value.swapaxes(0, 1))
        return attend(query, keys.transpose(1, 2, 0, 3), values.transpose(1, 2, 0, 3), hidden).swapaxes(1, 2)


class Flash(Cached):
    """The same with one op: it turns query and key, writes the cache and attends to what is written."""

    def _shape(self, batch):
        return batch, self.capacity, self.net.config.kv_heads, self.net.config.head_dim

    def place(self, ids, lengths):
        return lengths

    def mix(self, i, query, key, value, where):
        return flash_attention_with_kvcache(query, self.keys[i], self.values[i], key, value, cache_seqlens=where,
                                            rotary_cos=self.net.cos, rotary_sin=self.net.sin)


ATTENTIONS = {"naive": Naive, "ms_flash": Flash}


class FullError(ValueError):
    """There is no room for what is to be read."""


class Generator:
    """A text that a model goes on with, always with its most probable token.

    The prompt is read op by op, so that any length will do, and the steps are one compiled graph.
    """

    def __init__(self, model: Cached):
        self.model, self.length = model, 0
        self._step = ms.jit(model)

    @property
    def room(self) -> int:
        """Tokens that can still be read."""
        return self.model.capacity - self.length

    def warm_up(self) -> None:
        """Compiles the step. What it writes into the memory is overwritten by the next token that is read."""
        self._step(Tensor([[0]], ms.int32), Tensor([self.length], ms.int32)).asnumpy()

    def read(self, ids: list[int]) -> int:
        """Reads on, and returns what follows."""
        if len(ids) > self.room:
            raise FullError(f"there is room for {self.model.capacity} tokens, of which {self.length} are taken: "
                            f"{len(ids)} more do not fit")
        run = self._step if len(ids) == 1 else self.model
        logits = run(Tensor([ids], ms.int32), Tensor([self.length], ms.int32))
        self.length += len(ids)
        return int(logits.asnumpy()[0].argmax())

    def generate(self, ids: list[int], count: int, end: int | None = None):
        """Yields up to `count` tokens after `ids`: fewer where `end` comes, which is the last then, or room ends."""
        token = self.read(ids)
        yield token
        for _ in range(min(count - 1, self.room)):
            if token == end:
                return
            token = self.read([token])
            yield token
