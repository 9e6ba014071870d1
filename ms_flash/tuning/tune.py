"""``tune``: measures block sizes on this machine and writes those that win as the table of this machine."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from pathlib import Path

import yaml

from .. import doctor, library
from . import DTYPES, PASSES, as_text, own, read

# What a winner must gain, at the lower quartile of the rounds, to get into the table: less is noise.
LEAST_GAIN = 1.015
_SIZES = {  # candidates; the kernels' own sizes always run beside them
    "forward": [{"block_m": m, "block_n": n} for m in (96, 192, 288, 384) for n in (64, 128, 192, 256)],
    "decode": [{"block_n": n, "keys_per_part": part} for n in (64, 128, 256, 512) for part in (256, 512, 1024, 4096)],
    "backward": [{"block_m": m, "block_n": n} for m in (48, 96, 144, 192) for n in (72, 144, 216, 288)],
}


@dataclasses.dataclass(frozen=True)
class Site:
    """One problem that is measured, for all up to its head_dim and number of keys from the next smaller one on."""

    pass_: str
    dtype: str
    head_dim: int
    keys: int
    heads: int


@dataclasses.dataclass(frozen=True)
class Found:
    """The best candidate of a site, and quartiles of its gain over the kernels' own sizes."""

    sizes: dict
    gain: tuple


_HEAD_DIMS, _LENGTHS, _CACHES = (32, 64, 128, 256), (256, 1024, 4096), (1024, 8192)
_QUICK = {"head_dims": (64, 128), "dtypes": ("float32",)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--quick", action="store_true",
                        help="head_dim 64 and 128 in float32 only, in about four minutes (otherwise about 40)")
    parser.add_argument("--seconds", type=float, default=None, help="to spend on each problem (default: 20, quick 10)")
    parser.add_argument("--passes", help=f"comma-separated, of {', '.join(PASSES)} (default: all)")
    parser.add_argument("--out", type=Path, default=own(), metavar="FILE",
                        help="the table to write; what it says of other problems stays (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")


def run(args: argparse.Namespace) -> int:
    """Measures, printing a line per problem; 2 for wrong arguments."""
    passes = args.passes.split(",") if args.passes else list(PASSES)
    if not set(passes) <= set(PASSES):
        print(f"For 'tune', 'passes' must be of {', '.join(PASSES)}, but got {args.passes}.", file=sys.stderr)
        return 2
    seconds = args.seconds or (10 if args.quick else 20)
    isa = library.load().msflash_cpu_isa().decode()
    print(f"{doctor.cpu_model()}, {isa}, {library.load().msflash_cpu_get_num_threads()} threads")
    head_dims, dtypes = (_QUICK["head_dims"], _QUICK["dtypes"]) if args.quick else (_HEAD_DIMS, DTYPES)
    sites = [site for pass_ in passes for site in _sites(pass_, head_dims, dtypes)]
    rules, gains, places = [], [], []
    try:
        for number, site in enumerate(sites, 1):
            found = best(site, seconds)
            gains.append(max(1.0, found.gain[1]) if found.gain[0] >= LEAST_GAIN else 1.0)
            print(f"[{number}/{len(sites)}] {site.pass_} {site.dtype} head_dim {site.head_dim} keys {site.keys}: "
                  f"{_shown(found)}", flush=True)
            places.append(_place(isa, site, head_dims))
            if found.gain[0] >= LEAST_GAIN:
                rules.append({**places[-1], **found.sizes})
    finally:
        library.use_blocks()
    if not args.dry_run:
        _write(args.out, rules, places)
    print(f"better than the kernels' own sizes: {len(rules)} of {len(sites)} problems, by {max(gains):.2f} at most; "
          f"{'nothing written' if args.dry_run else f'written to {args.out}'}")
    return 0


def _sites(pass_, head_dims, dtypes):
    for dtype in dtypes:
        for head_dim in head_dims:
            for keys in _CACHES if pass_ == "decode" else _LENGTHS:
                yield Site(pass_, dtype, head_dim, keys, heads=16 if pass_ == "decode" else 4 if keys > 2048 else 8)


def _place(isa, site, head_dims):
    """Where a site speaks for: from the next smaller one on; the largest have no upper limit."""
    def between(value, values):
        least = max((v for v in values if v < value), default=0) + 1
        return [least, value if value < max(values) else 2**31]

    lengths = _CACHES if site.pass_ == "decode" else _LENGTHS
    return {"isa": isa, "dtype": site.dtype, "pass": site.pass_, "head_dim": between(site.head_dim, head_dims),
            "keys": between(site.keys, lengths)}


def best(site: Site, seconds: float) -> Found:
    """The fastest candidate. Every round runs each once, interleaved; the slower ones drop out."""
    from ..bench.worker import interleaved

    step, native = _step(site), library.load()

    def with_sizes(sizes):
        text = as_text([sizes] if sizes else []).encode()

        def timed():
            native.msflash_cpu_set_block_rules(text)
            step()
        return timed

    candidates = dict(enumerate(_SIZES[site.pass_], 1))
    steps = {0: with_sizes({}), **{i: with_sizes(sizes) for i, sizes in candidates.items()}}
    # a third of the time for all of them, a third for the best quarter, a third for the best one
    for keep in (len(candidates) // 4, 1, 1):
        times = interleaved(steps, seconds / 3, 3)
        ranking = sorted(candidates.keys() & steps.keys(), key=lambda i: statistics.median(times[i]))
        steps = {i: steps[i] for i in (0, *ranking[:keep])}
    winner = ranking[0]
    gain = statistics.quantiles([a / b for a, b in zip(times[0], times[winner])], n=4, method="inclusive")
    return Found(candidates[winner], tuple(gain))


def _step(site):
    """Runs one forward, or one backward."""
    import numpy as np

    from .. import direct

    rng = np.random.default_rng(0)
    make = lambda rows: direct.stored(rng.standard_normal((1, site.heads, rows, site.head_dim), np.float32), site.dtype)
    queries = 1 if site.pass_ == "decode" else site.keys
    attention = direct.Attention(site.dtype, make(queries), make(site.keys), make(site.keys))
    attention.dout[:] = make(queries)
    attention.forward()
    return attention.backward if site.pass_ == "backward" else attention.forward


def _shown(found):
    low, middle, high = found.gain
    sizes = " ".join(f"{name} {size}" for name, size in found.sizes.items())
    verdict = "" if low >= LEAST_GAIN else ": the kernels' own stay"
    return f"{sizes}, {middle:.2f} times as fast as the kernels' own ({low:.2f} to {high:.2f}){verdict}"


def _write(file, rules, measured):
    """`rules`, before those that the file has for other places than those `measured`."""
    old = [rule for rule in read(file) if not any(place.items() <= rule.items() for place in measured)] \
        if file.exists() else []
    lines = [yaml.safe_dump(rule, default_flow_style=True, sort_keys=False, width=1000).strip() for rule in rules + old]
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    text = "".join(f"- {line}\n" for line in lines)
    partial.write_text(f"# Measured by `ms-flash tune` on: {doctor.cpu_model()}\n{text}", encoding="utf-8")
    partial.replace(file)   # a process that starts meanwhile reads the old table or the new one, whole
