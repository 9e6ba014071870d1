"""``bench --suite ascend-model``: what the cycle model of the host twin says of the Ascend kernels.

A model, not a measurement: costs of instructions from public tables, each with the fast and the slow end of what the
tables say (op_impl/ascendc/twin/cost.h). The kernels themselves are run, all cores, and their bytes are exact.
"""

from __future__ import annotations

import argparse

from .. import library, tiling
from .cases import Case

SOC = "910B2"       # that of the published figures
L2_MIB = 192
COLUMNS = ("shape", "batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "direction", "causal", "soc",
           "of_peak_slow", "of_peak_fast", "cube", "fix", "mte1", "mte2", "vector", "vector_mte2", "vector_mte3",
           "bound_by", "gm_mib", "naive_mib", "gm_ratio", "ring_mib", "ring_footprint_mib", "pipelined",
           "double_buffer", "block_skip", "note")
_AIC = {"cube": "M", "fix": "FIX", "mte1": "MTE1", "mte2": "MTE2"}
_AIV = {"vector": "V", "vector_mte2": "MTE2", "vector_mte3": "MTE3"}


def _case(name, heads, kv_heads, q_len, kv_len, head_dim, directions=("fwd", "bwd"), causal=(False, True)):
    """There are enough heads to fill the cores, and no more."""
    return Case(name, 1, heads, kv_heads, q_len, kv_len, head_dim, directions, causal)


def _cases():
    for d in (64, 128, 256):
        for s, heads in ((1024, 24), (2048, 24), (4096, 12), (8192, 6), (16384, 3), (32768, 3)):
            yield _case(f"d{d}-s{s // 1024}k", heads, heads, s, s, d)
    for s in (8192, 32768):
        yield _case(f"decode-s{s // 1024}k", 32, 8, 1, s, 128, directions=("fwd",), causal=(False,))


CASES = {case.name: case for case in _cases()}
QUICK = ("d128-s1k", "d128-s4k", "d64-s2k", "d256-s1k", "decode-s8k")

# Measured by others on a 910B2, one head, D = 128, not causal: shares of the cube's peak by length.
PUBLISHED = {"d128-s8k": {"aclnn": 27.5, "PTO": 33.2}, "d128-s16k": {"aclnn": 34.7, "PTO": 42.7},
             "d128-s32k": {"aclnn": 42.6, "PTO": 47.6}}
# Published cycles of one tile of 128 x 256, D = 128, of a hand-written kernel.
TILES = {"qk": 2487, "softmax": 2489, "pv": 1617, "rescale": 834}
AIMS = {"fwd": 50.0, "bwd": 40.0}   # at S >= 8K, D = 128


class AscendModelPlan:
    """What one call of the command models."""

    columns = COLUMNS

    def __init__(self, args: argparse.Namespace, threads: list, progress):
        self.cases = [CASES[name] for name in args.shapes or (QUICK if args.quick else CASES)]
        self.progress = progress(sum(len(case.directions) * len(case.causal) for case in self.cases))

    @staticmethod
    def failed(row: dict) -> bool:
        """Whether a kernel could not be modelled."""
        return row["of_peak_fast"] is None

    def rows(self):
        """Yields a dict per row of the table."""
        library.configure_twin(soc=SOC, cores=0, effects=0)
        try:
            for case in self.cases:
                for direction in case.directions:
                    for causal in case.causal:
                        self.progress.show(f"{case.name} {direction} {'causal' if causal else 'full'}")
                        yield self._row(case, direction, causal)
                        self.progress.step()
        finally:
            library.configure_twin(soc="910B3", cores=0, effects=1)

    def _row(self, case, direction, causal):
        head = {"shape": case.name, "batch": 1, "direction": direction, "causal": int(causal), "soc": SOC,
                "note": "model"}
        head.update({name: getattr(case, name) for name in COLUMNS[2:7]})
        call = call_of(case, direction, causal)
        try:
            plain = call.report()
        except ValueError as error:
            return {**dict.fromkeys(COLUMNS), **head, "note": str(error)}
        row = {**dict.fromkeys(COLUMNS), **head, **shares(plain), **traffic(case, direction, plain, call.plan())}
        row["pipelined"] = gain(call, plain, serial=1)
        if direction == "fwd":
            row["double_buffer"] = gain(call, plain, single_buffer=1)
        if causal:      # the same with every block computed
            row["block_skip"] = ratio(call_of(case, direction, False).report(), plain)
        return row


def notes(rows: list):
    """Lines on what the table is to be held against."""
    yield ("model, not measurement: shares of the cube's peak from public instruction costs, slow..fast end; "
           "pipelined, double_buffer, block_skip: how many times the cycles without it")
    yield from calibration(rows)
    yield from aims(rows)


