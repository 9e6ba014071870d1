"""The command line: doctor, bench and docs as users call them, healthy and broken installations."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import io
import itertools
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from ms_flash import op_table
from ms_flash.bench import COLUMNS, Plan, cases, claims, judge, peers, worker
from ms_flash.bench.worker import interleaved
from ms_flash.version import __version__

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(*arguments, **environment):
    """The finished process of ``python -m ms_flash ...``."""
    path = os.pathsep.join([*environment.pop("path", ()), PACKAGE_PARENT])
    return subprocess.run([sys.executable, "-m", "ms_flash", *arguments], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path, **environment})


# ---- doctor --------------------------------------------------------------------------------------------------------
def test_doctor_of_a_healthy_installation():
    done = run("doctor", "--json", MS_FLASH_NUM_THREADS="1")
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert report["problems"] == []
    assert report["ms_flash"] == __version__
    assert report["settings"] == {"MS_FLASH_NUM_THREADS": "1"}
    assert report["library"]["simd"] in report["library"]["simd_usable"]
    assert report["library"]["threads"] == 1
    present = [name for name, reason in report["backends"].items() if not reason]
    assert {"cpu", "reference"} <= set(present) == set(report["self_test"])
    for name, test in report["self_test"].items():
        assert list(test["errors"]) == op_table.table()["backends"][name]["dtypes"]
    assert report["backends"]["ascend"]


def test_doctor_prints_for_people():
    done = run("doctor")
    assert done.returncode == 0
    assert "self-test cpu" in done.stdout and done.stdout.rstrip().endswith("All well.")


def test_doctor_obeys_the_choice_of_instruction_set():
    assert json.loads(run("doctor", "--json", MS_FLASH_ISA="portable").stdout)["library"]["simd"] == "portable"


@pytest.mark.parametrize("content", [None, "not a library"])
def test_doctor_without_native_library(tmp_path, content):
    library = tmp_path / "lib.so"
    if content is not None:
        library.write_text(content)
    done = run("doctor", MS_FLASH_CPU_LIB=str(library))
    assert done.returncode == 1
    assert f"BROKEN: The native library {library} " in done.stdout
    assert "self-test reference" in done.stdout      # what is whole is still tested


def test_doctor_without_mindspore(tmp_path):
    (tmp_path / "mindspore.py").write_text("raise ImportError('libfoo.so.1: cannot open shared object file')\n")
    done = run("doctor", path=[str(tmp_path)])
    assert done.returncode == 1, done.stderr
    assert "BROKEN: MindSpore cannot be imported: ImportError: libfoo.so.1" in done.stdout
    assert "simd" in done.stdout


def test_doctor_with_a_numpy_that_mindspore_cannot_use(tmp_path):
    metadata = tmp_path / "numpy-2.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.1.0\n")
    done = run("doctor", path=[str(tmp_path)])
    assert done.returncode == 1
    assert "BROKEN: MindSpore 2.10 is built against NumPy 1, with NumPy 2.1.0" in done.stdout


def test_doctor_finds_wrong_results(tmp_path):
    """A reference that is off by a little is as good as a kernel that is."""
    (tmp_path / "sitecustomize.py").write_text(
        "import ms_flash.reference as r\n"
        "right = r.backward\n"
        "r.backward = lambda dout, dlse, saved: {**(g := right(dout, dlse, saved)), 'dk': g['dk'] * 1.1}\n")
    done = run("doctor", path=[str(tmp_path)])
    assert done.returncode == 1
    assert "BROKEN: The backend 'cpu' computes wrong results in float32" in done.stdout


# ---- bench ---------------------------------------------------------------------------------------------------------
def test_bench_prints_and_writes_the_same_csv(tmp_path):
    done = run("bench", "--shapes", "bert", "--dtypes", "float32", "--quick", "--seconds", "0.01", "--out",
               str(tmp_path))
    assert done.returncode == 0, done.stderr
    cores = len(os.sched_getaffinity(0))
    table, last = done.stdout.rsplit("targets met: ", 1)
    table = "".join(line for line in table.splitlines(keepends=True) if not line.startswith("missed: "))
    assert (tmp_path / "cpu.csv").read_text() == table
    assert re.fullmatch(rf"\d+ / {4 if cores > 1 else 0}\n", last)    # bert against the compiled graph
    assert json.loads((tmp_path / "cpu.json").read_text())["ms_flash"] == __version__
    rows = list(csv.DictReader(io.StringIO(table)))
    assert [(r["direction"], r["causal"], r["peer"]) for r in rows] == [
        (direction, causal, peer) for causal in "01" for direction in ("fwd", "fwd+bwd")
        for peer in ("mindspore-jit", "mindspore-pynative")]
    for row in rows:
        assert row["note"] == "" and row["threads"] == str(cores)
        assert float(row["ours_ms"]) > 0 and float(row["peer_ms"]) > 0 and 0 < float(row["of_limit"]) < 150
        assert float(row["ratio_low"]) <= float(row["ratio"]) <= float(row["ratio_high"])
        measured = row["direction"] == "fwd+bwd" and row["causal"] == "0"
        assert bool(row["ours_mib"] and row["peer_mib"]) == measured
    assert "8/8" not in done.stderr.splitlines()[0] and "8/8" in done.stderr and "s  done" in done.stderr


def test_bench_says_why_a_cell_is_empty(tmp_path):
    """MindSpore has no bfloat16 softmax on the CPU."""
    done = run("bench", "--shapes", "bert", "--dtypes", "bfloat16", "--threads", "1", "--quick", "--seconds", "0.01",
               "--no-memory", "--out", str(tmp_path))
    assert done.returncode == 0
    for row in csv.DictReader((tmp_path / "cpu.csv").read_text().splitlines()):
        assert float(row["ours_ms"]) > 0 and row["peer_ms"] == row["ratio"] == ""
        assert row["note"].startswith(row["peer"] + ": ")


@pytest.mark.parametrize("arguments, text", [
    (["--shapes", "s512,s513"], "but got 's513'"), (["--threads", "0"], "must be from 1 to"),
    (["--dtypes", "float64"], "but got 'float64'")])
def test_bench_refuses_what_it_does_not_know(arguments, text):
    done = run("bench", *arguments)
    assert done.returncode == 2 and text in done.stderr


SMALL = {
    "plain": cases.Case("plain", 2, 4, 4, 33, 33, 16),
    "gqa": cases.Case("gqa", 1, 6, 2, 33, 33, 16),
    "varlen": cases.Case("varlen", 1, 2, 2, 50, 50, 16, lengths=(7, 43)),
    "decode": cases.Case("decode", 1, 4, 2, 1, 65, 16, directions=("fwd",), causal=(False,)),
    "window": cases.Case("window", 1, 2, 2, 40, 40, 16, causal=(False,), window=5),
    "layers": cases.Case("layers", 1, 4, 2, 33, 33, 16, calls=3),
}


@pytest.mark.parametrize("case, direction, causal", [
    (name, *variant) for name, case in SMALL.items() for variant in Plan.variants(case)])
def test_all_that_is_compared_computes_the_same(case, direction, causal):
    results = {}
    for name, make in peers.IMPLEMENTATIONS.items():
        if name == "torch" and importlib.util.find_spec("torch") is None:
            continue    # an optional extra
        try:
            results[name] = make(SMALL[case], "float32", direction, causal)()
        except peers.NotOffered:
            assert name.startswith("ort-") or (name == "torch" and SMALL[case].window >= 0) or (
                name == "ms_flash-kernel" and SMALL[case].lengths)
    results.pop("mindspore-op", None)   # a call and nothing more
    if SMALL[case].window >= 0:
        more, less = results.pop("ms_flash-full"), results["ms_flash-jit"]
        assert np.abs(np.subtract(more, less)).max() > 1e-2     # sees more keys
    expected = results.pop("mindspore-pynative")
    for name, got in results.items():
        if name == "ort-mha":   # (B, S, N * D)
            got = got.reshape(*got.shape[:2], SMALL[case].heads, -1).swapaxes(1, 2)
        for x, y in zip(*(([r] if direction == "fwd" else r) for r in (got, expected))):
            np.testing.assert_allclose(x, y, atol=2e-5, err_msg=name)


def test_the_cost_of_a_call_is_judged():
    row = dict.fromkeys(COLUMNS) | {"shape": "call", "dtype": "float32", "direction": "fwd", "causal": 0, "threads": 1,
                                    "peer": "mindspore-op"}
    assert list(judge([row | {"ratio": 0.67}])) == ["targets met: 1 / 1"]
    missed, last = judge([row | {"ratio": 0.66}])
    assert missed.startswith("missed: a call takes") and last == "targets met: 0 / 1"


def test_memory_growth_is_judged_at_every_length():
    assert claims.LENGTHS[-1] == 32768
    case = cases.Case("growth", 1, 8, 8, 1024, 1024, 64)    # 8 tensors of 2 MiB
    for ours, verdict in ((19.2, "holds"), (19.3, "does not hold"), ("out of memory", "does not hold")):
        row = claims.growth_row(case, ours)
        assert row["verdict"] == verdict and row["said"] == 1.2
        assert row["note"] == ours or row["measured"] == round(ours / 16, 2)


@pytest.mark.slow
def test_the_memory_of_a_forward_holds_its_output():
    """In memory that was resident before, an output of 20 MiB would be seen as growth of 2."""
    case = cases.Case("output", 1, 40, 40, 1024, 1024, 128)
    request = {"what": "memory", "case": dataclasses.asdict(case), "dtype": "float32", "variants": [["fwd", False]],
               "threads": 1, "implementations": ["ms_flash-jit"]}
    done = subprocess.run([sys.executable, "-m", "ms_flash.bench.worker", json.dumps(request)], capture_output=True,
                          text=True)
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    assert 20 <= json.loads(line[len("RESULT "):])["ms_flash-jit"] < 40, done.stderr


def test_rounds_are_interleaved():
    log = []
    times = interleaved({"a": lambda: log.append("a"), "b": lambda: log.append("b")}, seconds=0.0, rounds=3)
    assert {name: len(t) for name, t in times.items()} == {"a": 3, "b": 3}
    assert [name for name, _ in itertools.groupby(log)] == ["b", "a", "b", "a"]
    assert min(log.count("a"), log.count("b")) > 100    # bursts of what takes no time


def test_a_slow_step_drops_out(monkeypatch):
    monkeypatch.setattr(worker, "SLOW", 0.02)
    times = interleaved({"fast": lambda: None, "slow": lambda: time.sleep(0.03)}, seconds=0.0, rounds=5)
    assert {name: len(t) for name, t in times.items()} == {"fast": 5, "slow": 2}


# ---- docs ----------------------------------------------------------------------------------------------------------
def test_generated_docs_are_current():
    done = run("docs", "--check")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("readme", ["README.md", "README_CN.md"])
def test_example_of_the_readme_runs(readme, tmp_path):
    with open(os.path.join(PACKAGE_PARENT, readme), encoding="utf-8") as file:
        example = file.read().split("```python\n")[1].split("```")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 10
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": PACKAGE_PARENT})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str([(1, 8, 1024, 64)] * 3)


def test_help_and_version():
    assert run("--version").stdout.strip() == f"ms_flash {__version__}"
    for command in ("doctor", "bench", "docs"):
        assert command in run("--help").stdout
    assert run("no-such-command").returncode == 2
