"""``python -m ms_flash export`` and the sample, as users call them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from ms_flash.onnx_export.runtime import Runtime

from ms_flash.cli import main

ROOT = Path(__file__).resolve().parents[2]
NET = """
import mindspore as ms
import numpy as np
from mindspore import nn
import ms_flash


class Net(nn.Cell):
    def construct(self, x):
        return ms_flash.flash_attention(x, x, x, causal=True)


def build():
    x = ms.Tensor(np.random.default_rng(0).standard_normal((1, 2, 5, 8)), ms.float32)
    return Net(), (x,), {"dynamic_axes": {"x": {2: "length"}}}


def nothing():
    return None
"""


def run(*arguments):
    """The finished process of ``python -m ms_flash export ...``."""
    return subprocess.run([sys.executable, "-m", "ms_flash", "export", *map(str, arguments)], capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture(autouse=True)
def _same_path(monkeypatch):
    """The command makes the folder of the file importable."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def net(tmp_path):
    file = tmp_path / "some_net.py"
    file.write_text(NET)
    return file


def test_export(net, tmp_path):
    done = run(f"{net}:build", tmp_path / "build" / "net.onnx", "--profile", "inlined", "--opset", 20, "--verify")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("certificate for net.onnx: ") and "profile inlined, opset 20" in done.stdout
    x = np.random.default_rng(1).standard_normal((1, 2, 9, 8)).astype(np.float32)
    (out,) = Runtime(tmp_path / "build" / "net.onnx").run({"x": x})
    assert out.shape == x.shape and np.isfinite(out).all()


def test_without_verification(net, tmp_path, capsys):
    assert main(["export", f"{net}:build", str(tmp_path / "net"), "--no-verify"]) == 0
    assert "not compared with the net" in capsys.readouterr().out
    onnx.checker.check_model(str(tmp_path / "net.onnx"))


@pytest.mark.parametrize(("target", "text"), [
    ("some_net.py", "the net must be given as MODULE:FACTORY or as a .mindir file, but got"),
    ("some_net.py:missing", "there is no 'missing' in"),
    ("some_net.py:nothing", "'nothing' must return (net, inputs) or (net, inputs, options), but got NoneType"),
    ("absent.py:build", "does not exist"),
    ("absent.mindir", "cannot be read: No such file or directory"),
])
def test_wrong_target(net, target, text, tmp_path, capsys):
    assert main(["export", str(tmp_path / target), str(tmp_path / "net.onnx")]) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "net.onnx").exists()


@pytest.mark.parametrize(("out", "text"), [
    ("folder.onnx", "'file_name' must be a file, but got the folder"),
    ("file/net.onnx", "file"),
])
def test_output_that_cannot_be_written(net, out, text, tmp_path, capsys):
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "file").write_text("")
    assert main(["export", f"{net}:build", str(tmp_path / out)]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert text in error and "Traceback" not in error
    assert (tmp_path / "file").read_text() == "" and not any((tmp_path / "folder.onnx").iterdir())


def test_another_profile(net, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["export", f"{net}:build", str(tmp_path / "net.onnx"), "--profile", "other"])
    assert ended.value.code == 2 and "invalid choice: 'other'" in capsys.readouterr().err


def test_a_file_there_is_replaced(net, tmp_path, capsys):
    (tmp_path / "net.onnx").write_text("something else")
    assert main(["export", f"{net}:build", str(tmp_path / "net.onnx"), "--no-verify"]) == 0
    onnx.checker.check_model(str(tmp_path / "net.onnx"))


class Terminal(io.StringIO):
    """What a program on a terminal writes to."""

    def isatty(self):
        return True


def test_progress_on_a_terminal(net, tmp_path, monkeypatch, capsys):
    """A bar in one line that is gone at the end; nothing where there is no terminal."""
    assert main(["export", f"{net}:build", str(tmp_path / "net")]) == 0
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["export", f"{net}:build", str(tmp_path / "net")]) == 0
    *bars, blank, end = terminal.getvalue().split("\r")[1:]
    assert blank.strip() == end == "" and len(blank) >= max(map(len, bars))
    done = [bar.partition("]")[0].count("#") for bar in bars]
    assert done == sorted(done) and done[-1] == 30 and len(set(done)) > 5
    for text in ("compiling", "converting", "checking", "running the net in MindSpore", "running in ONNX Runtime"):
        assert any(text in bar for bar in bars), text


@pytest.mark.slow
@pytest.mark.parametrize("target", ["train_gpt.py:build", "gpt_export_generate.py:build"])
def test_samples_can_be_exported(target, tmp_path):
    done = run(ROOT / "samples" / target, tmp_path / "gpt.onnx", "--verify")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("certificate for gpt.onnx") and done.stdout.count("error") == 3


@pytest.mark.slow
def test_sample(tmp_path):
    """The trained GPT writes the same text in ONNX Runtime as in MindSpore."""
    done = subprocess.run([sys.executable, ROOT / "samples" / "gpt_export_generate.py", "--steps", "3", "--count", "9",
                           "--context", "64", "--layers", "1", "--dim", "64", "--out", tmp_path / "gpt.onnx"],
                          capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "The texts are equal." in done.stdout and "ONNX reference evaluator" in done.stdout
    assert done.stdout.count("The class statement ") == 3      # MindSpore, ONNX Runtime, and with the library


@pytest.mark.slow
def test_sample_with_real_weights(tmp_path):
    """MiniLM's embeddings in ONNX Runtime are those of MindSpore."""
    text = tmp_path / "text.txt"
    text.write_text("A sentence of my own.\n\nThe other one is longer: it makes the first one be padded.\n")
    command = [sys.executable, ROOT / "samples" / "minilm_export.py", "--out", tmp_path / "minilm.onnx"]
    for more, rows in (((), 10), (("--text", text), 4)):
        done = subprocess.run([*command, *more], capture_output=True, text=True, cwd=tmp_path,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert "6 FlashAttention nodes" in done.stdout and "they agree" in done.stdout
        assert done.stdout.partition("Largest difference")[2].count("e-0") >= 2 * rows
