"""Continuous batching: requests join a running batch, grow in the blocks of one paged cache, and leave."""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import mindspore as ms
import numpy as np
from gpt import GPT, HEAD_DIM
from mindspore import Tensor, nn

import ms_flash
from ms_flash.nn import CacheFullError, PagedKVCache


class CachedGPT(nn.Cell):
    """The blocks of a GPT over a paged cache.

    ids (batch, n) int32, new in each sequence, lengths (batch,) int32, of the sequences so far, and table
    (batch, blocks) int32 -> logits of the last id, (batch, vocab). Keys and values of the ids go into the cache.
    """

    def __init__(self, net: GPT, cache: PagedKVCache):
        super().__init__()
        self.net = net
        self.cache = cache
        self.cos, self.sin = net.blocks[0].rotary.cos, net.blocks[0].rotary.sin

    def attend(self, layer, block, x, lengths, table):
        batch, n, dim = x.shape
        qkv = block.qkv(x).reshape(batch, n, 3, dim // HEAD_DIM, HEAD_DIM)
        out = ms_flash.flash_attention_with_kvcache(
            qkv[:, :, 0], self.cache.k(layer), self.cache.v(layer), qkv[:, :, 1], qkv[:, :, 2], cache_seqlens=lengths,
            block_table=table, rotary_cos=self.cos, rotary_sin=self.sin)
        return block.proj(out.reshape(batch, n, dim))

    def construct(self, ids, lengths, table):
        x = self.net.tokens(ids)
        for layer, block in enumerate(self.net.blocks):
            x = x + self.attend(layer, block, block.norm1(x), lengths, table)
            x = x + block.down(block.gelu(block.up(block.norm2(x))))
        return self.net.head(self.net.norm(x[:, -1]))


@dataclass(eq=False)
class Request:
    """A text to go on with for `count` characters, after the common text of all requests if `shared`."""

    prompt: list[int]
    count: int
    shared: bool = False
    written: list[int] = field(default_factory=list)


class Batcher:
    """Runs requests together, at most `slots` at a time, each with the most probable character.

    Every step takes in what fits, then moves all that run by one character. When the cache is full the request that
    came last gives its blocks back and waits, with what it has written, until there is room to read all of that anew.
    The cache knows a sequence by its request; one more, "shared", is the common text, which is read once.
    """

    def __init__(self, net: GPT, slots: int, num_blocks: int, block_size: int, shared: list[int] = ()):
        self.cache = PagedKVCache(len(net.blocks), num_blocks, block_size, net.head.in_channels // HEAD_DIM, HEAD_DIM,
                                  ms.float32)
        model = CachedGPT(net.set_train(False), self.cache)
        # lengths left open: one graph for every prompt and every batch
        model.set_inputs(*(Tensor(shape=shape, dtype=ms.int32) for shape in ([None, None], [None], [None, None])))
        self.model = ms.jit(model)
        self.slots, self.shared = slots, len(shared)
        self.waiting, self.running = deque(), []
        self.steps = self.moved = self.set_back = 0
        self.cache.allocate("shared")
        if shared:
            self._read("shared", list(shared))

    def submit(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        before = self.shared if request.shared else 0
        blocks = self._blocks(before + len(request.prompt) + request.count) - before // self.cache.block_size
        if not request.prompt or request.count < 1 or blocks > self.cache.num_blocks - self._blocks(self.shared):
            raise ValueError("a request must have a prompt, ask for something, and fit the cache alone, but got "
                             f"{len(request.prompt)} + {request.count} characters")
        self.waiting.append(request)

    def step(self) -> list[Request]:
        """Takes in what fits, moves everything by one character, and returns what is done."""
        while self.waiting and len(self.running) < self.slots and self._take_in(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        done = self._leave()
        lengths = None
        while self.running and lengths is None:
            try:
                lengths = self.cache.append(self.running, 1)
            except CacheFullError:
                request = self.running.pop()
                self.cache.free(request)
                self.waiting.appendleft(request)
                self.set_back += 1
        if self.running:
            ids = Tensor([request.written[-1:] for request in self.running], ms.int32)
            logits = self.model(ids, lengths, self.cache.block_table(self.running)).asnumpy()
            for request, row in zip(self.running, logits):
                request.written.append(int(row.argmax()))
            self.steps += 1
            self.moved += len(self.running)
        return done + self._leave()

    def close(self) -> None:
        """Gives back the blocks of the common text."""
        self.cache.free("shared")

    def _blocks(self, tokens):
        return -(-tokens // self.cache.block_size)

    def _take_in(self, request):
        """Reads the prompt, which gives the first character; False if there is no room."""
        text = request.prompt + request.written
        # one block more for each that runs, so that nobody is taken in to be set back at once
        if self.running and self.cache.free_blocks < self._blocks(len(text)) + len(self.running):
            return False
        if request.shared:
            self.cache.fork("shared", request)
        else:
            self.cache.allocate(request)
        try:
            request.written.append(self._read(request, text))
        except CacheFullError:
            self.cache.free(request)
            return False
        return True

    def _read(self, sequence, text):
        lengths = self.cache.append([sequence], len(text))
        logits = self.model(Tensor([text], ms.int32), lengths, self.cache.block_table([sequence]))
        return int(logits.asnumpy()[0].argmax())

    def _leave(self):
        done = [request for request in self.running if len(request.written) == request.count]
        for request in done:
            self.cache.free(request)
            self.running.remove(request)
        return done


def random_requests(rng: np.random.Generator, ids: np.ndarray, number: int, longest: int, most: int) -> list[Request]:
    """Requests of random lengths over a text: prompts of 1 to `longest` ids, answers of 1 to `most`; half share."""
    requests = []
    for _ in range(number):
        start, length = rng.integers(0, len(ids) - longest), rng.integers(1, longest + 1)
        requests.append(Request(ids[start:start + length].tolist(), int(rng.integers(1, most + 1)),
                                bool(rng.integers(2))))
    return requests
