"""The process in which something is measured: ``python -m ms_flash.bench.worker``, a request as JSON in, a result out.

A request is {what: "time" or "memory", case: the fields of a Case, dtype, variants: [[direction, causal], ...],
implementations, threads, seconds, rounds}. For each variant, a line "RESULT {...}" of the output holds its result by
implementation: for "time" the seconds of a call in each round, for "memory" MiB; an implementation that cannot run this
has its error text there. With the times comes "limits": what the machine reached in a quarter of the same rounds,
FLOP/s and B/s.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import re
import statistics
import sys
import time
from pathlib import Path

from .. import library
from .cases import Case

MOST_ROUNDS = 50
BURST = 0.03    # seconds
SLOW, SLOW_ROUNDS = 2.0, 2  # who takes more than this many seconds runs so often: each run costs all others' time


def limit_threads(threads: int) -> None:
    """Leaves this process `threads` cores. Must come before MindSpore is imported.

    MindSpore has several pools, sized by several switches that not every operator obeys; the cores a process may use
    are the one limit that holds for all of them, and for ms_flash too.
    """
    cores = sorted(os.sched_getaffinity(0))
    if threads > len(cores):
        raise ValueError(f"For 'bench', 'threads' must be at most {len(cores)}, the cores here, but got {threads}.")
    os.sched_setaffinity(0, cores[:threads])
    os.environ["OMP_NUM_THREADS"] = os.environ["MS_FLASH_NUM_THREADS"] = str(threads)
    import mindspore as ms

    ms.set_device("CPU")
    ms.device_context.cpu.op_tuning.threads_num(threads)


def interleaved(steps: dict, seconds: float, rounds: int) -> dict:
    """Seconds of each round for every step: each has a turn per round, the first in turn.

    Goes on for about `seconds`, but for `rounds` rounds at least. A slow step drops out after the first rounds.
    """
    times = {name: [] for name in steps}
    order, start = list(steps), time.perf_counter()
    for done in range(MOST_ROUNDS):
        if done >= rounds and time.perf_counter() - start > seconds:
            break
        order.append(order.pop(0))
        for name in order:
            if done >= SLOW_ROUNDS and times[name][-1] > SLOW:
                continue
            times[name].append(_turn(steps[name]))
    return times


def _turn(step):
    """Seconds of a run: of one, or of as many as fill a burst, behind half a burst that does not count: thread pools of
    whoever ran before wait actively for some milliseconds, and the threads of this one have yet to find their cores."""
    seconds, runs = _elapsed(step, 1), 1
    if seconds > BURST:
        return seconds
    while seconds * runs < BURST / 2:
        seconds, runs = _elapsed(step, 2 * runs), 2 * runs
    return _elapsed(step, math.ceil(BURST / seconds))


def _elapsed(step, runs):
    begin = time.perf_counter()
    for _ in range(runs):
        step()
    return (time.perf_counter() - begin) / runs


def measure_time(request: dict, direction: str, causal: bool) -> dict:
    """Seconds per round of every implementation that runs the request, the error text of the others."""
    from .peers import IMPLEMENTATIONS

    steps, results, case = {}, {}, Case(**request["case"])
    for name in request["implementations"]:
        try:
            steps[name] = IMPLEMENTATIONS[name](case, request["dtype"], direction, causal)
            steps[name]()  # compiles, fills the memory pools, starts the threads
        except Exception as error:  # what a peer raises for what it does not support is not ours to list
            results[name] = _short(error)
            steps.pop(name, None)
    native, limits = library.load(), {"flops": [], "bytes": []}
    least = {"flops": lambda: limits["flops"].append(native.msflash_cpu_fma_peak()),
             "bytes": lambda: limits["bytes"].append(native.msflash_cpu_read_bandwidth())}
    times = interleaved({**steps, **least}, request["seconds"], request["rounds"])
    times = {name: [seconds / case.calls for seconds in times[name]] for name in steps}
    # the upper quartile: a limit is what can be reached, though not in every phase of a shared machine
    limits = {name: statistics.quantiles(found, n=4, method="inclusive")[2] for name, found in limits.items()}
    return {**results, **times, "limits": limits}


def measure_memory(request: dict, direction: str, causal: bool) -> dict:
    """MiB by which one step raises the peak of resident memory.

    A small step goes first, so that libraries and thread pools are not counted.
    """
    from .peers import IMPLEMENTATIONS

    (name,) = request["implementations"]
    case = dataclasses.replace(Case(**request["case"]), calls=1)
    small = dataclasses.replace(case, batch=1, q_len=16, kv_len=16, lengths=(7, 9) if case.lengths else ())
    try:
        IMPLEMENTATIONS[name](small, request["dtype"], direction, causal)()
        return {name: peak_growth(IMPLEMENTATIONS[name](case, request["dtype"], direction, causal))}
    except Exception as error:
        return {name: _short(error)}


def peak_growth(step) -> float:
    """MiB by which `step` raises the peak of resident memory.

    It runs twice: its compiler has given its own memory back by the second time, while what MindSpore's pool keeps
    still counts.
    """
    before = _settle()
    step()
    _settle()
    step()
    return max(_status_mib("VmHWM") - before, 0.0)


def _short(error):
    return " ".join(str(error).split())[:120] or type(error).__name__


def _status_mib(field):
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def _settle():
    """Resident MiB once the allocator has given back what it can; the high-water mark starts anew from there."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_mib("VmRSS")


if __name__ == "__main__":
    _request = json.loads(sys.argv[1])
    limit_threads(_request["threads"])
    _measure = {"time": measure_time, "memory": measure_memory}[_request["what"]]
    for _variant in _request["variants"]:
        print("RESULT", json.dumps(_measure(_request, *_variant)), flush=True)
