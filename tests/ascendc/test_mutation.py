"""The rewriting that makes mutants of the kernels. The score is `make mutate`, which `make test-all` runs too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mutate
import mutation
import pytest

SOURCE = """// SetFlag<HardEvent::V_S>(0); in a comment is none
struct Ring {
  __aicore__ inline void SignalFull() {
    SetFlag<HardEvent::MTE2_V>(event_ + turn_);
    WaitFlag<HardEvent::MTE2_V>(event_ + turn_);
  }
  __aicore__ inline void All() {
    for (int i = 0; i < 2; ++i) WaitFlag<HardEvent::V_MTE2>(i);
    if (last) AscendC::PipeBarrier<PIPE_V>();
    else
      AscendC::SyncAll<true>();
    const auto x = ring_.WaitEmpty<float>(n);
    Add(x, y, BinaryRepeatParams(1, 1, 0, pitch, pitch, 1));
  }
};
"""


@pytest.fixture
def mutants(tmp_path):
    source = tmp_path / "kernels"
    source.mkdir()
    (source / "ring.h").write_text(SOURCE)
    sync, further = mutation.rewrite(source, tmp_path / "mutants")
    return sync, further, (tmp_path / "mutants" / "ring.h").read_text()


def test_statements_are_found(mutants):
    sync, further, _ = mutants
    assert [(m.function, m.text) for m in sync] == [
        ("SignalFull", "SetFlag<HardEvent::MTE2_V>(event_ + turn_);"),
        ("SignalFull", "WaitFlag<HardEvent::MTE2_V>(event_ + turn_);"),
        ("All", "WaitFlag<HardEvent::V_MTE2>(i);"),
        ("All", "AscendC::PipeBarrier<PIPE_V>();"),
        ("All", "AscendC::SyncAll<true>();"),
        ("All", "ring_.WaitEmpty<float>(n)"),
    ]
    assert [m.number for m in sync + further] == list(range(len(sync) + len(further)))
    assert sum("BinaryRepeatParams" in m.kind for m in further) == 3
    assert sum(m.kind == "event id + 1" for m in further) == 3
    assert sum(m.kind == "pair MTE2_MTE3" for m in further) == 1


def test_lines_stay_where_they_are(mutants):
    _, _, text = mutants
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("#line 1 "))
    assert len(lines) - start - 1 == len(SOURCE.splitlines())
    for old, new in zip(SOURCE.splitlines(), lines[start + 1 :]):
        assert old.strip().split("(")[0][-8:] in new


def test_a_kernel_without_edits_is_unchanged(tmp_path):
    (tmp_path / "plain.h").write_text("inline int twice(int x) { return 2 * x; }\n")
    sync, further = mutation.rewrite(tmp_path, tmp_path / "out")
    assert not sync and not further
    assert (tmp_path / "out" / "plain.h").read_text().endswith("inline int twice(int x) { return 2 * x; }\n")


def test_every_reason_is_for_a_place_that_is_there(tmp_path):
    sync, further = mutation.rewrite(mutate.ascend.KERNELS, tmp_path)
    given = {reason for reason in map(mutate.reason_for, sync + further) if reason}
    assert given == {*mutate.REASONS.values(), *mutate.LONG.values()}
    places = {f"{m.file}: {m.function}: {m.text}" for m in sync + further}
    assert set(mutate.REASONS) <= places


@pytest.mark.slow
def test_score():
    """Every synchronisation statement of every product kernel."""
    tool = Path(__file__).with_name("mutate.py")
    done = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
