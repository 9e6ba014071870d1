"""Nets computed in float16: at most twice the error of MindSpore's own run in float16, as for the kernels."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
import zoo
from mindspore import Tensor
from ms_flash.onnx_export import inputs as net_inputs
from ms_flash.onnx_export import verify
from ms_flash.onnx_export.runtime import Runtime

from ms_flash import export_onnx

pytestmark = pytest.mark.slow

# How each net gets to float16: by `to_float`, which MindSpore has for this; or, where that leaves constants behind that
# MindSpore's operators then refuse, with weights and constants in float16; or by its mixed precision "auto", where the
# code itself makes float32 numbers: -1e4 and a product in "gpt2", ALiBi for baddbmm in "bloom", and the mean over the
# words in "minilm_pooled", which `to_float` leaves in float16 in PyNative and in float32 in the graph that is exported.
CAST = ("bert", "vit", "t5", "whisper_encoder", "detr_decoder", "mint_block", "flash_layouts", "score_call",
        "score_causal", "multihead", "mindspore_encoder", "unet_attention", "branches", "in_place", "segformer",
        "roberta")
HALVED = ("swin", "llama", "llama_naive", "llama_decoder", "whisper_decoder", "mint_misc", "gemma", "qwen2", "mixture",
          "clip", "bart", "flash_everything", "flash_varlen", "indexing")
AUTO = ("gpt2", "bloom", "minilm_pooled")
FLOAT32 = ("slopes",)       # of ALiBi: flash_attention takes them in no other dtype
HALF_ULP = 2.0 ** -11       # the correctly rounded result is never wrong, however lucky MindSpore's is


def trials(net, inputs, options):
    """Inputs as the net takes them and as arrays by name, at three shapes; where none is free, its own, so that lengths
    and positions keep their sense and no two numbers tie: which of equal ones is first in a top-k is nobody's promise.
    """
    if not options["dynamic_axes"]:
        for given in options.get("verify", [inputs]):
            yield given, {entry.name: entry.example for entry in net_inputs.describe(net, given, None, None)[0]}
        return
    found, _ = net_inputs.describe(net, inputs, None, options["dynamic_axes"])
    known, rng = net_inputs.lengths_of(found), np.random.default_rng(5)
    for more in (0, 1, 3):
        arrays = net_inputs.redrawn(found, {name: n + more for name, n in known.items()}, rng)
        yield net_inputs.substituted(inputs, found, arrays), arrays


def halved(net):
    """The net with its weights and constants in float16."""
    for parameter in net.get_parameters():
        parameter.set_dtype(ms.float16)
    for _, cell in net.cells_and_names():
        for name, value in list(vars(cell).items()):
            if type(value) is Tensor and value.dtype == ms.float32 and name not in FLOAT32:
                setattr(cell, name, value.astype(ms.float16))
    return net


def in_float16(inputs):
    """Inputs, tuples among them, with float16 in the place of float32."""
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(in_float16(x) for x in inputs)
    return inputs.astype(ms.float16) if isinstance(inputs, Tensor) and inputs.dtype == ms.float32 else inputs


def test_every_net_is_here():
    assert sorted(CAST + HALVED + AUTO) == sorted(zoo.NETS)


@pytest.mark.parametrize("name", CAST + HALVED + AUTO)
def test_net_in_float16(name, tmp_path):
    ms.set_seed(0)
    net, inputs, options = zoo.build(name)
    cases = list(trials(net, inputs, options))
    exact = [verify.run_net(net, given) for given, _ in cases]
    if name in HALVED:
        net, inputs = halved(net), in_float16(inputs)
        half = lambda x: x.astype(np.float16) if x.dtype == np.float32 else x
        cases = [(in_float16(given), {n: half(x) for n, x in feeds.items()}) for given, feeds in cases]
    elif name in AUTO:
        net = ms.amp.auto_mixed_precision(net, "auto")
    else:
        net.to_float(ms.float16)
    naive = [verify.run_net(net, given) for given, _ in cases]
    export_onnx(net, *inputs, file_name=tmp_path / "net.onnx", **{**options, "verify": False})
    running = Runtime(tmp_path / "net.onnx")
    for (_, arrays), wanted, low in zip(cases, exact, naive):
        got = running.run(arrays)
        assert max(verify.difference(z, y) for y, z in zip(wanted, low)) > 1e-5     # it is float16
        for x, y, z in zip(got, wanted, low):
            assert x.dtype == z.dtype and x.shape == z.shape
            assert verify.difference(x, y) <= 2 * verify.difference(z, y) + HALF_ULP
