"""fuse, unfuse and fusion: what they switch, that they are undone, and what they say."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import mindspore as ms
import pytest
from mindspore import nn
from ms_flash.fusion_passes import plan
from small_net import Attention, Loss, batch, build, fresh

import ms_flash


@pytest.fixture
def rng(request):
    return fresh(request)


@pytest.fixture(autouse=True)
def _graph_mode_and_off_at_the_end():
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms_flash.unfuse()


class Plus(nn.Cell):
    def construct(self, x):
        return x + 1


class Weights(nn.Cell):
    """A softmax that no fusion can take."""

    def construct(self, x):
        return ms.ops.softmax(x, -1) * 2


def test_fuse_reaches_compiled_nets_and_unfuse_brings_them_back(rng):
    net, inputs = build(), batch(rng)
    before = net(*inputs).asnumpy()
    report = ms_flash.fuse()
    assert ms_flash.fuse() is report        # idempotent
    fused = net(*inputs).asnumpy()
    assert len(report.fused) == 1 and report.compiled == 1
    net(*inputs)
    assert report.compiled == 1
    ms_flash.unfuse()
    assert net(*inputs).asnumpy() == before
    assert report.compiled == 1
    assert fused == pytest.approx(before, rel=1e-6)


def test_other_options_compile_anew(rng):
    net, inputs = build(), batch(rng)
    ms_flash.fuse()
    net(*inputs)
    core = ms_flash.fuse("core")
    net(*inputs)
    assert [site["level"] for site in core.sites] == ["core"]


def test_nets_on_both_sides_of_a_block_are_compiled_once_each(rng):
    inside, outside, inputs = build(1), build(2), batch(rng)
    compiled = 0
    for _ in range(3):
        outside(*inputs)
        with warnings.catch_warnings(), ms_flash.fusion() as report:
            warnings.simplefilter("error")
            inside(*inputs)
        compiled += report.compiled
    assert compiled == 1
    with ms_flash.fusion() as report:
        outside(*inputs)
    assert report.compiled == 1


def test_24_layers_take_less_than_a_second_to_match(rng):
    layers = nn.SequentialCell([build(i).attention for i in range(24)])
    report = ms_flash.explain(Loss(layers), *batch(rng))
    assert len(report.fused) == 24
    assert report.graphs[0].seconds < 1.0
    assert "layers" not in str(report) and "attention.0 to attention.23, 24 sites" in str(report)


def test_a_block_inside_a_block_and_an_error_in_it_are_undone(rng):
    net, inputs = build(), batch(rng)
    with ms_flash.fusion() as outer:
        with pytest.raises(KeyError), ms_flash.fusion("core"):
            raise KeyError
        net(*inputs)
        with pytest.raises(RuntimeError, match="must not be called inside"):
            ms_flash.unfuse()
        with pytest.raises(RuntimeError, match="must not be called inside"):
            ms_flash.fuse()
    assert outer.fused[0]["level"] != "core"


@pytest.mark.parametrize("function", [False, True])
def test_an_exported_graph_stays_as_written(rng, tmp_path, function):
    """Of a Cell or a compiled function; it is read where ms_flash is not."""
    net, (x, _) = Attention().set_train(False), batch(rng)

    def call(x):
        return net(x)

    with ms_flash.fusion() as report:
        net(x)
        ms.export(ms.jit(call) if function else net, x, file_name=str(tmp_path / "net"), file_format="MINDIR")
        assert len(report.sites) == len(report.fused) == report.compiled == 1
    written = (tmp_path / "net.mindir").read_bytes()
    assert b"Softmax" in written and b"MsFlash" not in written


def test_strict_ends_a_compilation_that_fuses_nothing(rng):
    x, _ = batch(rng)
    ms_flash.fuse(strict=True)
    Plus()(x)       # no softmax, nothing to ask for
    with pytest.raises(RuntimeError, match=r"For 'fuse', nothing was fused: .*softmax"):
        Weights()(x)
    ms_flash.unfuse()
    Weights()(x)
    with pytest.raises(RuntimeError, match="For 'fusion', nothing was fused: there is no softmax"), \
            ms_flash.fusion(strict=True):
        Plus()(x)


def test_what_fails_in_fusion_itself_is_reported_and_strict_ends_it(rng, monkeypatch):
    def broken(*_):
        raise LookupError("no such rule")

    net, inputs = build(), batch(rng)
    expected = net(*inputs).asnumpy()
    monkeypatch.setattr(plan, "plan_graph", broken)
    with pytest.warns(RuntimeWarning, match="left the graph as it was: LookupError: no such rule"), \
            ms_flash.fusion() as report:
        assert net(*inputs).asnumpy() == expected
    assert str(report) == "ms_flash fusion: nothing fused in 1 graph; fusion failed: LookupError: no such rule"
    with pytest.raises(RuntimeError, match="For 'fuse', fusion failed: LookupError: no such rule"), \
            ms_flash.fusion(strict=True):
        net(*inputs)


def test_pynative_is_warned_of(rng):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    net, inputs = build(), batch(rng)
    unused = {"level": "core", "dropout": False}     # no test before has compiled anything with them
    with pytest.warns(UserWarning, match="the mode is PyNative"):
        ms_flash.fuse()
    ms_flash.unfuse()
    with pytest.warns(UserWarning, match="no graph was compiled in the block. Hint: Py"), ms_flash.fusion(**unused):
        net(*inputs)
    with pytest.raises(RuntimeError, match="no graph was compiled in the"), ms_flash.fusion(strict=True, **unused):
        net(*inputs)


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ({"level": "all"}, ValueError, r"For 'fuse', the 'level' must be one of \['auto', .*\], but got 'all'"),
    ({"level": None}, TypeError, "For 'fuse', the type of 'level' must be str, but got NoneType"),
    ({"memory": "drop"}, ValueError, "For 'fuse', the 'memory' must be one of"),
    ({"dropout": 1}, TypeError, "For 'fuse', the type of 'dropout' must be bool, but got int"),
    ({"strict": "yes"}, TypeError, "For 'fuse', the type of 'strict' must be bool, but got str"),
])
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        ms_flash.fuse(**arguments)


SCRIPT = """
import sys
import mindspore as ms, numpy as np
sys.path.insert(0, {folder!r})
from small_net import batch, build
import ms_flash
ms.set_context(mode=ms.GRAPH_MODE)
fused = sys.argv[1] == "fused"
report = ms_flash.fuse() if fused else None
net, inputs = build(), batch(np.random.default_rng(3))
print("LOSS", float(net(*inputs).asnumpy()), len(report.fused) if fused else 0)
"""


@pytest.mark.slow
def test_graphs_that_mindspore_keeps_on_disk_are_kept_apart(tmp_path, monkeypatch):
    """Four processes: as written, fused, and both again from the disk."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).resolve().parent)))
    monkeypatch.setenv("MS_COMPILER_CACHE_ENABLE", "1")
    monkeypatch.setenv("MS_COMPILER_CACHE_PATH", str(tmp_path / "store"))
    found = []
    for kind in ("written", "fused", "written", "fused"):
        done = subprocess.run([sys.executable, str(script), kind], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        found.append(next(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("LOSS")))
    assert [int(count) for _, count in found] == [0, 1, 0, 0]       # the last comes from the disk, fused
    assert len(list((tmp_path / "store").glob("ms_flash-*/**/*.mindir"))) == 1
    losses = [float(loss) for loss, _ in found]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
