"""The sample with a real language model: tokenizer, weights, attentions against each other and llama.cpp, export."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import llama_cpp_record as recorded
import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

import ms_flash

ROOT = Path(__file__).resolve().parent.parent.parent
SAMPLE = ROOT / "samples" / "smollm2"


@pytest.fixture(scope="module", autouse=True)
def path():
    """The modules of the sample import each other by name."""
    sys.path.insert(0, str(SAMPLE))
    yield
    sys.path.remove(str(SAMPLE))


def script(name):
    """A script of the sample, loaded by its path as the command line tools load it."""
    spec = importlib.util.spec_from_file_location(f"smollm2_{name}", SAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def checkpoint(path):
    from checkpoint import Checkpoint

    return Checkpoint()


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return checkpoint.tokenizer()


@pytest.fixture(scope="module")
def net(checkpoint):
    from llama import load

    return load(checkpoint)


@pytest.fixture(scope="module")
def texts(net):
    """Generators of both kinds, compiled once; whoever uses one sets its length."""
    return {kind: generator(kind, net, 256) for kind in ("naive", "ms_flash")}


@pytest.fixture(scope="module")
def llama_cpp():
    """What an independent runtime made of the same file."""
    return json.loads(gzip.decompress(recorded.RECORD.read_bytes()))


@pytest.fixture
def small(path):
    """A Llama of three layers with random weights, large enough for attention to be sharp."""
    from checkpoint import Config
    from llama import Llama

    net = Llama(Config(layers=3, width=96, heads=6, kv_heads=2, inner=80, vocabulary=130, context=64,
                       rotary_base=10000.0, epsilon=1e-5))
    rng = np.random.default_rng(3)
    for parameter in net.parameters_dict().values():
        parameter.set_data(Tensor(rng.standard_normal(parameter.shape) * 2.5 / parameter.shape[-1]**0.5, ms.float32))
    return net.set_train(False)


def generator(kind, net, capacity):
    from cached import ATTENTIONS, Generator

    return Generator(ATTENTIONS[kind](net, capacity))


def logits_of(net, ids):
    """Of the plain network, in float64: written from the definition, head by head and row by row."""
    config, x = net.config, net.embedding.embedding_table.asnumpy().astype(np.float64)[ids]
    weights = {name: p.asnumpy().astype(np.float64) for name, p in net.parameters_and_names()}
    size, group = config.head_dim, config.heads // config.kv_heads
    turns = np.exp(1j * np.outer(np.arange(len(ids)), config.rotary_base ** (-np.arange(0, size, 2) / size)))

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.epsilon) * weights[name]

    def turned(x):
        x = (x[:, :size // 2] + 1j * x[:, size // 2:]) * turns
        return np.concatenate((x.real, x.imag), -1)

    for i in range(config.layers):
        name_of, h = f"blocks.{i}.", norm(x, f"blocks.{i}.attention_norm.weight")
        query, key, value = (h @ weights[f"{name_of}attention.{name}.weight"].T for name in ("query", "key", "value"))
        mixed = []
        for head in range(config.heads):
            mine, shared = (slice(at * size, (at + 1) * size) for at in (head, head // group))
            q, k, v = turned(query[:, mine]), turned(key[:, shared]), value[:, shared]
            for row in range(len(ids)):
                scores = k[:row + 1] @ q[row] / size**0.5
                weight = np.exp(scores - scores.max())
                mixed.append(weight @ v[:row + 1] / weight.sum())
        mixed = np.array(mixed).reshape(config.heads, len(ids), size).swapaxes(0, 1).reshape(len(ids), -1)
        x = x + mixed @ weights[f"{name_of}attention.output.weight"].T
        h = norm(x, f"{name_of}feed_norm.weight")
        gate = h @ weights[f"{name_of}feed.gate.weight"].T
        h = gate / (1 + np.exp(-gate)) * (h @ weights[f"{name_of}feed.up.weight"].T)
        x = x + h @ weights[f"{name_of}feed.down.weight"].T
    return norm(x, "norm.weight") @ weights["embedding.embedding_table"].T


def apart(got, exact):
    """Largest difference, relative to the largest of `exact`."""
    return np.abs(got - exact).max() / np.abs(exact).max()


def logprobs(logits):
    logits = logits.astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


# ---- a small network ----

def test_plain_network_is_the_definition_with_and_without_past(small):
    ids = np.random.default_rng(0).integers(0, 130, 23)
    exact = logits_of(small, ids)
    whole, _ = small(Tensor(ids[None], ms.int32), small.no_past())
    assert apart(whole.asnumpy()[0], exact) < 2e-6
    past, rows = small.no_past(), []
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 23)):
        logits, past = small(Tensor(ids[None, start:end], ms.int32), past)
        rows.append(logits.asnumpy()[0])
    assert apart(np.concatenate(rows), exact) < 2e-6
    assert past[0].shape == (1, 2, 23, 16)


@pytest.mark.parametrize("kind", ["naive", "ms_flash"])
def test_cached_network_is_the_definition(small, mode, kind):
    from cached import ATTENTIONS

    model, ids = ATTENTIONS[kind](small, 29), np.random.default_rng(1).integers(0, 130, 29)
    exact = logits_of(small, ids)
    for memory in (*model.keys, *model.values):
        memory.set_data(Tensor(np.full(memory.shape, 1e30), ms.float32))    # what is not written must not be read
    for start, end in ((0, 11), (11, 12), (12, 13), (13, 28), (28, 29)):
        got = model(Tensor(ids[None, start:end], ms.int32), Tensor([start], ms.int32))
        assert apart(got.asnumpy()[0], exact[end - 1]) < 2e-6, (start, end)


def test_texts_side_by_side(small):
    from cached import Flash

    ids = np.random.default_rng(2).integers(0, 130, (2, 20))
    model = Flash(small, 20, batch=2)
    model(Tensor(ids[:, :9], ms.int32), Tensor([0, 0], ms.int32))
    # the second text goes on earlier: what stood there is overwritten, and unseen behind
    got = model(Tensor(np.stack((ids[0, 9:13], ids[1, 5:9])), ms.int32), Tensor([9, 5], ms.int32)).asnumpy()
    for row, end in ((0, 13), (1, 9)):
        assert apart(got[row], logits_of(small, ids[row, :end])[-1]) < 2e-6


def test_reading_of_the_plain_network_is_fused(small):
    ids = np.random.default_rng(4).integers(0, 130, 31)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        report = ms_flash.fuse(strict=True)
        logits, _ = small(Tensor(ids[None], ms.int32), small.no_past())
        assert len(report.fused) == 3 and not report.left and str(report).count("causal") >= 1, str(report)
        assert apart(logits.asnumpy()[0], logits_of(small, ids)) < 2e-6
    finally:
        ms_flash.unfuse()


def test_small_export_writes_the_same_tokens(small, tmp_path):
    export = script("export")
    net, inputs, options = export.example(small)
    certificate = ms_flash.export_onnx(net, *inputs, file_name=tmp_path / "small.onnx", **options)
    assert certificate.passed and sum(site.fused for site in certificate.sites) == 3, str(certificate)
    prompt = [5, 77, 3, 120, 9]
    assert list(export.generate(tmp_path / "small.onnx", prompt, 30)) == \
        list(generator("ms_flash", small, 40).generate(prompt, 30))


def test_room_ends(small):
    text = generator("ms_flash", small, 12)
    assert len(list(text.generate([1] * 10, 50))) == 3, "two more are read, and one is chosen after each of them"
    with pytest.raises(ValueError, match="room for 12 tokens, of which 12 are taken: 1 more do not fit"):
        text.read([1])


# ---- the tokenizer ----

def test_tokens_are_those_of_llama_cpp(tokenizer, llama_cpp):
    for text, ids in zip(recorded.TEXTS, llama_cpp["as it is"]["texts"]):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text
    for question, ids in zip(recorded.QUESTIONS, llama_cpp["as it is"]["prompts"]):
        assert tokenizer.chat(question) == ids


def test_chat_is_laid_out_as_the_file_says(checkpoint, tokenizer):
    from byte_bpe import SYSTEM

    template = checkpoint._field("tokenizer.chat_template")
    assert SYSTEM in template and recorded.CHAT.split("<|im_end|>")[0] in template
    names = {i: token for token, i in tokenizer.control.items()}
    spelled = "".join(names.get(i) or tokenizer.decode([i]) for i in tokenizer.chat("How?"))
    assert spelled == recorded.CHAT.format("How?")


def test_control_tokens_cannot_be_typed(tokenizer):
    ids = tokenizer.encode("<|im_end|><|im_start|>system")
    assert not set(ids) & set(tokenizer.control.values())
    assert tokenizer.decode(ids) == "<|im_end|><|im_start|>system"


def test_stream_waits_for_whole_characters(tokenizer):
    text = "naïve 🙂🙃 日本"
    parts = list(tokenizer.stream(tokenizer.encode(text)))
    assert "".join(parts) == text and "\ufffd" not in "".join(parts) and "" in parts


# ---- the real network ----

def test_logits_are_those_of_the_definition_and_of_llama_cpp(net, llama_cpp):
    """Seen: 8e-5 from float64 in MindSpore's ops, 3e-5 by ms_flash, 1e-2 in llama.cpp's float32, 0.6 in its 8 bits."""
    from cached import ATTENTIONS

    wide, narrow = (np.array(llama_cpp[run]["logprobs"]) for run in ("float32", "as it is"))
    noise = np.abs(wide - narrow).max()
    ids = llama_cpp["float32"]["prompts"][0]
    exact = logprobs(logits_of(net, np.array(ids))[-1])
    for kind, build in ATTENTIONS.items():
        got = logprobs(build(net, len(ids))(Tensor([ids], ms.int32), Tensor([0], ms.int32)).asnumpy()[0])
        assert np.abs(got - exact).max() < 2e-4, kind
        assert np.abs(got[::recorded.EVERY] - wide).max() < 0.02 < noise / 10, kind
        assert np.abs(got[::recorded.EVERY] - narrow).max() < 1.1 * noise, kind


def test_answer_begins_as_that_of_llama_cpp(texts, llama_cpp):
    prompt, expected = (llama_cpp["float32"][what][0] for what in ("prompts", "continued"))
    for kind, text in texts.items():
        text.length = 0
        assert list(text.generate(prompt, 12)) == expected[:12], kind


@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(recorded.QUESTIONS)))
def test_answers_are_those_of_naive_attention(texts, llama_cpp, at):
    answers = []
    for text in texts.values():
        text.length = 0
        answers.append(list(text.generate(llama_cpp["float32"]["prompts"][at], 140)))
    assert answers[0] == answers[1] and len(answers[0]) == 140


@pytest.mark.slow
@pytest.mark.parametrize("run, whole", [("float32", 4), ("as it is", 2)])
def test_llama_cpp_goes_on_alike_unless_its_rounding_decides(net, llama_cpp, run, whole):
    """Where its token is not ours for the first time, ours is better by no more than what its logits are apart by.

    Seen: in float32 four of five answers of 32 tokens are the same, and in the fifth the 21st token has a rival that is
    worse by 4e-4; with 8 bits per activation two are the same.
    """
    wide, narrow = (np.array(llama_cpp[name]["logprobs"]) for name in ("float32", "as it is"))
    noise = 0.02 if run == "float32" else np.abs(wide - narrow).max()
    same = 0
    for prompt, tokens in zip(llama_cpp[run]["prompts"], llama_cpp[run]["continued"]):
        logits = net(Tensor([prompt + tokens[:-1]], ms.int32), net.no_past())[0].asnumpy()[0, len(prompt) - 1:]
        differs = np.flatnonzero(logits.argmax(-1) != tokens)
        same += not differs.size
        if differs.size:
            row = logits[differs[0]]
            assert row.max() - row[tokens[differs[0]]] < 2 * noise, (prompt, differs[0])
    assert same >= whole


@pytest.mark.slow
def test_reading_of_the_real_network_is_fused(net, llama_cpp):
    prompt = Tensor([llama_cpp["float32"]["prompts"][0]], ms.int32)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        report = ms_flash.fuse(strict=True)
        logits, _ = net(prompt, net.no_past())
        assert len(report.fused) == 30 and not report.left
        got = logprobs(logits.asnumpy()[0, -1])[::recorded.EVERY]
        assert np.abs(got - llama_cpp["float32"]["logprobs"]).max() < 0.02
    finally:
        ms_flash.unfuse()


@pytest.mark.slow
def test_export_command(tmp_path):
    done = run("export", "--max-tokens", "40", "--out", str(tmp_path / "model.onnx"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "All 40 tokens are equal." in done.stdout and "30 FlashAttention nodes" in done.stdout


def run(name, *options, cwd, text=""):
    return subprocess.run([sys.executable, str(SAMPLE / f"{name}.py"), *options], cwd=cwd, text=True, input=text,
                          capture_output=True, timeout=900)


def test_chat_command(tmp_path, tokenizer, llama_cpp):
    done = run("chat", recorded.QUESTIONS[0], "--max-tokens", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(tokenizer.decode(llama_cpp["float32"]["continued"][0][:8]))
    assert re.search(r"\[prompt of 34 tokens at \d+ tokens/s, 8 tokens written at [\d.]+ tokens/s", done.stdout)


def test_second_question_is_read_after_the_first(texts, tokenizer):
    chat, text, heard = script("chat"), texts["ms_flash"], io.StringIO()
    text.length = 0
    talk = chat.Conversation(text, tokenizer, "Be brief.", heard.write)
    with contextlib.redirect_stdout(io.StringIO()):
        talk.ask("Name a colour.", 3)
        first = heard.getvalue()
        talk.ask("Another.", 4)
    second = heard.getvalue()[len(first):]
    ids = [*tokenizer.turn("system", "Be brief."), *tokenizer.turn("user", "Name a colour."), *tokenizer.answer()]
    ids += [*tokenizer.encode(first), tokenizer.end, *tokenizer.encode("\n"), *tokenizer.turn("user", "Another.")]
    text.length = 0
    assert second == tokenizer.decode(text.generate([*ids, *tokenizer.answer()], 4, tokenizer.end))


@pytest.mark.slow
def test_bench_command(tmp_path):
    done = run("bench", "--contexts", "24", "--repeats", "2", "--steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"prefill +24 .*\ndecode +24 ", done.stdout)


def test_missing_weights_are_explained(path, monkeypatch):
    import checkpoint

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=re.escape(checkpoint.PACKAGES)):
        checkpoint.gguf_file()


def test_one_version_of_the_packages(path):
    import checkpoint

    for package in checkpoint.PACKAGES.split():
        for file in ("Makefile", "setup.py", "samples/README.md", "samples/smollm2/chat.py"):
            assert package in (ROOT / file).read_text(encoding="utf-8"), (package, file)
