"""Trains a small GPT on the Python language reference three times, side by side: with naive attention, with the same
code fused by ms_flash, and with ms_flash called in the model.

    python samples/train_gpt.py                       all three, compared: losses, step time, memory, plots
    python samples/train_gpt.py --attention fused     one of them alone
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for those who load this file from elsewhere

import mindspore as ms
import numpy as np
from gpt import ATTENTIONS, GPT, HEAD_DIM, NextTokenLoss
from memory import measure, sweep
from trainer import DTYPES, Text, Trainer, generate

# Largest difference of the two runs' losses that passes, in nats per character. They differ by rounding, which the
# optimiser's steps amplify: 5e-6 is seen in 100 steps, and 3e-4 in 60 of float16. (bfloat16 has nothing to compare to.)
LOSS_BOUNDS = {"float32": 1e-4, "float16": 5e-3}
SWEEP_LENGTHS = [512, 1024, 2048, 4096, 8192]
SWEEP_BUDGET = 3 * 1024.0  # MiB


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--attention", choices=[*ATTENTIONS, "all"], default="all")
    add("--steps", type=int, default=80, help="training steps of each run (default %(default)s)")
    add("--context", type=int, default=1024, help="characters per sequence (default %(default)s)")
    add("--layers", type=int, default=4, help="transformer blocks (default %(default)s)")
    add("--dim", type=int, default=128, help=f"width, a multiple of the head_dim {HEAD_DIM} (default %(default)s)")
    add("--batch", type=int, default=2, help="sequences per step (default %(default)s)")
    add("--learning-rate", type=float, default=4e-3, help="peak of the cosine schedule (default %(default)s)")
    add("--dtype", choices=list(DTYPES), default="float32", help="of the attention; the rest is float32")
    add("--seed", type=int, default=1)
    add("--out", type=Path, default=Path("build/demo"), help="folder of the plots (default %(default)s)")
    add("--no-plots", action="store_true", help="neither plots nor the memory sweep they need")
    add("--no-memory", action="store_true", help="no memory measurement at all")
    args = parser.parse_args(argv)
    if args.dim % HEAD_DIM:
        parser.error(f"--dim must be a multiple of the head_dim {HEAD_DIM}, but got {args.dim}")
    if args.dtype == "bfloat16" and args.attention != "flash":
        parser.error("MindSpore has no bfloat16 softmax or matmul on the CPU: use --attention flash with it")
    return args


def build(attention: str = "naive", argv: list[str] | None = None):
    """The network of this sample with its loss, and one batch for it: ``net(*inputs)`` is the loss."""
    args, text = parse_options(argv or []), Text()
    ms.set_seed(args.seed)
    net = GPT(len(text.vocabulary), args.context, args.dim, args.layers, attention, DTYPES[args.dtype])
    return NextTokenLoss(net), text.batch(np.random.default_rng(args.seed), args.batch, args.context)


def train(text: Text, kinds: list[str], args) -> tuple[dict[str, Trainer], dict[str, list], dict[str, list]]:
    """Trains one model per kind on the same batches, their steps taking turns; returns losses and seconds too."""
    from tqdm import tqdm

    trainers = {kind: Trainer(len(text.vocabulary), kind, args) for kind in kinds}
    losses: dict[str, list[float]] = {kind: [] for kind in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    rng = np.random.default_rng(args.seed)
    show_every = max(args.steps // 10, 1)
    print("  ".join(["  step", *(f"{kind + ' loss':>12}" for kind in kinds), *(f"{kind + ' ms':>10}" for kind in kinds),
                     *(f"{kind + ' - naive':>13}" for kind in others(losses))]))
    with tqdm(total=args.steps, unit="step", desc="compiling", dynamic_ncols=True) as bar:
        for step in range(1, args.steps + 1):
            ids, targets = text.batch(rng, args.batch, args.context)
            # Whoever comes second finds warm caches, so they change places at every step.
            for kind in kinds if step % 2 else reversed(kinds):
                start = time.perf_counter()
                losses[kind].append(trainers[kind].step(ids, targets))
                seconds[kind].append(time.perf_counter() - start)
            if step == 1 or step % show_every == 0:
                row = [f"{step:6}", *(f"{losses[kind][-1]:12.4f}" for kind in kinds),
                       *(f"{1e3 * seconds[kind][-1]:10.0f}" for kind in kinds)]
                row += [f"{losses[kind][-1] - losses['naive'][-1]:+13.1e}" for kind in others(losses)]
                if step == 1 and "fused" in trainers:
                    bar.write(f"{trainers['fused'].report}\n")
                bar.write("  ".join(row))
            bar.set_description("training")
            bar.set_postfix_str("loss " + " | ".join(f"{kind} {losses[kind][-1]:.3f}" for kind in kinds))
            bar.update()
    return trainers, losses, seconds


def others(by_kind: dict) -> list[str]:
    """What is compared with naive attention: everything else, if that is there."""
    return [kind for kind in by_kind if kind != "naive"] if "naive" in by_kind else []


def spread(values: list[float], digits: str, unit: str) -> str:
    """'median (first to third quartile) unit'."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{digits}} ({low:{digits}} to {high:{digits}}) {unit}".rstrip()


