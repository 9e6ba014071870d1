"""The host twin's machinery: fibres, deadlocks, definedness, the cycle model, number formats (cases: core.cpp)."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from ascendc.driver import build

SOURCE = Path(__file__).with_name("core.cpp")
NAMES = re.findall(r"^CASE\((\w+)\)", SOURCE.read_text(), re.M)


@pytest.fixture(scope="module", params=["f16c", pytest.param("portable", marks=pytest.mark.slow)])
def library(request):
    """With the processor's half conversions and with the portable ones."""
    flags = ["-pthread"] + (["-mno-f16c"] if request.param == "portable" else [])
    loaded = ctypes.CDLL(str(build(SOURCE, flags=flags)))
    loaded.CaseNames.restype = loaded.RunCase.restype = ctypes.c_char_p
    return loaded


@pytest.mark.parametrize("name", NAMES)
def test_case(library, name):
    failure = library.RunCase(name.encode()).decode()
    assert not failure, failure


def test_all_cases_are_run(library):
    assert sorted(library.CaseNames().decode().split()) == sorted(NAMES)
