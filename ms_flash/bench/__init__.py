"""``bench``: time and memory of ms_flash against other implementations, as CSV on stdout and in a file."""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
from pathlib import Path

from .. import doctor
from . import ascend_model, fusion
from .cases import CASES, NETS, SUITES, TARGETS, Case
from .claims import ClaimsPlan, summary
from .onnx import ONNX_CASES, OnnxPlan
from .runs import Runs

COLUMNS = ("shape", "batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "calls", "dtype",
           "direction", "causal", "threads", "peer", "ours_ms", "peer_ms", "ratio", "ratio_low", "ratio_high",
           "limit_ms", "of_limit", "ours_mib", "peer_mib", "memory_ratio", "note")
DTYPES = ("float32", "float16", "bfloat16")
KERNEL = "ms_flash-kernel"
_PLANS = {"fusion": fusion.FusionPlan, "onnx": OnnxPlan, "ascend-model": ascend_model.AscendModelPlan,
          "claims": ClaimsPlan}   # the other suites
_PEERS = tuple(dict.fromkeys(peer for suite in SUITES.values() for peer in suite.peers))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--suite", choices=[*SUITES, *_PLANS], default="cpu",
                        help="attention against peers, whole models as written against fused, the exported node in "
                             "ONNX Runtime, a cycle model of the Ascend kernels, or what articles say (default: "
                             "%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few shapes in float32, in less than four minutes")
    parser.add_argument("--shapes", type=_names([*CASES, *NETS, *ascend_model.CASES]),
                        help=f"comma-separated, of {', '.join(CASES)}; of the suite fusion: {', '.join(NETS)}")
    parser.add_argument("--dtypes", type=_names(DTYPES), help=f"comma-separated, of {', '.join(DTYPES)}")
    parser.add_argument("--peers", type=_names(_PEERS), help=f"comma-separated, of {', '.join(_PEERS)}")
    parser.add_argument("--threads", type=_counts, metavar="N,...",
                        help="numbers of cores to leave to everybody (default: all; without --quick also 1)")
    parser.add_argument("--seconds", type=float, help="to spend on the rounds of a row (default: 3, with --quick 1)")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), metavar="FOLDER",
                        help="gets SUITE.csv, and SUITE.json about the machine (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measures, printing each row as it comes; 1 if ms_flash itself failed somewhere, 2 for wrong arguments."""
    wrong = _wrong(args)
    if wrong:
        print(f"For 'bench', {wrong}", file=sys.stderr)
        return 2
    cores = len(os.sched_getaffinity(0))
    threads = args.threads or ([cores] if args.quick else sorted({1, cores}))
    plan = _PLANS.get(args.suite, Plan)(args, threads, Progress)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.suite}.json").write_text(json.dumps(doctor.environment(), indent=2) + "\n")
    failed, measured = False, []
    with open(args.out / f"{args.suite}.csv", "w", newline="") as file:
        writers = [csv.DictWriter(stream, plan.columns, lineterminator="\n") for stream in (sys.stdout, file)]
        for writer in writers:
            writer.writeheader()
        for row in plan.rows():
            failed |= plan.failed(row)
            measured.append(row)
            for writer in writers:
                writer.writerow(row)
            sys.stdout.flush()
    plan.progress.close()
    if args.suite == "cpu":
        _plot(args.out / "cpu.csv", plan)
    judges = {"cpu": judge, "fusion": fusion.judge, "ascend-model": ascend_model.notes, "claims": summary}
    for line in judges[args.suite](measured) if args.suite in judges else ():
        print(line)
    return int(failed)


def _plot(table, plan):
    """Charts beside the table, where matplotlib is installed."""
    from . import plots

    try:
        for dtype in dict.fromkeys(dtype for _, dtype in plan.problems):
            for path in plots.draw(table, dtype, table.parent / dtype):
                print(path, file=sys.stderr)
    except ImportError:
        print("no charts: they need matplotlib (pip install 'ms_flash[demo]')", file=sys.stderr)


