"""Nets in the shapes of real ones: exported, checked, and run in stock ONNX Runtime at three shapes."""

from __future__ import annotations

from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import zoo
from ms_flash.onnx_export import inputs as net_inputs
from ms_flash.onnx_export import register, verify
from ms_flash.onnx_export.runtime import Runtime

from ms_flash import export_onnx

# How many attentions each net writes out in small ops that have to become the node; the others call ms_flash or have
# none. Left as it is, on purpose: what has a mask per window in swin, and the router of mixture, which is no attention.
WRITTEN_OUT = {"gpt2": 2, "bert": 2, "minilm_pooled": 2, "vit": 1, "llama_naive": 2, "t5": 1, "whisper_decoder": 2,
               "whisper_encoder": 1, "mint_block": 1, "mindspore_encoder": 2, "bloom": 1, "clip": 2, "segformer": 1,
               "roberta": 1, "bart": 3}
LEFT = {"swin": 1, "mixture": 1}
NODES = {**WRITTEN_OUT, "llama": 2, "llama_decoder": 2, "detr_decoder": 1, "flash_everything": 4, "flash_layouts": 3,
         "flash_varlen": 1, "score_call": 1, "score_causal": 1, "multihead": 1, "gemma": 1, "unet_attention": 1,
         "qwen2": 1, "mixture": 1}


def third_shape(net, inputs, options, path):
    """Largest error at lengths that neither the export nor its verification has seen, without the operator library and
    with it."""
    found, _ = net_inputs.describe(net, inputs, None, options["dynamic_axes"])
    lengths = {name: n + 3 for name, n in net_inputs.lengths_of(found).items()}
    arrays = net_inputs.redrawn(found, lengths, np.random.default_rng(7))
    expected = verify.run_net(net, net_inputs.substituted(inputs, found, arrays))
    worst = 0.0
    for library in (None, register):
        got = Runtime(path, library).run(arrays)
        assert [x.shape for x in got] == [x.shape for x in expected]
        worst = max(worst, *(verify.difference(x, y) for x, y in zip(got, expected)))
    return worst


@pytest.mark.parametrize("name", zoo.NETS)
def test_net(name, tmp_path):
    ms.set_seed(0)
    net, inputs, options = zoo.build(name)
    certificate = export_onnx(net, *inputs, file_name=tmp_path / "net.onnx", tolerance=1e-5, **options)
    assert len(certificate.runs) == 3, certificate
    assert f"{NODES.get(name, 0)} FlashAttention nodes" in str(certificate) or name not in NODES, certificate
    assert sum(site.fused for site in certificate.sites) == WRITTEN_OUT.get(name, 0), certificate
    assert sum(not site.fused for site in certificate.sites) == LEFT.get(name, 0), certificate
    if options["dynamic_axes"]:
        assert third_shape(net, inputs, options, tmp_path / "net.onnx") <= 1e-5


def test_at_least_25_nets_run_at_three_shapes():
    """And the documents say how many of how many."""
    free = sum(bool(zoo.build(name)[2]["dynamic_axes"]) for name in zoo.NETS)
    assert free >= 25
    root = Path(__file__).resolve().parents[2]
    assert f"{len(zoo.NETS)} nets in the shapes of real ones" in (root / "README.md").read_text(encoding="utf-8")
    document = (root / "docs" / "onnx.md").read_text(encoding="utf-8")
    assert f"{free} nets at three shapes" in document and f"ran: {len(zoo.NETS)} nets, 93 cases |" in document


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["inlined", "standard"])
@pytest.mark.parametrize("name", zoo.NETS)
def test_net_in_other_profiles(name, profile, tmp_path):
    net, inputs, options = zoo.build(name)
    certificate = export_onnx(net, *inputs, file_name=tmp_path / "net.onnx", tolerance=1e-5, profile=profile, **options)
    assert certificate.runs and certificate.passed
    assert "FlashAttention nodes" not in str(certificate)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_left_as_written_on_request(name, tmp_path):
    net, inputs, options = zoo.build(name)
    certificate = export_onnx(net, *inputs, file_name=tmp_path / "net.onnx", tolerance=1e-5, fuse=False, **options)
    assert certificate.passed and not certificate.sites
    assert "FlashAttention" not in str(certificate)
