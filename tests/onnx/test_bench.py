"""``python -m ms_flash bench --suite onnx``"""

from __future__ import annotations

import csv
import io
import subprocess
import sys


def bench(*arguments):
    return subprocess.run([sys.executable, "-m", "ms_flash", "bench", "--suite", "onnx", *arguments],
                          capture_output=True, text=True)


def test_rows(tmp_path):
    done = bench("--quick", "--shapes", "bert,decode-gqa", "--threads", "1", "--seconds", "0.01", "--out",
                 str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "onnx.csv").read_text() == done.stdout
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [(row["shape"], row["causal"], row["peer"]) for row in rows] == [
        (shape, causal, peer) for shape, masks in (("bert", "01"), ("decode-gqa", "0")) for causal in masks
        for peer in ("function", "attention")]
    for row in rows:
        assert row["note"] == "" and float(row["ours_ms"]) > 0 and float(row["peer_ms"]) > 0
        assert float(row["ratio_low"]) <= float(row["ratio"]) <= float(row["ratio_high"])


def test_a_library_that_does_not_load_fails_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_FLASH_ORT_LIB", str(tmp_path / "none.so"))
    done = bench("--quick", "--shapes", "bert", "--threads", "1", "--seconds", "0.01", "--out", str(tmp_path))
    assert done.returncode == 1
    for row in csv.DictReader(io.StringIO(done.stdout)):
        assert row["ours_ms"] == row["ratio"] == "" and "is missing" in row["note"]


def test_wrong_arguments():
    assert "'bfloat16'" in bench("--dtypes", "bfloat16").stderr
    assert "'varlen'" in bench("--shapes", "varlen").stderr