def _wrong(args):
    """What does not go together."""
    known = {"fusion": NETS, "onnx": ONNX_CASES, "ascend-model": ascend_model.CASES}.get(args.suite, CASES)
    for name in args.shapes or ():
        if name not in known:
            return f"'shapes' of the suite {args.suite} must be of {', '.join(known)}, but got {name!r}."
    if args.suite == "fusion" and args.dtypes:
        return "'dtypes' must not be given for the suite fusion, which is float32."
    if args.suite == "ascend-model" and (args.dtypes or args.threads or args.seconds):
        return "'dtypes', 'threads' and 'seconds' must not be given for the suite ascend-model, which runs nothing."
    if args.suite == "onnx" and "bfloat16" in (args.dtypes or ()):
        return "'dtypes' of the suite onnx must be of float32, float16, but got 'bfloat16'."
    if args.suite == "claims" and (args.shapes or args.dtypes):
        return "'shapes' and 'dtypes' must not be given for the suite claims, whose sizes are those of the claims."
    if args.suite != "cpu" and args.peers:
        return f"'peers' must not be given for the suite {args.suite}."
    return None


class Plan(Runs):
    """What one call of the command measures, and how."""

    columns = COLUMNS

    def __init__(self, args: argparse.Namespace, threads: list, progress):
        suite = SUITES[args.suite]
        self.peers, self.threads = args.peers or (suite.quick_peers if args.quick else suite.peers), threads
        self.memory = not args.no_memory
        # MindSpore's float16 kernels are the same in a graph and out of it, and take up to a minute a run: once will do
        self.half_peers = args.peers or tuple(peer for peer in self.peers if peer != "mindspore-pynative")
        shapes = args.shapes or (suite.quick_cases if args.quick else suite.cases)
        dtypes = args.dtypes or (suite.quick_dtypes if args.quick else suite.dtypes)
        self.problems = [(CASES[shape], dtype) for shape in shapes for dtype in dtypes]
        # A process for each number: the other dtypes would take 15 minutes, and show the same tensors at half the size.
        self.memory_dtype = dtypes[0]
        super().__init__(args, progress(sum(
            len(self.threads) * len(self.variants(case))
            + len(self.trained(case, dtype)) * len(self.memory_variants(case, dtype))
            for case, dtype in self.problems)))

    @staticmethod
    def failed(row: dict) -> bool:
        """Whether ms_flash itself failed."""
        return row["ours_ms"] is None

    @staticmethod
    def variants(case: Case) -> list:
        """(direction, causal) of the rows."""
        return [(direction, causal) for causal in case.causal for direction in case.directions]

    def memory_variants(self, case: Case, dtype: str) -> list:
        """Those whose memory is measured: training steps without mask."""
        wanted = [("fwd+bwd", False)] if self.memory and dtype == self.memory_dtype else []
        return [variant for variant in self.variants(case) if variant in wanted]

    def peers_of(self, case: Case, dtype: str) -> tuple:
        """Who runs it besides us."""
        return case.peers or (self.peers if dtype == "float32" else self.half_peers)

    def implementations(self, case: Case, dtype: str) -> list:
        """Ours and the peers', each once."""
        from .peers import PEERS

        peers = self.peers_of(case, dtype)
        return list(dict.fromkeys([*(PEERS[peer] for peer in peers), *peers]))

    def trained(self, case: Case, dtype: str) -> list:
        """Those of them that train, whose memory is measured."""
        return [name for name in self.implementations(case, dtype) if not name.startswith("ort-")]

    def rows(self):
        """Yields a dict per row of the table."""
        for case, dtype in self.problems:
            memory = {variant: {} for variant in self.variants(case)}
            for variant in self.memory_variants(case, dtype):
                for name in self.trained(case, dtype):  # a process each: MindSpore's pool never gives back
                    results = self.measure("memory", case, dtype, [variant], [name], max(self.threads))
                    memory[variant].update(next(results))
            for threads in self.threads:
                variants = self.variants(case)
                results = self.measure("time", case, dtype, variants, [KERNEL, *self.implementations(case, dtype)],
                                       threads)
                for (direction, causal), times in zip(variants, results):
                    head = {**{column: getattr(case, column) for column in COLUMNS[1:8]}, "shape": case.name,
                            "dtype": dtype, "direction": direction, "causal": int(causal), "threads": threads}
                    kernel = times.pop(KERNEL)
                    limit = limits_of(case, dtype, direction, causal, kernel, times.pop("limits", None))
                    for peer in self.peers_of(case, dtype):
                        row = {**head, **compare(peer, times, memory[direction, causal]), **limit}
                        if isinstance(kernel, str):
                            row["note"] = "; ".join(filter(None, [row["note"], f"{KERNEL}: {kernel}"]))
                        yield row


