"""The GPT sample: it runs from the command line, its attentions agree, and `build` feeds the other tools."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

SAMPLES = Path(__file__).resolve().parent.parent / "samples"
TINY = ["--steps", "3", "--layers", "1", "--context", "64", "--batch", "2"]


@pytest.fixture(scope="module")
def sample():
    """samples/train_gpt.py, loaded by its path as the command line tools load it."""
    spec = importlib.util.spec_from_file_location("train_gpt", SAMPLES / "train_gpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SAMPLES))


def run(*options, cwd):
    return subprocess.run([sys.executable, str(SAMPLES / "train_gpt.py"), *TINY, *options], cwd=cwd, text=True,
                          capture_output=True, timeout=300)


def test_three_steps_of_all_attentions_agree(tmp_path):
    done = run("--no-memory", "--out", "plots", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "naive / fused" in done.stdout and "naive / flash" in done.stdout
    assert "1 of 1 attention sites fused" in done.stdout and "causal" in done.stdout
    assert done.stdout.count("they agree") == 2
    assert (tmp_path / "plots" / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_bfloat16_is_refused_where_mindspore_has_no_kernel(tmp_path):
    done = run("--dtype", "bfloat16", cwd=tmp_path)
    assert done.returncode == 2
    assert "use --attention flash" in done.stderr


def test_losses_apart_or_nan_make_the_command_fail(sample, capsys):
    assert sample.losses_agree({"naive": [2.0, 1.0], "flash": [2.0, 1.0005]}, 1e-3)
    assert not sample.losses_agree({"naive": [2.0, 1.0], "flash": [2.0, 1.1]}, 1e-3)
    assert not sample.losses_agree({"naive": [2.0, 1.0], "flash": [float("nan"), 1.0]}, 1e-3)
    assert not sample.losses_agree({"naive": [2.0, 1.0], "fused": [2.1, 1.0], "flash": [2.0, 1.0]}, 1e-3)
    assert "nan at step 1" in capsys.readouterr().out


def test_build_returns_a_net_with_inputs_whose_output_is_the_loss(sample):
    losses = {}
    for kind in ("naive", "flash"):
        net, inputs = sample.build(kind, TINY)
        losses[kind] = float(net(*inputs).asnumpy())
    assert losses["naive"] == pytest.approx(np.log(103), abs=0.6)  # knows nothing yet
    assert losses["flash"] == pytest.approx(losses["naive"], abs=1e-5)


def test_a_shorter_input_gives_the_same_logits_where_they_overlap(sample):
    net = sample.build("naive", TINY)[0].net
    ids = np.arange(64, dtype=np.int32)[None]
    whole, part = net(ms.Tensor(ids)).asnumpy(), net(ms.Tensor(ids[:, :20])).asnumpy()
    np.testing.assert_allclose(part, whole[:, :20], atol=1e-5)
