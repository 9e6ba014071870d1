"""Trains the small GPT for a moment, exports it with its cache to ONNX, and lets ONNX Runtime go on with a text.

    python samples/gpt_export_generate.py                                         train, export, generate, compare
    python -m ms_flash export samples/gpt_export_generate.py:build build/gpt.onnx  the export alone, untrained weights

The exported model takes ids and, for every block, the keys and values of what came before; it returns logits and the
keys and values including the new ones. With a past of length 0 it reads the prompt, with ids of length 1 it writes.
"""
from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for those who load this file from elsewhere

import mindspore as ms
import numpy as np
from gpt import GPT, HEAD_DIM
from mindspore import Tensor, nn, ops
from options import at_least, output_file, some_text
from trainer import Text, Trainer

import ms_flash
from ms_flash import onnx_export
from ms_flash.cli import ended

TEMPERATURE = 0.7   # of the sampling; the most probable character alone would soon repeat itself after a short training


class Decoder(nn.Cell):
    """The blocks of a GPT with keys and values of the past in and out.

    ids (batch, n) int32 and past, a tuple of (batch, heads, m, head_dim) key and value per block -> logits
    (batch, n, vocab) and a tuple like past with length m + n.
    """

    def __init__(self, net: GPT):
        super().__init__()
        self.net = net
        rotary = net.blocks[0].rotary
        self.cos, self.sin = rotary.cos, rotary.sin

    def rotate(self, x, start):
        end = start + x.shape[2]
        first, second = ops.chunk(x, 2, -1)
        cos, sin = self.cos[start:end], self.sin[start:end]
        return ops.concat((first * cos - second * sin, second * cos + first * sin), -1)

    def attend(self, block, x, key, value):
        batch, length, dim = x.shape
        qkv = block.qkv(x).reshape(batch, length, 3, dim // HEAD_DIM, HEAD_DIM).transpose(2, 0, 3, 1, 4)
        start = key.shape[2]
        key = ops.concat((key, self.rotate(qkv[1], start)), 2)
        value = ops.concat((value, qkv[2]), 2)
        out = ms_flash.flash_attention(self.rotate(qkv[0], start), key, value, causal=True)
        return block.proj(out.swapaxes(1, 2).reshape(batch, length, dim)), key, value

    def construct(self, ids, past):
        x, present = self.net.tokens(ids), ()
        for i, block in enumerate(self.net.blocks):
            out, key, value = self.attend(block, block.norm1(x), past[2 * i], past[2 * i + 1])
            x = x + out
            x = x + block.down(block.gelu(block.up(block.norm2(x))))
            present += (key, value)
        return self.net.head(self.net.norm(x)), present


def example(net: GPT):
    """(decoder, inputs, options of export_onnx) for a GPT."""
    heads, count = net.head.in_channels // HEAD_DIM, 2 * len(net.blocks)
    rng = np.random.default_rng(0)
    ids = Tensor(rng.integers(0, net.head.out_channels, (2, 3)), ms.int32)
    past = tuple(Tensor(rng.standard_normal((2, heads, 5, HEAD_DIM)), ms.float32) for _ in range(count))
    names = [f"past_{what}_{i}" for i in range(len(net.blocks)) for what in ("key", "value")]
    axes = {"ids": {0: "batch", 1: "length"}, **{name: {0: "batch", 2: "past"} for name in names}}
    outputs = ["logits", *(name.replace("past", "present") for name in names)]
    return Decoder(net), (ids, past), {"input_names": ["ids", *names], "output_names": outputs, "dynamic_axes": axes}


def build():
    """For ``python -m ms_flash export``: an untrained decoder."""
    text = Text()
    return example(GPT(len(text.vocabulary), 256, 128, 2, "flash"))


def generate_in_mindspore(net: GPT, prompt: list[int], noise: np.ndarray) -> list[int]:
    """Goes on after `prompt`, each time with the whole text run again.

    `noise` (count, vocab) is added to the logits before the largest is taken: drawn from a Gumbel distribution, that
    is sampling, with the same draws for all who are compared.
    """
    net.set_train(False)
    logits_of = ms.jit(net)
    # One shape for all calls, so one graph: what stands behind the last character is unseen, the model is causal.
    ids = np.zeros((1, len(prompt) + len(noise)), np.int32)
    ids[0, : len(prompt)] = prompt
    for at, drawn in enumerate(noise, len(prompt)):
        ids[0, at] = (logits_of(Tensor(ids)).asnumpy()[0, at - 1] + drawn).argmax()
    return ids[0].tolist()


def generate_in_onnxruntime(path: Path, ids: list[int], noise: np.ndarray, library: bool = False) -> list[int]:
    """The same in ONNX Runtime, with the cache: the prompt once, then one character at a time.

    Attention is the function that the model carries, or, with `library`, the compiled kernels of ms_flash.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if library:
        onnx_export.register(options)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    cache_inputs = session.get_inputs()[1:]
    cache = [np.zeros((1, entry.shape[1], 0, entry.shape[3]), np.float32) for entry in cache_inputs]
    ids, new = list(ids), np.array([ids], np.int32)
    for drawn in noise:
        logits, *cache = session.run(None, {"ids": new, **{e.name: x for e, x in zip(cache_inputs, cache)}})
        ids.append(int((logits[0, -1] + drawn).argmax()))
        new = np.array([ids[-1:]], np.int32)
    return ids


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=at_least(1), default=120, help="training steps (default %(default)s)")
    add("--context", type=at_least(2), default=256, help="characters per sequence (default %(default)s)")
    add("--layers", type=at_least(1), default=2, help="transformer blocks (default %(default)s)")
    add("--dim", type=at_least(1), default=128, help=f"width, a multiple of {HEAD_DIM} (default %(default)s)")
    add("--prompt", type=some_text, default="The class statement ", help="what the model goes on with")
    add("--count", type=at_least(1), default=80, help="characters to write (default %(default)s)")
    add("--profile", default="portable", choices=["portable", "inlined", "standard"],
        help="of the export, among those for ONNX Runtime (default %(default)s)")
    add("--out", type=output_file, default=Path("build/gpt.onnx"), help="the model file (default %(default)s)")
    args = parser.parse_args(argv)
    text = Text()
    if len(args.prompt) + args.count > args.context:
        parser.error(f"--prompt and --count must fit the context of {args.context} characters")
    strange = sorted(set(args.prompt) - set(text.vocabulary))
    if strange:
        parser.error(f"--prompt must be in characters of the text, but got {' '.join(map(repr, strange))}")
    if args.context >= len(text.ids):
        parser.error(f"--context must be less than {len(text.ids)}, the length of the text, but got {args.context}")
    if args.dim % HEAD_DIM:
        parser.error(f"--dim must be a multiple of {HEAD_DIM}, but got {args.dim}")

    from tqdm import trange

    options = argparse.Namespace(**vars(args), batch=4, learning_rate=4e-3, dtype="float32", seed=1)
    trainer, rng = Trainer(len(text.vocabulary), "flash", options), np.random.default_rng(1)
    bar = trange(args.steps, desc="training", unit="step")
    for _ in bar:
        loss = trainer.step(*text.batch(rng, options.batch, args.context))
        bar.set_postfix_str(f"loss {loss:.3f}")

    decoder, inputs, export_options = example(trainer.net)
    print(ms_flash.export_onnx(decoder, *inputs, file_name=args.out, profile=args.profile, **export_options))

    prompt = [text.index[char] for char in args.prompt]
    noise = TEMPERATURE * np.random.default_rng(2).gumbel(size=(args.count, len(text.vocabulary)))
    runs = {"MindSpore, the whole text each time": lambda: generate_in_mindspore(trainer.net, prompt, noise),
            "ONNX Runtime, with the cache": lambda: generate_in_onnxruntime(args.out, prompt, noise)}
    if args.profile == "portable":      # the others have no node for the library
        runs["the same with the operator library"] = lambda: generate_in_onnxruntime(args.out, prompt, noise, True)
    texts = {}
    for name, write in runs.items():
        start = time.perf_counter()
        texts[name] = "".join(text.vocabulary[i] for i in write())
        print(f"\n{name}: {time.perf_counter() - start:.1f} s\n{texts[name]}")
    same = len(set(texts.values())) == 1
    print("\nThe texts are equal." if same else "\nTHE TEXTS DIFFER.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(ended(main))
