"""``bench --suite fusion``: training steps of whole models, as written and fused at every level."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys

from .cases import NETS

# name of a variant: arguments of ms_flash.fusion, or None for the model as it is written
VARIANTS = {"unfused": None, "auto": {}, "core": {"level": "core"}, "layout": {"level": "layout"},
            "block": {"level": "block"}, "block-recompute": {"level": "block", "memory": "recompute"}}
COLUMNS = ("net", "batch", "length", "width", "heads", "layers", "threads", "level", "fused", "ms", "unfused_ms",
           "ratio", "ratio_low", "ratio_high", "attention", "unfused_attention", "mib", "unfused_mib", "memory_ratio",
           "loss_difference", "note")
# The model whose attention hands the values on: what remains of a step without scores, softmax and mixing.
WITHOUT = "without"


class FusionPlan:
    """What one call of the command measures. More than 1 in a ratio = fused is faster, or needs less memory."""

    columns = COLUMNS

    def __init__(self, args: argparse.Namespace, threads: list, progress):
        self.nets, self.threads = [NETS[name] for name in args.shapes or NETS], threads
        self.seconds, self.rounds = (args.seconds or 20.0, 5) if args.quick else (args.seconds or 60.0, 10)
        # Processes for the peak memory of a variant, whose median counts. MindSpore runs what is ready in parallel: one
        # run beside other work held 497 MiB where five on a quiet machine held 467.
        self.processes = 0 if args.no_memory else 1 if args.quick else 3
        self.progress = progress(len(self.nets) * (len(threads) + self.processes * len(VARIANTS)))

    def rows(self):
        """Yields a dict per row of the table."""
        for net in self.nets:
            memory = {}
            for name in VARIANTS if self.processes else ():
                memory[name] = self.peak(net, name)
            for threads in self.threads:
                times = self.measure("time", net, [*VARIANTS, WITHOUT], threads)
                for name in VARIANTS:
                    if name != "unfused":
                        yield {"net": net.name, "batch": net.batch, "length": net.length, "width": net.width,
                               "heads": net.heads, "layers": net.layers, "threads": threads, "level": name,
                               **compare(times, memory, name)}

    def peak(self, net, name):
        """The result of the process whose peak is the median; of one that died, where one did."""
        # each in a new process: MindSpore's pool never gives back
        results = [self.measure("memory", net, [name], max(self.threads))[name] for _ in range(self.processes)]
        return next((result for result in results if "mib" not in result),
                    sorted(results, key=lambda result: result.get("mib", 0))[len(results) // 2])

    def measure(self, what, net, variants, threads):
        """The results of a worker by variant; where it died, the reason stands for all of them."""
        self.progress.show(f"{what} {net.name} {' '.join(variants)} {threads} threads")
        request = {"what": what, "net": net.name, "variants": variants, "threads": threads, "seconds": self.seconds,
                   "rounds": self.rounds}
        done = subprocess.run([sys.executable, "-m", "ms_flash.bench.fusion", json.dumps(request)],
                              capture_output=True, text=True, check=False)
        self.progress.step()
        for line in done.stdout.splitlines():
            if line.startswith("RESULT "):
                return json.loads(line[len("RESULT "):])
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return {name: {"note": f"the process ended with {done.returncode}: {reason[0][:100]}"} for name in variants}

    @staticmethod
    def failed(row):
        """Whether ms_flash did not run."""
        return row["ms"] is None or not row["fused"]


def compare(times: dict, memory: dict, name: str) -> dict:
    """The measured columns of the row of variant `name`; ratios are of rounds: their median and quartiles."""
    columns = dict.fromkeys(COLUMNS[8:])
    notes = [f"{at} of {x}: {results[x]['note']}" for at, results in (("time", times), ("memory", memory))
             for x in ("unfused", name) if "note" in results.get(x, {})]
    mine, theirs = times[name], times["unfused"]
    columns["fused"] = mine.get("fused")
    if "times" in mine:
        columns["ms"] = round(1e3 * statistics.median(mine["times"]), 1)
    if "times" in mine and "times" in theirs:
        columns["unfused_ms"] = round(1e3 * statistics.median(theirs["times"]), 1)
        ratios = [b / a for a, b in zip(mine["times"], theirs["times"])]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        if "times" in times.get(WITHOUT, {}):
            columns["attention"], columns["unfused_attention"] = (
                _attention(x["times"], times[WITHOUT]["times"]) for x in (mine, theirs))
        columns.update(ratio_low=round(low, 2), ratio=round(middle, 2), ratio_high=round(high, 2))
        columns["loss_difference"] = f"{abs(mine['loss'] - theirs['loss']):.1e}"
    if "mib" in memory.get(name, {}):
        columns["mib"] = round(memory[name]["mib"], 1)
    if "mib" in memory.get(name, {}) and "mib" in memory["unfused"]:
        columns["unfused_mib"] = round(memory["unfused"]["mib"], 1)
        columns["memory_ratio"] = round(memory["unfused"]["mib"] / max(memory[name]["mib"], 0.1), 2)
    return {**columns, "note": "; ".join(notes)}


def _attention(step: list, without: list):
    """Percent of a step that attention takes: what is saved where it is left out, the median of the rounds."""
    return round(100 * statistics.median(1 - b / a for a, b in zip(step, without)), 1)


def judge(rows: list):
    """Lines about what fusion promises: every level faster than the model as written and lower in memory, and level
    block with recomputation lower than level layout."""
    checks = [(f"{row['net']}, {row['threads']} threads, level {row['level']}: {column} {row[column]}, more than 1",
               row[column] > 1) for row in rows for column in ("ratio", "memory_ratio") if row[column] is not None]
    mib = {(row["net"], row["level"]): row["mib"] for row in rows if row["mib"] is not None}
    for (net, level), layout in mib.items():
        if level == "layout" and (net, "block-recompute") in mib:
            again = mib[net, "block-recompute"]
            checks.append((f"{net}, level block with recomputation: {again} MiB, less than {layout} at level layout",
                           again < layout))
    yield from (f"missed: {text}" for text, holds in checks if not holds)
    yield f"promises kept: {sum(holds for _, holds in checks)} / {len(checks)}"


def _step_of(name, net):
    """A step of this variant that returns the loss, and the report of its fusion in a list."""
    import ms_flash

    from .nets import training_step

    if name == WITHOUT:
        net = dataclasses.replace(net, attention=False)
    step, arguments, reports = training_step(net), VARIANTS.get(name), []
    context = contextlib.nullcontext if arguments is None else lambda: ms_flash.fusion(**arguments)

    def run():
        with context() as report:
            loss = step()
        if not reports:
            reports.append(report)
        return loss

    return run, reports


def _levels(reports):
    """How many sites were fused, by level: "2 layout"."""
    found = {}
    for site in reports[0].fused if reports and reports[0] is not None else ():
        found[site["level"]] = found.get(site["level"], 0) + 1
    return " + ".join(f"{count} {level}" for level, count in found.items())


def measure_time(net, request) -> dict:
    """Seconds of the rounds, the loss of the third step, and what was fused, by variant."""
    from .worker import interleaved

    steps, results = {}, {}
    for name in request["variants"]:
        run, reports = _step_of(name, net)
        run()   # compiles
        run()
        results[name] = {"loss": run(), "fused": _levels(reports)}
        steps[name] = run
    times = interleaved(steps, request["seconds"], request["rounds"])
    return {name: {**results[name], "times": times[name]} for name in results}


def measure_memory(net, request) -> dict:
    """MiB by which a training step raises the peak of resident memory; a small model goes first, as in `worker`."""
    from .worker import peak_growth

    (name,) = request["variants"]
    _step_of(name, dataclasses.replace(net, batch=1, length=16, width=8 * net.heads))[0]()
    run, _ = _step_of(name, net)
    return {name: {"mib": peak_growth(run)}}


if __name__ == "__main__":
    from .worker import limit_threads

    _request = json.loads(sys.argv[1])
    limit_threads(_request["threads"])
    _measure = {"time": measure_time, "memory": measure_memory}[_request["what"]]
    print("RESULT", json.dumps(_measure(NETS[_request["net"]], _request)), flush=True)