def call_of(case: Case, direction: str, causal: bool) -> tiling.TwinCall:
    """The call that is modelled."""
    return tiling.TwinCall(case, direction, "float16", (-1, 0 if causal else -1))


def gain(call: tiling.TwinCall, plain: dict, **setting) -> float:
    """How many times the cycles a kernel takes with `setting`, which takes something away from it."""
    library.configure_twin(**setting)
    try:
        return ratio(call.report(), plain)
    finally:
        library.configure_twin(**dict.fromkeys(setting, 0))


def ratio(other: dict, plain: dict) -> float:
    """Of the cycles, in the middle of the range."""
    return round(sum(other["cycles"]) / sum(plain["cycles"]), 2)


def shares(report: dict) -> dict:
    """Busy shares of the pipes, "slow..fast" in percent of the launch, the mean over the cores; and the busiest."""
    fast, slow = report["cycles"]
    row = {"of_peak_fast": round(100 * report["cube_fraction"][0], 1),
           "of_peak_slow": round(100 * report["cube_fraction"][1], 1)}
    busy = {}
    for kind, pipes in (("AIC", _AIC), ("AIV", _AIV)):
        cores = [core["pipes"] for core in report["cores"] if core["name"].startswith(kind)]
        for column, pipe in pipes.items():
            mean = [sum(core.get(pipe, (0, 0))[end] for core in cores) / len(cores) for end in (0, 1)]
            low, high = sorted((100 * mean[0] / fast, 100 * mean[1] / slow))
            row[column] = f"{low:.0f}..{high:.0f}"
            busy[column] = (low + high) / 2
    row["bound_by"] = max(busy, key=busy.get)
    return row


def traffic(case: Case, direction: str, report: dict, plan: dict) -> dict:
    """Exact bytes: of the tensors, and of the rings through which cube and vector cores talk, which stay in L2; beside
    them the least that the algorithm with whole S x S matrices moves."""
    mib = 1 << 20
    tensors = sum(read + written for name, (read, written) in report["buffers"].items() if name != "workspace")
    ring = sum(report["buffers"].get("workspace", (0, 0)))
    ours, naive = tensors / mib, naive_bytes(case, direction) / mib
    return {"gm_mib": round(ours, 2), "naive_mib": round(naive, 2), "gm_ratio": round(naive / ours, 1),
            "ring_mib": round(ring / mib, 1), "ring_footprint_mib": round(plan["workspace"] / mib, 2)}


def naive_bytes(case: Case, direction: str) -> int:
    """Scores and probabilities in 16 bit, each matrix written once and read once by every product or softmax that
    wants it; the mask is free, and all blocks are computed."""
    pairs = case.heads * case.q_len * case.kv_len
    tensors = 2 * case.head_dim * (2 * case.heads * case.q_len + 2 * case.kv_heads * case.kv_len)
    if direction == "fwd":
        return tensors + 2 * pairs * 4          # S written, read; P written, read
    return 2 * tensors + 2 * pairs * 7          # P read by dV and dS, dP written, read; dS written, read twice


def calibration(rows: list):
    """The published anchors beside what the model says of our kernels, and of tiles of the published size."""
    for row in rows:
        anchors = PUBLISHED.get(row["shape"])
        if anchors and row["direction"] == "fwd" and not row["causal"] and row["of_peak_fast"]:
            measured = ", ".join(f"{name} {share} %" for name, share in anchors.items())
            yield (f"calibration: {row['shape']}: measured by others: {measured}; this kernel by the model: "
                   f"{row['of_peak_slow']}..{row['of_peak_fast']} %")
    for name, published in TILES.items():
        fast, slow = tiling.tile_cycles(name)
        middle = (fast + slow) / 2
        yield (f"calibration: tile {name}, 128 x 256 x 128: published {published} cycles, model "
               f"{fast:.0f}..{slow:.0f}, middle {middle / published - 1:+.0%}")


def aims(rows: list):
    """Lines about what was aimed at: S >= 8K, D = 128, not causal."""
    for row in rows:
        if row["head_dim"] != 128 or row["q_len"] < 8192 or row["causal"] or row["of_peak_fast"] is None:
            continue
        aim, low, high = AIMS[row["direction"]], row["of_peak_slow"], row["of_peak_fast"]
        middle = 2 / (1 / low + 1 / high)       # of the cycles
        reached = "all of the range reaches it" if low >= aim else "its middle reaches it" if middle >= aim else (
            "only its fast end reaches it" if high >= aim else "it is missed")
        yield (f"aim: {row['shape']} {row['direction']}: {aim:.0f} % of peak; the model says {low}..{high} %, middle "
               f"{middle:.1f} %: {reached}; busiest is {row['bound_by']} ({row[row['bound_by']]} %)")
