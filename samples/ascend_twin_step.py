"""Trains a small GPT whose attention runs the Ascend C kernels, forward and backward, on the host twin, and computes
loss and gradients of every step on the CPU backend too.

    python samples/ascend_twin_step.py
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for those who load this file from elsewhere

import mindspore as ms
import numpy as np
from gpt import GPT, HEAD_DIM, NextTokenLoss
from mindspore import nn, ops
from trainer import DTYPES, Text

import ms_flash
from ms_flash.backends import ascend_twin

# Largest difference that passes, of the losses and of each gradient as a share of its largest entry. Both backends
# round the scores' exponentials to the dtype of the attention, and add them up in different blocks.
BOUNDS = {"float16": 1e-3, "bfloat16": 5e-3}


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=3, help="training steps (default %(default)s)")
    add("--context", type=int, default=200, help="characters per sequence (default %(default)s)")
    add("--layers", type=int, default=1, help="transformer blocks (default %(default)s)")
    add("--dim", type=int, default=128, help=f"width, a multiple of the head_dim {HEAD_DIM} (default %(default)s)")
    add("--batch", type=int, default=2, help="sequences per step (default %(default)s)")
    add("--dtype", choices=list(BOUNDS), default="float16", help="of the attention; the rest is float32")
    add("--mode", choices=("graph", "pynative"), default="graph")
    add("--learning-rate", type=float, default=3e-3)
    add("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if args.dim % HEAD_DIM:
        parser.error(f"--dim must be a multiple of the head_dim {HEAD_DIM}, but got {args.dim}")
    return args


class Model:
    """Loss and gradients; the attention of all blocks runs on `backend`."""

    def __init__(self, backend: str, vocabulary: int, args):
        ms.set_seed(args.seed)
        net = GPT(vocabulary, args.context, args.dim, args.layers, "flash", DTYPES[args.dtype])
        for block in net.blocks:
            block.attention = ms_flash.nn.FlashAttention(causal=True, backend=backend)
        self.weights = net.trainable_params()
        self.value_and_grad = ms.value_and_grad(NextTokenLoss(net), None, self.weights)


def difference(weights, got, expected) -> tuple[float, str]:
    """The largest difference of a gradient as a share of its largest entry, and whose it is."""
    pairs = zip(weights, (g.asnumpy() for g in got), (g.asnumpy() for g in expected))
    return max((float(np.abs(g - e).max() / np.abs(e).max()), weight.name) for weight, g, e in pairs if e.any())


def report(args) -> str:
    """What the twin says of its launches."""
    lines = [f"host twin of the Ascend 910B, {args.dtype}: model, not measurement",
             f"{'kernel':<12}{'launches':>9}{'violations':>12}{'cycles of a launch':>24}{'GM read':>14}{'written':>14}"]
    for kernel, t in ascend_twin.totals().items():
        low, high = (round(x / t["launches"]) for x in t["cycles"])
        lines.append(f"{kernel:<12}{t['launches']:>9}{t['violations']:>12}{f'{low:,} to {high:,}':>24}"
                     f"{t['read']:>12,} B{t['written']:>12,} B")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    args = parse_options(argv)
    ms.set_context(mode=ms.GRAPH_MODE if args.mode == "graph" else ms.PYNATIVE_MODE)
    text, rng = Text(), np.random.default_rng(args.seed)
    twin, cpu = (Model(backend, len(text.vocabulary), args) for backend in ("ascend-twin", "cpu"))
    optimizer = nn.AdamWeightDecay(twin.weights, args.learning_rate)
    ascend_twin.totals(reset=True)
    print(f"{'step':>4}{'loss, ascend-twin':>20}{'loss, cpu':>14}{'apart':>11}{'gradients apart':>18}  most in")
    worst = 0.0
    for number in range(1, args.steps + 1):
        batch = text.batch(rng, args.batch, args.context)
        (loss, grads), (cpu_loss, cpu_grads) = twin.value_and_grad(*batch), cpu.value_and_grad(*batch)
        loss, cpu_loss = float(loss.asnumpy()), float(cpu_loss.asnumpy())
        apart, name = difference(twin.weights, grads, cpu_grads)
        print(f"{number:>4}{loss:>20.6f}{cpu_loss:>14.6f}{abs(loss - cpu_loss):>11.1e}{apart:>18.1e}  {name}")
        worst = max(worst, abs(loss - cpu_loss), apart) if np.isfinite([loss, cpu_loss, apart]).all() else np.inf
        optimizer(grads)
        for follower, weight in zip(cpu.weights, twin.weights):     # both at the same place again
            ops.assign(follower, weight)
    print()
    print(report(args))
    agree = worst <= BOUNDS[args.dtype]
    print(f"\n{'agree' if agree else 'DISAGREE'}: {worst:.1e}, at most {BOUNDS[args.dtype]:.1e} is right")
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
