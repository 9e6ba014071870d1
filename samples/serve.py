"""Serves many requests with one small GPT: they join a running batch, share blocks of a paged cache, and leave.

    python samples/serve.py                        trains for a moment, then serves 60 requests, 8 at a time
    python samples/serve.py --train 0 --blocks 24  untrained, with a cache that is too small for 8 at a time

The same requests run one at a time as well. The exit status is 1 if a result differs or a block is not given back.
"""
from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for those who load this file from elsewhere

import mindspore as ms
import numpy as np
from batcher import Batcher, random_requests
from gpt import GPT, HEAD_DIM
from options import at_least
from tqdm import tqdm
from trainer import Text, Trainer

from ms_flash.cli import ended

SHARED = "The Python language reference says: "
LONGEST = 100_000    # of a prompt: the text that they are cut from is a few times as long


def parse_options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--requests", type=at_least(1), default=60, help="how many (default %(default)s)")
    add("--slots", type=at_least(1), default=8, help="requests that run at a time, at most (default %(default)s)")
    add("--blocks", type=at_least(1), default=48, help="blocks of the cache (default %(default)s)")
    add("--block-size", type=at_least(1), default=16, help="characters in a block (default %(default)s)")
    add("--longest", type=at_least(1), default=48, help="longest prompt (default %(default)s)")
    add("--most", type=at_least(1), default=48, help="longest answer (default %(default)s)")
    add("--train", type=at_least(0), default=100, metavar="STEPS",
        help="training steps before; 0 is a random model (default %(default)s)")
    add("--layers", type=at_least(1), default=2, help="transformer blocks (default %(default)s)")
    add("--dim", type=at_least(1), default=128, help=f"width, a multiple of {HEAD_DIM} (default %(default)s)")
    add("--seed", type=at_least(0), default=1)
    args = parser.parse_args(argv)
    if args.dim % HEAD_DIM:
        parser.error(f"--dim must be a multiple of {HEAD_DIM}, but got {args.dim}")
    if args.longest > LONGEST:
        parser.error(f"--longest must be at most {LONGEST}, but got {args.longest}")
    args.context = len(SHARED) + args.longest + args.most
    blocks = lambda tokens: -(-tokens // args.block_size)
    needed = blocks(len(SHARED)) + max(blocks(args.longest + args.most),
                                       blocks(args.context) - len(SHARED) // args.block_size)
    if args.blocks < needed:
        parser.error(f"--blocks must be at least {needed}, for the common text and the longest request, but got "
                     f"{args.blocks}")
    return args


def make_net(text: Text, args) -> GPT:
    """A GPT, trained for `args.train` steps."""
    if not args.train:
        ms.set_seed(args.seed)
        return GPT(len(text.vocabulary), args.context, args.dim, args.layers, "flash")
    options = argparse.Namespace(**{**vars(args), "steps": args.train}, batch=8, learning_rate=4e-3, dtype="float32")
    trainer, rng = Trainer(len(text.vocabulary), "flash", options), np.random.default_rng(args.seed)
    with tqdm(range(args.train), desc="training", unit="step") as bar:
        for _ in bar:
            bar.set_postfix_str(f"loss {trainer.step(*text.batch(rng, options.batch, args.context)):.3f}")
    return trainer.net


def serve(batcher: Batcher, requests, title: str) -> tuple[float, int]:
    """Runs all requests; returns the seconds that took, and the most blocks that were in use."""
    for request in requests:
        batcher.submit(request)
    peak, start = 0, time.perf_counter()
    with tqdm(total=len(requests), desc=title, unit="request") as bar:
        while batcher.waiting or batcher.running:
            bar.update(len(batcher.step()))
            used = batcher.cache.used_blocks
            peak = max(peak, used)
            bar.set_postfix_str(f"{len(batcher.running)} running, {len(batcher.waiting)} waiting, {used} blocks")
    return time.perf_counter() - start, peak


def main(argv: list[str] | None = None) -> int:
    args, text = parse_options(argv), Text()
    net = make_net(text, args)
    together = random_requests(np.random.default_rng(args.seed), text.ids, args.requests, args.longest, args.most)
    alone = copy.deepcopy(together)
    shared = [text.index[char] for char in SHARED]

    batcher = Batcher(net, args.slots, args.blocks, args.block_size, shared)
    seconds, peak = serve(batcher, together, "together")
    batcher.close()
    single = Batcher(net, 1, args.blocks, args.block_size, shared)
    alone_seconds, _ = serve(single, alone, "one at a time")
    single.close()

    for request in together[:3]:
        prompt, written = ("".join(text.vocabulary[i] for i in ids) for ids in (request.prompt, request.written))
        print(f"\n{SHARED if request.shared else ''}{prompt}[{written}]")
    count = sum(request.count for request in together)
    same = sum(a.written == b.written for a, b in zip(together, alone))
    left = batcher.cache.used_blocks + single.cache.used_blocks
    print(f"\n{args.requests} requests, {count} characters in {batcher.steps} steps, "
          f"{batcher.moved / max(batcher.steps, 1):.1f} requests in each; {batcher.set_back} times one was set back")
    print(f"blocks: {peak} of {args.blocks} at the peak, {left} left behind")
    print(f"together {count / seconds:.0f} characters/s, one at a time {count / alone_seconds:.0f}: "
          f"{alone_seconds / seconds:.2f} times as many")
    print(f"{same} of {args.requests} results equal those of one at a time")
    return 0 if same == args.requests and not left else 1


if __name__ == "__main__":
    sys.exit(ended(main))
