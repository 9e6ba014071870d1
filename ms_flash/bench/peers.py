"""What is measured against what: a function per implementation, all behind one signature.

``IMPLEMENTATIONS[name](case, dtype, direction, causal)`` makes the inputs and returns a function without parameters
that runs one step and waits for its results. ``PEERS[name]`` names the implementation of ours that a peer is compared
with: the one that is called in the same way.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import ms_flash

from .cases import Case


class _Ours(nn.Cell):
    """ms_flash."""

    def __init__(self, case: Case, causal: bool, dtype):
        super().__init__()
        self.causal = causal
        self.lengths = Tensor(np.cumsum([0, *case.lengths]), ms.int32) if case.lengths else None

    def construct(self, query, key, value):
        if self.lengths is None:
            return ms_flash.flash_attention(query, key, value, causal=self.causal)
        return ms_flash.flash_attention_varlen(query, key, value, self.lengths, self.lengths, causal=self.causal)


class _Naive(nn.Cell):
    """MindSpore's own operators: two products and a softmax, the causal mask added to the scores."""

    def __init__(self, case: Case, causal: bool, dtype):
        super().__init__()
        self.scale = case.head_dim**-0.5
        self.group = case.heads // case.kv_heads
        ends = np.cumsum(case.lengths).tolist()
        self.bounds = list(zip([0, *ends], ends)) if case.lengths else None
        self.mask = None
        if causal:
            longest = max(case.lengths, default=case.q_len)
            mask = np.triu(np.full((longest, longest), -1e4, np.float32), 1)
            self.mask = Tensor(np.tile(mask, (self.group, 1))).astype(dtype)

    def construct(self, query, key, value):
        if self.bounds is None:
            return self.attention(query, key, value, self.mask)
        # sequence by sequence, (T, N, D): less work than padding all of them to the longest
        outs = ()
        for start, stop in self.bounds:
            q, k, v = query[start:stop], key[start:stop], value[start:stop]
            mask = None
            if self.mask is not None:
                mask = self.mask[:stop - start, :stop - start]
            outs += (self.attention(q.swapaxes(0, 1), k.swapaxes(0, 1), v.swapaxes(0, 1), mask).swapaxes(0, 1),)
        return ops.concat(outs)

    def attention(self, query, key, value, mask):
        # grouped heads as more queries per key head: no copy of key and value, MindSpore's fastest form by far
        shape = query.shape
        if self.group > 1:
            query = query.reshape((shape[0], shape[1] // self.group, self.group * shape[2], shape[3]))
        score = ops.matmul(query, key.swapaxes(-1, -2)) * self.scale
        if mask is not None:
            score = score + mask
        return ops.matmul(ops.softmax(score, -1), value).reshape(shape)


class _Step(nn.Cell):
    """Forward and backward: the gradients of query, key and value."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.grad = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, query, key, value, dout):
        return self.grad(self.net)(query, key, value, dout)


def _shapes(case):
    """Shapes of query, key and value; the output has that of the query."""
    if case.lengths:
        return [(case.q_len, case.heads, case.head_dim), *[(case.kv_len, case.kv_heads, case.head_dim)] * 2]
    return [(case.batch, case.heads, case.q_len, case.head_dim),
            *[(case.batch, case.kv_heads, case.kv_len, case.head_dim)] * 2]


def _mindspore(cell, compiled):
    def implementation(case: Case, dtype: str, direction: str, causal: bool):
        rng, dtype = np.random.default_rng(0), getattr(ms, dtype)
        shapes = _shapes(case)
        query, key, value, dout = (Tensor(rng.standard_normal(shape, np.float32)).astype(dtype)
                                   for shape in [*shapes, shapes[0]])
        net = cell(case, causal, dtype)
        if direction == "fwd":
            step = ms.jit(net) if compiled else net
            return lambda: step(query, key, value).asnumpy()
        step = ms.jit(_Step(net)) if compiled else _Step(net)
        return lambda: [x.asnumpy() for x in step(query, key, value, dout)]

    return implementation


IMPLEMENTATIONS = {
    "ms_flash-jit": _mindspore(_Ours, compiled=True),
    "ms_flash-pynative": _mindspore(_Ours, compiled=False),
    "mindspore-jit": _mindspore(_Naive, compiled=True),
    "mindspore-pynative": _mindspore(_Naive, compiled=False),
}
PEERS = {"mindspore-jit": "ms_flash-jit", "mindspore-pynative": "ms_flash-pynative"}
