"""Runtimes that know neither the node nor functions take the profile "inlined".

Each test runs where its runtime is installed: pip install 'ms_flash[runtimes]'.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import zoo
from ms_flash.onnx_export import inputs as net_inputs
from ms_flash.onnx_export import verify

from ms_flash import export_onnx

pytestmark = pytest.mark.slow

NETS = ["gpt2", "bert", "vit", "swin", "llama", "llama_decoder", "t5", "whisper_decoder", "detr_decoder", "gemma",
        "flash_everything", "flash_layouts", "bloom", "multihead"]


def exported(name, folder):
    """(path, arrays at lengths that the export has not seen, what the net gives for them)."""
    net, inputs, options = zoo.build(name)
    export_onnx(net, *inputs, file_name=folder / "net.onnx", verify=False, profile="inlined", **options)
    found, _ = net_inputs.describe(net, inputs, None, options["dynamic_axes"])
    lengths = {axis: n + 2 for axis, n in net_inputs.lengths_of(found).items()}
    arrays = net_inputs.redrawn(found, lengths, np.random.default_rng(1))
    return folder / "net.onnx", arrays, verify.run_net(net, net_inputs.substituted(inputs, found, arrays))


@pytest.mark.parametrize("name", NETS)
def test_openvino(name, tmp_path):
    openvino = pytest.importorskip("openvino")
    path, arrays, expected = exported(name, tmp_path)
    core = openvino.Core()
    model = core.compile_model(core.read_model(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = model(arrays)
    assert max(verify.difference(results[o], y) for o, y in zip(model.outputs, expected)) <= 1e-5


@pytest.mark.parametrize("name", ["gpt2", "vit", "llama_decoder"])
def test_mnn_converts(name, tmp_path):
    pytest.importorskip("MNN")
    path, _, _ = exported(name, tmp_path)
    command = [sys.executable, "-m", "MNN.tools.mnnconvert", "-f", "ONNX", "--modelFile", path,
               "--MNNModel", tmp_path / "net.mnn", "--bizCode", "x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (tmp_path / "net.mnn").exists() and "Converted Success" in done.stdout + done.stderr
