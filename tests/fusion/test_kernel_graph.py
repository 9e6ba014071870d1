"""What runs in the end: MindSpore's own dump of the graph of kernels, with fusion and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import routes, spellings, ms_flash.fusion_passes
cls = getattr(spellings, {name!r})
routes.jit_gradient(routes.build([cls]), routes.inputs(), {fused}, **{options})
"""


def kernels(name, folder, fused, **options):
    """The names of the operations in the graph of kernels of one spelling, forward and backward."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    script = SCRIPT.format(name=name, fused=fused, options=options)
    subprocess.run([sys.executable, "-c", script], check=True, cwd=folder,
                   env={**os.environ, "MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": str(folder),
                        "PYTHONPATH": path})
    found = []
    for file in folder.rglob("graph_build_*.ir"):
        found += re.findall(r"^ +%\d+\([^)]*\) = (?:PrimFunc_)?(\w+)\(", file.read_text(), re.M)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Bert", "Vit", "MultiQuery"])
def test_layout_level_leaves_no_softmax_and_no_copy_of_heads(name, tmp_path):
    ops = kernels(name, tmp_path, True, level="layout")
    assert ops.count("Custom") == 2
    assert not [op for op in ops if "Softmax" in op]
    assert not {"Transpose", "BatchMatMul", "MatMulExt", "Split", "Concat", "StridedSlice"} & set(ops)


@pytest.mark.slow
def test_the_check_sees_a_softmax(tmp_path):
    ops = kernels("Bert", tmp_path, False)
    assert [op for op in ops if "Softmax" in op] and "Transpose" in ops and "Custom" not in ops
