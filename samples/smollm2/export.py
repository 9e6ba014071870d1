"""Exports the plain SmolLM2-135M-Instruct with its cache to ONNX, and lets ONNX Runtime write what MindSpore writes.

    python samples/smollm2/export.py
    python -m ms_flash export samples/smollm2/export.py:build build/smollm2.onnx        the export alone
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # for those who load this file from elsewhere

import mindspore as ms
import numpy as np
from cached import Flash, Generator
from checkpoint import Checkpoint
from llama import Llama, load
from mindspore import Tensor
from options import at_least, output_file, some_text
from tqdm import tqdm

import ms_flash
from ms_flash.cli import ended


def example(net: Llama):
    """(net, inputs, options of export_onnx).

    What the model is compared with is a past that the network has read: 30 layers make of one that is drawn at random
    numbers so large that rounding shows (2e-4 was seen, against 4e-5).
    """
    config, rng = net.config, np.random.default_rng(0)

    def call(batch, read, length):
        ids = Tensor(rng.integers(0, config.vocabulary, (batch, read + length)), ms.int32)
        return ids[:, read:], net(ids[:, :read], net.no_past(batch))[1]

    inputs = call(1, 5, 3)
    names = [f"past_{what}_{i}" for i in range(config.layers) for what in ("key", "value")]
    axes = {"ids": {0: "batch", 1: "length"}, **{name: {0: "batch", 2: "past"} for name in names}}
    outputs = ["logits", *(name.replace("past", "present") for name in names)]
    return net, inputs, {"input_names": ["ids", *names], "output_names": outputs, "dynamic_axes": axes,
                         "verify": [inputs, call(2, 4, 2)]}


def build():
    """For ``python -m ms_flash export``."""
    return example(load(Checkpoint()))


def generate(path: Path, ids: list[int], count: int, end: int | None = None):
    """Yields up to `count` tokens after `ids` from ONNX Runtime: the prompt at once, then one token at a time."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    inputs = session.get_inputs()[1:]
    cache, new = [np.zeros((1, x.shape[1], 0, x.shape[3]), np.float32) for x in inputs], ids
    for _ in range(count):
        logits, *cache = session.run(None, {"ids": np.array([new], np.int32),
                                            **{x.name: array for x, array in zip(inputs, cache)}})
        new = [int(logits[0, -1].argmax())]
        yield new[0]
        if new[0] == end:
            return


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--question", type=some_text, default="What is attention?", help="what both answer")
    add("--max-tokens", type=at_least(1), default=64, help="longest answer (default %(default)s)")
    add("--profile", default="portable", choices=["portable", "inlined", "standard"],
        help="of the export, among those for ONNX Runtime (default %(default)s)")
    add("--out", type=output_file, default=Path("build/smollm2.onnx"), help="the model file (default %(default)s)")
    args = parser.parse_args(argv)

    checkpoint = Checkpoint()
    tokenizer = checkpoint.tokenizer()
    prompt, most = tokenizer.chat(args.question), checkpoint.config.context
    if len(prompt) + args.max_tokens > most:
        parser.error(f"the question, of {len(prompt)} tokens, and --max-tokens must fit the {most} of the model")
    net = load(checkpoint)
    _, inputs, options = example(net)
    with tqdm(total=100, desc="export", unit="%", dynamic_ncols=True) as bar:
        def progress(text, fraction):
            bar.set_description_str(text)
            bar.update(round(100 * fraction) - bar.n)

        print(ms_flash.export_onnx(net, *inputs, file_name=args.out, profile=args.profile, progress=progress,
                                   **options))

    generator = Generator(Flash(net, len(prompt) + args.max_tokens))
    answers = []
    for name, tokens in (("MindSpore", generator.generate(prompt, args.max_tokens, tokenizer.end)),
                         ("ONNX Runtime", generate(args.out, prompt, args.max_tokens, tokenizer.end))):
        answers.append(list(tqdm(tokens, desc=name, total=args.max_tokens, unit="token", dynamic_ncols=True)))
        print(f"\n{name}:\n{tokenizer.decode(answers[-1])}")
    same = answers[0] == answers[1]
    print(f"\nAll {len(answers[0])} tokens are equal." if same else "\nTHE TOKENS DIFFER.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(ended(main))
