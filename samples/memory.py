"""Peak memory of one training step or one attention step, each measured in a process of its own."""
from __future__ import annotations

import argparse
import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path

ATTENTION_HEADS = 8  # of the attention step: (1, 8, length, 64)


def _status_mib(field: str) -> float:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def _settle() -> float:
    """Resident MiB once the allocator has given back what it can; the high-water mark starts anew."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_mib("VmRSS")


def _growth(small, full) -> float:
    """MiB that `full` adds at its peak.

    `small` goes first, so that libraries and thread pools are there, and `full` runs twice, so that
    the compiler's own memory is given back before the run that is measured.
    """
    small()
    before = _settle()
    full()
    _settle()
    full()
    return max(_status_mib("VmHWM") - before, 0.0)


def _training_step(attention: str, args) -> float:
    import numpy as np
    from trainer import Text, Trainer

    text, rng = Text(), np.random.default_rng(0)
    trainer = Trainer(len(text.vocabulary), attention, args)
    return _growth(lambda: trainer.step(*text.batch(rng, 1, 16)),
                   lambda: trainer.step(*text.batch(rng, args.batch, args.context)))


def _attention_step(attention: str, args) -> float:
    import mindspore as ms
    import numpy as np
    from gpt import HEAD_DIM, make_attention
    from trainer import DTYPES

    import ms_flash

    ms.set_context(mode=ms.GRAPH_MODE)
    if attention == "fused":
        ms_flash.fuse(strict=True)
    rng = np.random.default_rng(0)

    def run(length):
        cell = make_attention(attention, length, DTYPES[args.dtype])
        shape = (1, ATTENTION_HEADS, length, HEAD_DIM)
        qkv = [ms.Tensor(rng.standard_normal(shape, np.float32)).astype(DTYPES[args.dtype]) for _ in range(3)]
        step = ms.value_and_grad(cell, (0, 1, 2))

        def values():
            value, grads = step(*qkv)
            return [x.asnumpy() for x in (value, *grads)]

        return values

    return _growth(run(16), run(args.context))


def measure(what: str, attention: str, args, **changes) -> float:
    """Peak growth in MiB of one step of 'training' or 'attention', in a fresh process.

    `changes` override options of `args`, as in ``measure("attention", "naive", args, context=2048)``.
    """
    options = json.dumps({**vars(args), **changes}, default=str)
    done = subprocess.run([sys.executable, __file__, what, attention, options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring the {what} step with {attention} attention failed:\n{done.stderr[-3000:]}")
    return float(done.stdout.split()[-1])


def sweep(attention: str, args, lengths: list[int], budget: float) -> dict[int, float]:
    """MiB of one attention step for each length that is expected to stay under `budget` MiB.

    Naive attention grows with the square of the length, so the next length is foreseen from the last.
    """
    grown: dict[int, float] = {}
    for length in lengths:
        if attention == "naive" and grown and expected(grown, length) > budget:
            break
        grown[length] = measure("attention", attention, args, context=length)
    return grown


def expected(grown: dict[int, float], length: int) -> float:
    """MiB at `length` if memory goes on with the square of the length."""
    last = max(grown)
    return grown[last] * (length / last) ** 2


if __name__ == "__main__":
    _what, _attention, _options = sys.argv[1:]
    _measured = {"training": _training_step, "attention": _attention_step}[_what]
    print(_measured(_attention, argparse.Namespace(**json.loads(_options))))
