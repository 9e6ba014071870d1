"""Tokens per second of SmolLM2-135M-Instruct, attention by ms_flash against the same in MindSpore's ops.

    python samples/smollm2/bench.py

Reading (prefill) is a whole text at once, writing (decode) one token after a text of that length. The models take turns
in one process and share their weights; ratios are taken turn by turn.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # for those who load this file from elsewhere

import mindspore as ms
from cached import ATTENTIONS
from checkpoint import Checkpoint
from llama import load
from mindspore import Tensor
from options import at_least
from tqdm import tqdm

from ms_flash.cli import ended

GOALS = {("prefill", 256): 1.3, ("prefill", 1024): 2.0, ("prefill", 4096): 4.0,
         ("decode", 256): 1.1, ("decode", 1024): 1.3, ("decode", 4096): 2.0}


def take_turns(calls: dict, turns: int, title: str) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of every call of each, after one that compiles and warms up, and the token that each of them chose."""
    seconds, tokens = {kind: [] for kind in calls}, {}
    for turn in tqdm(range(turns + 1), desc=title, unit="turn", dynamic_ncols=True, leave=False):
        # Whoever comes second finds warm caches, so they change places at every turn.
        for kind in calls if turn % 2 else reversed(calls):
            start = time.perf_counter()
            tokens[kind] = int(calls[kind]().asnumpy()[0].argmax())
            if turn:
                seconds[kind].append(time.perf_counter() - start)
    return seconds, tokens


def spread(values: list[float], digits: str) -> str:
    """'median (first to third quartile)'."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:{digits}} ({low:{digits}} to {high:{digits}})"


def row(phase: str, context: int, count: int, seconds: dict[str, list[float]]) -> tuple[str, bool]:
    """A line of the table, and whether the median of the ratios reaches its goal."""
    ratios = [naive / flash for naive, flash in zip(seconds["naive"], seconds["ms_flash"])]
    goal = GOALS.get((phase, context))
    reached = goal is None or statistics.median(ratios) >= goal
    speeds = [spread([count / x for x in seconds[kind]], ".1f") for kind in ("naive", "ms_flash")]
    return (f"{phase:8} {context:7}  {speeds[0]:>26}  {speeds[1]:>26}  {spread(ratios, '.2f'):>22}  "
            + ("" if goal is None else f"{goal:4.1f} {'reached' if reached else 'NOT REACHED'}")), reached


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--contexts", type=at_least(1), nargs="+", default=[256, 1024, 4096], help="(default %(default)s)")
    # a spread needs two values
    add("--repeats", type=at_least(2), default=7, help="turns of reading (default %(default)s)")
    add("--steps", type=at_least(2), default=40, help="turns of writing (default %(default)s)")
    args = parser.parse_args(argv)

    checkpoint = Checkpoint()
    net = load(checkpoint)
    text = checkpoint.tokenizer().encode("\n".join(topics[name] for name in sorted(topics))[:65536])
    longest = min(checkpoint.config.context - 1, len(text) - 1)
    if max(args.contexts) > longest:
        parser.error(f"--contexts must be at most {longest}, but got {max(args.contexts)}")
    print(f"{'':8} {'context':>7}  {'naive, tokens/s':>26}  {'ms_flash, tokens/s':>26}  {'ratio':>22}  goal")
    passed = True
    for context in args.contexts:
        models = {kind: build(net, context + 1) for kind, build in ATTENTIONS.items()}
        prompt = Tensor([text[:context]], ms.int32), Tensor([0], ms.int32)
        last = Tensor([text[context:context + 1]], ms.int32), Tensor([context], ms.int32)
        phases = [("prefill", context, args.repeats, {k: partial(model, *prompt) for k, model in models.items()}),
                  ("decode", 1, args.steps, {k: partial(ms.jit(model), *last) for k, model in models.items()})]
        for phase, count, turns, calls in phases:
            seconds, tokens = take_turns(calls, turns, f"{phase} {context}")
            line, reached = row(phase, context, count, seconds)
            same = len(set(tokens.values())) == 1
            passed = passed and reached and same
            print(line + ("" if same else f"  THE TOKENS DIFFER: {tokens}"), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(ended(main))
