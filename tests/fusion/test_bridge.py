"""The bridge: a planner may do anything, MindSpore's graph is changed as planned or not at all."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from ms_flash.fusion_passes import bridge, bridge_build, plan
from small_net import batch, build, fresh

import ms_flash


@pytest.fixture
def rng(request):
    return fresh(request)


@pytest.fixture(scope="module")
def written():
    """A net, its inputs, and what it gives as written."""
    ms.set_context(mode=ms.GRAPH_MODE)
    net, inputs = build(), batch(np.random.default_rng())
    return net, inputs, net(*inputs).asnumpy()


def out_of_range(made):
    made["replace"][0][0] = 10**6


def negative(made):
    made["replace"][0][0] = -3


def unknown_name(made):
    made["replace"][0][1] = "nowhere"


def unknown_primitive(made):
    next(node for node in made["new"] if "prim" in node)["prim"] = 77


def no_item(made):
    made["replace"][0][1] = {"item": [made["new"][0]["id"], 99]}


def twice(made):
    made["replace"].append(made["replace"][0])


def other_type(made):
    made["replace"][0][1] = 0


def cycle(made):
    fused = next(node for node in made["new"] if "prim" in node)
    fused["inputs"][0] = made["last"]


def nonsense(made):
    made["new"] = "nonsense"


def raises(made):
    raise KeyError("a defect")


def exits(made):
    raise SystemExit(3)


@pytest.mark.parametrize("damage", [out_of_range, negative, unknown_name, unknown_primitive, no_item, twice, other_type,
                                    cycle, nonsense, raises, exits], ids=lambda f: f.__name__)
def test_a_wrong_plan_leaves_the_graph_alone_with_one_warning(damage, written, monkeypatch):
    plan_graph = plan.plan_graph

    def damaged(graph, options):
        made, sites = plan_graph(graph, options)
        made["last"] = graph["outputs"][0]
        damage(made)
        return made, sites

    net, inputs, expected = written
    ms.set_context(mode=ms.GRAPH_MODE)
    monkeypatch.setattr(plan, "plan_graph", damaged)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ms_flash.fusion() as report:
            net.compile_cache.clear()   # of the damage before this one
            got = net(*inputs).asnumpy()
    assert np.array_equal(got, expected) and not report.fused and report.compiled == 1
    texts = [str(w.message) for w in caught if "left the graph as it was" in str(w.message)]
    assert len(texts) == 1, texts


def test_a_warning_that_is_an_error_stops_nothing(rng, monkeypatch):
    def broken(graph, options):
        raise KeyError("a defect")

    ms.set_context(mode=ms.GRAPH_MODE)
    net, inputs = build(), batch(rng)
    expected = net(*inputs).asnumpy()
    monkeypatch.setattr(plan, "plan_graph", broken)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ms_flash.fusion():
            assert np.array_equal(net(*inputs).asnumpy(), expected)


def test_another_mindspore_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setattr(ms, "__version__", "2.9.1")
    with pytest.raises(RuntimeError, match=r"supports MindSpore 2\.10\.\*, but this is 2\.9\.1\. Hint: pip install"):
        bridge.path()


def test_without_a_compiler_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="there is no C\\+\\+ compiler"):
        bridge_build.build(*bridge_build.mindspore(), tmp_path / "bridge.so")


def test_a_failing_compiler_is_quoted_and_leaves_no_file(monkeypatch, tmp_path):
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho no space left; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match="could not be compiled:\nno space left"):
        bridge_build.build(*bridge_build.mindspore(), tmp_path / "lib" / "bridge.so")
    assert [p.name for p in (tmp_path / "lib").iterdir()] == ["bridge.lock"]


def test_the_version_is_read_without_an_import():
    assert bridge_build.mindspore()[1] == ms.__version__
