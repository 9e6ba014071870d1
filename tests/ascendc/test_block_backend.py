"""The block op on the Ascend kernels: as a primitive of MindSpore, and where fusion finds it in a net."""
from __future__ import annotations

import zlib

import mindspore as ms
import native
import numpy as np
import pytest
from fusion import block_cases
from fusion.block_primitive import parse_options, run_primitive, spec_of
from mindspore import nn, ops

import ms_flash
from ms_flash.backends import ascend_twin

TWIN = "ascend-twin"
# name: (arguments of block_cases.draw, options of the attention). head_dim 13 is padded, packed weights of heads that
# are multiples of 16 are read where they lie.
CASES = {
    "plain": ({}, {}),
    "packed": ({"pack": "qkv", "d": 16, "e": 72}, {"right": 0}),
    "packed-transposed": ({"pack": "qkv", "d": 16, "transposed": (True,) * 4, "sinks": True}, {"right": 0}),
    "packed-interleaved": ({"pack": "qkv", "interleaved": True, "transposed": (True, False, False, False)}, {}),
    "cross-kv-packed": ({"cross": True, "k_len": 19, "pack": "kv", "heads": 6, "kv_heads": 3, "d": 32}, {"right": 2}),
    "values-apart": ({"values_apart": True, "biases": "v", "d": 24, "dv": 10, "out": 17}, {"recompute": True}),
    "no-output-projection": ({"w_o": False, "biases": "qkv", "d": 16}, {"recompute": True}),
    "no-output-projection-padded": ({"w_o": False, "biases": "qk", "transposed": (False, True, False, False)}, {}),
    "everything": ({"pack": "qkv", "mask": (2, 1, 1, 37), "bias": (4, 37, 37), "sinks": True, "alibi": True},
                   {"softcap": 5.0, "right": 0, "align": "top_left", "recompute": True}),
}
_NOT_MATHS = ("recompute", "layout")


@pytest.mark.parametrize("name", CASES)
def test_primitive(name, mode):
    dtype = native.DTYPES[("float16", "bfloat16")[list(CASES).index(name) % 2]]
    arguments, extra = CASES[name]
    rng = np.random.default_rng(zlib.crc32(f"{name} {mode}".encode()))
    given, options, channels = block_cases.draw(rng, dtype, **arguments)
    dy = rng.standard_normal((*given["x"].shape[:2], channels[0])).astype(dtype)
    ascend_twin.totals(reset=True)
    got = run_primitive(given, dy, spec_of(given, **parse_options({**options, **extra})), TWIN)
    launches = ascend_twin.totals()
    assert {"block", "bwd"} <= set(launches) and "fwd" not in launches
    assert all(total["violations"] == 0 for total in launches.values())
    block_cases.check(got, given, {**options, **{k: v for k, v in extra.items() if k not in _NOT_MATHS}}, dy)


def test_biases_of_another_dtype_are_refused():
    given, options, _ = block_cases.draw(np.random.default_rng(0), np.float16, bias_dtype=np.float32)
    with pytest.raises(TypeError, match="'b_q' must be that of 'x' float16 for the backend 'ascend-twin'"):
        ms_flash.backends.BACKENDS[TWIN].mha_forward(spec_of(given, **parse_options(options)))


class Written(nn.Cell):
    """A block in MindSpore's own ops."""

    def __init__(self, heads=2, width=48):
        super().__init__()
        self.heads = heads
        rng = np.random.default_rng(0)
        draw = lambda *shape: ms.Tensor((rng.standard_normal(shape) * width ** -0.5).astype(np.float16))
        self.q, self.k, self.v, self.o = (nn.Dense(width, width, draw(width, width), draw(width), dtype=ms.float16)
                                          for _ in range(4))

    def split(self, x):
        b, s, width = x.shape
        return x.reshape((b, s, self.heads, width // self.heads)).swapaxes(1, 2)

    def construct(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        p = ops.softmax(ops.matmul(q, k.swapaxes(-1, -2)) * 0.2, axis=-1)
        return self.o(ops.matmul(p, v).swapaxes(1, 2).reshape(x.shape))


@pytest.mark.parametrize("train", [False, True])
def test_fusion_of_a_whole_block_runs_its_kernel(train, monkeypatch):
    monkeypatch.setenv("MS_FLASH_BACKEND", TWIN)
    ms.set_context(mode=ms.GRAPH_MODE)
    x = ms.Tensor(np.random.default_rng(1).standard_normal((2, 40, 48)).astype(np.float16))

    def results():
        net = Written()
        if not train:
            return [net(x).asnumpy()]
        loss = lambda x: net(x).astype(ms.float32).sum()
        return [grad.asnumpy() for grad in ms.value_and_grad(loss, None, net.trainable_params())(x)[1]]

    expected = results()
    ascend_twin.totals(reset=True)
    with ms_flash.fusion("block") as report:
        got = results()
    assert set(ascend_twin.totals()) == ({"block", "bwd"} if train else {"block"}), report.sites
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected):
        largest = max(1.0, np.abs(theirs).max())     # the exact gradient of the keys' bias is 0
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-2 * largest)
