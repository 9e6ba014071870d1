"""The host twin's checks of order, flags, bounds and definedness.

Each wrong kernel of hazards.cpp is reported where its text says so, and the right ones are not.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
from ascendc.driver import build

SOURCE = Path(__file__).with_name("hazards.cpp")


def _kernels():
    """name -> {line: (kinds, has an EARLIER mark)}: what the comments of hazards.cpp say."""
    kernels, name = {}, None
    for number, line in enumerate(SOURCE.read_text().splitlines(), 1):
        head = re.match(r"(?:VECTOR|CUBE|MIX)_KERNEL\((\w+)[,)]", line)
        if head:
            name = head.group(1)
            kernels[name] = {"expect": {}, "earlier": []}
        if name is None:
            continue
        mark = re.search(r"// EXPECT ([\w|]+)", line)
        if mark:
            kernels[name]["expect"][number] = mark.group(1).split("|")
        if "// EARLIER" in line:
            kernels[name]["earlier"].append(number)
    return kernels


KERNELS = _kernels()


@pytest.fixture(scope="module")
def run():
    library = ctypes.CDLL(str(build(SOURCE)))
    library.RunKernel.restype = ctypes.c_int64
    report = ctypes.create_string_buffer(1 << 16)

    def call(name, reverse):
        count = library.RunKernel(name.encode(), ctypes.c_int64(reverse), report, ctypes.c_uint64(len(report)))
        assert count >= 0, name
        faults = []
        for line in report.value.decode().splitlines():
            kind, file, number, other, text = line.split("|", 4)
            faults.append((kind, Path(file).name, int(number), int(other), text))
        return faults

    return call


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(run, name):
    marks = KERNELS[name]
    for reverse in (0, 1):  # the order in which the twin runs the cores is no excuse
        faults = run(name, reverse)
        listing = "\n".join(text for *_, text in faults)
        if not marks["expect"]:
            assert not faults, listing
            continue
        assert faults, "no report"
        for kind, file, line, _, text in faults:
            assert file == SOURCE.name, text
            assert kind in marks["expect"].get(line, ()), f"line {line} is not marked so: {text}"
            assert f"{SOURCE.name}:{line}" in text
        if marks["earlier"]:
            others = {other for *_, other, _ in faults}
            assert others & set(marks["earlier"]), f"the earlier access is on {marks['earlier']}: {listing}"


def test_enough_kernels():
    wrong = [name for name, marks in KERNELS.items() if marks["expect"]]
    assert len(wrong) >= 60
    assert len(KERNELS) - len(wrong) >= 20