def limits_of(case: Case, dtype: str, direction: str, causal: bool, kernel, limits) -> dict:
    """What the machine could do at best: multiplications with addition, or for a single query, which waits for memory,
    reading of keys and values. In milliseconds, and our kernels alone in percent of it."""
    if limits is None:
        return {}
    if case.q_len == 1:
        least = case.read_bytes(4 if dtype == "float32" else 2) / limits["bytes"]
    else:
        least = case.flops(direction, causal) / limits["flops"]
    reached = None if isinstance(kernel, str) else round(100 * least / statistics.median(kernel), 1)
    return {"limit_ms": round(1e3 * least, 3), "of_limit": reached}


def compare(peer: str, times: dict, memory: dict) -> dict:
    """The measured columns of a row: `peer` against the implementation of ours that is called in the same way.

    Ratios are of the rounds, each against the run of ours beside it: their median and quartiles. More than 1 = ours is
    faster, or needs less memory.
    """
    from .peers import PEERS

    columns = dict.fromkeys(COLUMNS[13:])
    notes, ours = [], PEERS[peer]
    for column, name in (("ours_ms", ours), ("peer_ms", peer)):
        if isinstance(times[name], str):
            notes.append(f"{name}: {times[name]}")
        else:
            columns[column] = round(1e3 * statistics.median(times[name]), 3)
    if columns["ours_ms"] and columns["peer_ms"]:
        ratios = [b / a for a, b in zip(times[ours], times[peer])]
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
        columns["ratio_low"], columns["ratio"], columns["ratio_high"] = (round(x, 2) for x in quartiles)
    for column, name in (("ours_mib", ours), ("peer_mib", peer)):
        if isinstance(memory.get(name), str):
            notes.append(f"memory of {name}: {memory[name]}")
        elif name in memory:
            columns[column] = round(memory[name], 1)
    if columns["ours_mib"] and columns["peer_mib"]:
        columns["memory_ratio"] = round(columns["peer_mib"] / columns["ours_mib"], 1)
    return {**columns, "peer": peer, "note": "; ".join(notes)}


def judge(rows: list):
    """Lines about the targets that `rows` bear on: those missed, and last how many were met."""
    met = total = 0
    for target in TARGETS:
        for row in rows:
            value = row[target.column]
            if not target.holds_for(row) or value is None:
                continue
            total += 1
            if value >= target.least:
                met += 1
            else:
                what = " ".join(str(row[column]) for column in ("shape", "dtype", "direction"))
                best = f", at the limit {row['peer_ms'] / row['limit_ms']:.2f}" if target.column == "ratio" and row[
                    "limit_ms"] else ""
                yield (f"missed: {target.text}: {what}{' causal' * row['causal']}, {row['threads']} threads, "
                       f"{row['peer']}: {target.column} {value}, at least {target.least}{best}")
    yield f"targets met: {met} / {total}"


class Progress:
    """A bar on stderr: one line that changes on a terminal, a line per step elsewhere."""

    def __init__(self, total: int):
        self.total, self.done, self.start, self.text = total, 0, time.monotonic(), ""
        self.terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """What is going on now."""
        self.text = text
        bar = "#" * round(24 * self.done / max(self.total, 1))
        line = f"[{bar:.<24}] {self.done}/{self.total} {time.monotonic() - self.start:.0f} s  {text}"
        before, after = ("\r\033[K", "") if self.terminal else ("", "\n")
        print(before + line, end=after, file=sys.stderr, flush=True)

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if self.terminal:
            self.show(self.text)

    def close(self) -> None:
        """Leaves the line."""
        self.show("done")
        if self.terminal:
            print(file=sys.stderr)


def _names(known):
    def parse(text):
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, but got {name!r}")
        return names

    return parse


def _counts(text):
    counts, cores = [int(n) for n in text.split(",")], len(os.sched_getaffinity(0))
    if not all(1 <= n <= cores for n in counts):
        raise argparse.ArgumentTypeError(f"must be from 1 to {cores}, the cores here, but got {text}")
    return counts
