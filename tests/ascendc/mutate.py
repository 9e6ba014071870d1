"""`make mutate`: does the host twin notice when the Ascend C kernels are wrong?

Takes away each statement of the kernels that orders something, one after the other, runs small problems through what is
left, and asks whether the twin reported it; then alters strides, event ids, pairs of pipes, buffers and copies. Prints
every survivor, and a summary line. A survivor needs a reason in `REASONS`; 98 % of the statements have to be caught,
and all of the further mutants.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import re
import select
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import ascend  # noqa: E402
import kvcases  # noqa: E402
import mutation  # noqa: E402
import native  # noqa: E402
import numpy as np  # noqa: E402
import test_block  # noqa: E402
import test_decode  # noqa: E402
import test_kernels  # noqa: E402
from tqdm import tqdm  # noqa: E402

FOLDER = ascend.ROOT / "build" / "ascendc" / "mutants"
SECONDS = 300  # for one mutant
ENOUGH = 0.98

# "file: function: text" of places that may be altered without harm -> why.
REASONS = {
    "backward.h: Prepare: grad_.SignalFull()": "the flag of the statistics, behind it on its pipe, covers it",
    "forward.h: LoadQueries: queries_.SignalFull()": "the flag of the first keys, behind it on its pipe, covers it",
    "forward.h: Finish: stats_out_.SignalFull()": "the flag of the output rows, behind it on its pipe, covers it",
    "bias_grad.h: Add: AscendC::PipeBarrier<PIPE_MTE3>();": "keeps the order of a sum, which the twin keeps anyway",
    "guard.h: Choose: AscendC::PipeBarrier<PIPE_ALL>();": "the flags of the rings cover it for the layouts of today",
    "score.h: DrawKept: planes_.SignalFull()": "MTE2 fills nothing here: the buffer is scratch of the vector pipe",
    "backward.h: GradientTile: FillColumns(g, n, width, tile.keys, width, 0);": "old numbers, times a probability of 0",
    "backward.h: Clear: AscendC::Duplicate(zeros, 0.0f, most);": "SetUp has filled UB with zeros",
    "forward.h: LoadQueries: ClearTail(query_, rows.count, t_.a.d);": "makes rows of S that nobody reads",
    "forward.h: Values: ClearTail(probs, rows.count, n16);": "makes rows of O that nobody reads",
    "forward.h: AddSinks: AscendC::Duplicate(sink, kLowest, kLanes);": "lanes of rows that are not there",
    "guard.h: Agree: AscendC::Duplicate(mine, 0.0f, 8);": "SetUp has filled it with zeros",
    "guard.h: Agree: AscendC::Duplicate(found, 0.0f, 1024);": "what it held are own findings, which count anyway",
    "guard.h: Agree: SetFlag<HardEvent::S_V>(0); WaitFlag<HardEvent::S_V>(0);": "a scalar read is complete anyway",
}
# The same by the start of the text.
LONG = {
    ("forward.h", "SetUp", "AscendC::Duplicate(Local<float>"): "padding only has to be numbers, and is never stored",
    ("ms_flash_merge.cpp", "Run", "AscendC::Duplicate(Local<float>"): "padding only has to be numbers",
    ("vector.h", "CopyOut", "AscendC::DataCopyPad(dst[r * pitch]"): "for rows more than 4 GiB apart",
    ("vector.h", "CopyOut", "bytes"): "for rows more than 4 GiB apart",
}


class Problem:
    """A small call of one kernel, with the results and places of the unaltered one."""

    def __init__(self, name, call, settings=None):
        self.name, self._call, self._settings = name, call, {"cores": 2, **(settings or {})}

    def prepare(self, hits):
        """Runs the unaltered kernel: results, time, and which places it passes."""
        hits[:] = 0
        start = time.monotonic()
        self.results = self.run()
        self.seconds = time.monotonic() - start
        self.passed = hits > 0

    def run(self):
        with ascend.Settings(**self._settings):
            return self._call()

    def same(self, results):
        """As good as the unaltered results: atomic sums may differ in the last places."""
        for name, want in self.results.items():
            want, got = np.asarray(want, np.float32), np.asarray(results[name], np.float32)
            largest = np.abs(want[np.isfinite(want)]).max(initial=1.0)
            if not np.allclose(got, want, rtol=0, atol=2e-3 * largest, equal_nan=True):
                return False
        return True


class Backward:
    """The gradients alone; what they need of the forward comes from the unaltered kernel."""

    def __init__(self, case):
        self._case, self._saved = case, None

    def __call__(self):
        case = self._case
        if self._saved is None:
            self._saved = ascend.forward(case.inputs(), **case.spec())
        dout = case.dout if case.layout == "TND" else native.to_layout(case.dout, case.layout)
        return ascend.backward(case.inputs(), self._saved, dout, case.dlse, **case.spec())


# Problems that fill whole blocks, whose rows lie too far apart for one copy, or that pass places which no test of the
# kernels passes.
MORE = {
    "whole blocks": {"sq": 130, "sk": 1100, "d": 128, "heads": 1},
    "whole blocks, bias and mask": {"sq": 130, "sk": 600, "d": 64, "heads": 1, "bias": "qk", "mask": "qk"},
    "whole blocks, d 256": {"sq": 130, "sk": 300, "d": 256, "heads": 1},
    "whole blocks, dropout": {"sq": 128, "sk": 520, "d": 64, "heads": 1, "dropout": 0.2},
    "sinks nobody asks for": {"lengths": [(0, 3), (0, 2)], "sinks": "float32"},
    "sinks of many rows": {"sq": 300, "sk": 40, "heads": 1, "sinks": "float32"},
    "drop mask of queries": {"drop_mask": "hq", "dropout": 0.4},
    "mask of queries, fill, softcap": {"mask": "hq", "fill": -1.5, "softcap": 4.0},
    "rows far apart": {"sq": 2, "sk": 3, "d": 64, "heads": 1024, "layout": "BSND"},
}


def problems():
    cases = [(name, options, {}) for name, options in {**test_kernels.FEATURES, **MORE}.items()]
    cases += [(f"decoding: {name}", options, {}) for name, options in test_kernels.DECODING.items()]
    cases += [(f"split {i}", options, {"cores": 3}) for i, options in enumerate(test_kernels.SPLIT)]
    cases += [(f"atomic {i}", options, {"cores": 3, "atomic": 1}) for i, options in enumerate(test_kernels.SPLIT[:2])]
    for name, options in test_kernels.NANS.items():
        cases += [(f"nan {nan}: {name}", {**options, "nan": nan}, {}) for nan in ("unseen", "seen by some")]
    for index, (name, options, settings) in enumerate(cases):
        case = test_kernels.Case(len(name), dtype=("float16", "bfloat16")[index % 2], **options)
        forward = lambda case=case: ascend.forward(case.inputs(), **case.spec())
        yield Problem(f"fwd {name}", forward, settings)
        yield Problem(f"bwd {name}", Backward(case), settings)
    for index, (name, options) in enumerate(test_block.CASES.items()):
        options = dict(options)
        spec = options.pop("options", {})
        inputs = test_block.make(len(name), dtype=("float16", "bfloat16")[index % 2], **options)
        heads, kv_heads = options.get("heads", 4), options.get("kv_heads", 2)
        block = lambda inputs=inputs, heads=heads, kv=kv_heads, spec=spec: ascend.block(inputs, heads, kv, **spec)
        yield Problem(f"block {name}", block)
    for index, (name, options) in enumerate(test_kernels.UNSEEING.items()):
        case = test_kernels.Case(len(name), dtype=("float16", "bfloat16")[index % 2], **options)
        empty = np.isneginf(test_kernels.flash_rule.evaluate({**case.call, "sinks": None}, None)["lse"])
        case.dout[empty if case.dout.ndim == 4 else empty.T] = np.nan
        yield Problem(f"bwd nan in dout: {name}", Backward(case))
    yield from cache_problems()


# Caches: rows that fill several tiles of the append, parts that are merged, pages, NaN that some queries see.
CACHES = {
    "one token, pages": {"block_size": 16, "sq": 1, "new_len": 1, "length": [300, 17, 40]},
    "one token, rows of its own": {"block_size": 0, "sq": 1, "new_len": 1, "length": [300, 0, 40]},
    "many new tokens": {"block_size": 64, "sq": 3, "new_len": 200, "length": [0, 70, 40], "d": 256, "dv": 256},
    "parts without keys": {"block_size": 64, "sq": 1, "new_len": 0, "length": [1500, 3, 0], "num_splits": 5},
    "parts": {"block_size": 128, "sq": 1, "new_len": 2, "length": [1500, 3, 777]},
    "several queries": {"block_size": 32, "sq": 9, "new_len": 0, "length": [100, 9, 40], "window": (20, 0)},
    "wide parts, rows of a block": {"block_size": 256, "sq": 16, "new_len": 16, "length": [900, 0, 40], "dv": 128},
}


def cache_problems():
    for index, (name, options) in enumerate(CACHES.items()):
        fixed = {"batch": 3, "kv_heads": 2, "group": 4, "d": 64, "dv": 64, "rotary": None, "precision": "default"}
        case = kvcases.draw(np.random.default_rng(index), ("float16", "bfloat16")[index % 2], **{**fixed, **options})

        def call(case=case):
            results, caches = kvcases.native_call(case, "BSND", ascend.raw_call)
            return {**results, "k_cache": caches[0], "v_cache": caches[1]}

        yield Problem(f"decode {name}", call)
        if name == "several queries":
            case = copy.deepcopy(case)
            case.inputs["v_cache"][case.inputs["block_table"][0, 90 // 32], :, 90 % 32] = np.nan
            yield Problem("decode nan", lambda case=case, call=call: call(case))
        if name == "parts":
            for slot, at, value in (("cache_seqlens", 0, 1 << 20), ("block_table", (0, 1), -1),
                                    ("block_table", (0, 10), -1)):
                wrong = copy.deepcopy(case)
                wrong.options.update(num_splits=1, window_size=(-1, -1))     # the later block is in a later stack
                wrong.inputs[slot][at] = value
                wrong.inputs["k_cache"][0] = wrong.inputs["v_cache"][0] = 0     # read in its place
                yield Problem(f"decode wrong {slot} {at}", lambda case=wrong, call=call: call(case), {"on_device": 1})
    rng = np.random.default_rng(0)
    for index, shape in enumerate([(3, 2, 2, 150, 64), (2, 1, 3, 70, 33), (2, 1, 2, 40, 256), (5, 1, 9, 1, 16)]):
        outs = rng.standard_normal(shape).astype(native.DTYPES[("float16", "bfloat16")[index % 2]])
        lses = rng.standard_normal(shape[:-1]).astype(np.float32) - 200 * (index == 0)    # exp of it is 0
        gone = rng.random(lses.shape) < 0.3
        lses[gone], outs[gone] = -np.inf, np.nan
        layout = ("BNSD", "BSND")[index % 2]
        merge = lambda outs=outs, lses=lses, layout=layout: test_decode.merge(outs, lses, layout)
        yield Problem(f"merge {index}", merge)


def reason_for(mutant):
    """Why it may survive, or None."""
    found = REASONS.get(f"{mutant.file}: {mutant.function}: {mutant.text}")
    return found or next((why for (file, function, text), why in LONG.items() if (file, function) == (
        mutant.file, mutant.function) and mutant.text.startswith(text)), None)


def load(kernels):
    """Builds the mutants: (library, hits, [mutants of statements], [further mutants])."""
    sync, further = mutation.rewrite(kernels, FOLDER)
    lib = ascend.load(ascend.build(FOLDER, flags=("-O1", "-w")))
    lib.ms_mutation_hits.restype = ctypes.POINTER(ctypes.c_long)
    hits = np.ctypeslib.as_array(lib.ms_mutation_hits(), shape=(len(sync) + len(further),))
    ascend._library = lib  # every call of this process goes to the mutants
    return lib, hits, sync, further


def judge(lib, mutant, chosen, by_result):
    """How the mutant was caught: a line of the twin's report or "wrong result"; None if it survived."""
    lib.ms_mutation_set(mutant.number)
    for problem in chosen:
        try:
            results = problem.run()
        except RuntimeError as error:
            text = str(error)
            if "the twin reports" not in text:
                return f"refused: {text.splitlines()[0]}"
            return text.splitlines()[1][:300]
        except AssertionError as error:
            return f"{error}"
        if by_result and not problem.same(results):
            return f"wrong result of {problem.name}"
    return None