def report_losses(losses: dict[str, list[float]]) -> None:
    print("\nLoss in nats per character, at first and as the mean of the last ten steps")
    for kind, values in losses.items():
        print(f"  {ATTENTIONS[kind]:22} {values[0]:.3f} -> {statistics.fmean(values[-10:]):.3f}")


def report_time(seconds: dict[str, list[float]]) -> None:
    timed = {kind: values[1:] for kind, values in seconds.items()}  # the first step compiles
    if min(len(values) for values in timed.values()) < 2:
        return
    print("\nStep time, median (quartiles)")
    for kind, values in timed.items():
        print(f"  {ATTENTIONS[kind]:22} {spread([1e3 * value for value in values], '.0f', 'ms')}")
    for kind in others(timed):
        ratios = [naive / other for naive, other in zip(timed["naive"], timed[kind])]
        print(f"  {'naive / ' + kind:22} {spread(ratios, '.2f', '')}")


def report_memory(kinds: list[str], args) -> dict[str, dict[int, float]]:
    """Prints the peak growth of a training step, and unless --no-plots returns that of an attention step by length."""
    print("\nMeasuring memory, each figure in a process of its own ...", flush=True)

    def measure_kind(kind):
        return measure("training", kind, args), {} if args.no_plots else sweep(kind, args, SWEEP_LENGTHS, SWEEP_BUDGET)

    with ThreadPoolExecutor(len(kinds)) as pool:
        measured = dict(zip(kinds, pool.map(measure_kind, kinds)))
    print("Peak memory growth of a training step" + ("" if args.no_plots else ", and of one attention step by length"))
    for kind, (training, grown) in measured.items():
        points = "".join(f"   {length}: {mib:.0f}" for length, mib in grown.items())
        print(f"  {ATTENTIONS[kind]:22} {training:.0f} MiB{points and '     attention' + points}")
    for kind in others(measured):
        (naive, naive_grown), (other, other_grown) = measured["naive"], measured[kind]
        points = "".join(f"   {length}: {naive_grown[length] / other_grown[length]:.0f}" for length in naive_grown)
        print(f"  {'naive / ' + kind:22} {naive / other:.1f}{points and '         attention' + points}")
    return {kind: grown for kind, (_, grown) in measured.items()}


def losses_agree(losses: dict[str, list[float]], bound: float) -> bool:
    print()
    verdicts = []
    for kind in others(losses):
        gaps = [abs(naive - other) for naive, other in zip(losses["naive"], losses[kind])]
        worst = max(range(len(gaps)), key=lambda i: gaps[i] if gaps[i] == gaps[i] else float("inf"))
        verdicts.append(gaps[worst] <= bound)  # False for NaN
        print(f"Largest difference of the losses, naive and {kind}: {gaps[worst]:.1e} at step {worst + 1}, "
              f"bound {bound:g}: {'they agree' if verdicts[-1] else 'THEY DISAGREE'}")
    return all(verdicts)


def main(argv: list[str] | None = None) -> int:
    args = parse_options(argv)
    ms.set_context(mode=ms.GRAPH_MODE)
    kinds = list(ATTENTIONS) if args.attention == "all" else [args.attention]
    text = Text()
    print(f"GPT of {args.layers} layers, width {args.dim}, context {args.context}; {args.batch} sequences per step; "
          f"attention in {args.dtype}; text of {len(text.ids):,} characters, {len(text.vocabulary)} of them distinct")
    trainers, losses, seconds = train(text, kinds, args)
    report_losses(losses)
    report_time(seconds)
    grown = {} if args.no_memory else report_memory(kinds, args)
    prompt = 'The "for" statement'
    count = min(180, args.context - len(prompt))
    print(f"\nText written by the model ({ATTENTIONS[kinds[-1]]}) after {args.steps} steps:\n")
    print("\n".join("    " + line for line in generate(trainers[kinds[-1]].net, text, prompt, count).splitlines()))
    if not args.no_plots:
        from plots import plot_losses, plot_memory

        args.out.mkdir(parents=True, exist_ok=True)
        subtitle = f"{args.layers} layers, width {args.dim}, context {args.context}, batch {args.batch}, {args.dtype}"
        plot_losses(losses, LOSS_BOUNDS.get(args.dtype), subtitle, args.out / "losses.png")
        print(f"\nWrote {args.out / 'losses.png'}")
        if grown:
            plot_memory(grown, SWEEP_LENGTHS, SWEEP_BUDGET, args.dtype, args.out / "memory.png")
            print(f"Wrote {args.out / 'memory.png'}")
    return 0 if len(kinds) == 1 or losses_agree(losses, LOSS_BOUNDS[args.dtype]) else 1


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # rows appear as they come in a log, too
    sys.exit(main())
