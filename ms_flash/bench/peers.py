"""What is measured against what: a function per implementation, all behind one signature.

``IMPLEMENTATIONS[name](case, dtype, direction, causal)`` makes the inputs and returns a function without parameters
that runs one step and waits for its results. ``PEERS[name]`` names the implementation of ours that a peer is compared
with: the one that is called in the same way.
"""

from __future__ import annotations

import dataclasses
import itertools
import os

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import ms_flash

from .cases import Case


class NotOffered(Exception):
    """What a peer has not got; the text becomes the note of the row."""


class _Ours(nn.Cell):
    """ms_flash."""

    def __init__(self, case: Case, causal: bool, dtype):
        super().__init__()
        self.causal = causal
        self.window = (case.window, 0) if case.window >= 0 else (-1, -1)
        self.lengths = Tensor(np.cumsum([0, *case.lengths]), ms.int32) if case.lengths else None

    def construct(self, query, key, value):
        if self.lengths is None:
            return ms_flash.flash_attention(query, key, value, causal=self.causal, window_size=self.window)
        return ms_flash.flash_attention_varlen(query, key, value, self.lengths, self.lengths, causal=self.causal)


class _OursFull(_Ours):
    """ms_flash without the window of the case: what the window saves."""

    def __init__(self, case: Case, causal: bool, dtype):
        super().__init__(dataclasses.replace(case, window=-1), causal, dtype)


class _Operator(nn.Cell):
    """One of MindSpore's own operators, the cheapest there is: what a call costs. It does not compute attention."""

    def __init__(self, case: Case, causal: bool, dtype):
        super().__init__()

    def construct(self, query, key, value):
        return ops.add(query, query)    # whatever the shape of the key


class _Naive(nn.Cell):
    """MindSpore's own operators: two products and a softmax, the causal mask added to the scores."""

    def __init__(self, case: Case, causal: bool, dtype):
        super().__init__()
        self.scale = case.head_dim**-0.5
        self.group = case.heads // case.kv_heads
        ends = np.cumsum(case.lengths).tolist()
        self.bounds = list(zip([0, *ends], ends)) if case.lengths else None
        self.mask = None
        if causal or case.window >= 0:
            longest = max(case.lengths, default=case.q_len)
            mask = np.triu(np.full((longest, longest), -1e4, np.float32), 1)
            if case.window >= 0:
                mask += np.tril(np.full((longest, longest), -1e4, np.float32), -case.window - 1)
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


def _arrays(case):
    """Query, key, value and the gradient of the output, float32."""
    rng, shapes = np.random.default_rng(0), _shapes(case)
    return [rng.standard_normal(shape, np.float32) for shape in [*shapes, shapes[0]]]


def _mindspore(cell, compiled):
    def implementation(case: Case, dtype: str, direction: str, causal: bool):
        dtype = getattr(ms, dtype)
        # For a forward no gradient is made: its memory, free again, would take the output, and no growth be seen.
        query, key, value, *dout = (Tensor(x).astype(dtype) for x in _arrays(case)[:3 if direction == "fwd" else 4])
        net = cell(case, causal, dtype)
        if direction == "fwd":
            step = ms.jit(net) if compiled else net
            return lambda: step(query, key, value).asnumpy()
        step = ms.jit(_Step(net)) if compiled else _Step(net)
        return lambda: [x.asnumpy() for x in step(query, key, value, *dout)]

    return implementation


def _torch(case: Case, dtype: str, direction: str, causal: bool):
    """PyTorch's scaled_dot_product_attention, which picks its flash kernel for the CPU."""
    if case.window >= 0:
        raise NotOffered("no window")
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attention

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    inputs = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in _arrays(case)]
    dout = inputs.pop()
    bounds = list(itertools.accumulate(case.lengths, initial=0))

    def forward(query, key, value):
        options = {"is_causal": causal, "enable_gqa": case.heads != case.kv_heads}
        if not case.lengths:
            return attention(query, key, value, **options)
        parts = ([x[start:stop].transpose(0, 1)[None] for x in (query, key, value)]
                 for start, stop in zip(bounds, bounds[1:]))
        return torch.cat([attention(*part, **options)[0].transpose(0, 1) for part in parts])

    if direction == "fwd":
        def step():
            with torch.no_grad():
                return forward(*inputs)
        return step
    for x in inputs:
        x.requires_grad_()
    return lambda: torch.autograd.grad(forward(*inputs), inputs, dout)


def _onnxruntime(graph):
    """A model of one node, made by `graph(case, causal)`: (node, names and shapes of the inputs)."""

    def implementation(case: Case, dtype: str, direction: str, causal: bool):
        import onnx
        import onnxruntime

        if direction != "fwd":
            raise NotOffered("ONNX Runtime does not train here")
        if case.lengths or case.window >= 0:
            raise NotOffered("no variable lengths, no window")
        if dtype == "bfloat16":
            raise NotOffered("no bfloat16 in numpy, which its inputs are")
        node, shapes = graph(case, causal)
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        value = lambda name, shape: onnx.helper.make_tensor_value_info(name, kind, shape)
        inputs = [value(*item) for item in shapes.items()]
        model = onnx.helper.make_model(
            onnx.helper.make_graph([node], "attention", inputs, [value("out", None)]), ir_version=10,
            opset_imports=[onnx.helper.make_opsetid(*opset) for opset in (("", 23), ("com.microsoft", 1))])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(os.sched_getaffinity(0))
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        feed = {name: (x if x.shape == shape else x.swapaxes(1, 2).reshape(shape)).astype(dtype)
                for x, (name, shape) in zip(_arrays(case), shapes.items())}
        return lambda: session.run(None, feed)[0]

    return implementation


def _multi_head(case, causal):
    """The contributed operator that its optimizer makes of transformers: (B, S, N * D), as many heads in key."""
    import onnx

    if case.heads != case.kv_heads:
        raise NotOffered("no grouped heads")
    rows = {"query": case.q_len, "key": case.kv_len, "value": case.kv_len}
    shapes = {name: (case.batch, length, case.heads * case.head_dim) for name, length in rows.items()}
    return onnx.helper.make_node("MultiHeadAttention", list(shapes), ["out"], domain="com.microsoft",
                                 num_heads=case.heads, unidirectional=int(causal)), shapes


def _standard(case, causal):
    """Attention of ai.onnx."""
    import onnx

    shapes = dict(zip(("query", "key", "value"), _shapes(case)))
    return onnx.helper.make_node("Attention", list(shapes), ["out"], is_causal=int(causal)), shapes


IMPLEMENTATIONS = {
    "ms_flash-jit": _mindspore(_Ours, compiled=True),
    "ms_flash-pynative": _mindspore(_Ours, compiled=False),
    "ms_flash-full": _mindspore(_OursFull, compiled=True),
    "mindspore-op": _mindspore(_Operator, compiled=True),
    "mindspore-jit": _mindspore(_Naive, compiled=True),
    "mindspore-pynative": _mindspore(_Naive, compiled=False),
    "torch": _torch,
    "ort-mha": _onnxruntime(_multi_head),
    "ort-attention": _onnxruntime(_standard),
}
PEERS = {"mindspore-jit": "ms_flash-jit", "mindspore-pynative": "ms_flash-pynative", "torch": "ms_flash-jit",
         "ort-mha": "ms_flash-jit", "ort-attention": "ms_flash-jit", "ms_flash-full": "ms_flash-jit",
         "mindspore-op": "ms_flash-jit"}