class Pool:
    """Each mutant in a process of its own: a kernel gone wrong can do as it likes there."""

    def __init__(self, size):
        self._size, self._running = size, {}

    def start(self, mutant, work):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                answer = work()
            except BaseException as error:
                answer = f"!{type(error).__name__}: {error}"
            os.write(write, json.dumps(answer).encode())
            os._exit(0)
        os.close(write)
        self._running[read] = (mutant, pid, time.monotonic())

    def full(self):
        return len(self._running) >= self._size

    def finished(self):
        """(mutant, answer) of those that ended or ran out of time."""
        ready = select.select(list(self._running), [], [], 0.05)[0] if self._running else []
        for read, (mutant, pid, since) in list(self._running.items()):
            late = time.monotonic() - since > SECONDS
            if read not in ready and not late:
                continue
            if late:
                os.kill(pid, signal.SIGKILL)
            data = b"" if late else os.read(read, 1 << 16)
            os.waitpid(pid, 0)
            os.close(read)
            del self._running[read]
            yield mutant, json.loads(data) if data else ("!ran out of time" if late else "!crashed")

    def __len__(self):
        return len(self._running)


def run(lib, mutants, prepared, by_result, title):
    """number of the mutant -> answer of `judge`; "" where no problem passes the place."""
    answers = {}
    pool = Pool(max(1, len(os.sched_getaffinity(0))))
    with tqdm(total=len(mutants), desc=title, unit="mutant") as bar:
        waiting = list(mutants)
        while waiting or len(pool):
            while waiting and not pool.full():
                mutant = waiting.pop(0)
                chosen = [p for p in prepared if p.passed[mutant.number]]
                if not chosen:
                    answers[mutant.number] = ""
                    bar.update()
                    continue
                pool.start(mutant, lambda m=mutant, c=chosen: judge(lib, m, c, by_result))
            for mutant, answer in pool.finished():
                answers[mutant.number] = answer
                bar.update()
    return answers


