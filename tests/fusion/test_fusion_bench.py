"""`bench --suite fusion`: its models are fused at every level, and its rows say what was measured."""
from __future__ import annotations

import argparse
import json

import mindspore as ms
import pytest

import ms_flash.bench as bench
from ms_flash.bench import cases, fusion, worker

TINY = cases.Net("tiny", 2, 24, 32, 2, packed=True, mask="causal", layers=1)
TINY_PADDED = cases.Net("tiny-padded", 2, 24, 32, 2, packed=False, mask="padding", layers=1)


@pytest.mark.parametrize("net", [TINY, TINY_PADDED], ids=lambda net: net.name)
def test_every_level_is_measured_in_one_process(net):
    variants = ["unfused", "core", "layout", fusion.WITHOUT]
    results = fusion.measure_time(net, {"variants": variants, "seconds": 0.0, "rounds": 2})
    assert {name: (result["fused"], len(result["times"])) for name, result in results.items()} == {
        "unfused": ("", 2), "core": ("1 core", 2), "layout": ("1 layout", 2), fusion.WITHOUT: ("", 2)}
    losses = [result["loss"] for name, result in results.items() if name != fusion.WITHOUT]
    assert max(losses) - min(losses) <= 1e-5 * min(losses)


def test_rows():
    times = {"unfused": {"times": [3.0, 4.0, 5.0], "loss": 2.0, "fused": ""},
             "core": {"times": [1.0, 2.0, 2.0], "loss": 2.5, "fused": "1 core"},
             fusion.WITHOUT: {"times": [0.75, 1.0, 1.0], "loss": 9.0, "fused": ""},
             "block": {"note": "died"}}
    row = fusion.compare(times, {"unfused": {"mib": 30.0}, "core": {"mib": 10.0}, "block": {"mib": 5.0}}, "core")
    assert row == {"fused": "1 core", "ms": 2000.0, "unfused_ms": 4000.0, "ratio": 2.5, "ratio_low": 2.25,
                   "ratio_high": 2.75, "attention": 50.0, "unfused_attention": 75.0, "mib": 10.0, "unfused_mib": 30.0,
                   "memory_ratio": 3.0, "loss_difference": "5.0e-01", "note": ""}
    assert not fusion.FusionPlan.failed(row)
    row = fusion.compare(times, {}, "block")
    assert row["note"] == "time of block: died" and fusion.FusionPlan.failed(row)


def test_what_is_promised_and_missed_is_said():
    row = dict.fromkeys(fusion.COLUMNS)
    row.update(net="tiny", threads=2)
    rows = [{**row, "level": "layout", "ratio": 1.5, "memory_ratio": 2.0, "mib": 20.0},
            {**row, "level": "block-recompute", "ratio": 0.9, "memory_ratio": 2.5, "mib": 20.5},
            {**row, "level": "block", "note": "died"}]
    assert list(fusion.judge(rows)) == [
        "missed: tiny, 2 threads, level block-recompute: ratio 0.9, more than 1",
        "missed: tiny, level block with recomputation: 20.5 MiB, less than 20.0 at level layout",
        "promises kept: 3 / 5"]


def test_progress_counts_every_process(monkeypatch):
    shown = []

    class Progress:
        def __init__(self, total):
            self.total, self.done = total, 0

        def show(self, text):
            shown.append(text)

        def step(self):
            self.done += 1

    class Done:
        returncode, stderr = 0, ""
        stdout = "RESULT " + json.dumps({name: {"times": [1.0, 1.0], "loss": 1.0, "fused": "2 core", "mib": 1.0}
                                         for name in (*fusion.VARIANTS, fusion.WITHOUT)})

    monkeypatch.setattr(fusion.subprocess, "run", lambda *_, **__: Done)
    args = argparse.Namespace(shapes=["vit-s"], seconds=None, quick=True, no_memory=False)
    plan = fusion.FusionPlan(args, [1, 2], Progress)
    rows = list(plan.rows())
    assert [(row["threads"], row["level"]) for row in rows] == [
        (threads, level) for threads in (1, 2) for level in fusion.VARIANTS if level != "unfused"]
    assert all(set(row) == set(fusion.COLUMNS) for row in rows)
    assert plan.progress.done == plan.progress.total == len(shown) == len(fusion.VARIANTS) + 2


@pytest.mark.parametrize("peaks, expected", [((3.0, 9.0, 4.0), {"mib": 4.0}), ((3.0, None, 4.0), {"note": "died"})])
def test_peak_is_the_median_of_three_processes(peaks, expected, monkeypatch):
    given = iter({"note": "died"} if mib is None else {"mib": mib} for mib in peaks)
    monkeypatch.setattr(fusion.FusionPlan, "measure", lambda *_: {"layout": next(given)})
    args = argparse.Namespace(shapes=["vit-s"], seconds=None, quick=False, no_memory=False)
    plan = fusion.FusionPlan(args, [2], lambda total: None)
    assert plan.peak(plan.nets[0], "layout") == expected
    assert not list(given)


@pytest.mark.parametrize("given, text", [
    ({"shapes": ["s512"]}, "'shapes' of the suite fusion must be of gpt2-small, bert-base, vit-s, but got 's512'"),
    ({"shapes": ["vit-s"], "suite": "cpu"}, "'shapes' of the suite cpu must be of s512"),
    ({"dtypes": ["float16"]}, "'dtypes' must not be given for the suite fusion")])
def test_what_does_not_go_together_is_refused(given, text, capsys):
    args = argparse.Namespace(**{"suite": "fusion", "shapes": None, "dtypes": None, **given})
    assert bench.run(args) == 2
    assert text in capsys.readouterr().err


def test_peak_growth_sees_what_a_step_holds():
    held = []
    grown = worker.peak_growth(lambda: held.append(bytearray(64 << 20)))
    assert 60 < grown < 200


@pytest.fixture(autouse=True)
def _pynative_again():
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)
