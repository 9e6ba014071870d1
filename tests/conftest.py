"""One test body over every backend that is present, and every test in PyNative mode unless it says otherwise."""

from __future__ import annotations

import mindspore as ms
import pytest

import ms_flash
from ms_flash import op_table
from ms_flash.backends import ascend_twin

PRESENT = [name for name, reason in ms_flash.available_backends().items() if not reason]
KERNELS = [name for name in PRESENT if name != "reference"]
if "ascend-twin" in PRESENT:    # two simulated cores: results do not depend on their number, time does
    ascend_twin.configure(cores=2)


def pytest_collection_modifyitems(config, items):
    """A test meets a backend that takes its dtype (the parameter of this name, or else float32) and has its ops (those
    of its mark `ops`)."""
    kept, left = [], []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        entry = op_table.table()["backends"].get(params.get("backend", params.get("kernel_backend")))
        needed = {op for mark in item.iter_markers("ops") for op in mark.args}
        takes = entry is None or (params.get("dtype", "float32") in entry["dtypes"] and needed <= set(entry["ops"]))
        (kept if takes else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


@pytest.fixture(params=PRESENT)
def backend(request):
    """Every backend that can run here."""
    return request.param


@pytest.fixture(params=KERNELS)
def kernel_backend(request):
    """Every backend that can run here, apart from the reference."""
    return request.param


@pytest.fixture(params=["pynative", "graph"])
def mode(request):
    """Both execution modes."""
    if request.param == "graph":
        ms.set_context(mode=ms.GRAPH_MODE)
    return request.param


@pytest.fixture(autouse=True)
def _clean_start(tmp_path, monkeypatch):
    """PyNative mode, and a folder of its own for what MindSpore writes beside a failed compilation."""
    monkeypatch.chdir(tmp_path)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)
