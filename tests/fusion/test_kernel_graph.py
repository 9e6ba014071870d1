"""What runs in the end: MindSpore's own dump of the graph of kernels, with fusion and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from routes import ROUTES
from spellings import SPELLINGS

SCRIPT = """
import routes, spellings, ms_flash.fusion_passes
classes = [cls for name, cls, _ in spellings.SPELLINGS if name in {names!r}]
result = routes.{route}(routes.build(classes), routes.inputs(), {fused}, **{options})
print("SITES", sum(site["fused"] for sites in result.sites.values() for site in sites))
"""
SITES = {name: want["sites"] for name, _, want in SPELLINGS}


def kernels(names, folder, fused, route="jit_gradient", **options):
    """(name, shape of its first result) of each operation in the graphs of kernels, and how many sites were fused."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    script = SCRIPT.format(names=names, fused=fused, route=route, options=options)
    done = subprocess.run([sys.executable, "-c", script], check=True, cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": str(folder),
                               "PYTHONPATH": path})
    found = []
    for file in folder.rglob("graph_build_*.ir"):
        found += re.findall(r"^ +%\d+\([^)]*\) = (?:PrimFunc_)?(\w+)\(.*\n.*?(?:-> \(+<Tensor\[\w+\], \(([\d, ]*)\)|$)",
                            file.read_text(), re.M)
    return found, int(re.search(r"^SITES (\d+)", done.stdout, re.M)[1])


def names(found):
    return [name for name, _ in found]


def of_heads(found):
    """The operations whose result has heads: four axes. A product with a weight, and the weight turned around for its
    gradient, have two or three."""
    return [name for name, shape in found if len(shape.split(",")) == 4]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Bert", "Vit", "Gpt2", "MultiQuery", "BigCode"])
def test_layout_level_leaves_no_softmax_and_no_copy_of_heads(name, tmp_path):
    found, _ = kernels([name], tmp_path, True, level="layout")
    ops = names(found)
    assert ops.count("Custom") == 2
    assert not [op for op in ops if "Softmax" in op]
    assert not {"Split", "Concat", "StridedSlice"} & set(ops)
    assert not {"Transpose", "BatchMatMul", "MatMulExt"} & set(of_heads(found))


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_no_spelling_leaves_a_softmax_in_any_route(route, tmp_path):
    found, fused = kernels(list(SITES), tmp_path, True, route)
    ops = names(found)
    assert fused == sum(SITES.values()) > 40
    assert ops.count("Custom") >= fused * (1 if route == "inference" else 2)
    assert not [op for op in ops if "Softmax" in op]


@pytest.mark.slow
def test_the_check_sees_a_softmax(tmp_path):
    found, fused = kernels(["Bert"], tmp_path, False)
    ops = names(found)
    assert [op for op in ops if "Softmax" in op] and "Custom" not in ops and not fused
    assert {"Transpose", "BatchMatMul"} <= set(of_heads(found))
