"""One test body over every backend that is present, and every test in PyNative mode unless it says otherwise."""

from __future__ import annotations

import mindspore as ms
import pytest

import ms_flash

PRESENT = [name for name, reason in ms_flash.available_backends().items() if not reason]
KERNELS = [name for name in PRESENT if name != "reference"]


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
