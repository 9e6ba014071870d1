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

from .. import direct
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

    def construct(self, query, *pairs):
        for i in range(0, len(pairs), 2):
            query = self.attention(query, pairs[i], pairs[i + 1])
        return query

    def attention(self, query, key, value):
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

    def construct(self, query, *pairs):
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

    def construct(self, query, *pairs):
        for i in range(0, len(pairs), 2):
            query = self.attention(query, pairs[i], pairs[i + 1])
        return query

    def attention(self, query, key, value):
        if self.bounds is None:
            return self.padded(query, key, value, self.mask)
        # sequence by sequence, (T, N, D): less work than padding all of them to the longest
        outs = ()
        for start, stop in self.bounds:
            q, k, v = query[start:stop], key[start:stop], value[start:stop]
            mask = None
            if self.mask is not None:
                mask = self.mask[:stop - start, :stop - start]
            outs += (self.padded(q.swapaxes(0, 1), k.swapaxes(0, 1), v.swapaxes(0, 1), mask).swapaxes(0, 1),)
        return ops.concat(outs)

    def padded(self, query, key, value, mask):
        # grouped heads as more queries per key head: no copy of key and value, MindSpore's fastest form by far
        shape = query.shape
        if self.group > 1:
            query = query.reshape((shape[0], shape[1] // self.group, self.group * shape[2], shape[3]))
        score = ops.matmul(query, key.swapaxes(-1, -2)) * self.scale
        if mask is not None:
            score = score + mask
        return ops.matmul(ops.softmax(score, -1), value).reshape(shape)


class _Step(nn.Cell):
    """Forward and backward: the gradients of query, keys and values."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.grad = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, *inputs):
        return self.grad(self.net)(*inputs)     # the last one is the gradient of the output


def _shapes(case):
    """Shapes of query, key and value; the output has that of the query."""
    if case.lengths:
        return [(case.q_len, case.heads, case.head_dim), *[(case.kv_len, case.kv_heads, case.head_dim)] * 2]
    return [(case.batch, case.heads, case.q_len, case.head_dim),
            *[(case.batch, case.kv_heads, case.kv_len, case.head_dim)] * 2]


def _arrays(case):
    """Query, key and value of each call, and the gradient of the output, float32."""
    rng, (query, *pair) = np.random.default_rng(0), _shapes(case)
    return [rng.standard_normal(shape, np.float32) for shape in [query, *pair * case.calls, query]]


def _mindspore(cell, compiled):
    def implementation(case: Case, dtype: str, direction: str, causal: bool):
        dtype = getattr(ms, dtype)
        # For a forward no gradient is made: its memory, free again, would take the output, and no growth be seen.
        inputs = [Tensor(x).astype(dtype) for x in _arrays(case)[:-1 if direction == "fwd" else None]]
        net = cell(case, causal, dtype)
        if direction == "fwd":
            step = ms.jit(net) if compiled else net
            return lambda: step(*inputs).asnumpy()
        step = ms.jit(_Step(net)) if compiled else _Step(net)
        return lambda: [x.asnumpy() for x in step(*inputs)]

    return implementation


def _kernel(case: Case, dtype: str, direction: str, causal: bool):
    """Ours with no MindSpore around it."""
    if case.lengths:
        raise NotOffered("no variable lengths")
    query, *pairs, dout = (direct.stored(x, dtype) for x in _arrays(case))
    layers = []
    for key, value in zip(pairs[::2], pairs[1::2]):
        layers.append(direct.Attention(dtype, layers[-1].out if layers else query, key, value,
                                       (case.window, 0 if causal or case.window >= 0 else -1)))
    layers[-1].dout[:] = dout

    def step():
        for layer in layers:
            layer.forward()
        if direction == "fwd":
            return layers[-1].out
        for layer, before in zip(layers[::-1], [*layers[-2::-1], None]):
            layer.backward()
            if before:
                before.dout[:] = layer.grads[0]
        return [layers[0].grads[0], *(x for layer in layers for x in layer.grads[1:])]

    return step


def _torch(case: Case, dtype: str, direction: str, causal: bool):
    """PyTorch's scaled_dot_product_attention, which picks its flash kernel for the CPU."""
    if case.window >= 0:
        raise NotOffered("no window")
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attention

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    # copied: numpy's memory comes in large pages, which neither PyTorch nor MindSpore ask for
    inputs = [torch.from_numpy(x).to(getattr(torch, dtype), copy=True) for x in _arrays(case)]
    dout = inputs.pop()
    bounds = list(itertools.accumulate(case.lengths, initial=0))

    def layer(query, key, value):
        options = {"is_causal": causal, "enable_gqa": case.heads != case.kv_heads}
        if not case.lengths:
            return attention(query, key, value, **options)
        parts = ([x[start:stop].transpose(0, 1)[None] for x in (query, key, value)]
                 for start, stop in zip(bounds, bounds[1:]))
        return torch.cat([attention(*part, **options)[0].transpose(0, 1) for part in parts])

    def forward(query, *pairs):
        for key, value in zip(pairs[::2], pairs[1::2]):
            query = layer(query, key, value)
        return query

    if direction == "fwd":
        def step():
            with torch.no_grad():
                return forward(*inputs)
        return step
    for x in inputs:
        x.requires_grad_()
    return lambda: torch.autograd.grad(forward(*inputs), inputs, dout)


def _onnxruntime(kind):
    """A model of one node per call, made by `kind(case, causal)`: (shapes of query, key and value, make_node's
    arguments)."""

    def implementation(case: Case, dtype: str, direction: str, causal: bool):
        import onnxruntime
        from onnx import helper

        if direction != "fwd":
            raise NotOffered("ONNX Runtime does not train here")
        if case.lengths or case.window >= 0:
            raise NotOffered("no variable lengths, no window")
        if dtype == "bfloat16":
            raise NotOffered("no bfloat16 in numpy, which its inputs are")
        (query, *pair), node = kind(case, causal)
        shapes = {"x0": query, **{f"{name}{i}": shape for i in range(case.calls) for name, shape in zip("kv", pair)}}
        nodes = [helper.make_node(inputs=[f"x{i}", f"k{i}", f"v{i}"], outputs=[f"x{i + 1}"], **node)
                 for i in range(case.calls)]
        element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        values = [helper.make_tensor_value_info(name, element, shape)
                  for name, shape in [*shapes.items(), (f"x{case.calls}", None)]]
        model = helper.make_model(helper.make_graph(nodes, "attention", values[:-1], values[-1:]), ir_version=10,
                                  opset_imports=[helper.make_opsetid(*x) for x in (("", 23), ("com.microsoft", 1))])
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
    if case.heads != case.kv_heads:
        raise NotOffered("no grouped heads")
    shapes = [(case.batch, length, case.heads * case.head_dim) for length in (case.q_len, case.kv_len, case.kv_len)]
    return shapes, {"op_type": "MultiHeadAttention", "domain": "com.microsoft", "num_heads": case.heads,
                    "unidirectional": int(causal)}


def _standard(case, causal):
    """Attention of ai.onnx."""
    return _shapes(case), {"op_type": "Attention", "is_causal": int(causal)}


IMPLEMENTATIONS = {
    "ms_flash-jit": _mindspore(_Ours, compiled=True),
    "ms_flash-pynative": _mindspore(_Ours, compiled=False),
    "ms_flash-full": _mindspore(_OursFull, compiled=True),
    "ms_flash-kernel": _kernel,
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