def summary(title, mutants, answers, verbose):
    """Prints the survivors. Returns (caught, survivors without a reason)."""
    caught, unexplained, excused = 0, 0, 0
    for mutant in mutants:
        answer = answers[mutant.number]
        if answer and not answer.startswith("!"):
            caught += 1
            if verbose:
                print(f"caught    {mutant}\n          {answer}")
            continue
        why = "no problem gets there" if answer == "" else answer or "no report"
        reason = reason_for(mutant)
        unexplained += reason is None
        excused += reason is not None
        print(f"survived  {mutant}\n          {why}; {'reason: ' + reason if reason else 'NO REASON GIVEN'}")
    share = caught / max(1, len(mutants))
    left = len(mutants) - caught
    print(f"{title}: {len(mutants)} mutants, {caught} caught ({share:.1%}), {left} survivors, {excused} with a reason")
    return share, unexplained


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", default=ascend.KERNELS, type=Path, help="folder of the sources")
    parser.add_argument("--only", default="", help="regular expression for 'file:line: function: kind: text'")
    parser.add_argument("--cases", default="", help="regular expression for the names of the problems")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--verbose", action="store_true", help="print how each mutant was caught")
    args = parser.parse_args()
    lib, hits, sync, further = load(args.kernels)
    chosen = [[m for m in group if re.search(args.only, str(m))] for group in (sync, further)]
    if args.list:
        print("\n".join(map(str, chosen[0] + chosen[1])))
        return 0
    lib.ms_mutation_set(-1)
    prepared = []
    for problem in tqdm([p for p in problems() if re.search(args.cases, p.name)], desc="unaltered", unit="case"):
        try:
            problem.prepare(hits)
        except RuntimeError as error:
            print(f"left out: {problem.name}: {str(error).splitlines()[-1][:200]}")
            continue
        prepared.append(problem)
    prepared.sort(key=lambda p: p.seconds)
    shares = []
    for title, mutants, by_result in (("synchronisation", chosen[0], False), ("further", chosen[1], True)):
        answers = run(lib, mutants, prepared, by_result, title)
        shares.append(summary(title, mutants, answers, args.verbose))
    (share, unexplained), (_, missed) = shares
    return int(share < ENOUGH or unexplained > 0 or missed > 0)


if __name__ == "__main__":
    sys.exit(main())
