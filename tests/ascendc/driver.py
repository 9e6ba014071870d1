"""Builds driver_src over the host twin, and runs one instruction of the twin on the memories of a model."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TWIN = ROOT / "op_impl" / "ascendc" / "twin"
BUILD = ROOT / "build" / "ascendc"
# -ffp-contract=off: the twin rounds where the hardware does, whatever the compiler could fuse.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-mf16c", "-w"]


class Fault(NamedTuple):
    """One violation that the twin reported."""

    kind: str
    file: str
    line: int
    text: str


def build(*sources, flags=()):
    """A shared library of some C++ files, compiled again only when one of them or the twin changed."""
    sources = [Path(source) for source in sources]
    command = [os.environ.get("CXX", "g++"), *FLAGS, *flags, f"-I{TWIN}"]
    digest = hashlib.sha256(" ".join(command).encode())
    headers = {path for source in sources for path in source.parent.glob("*.h")} | set(TWIN.glob("*.h"))
    for path in (*sources, *sorted(headers)):
        digest.update(path.read_bytes())
    library = BUILD / f"{sources[0].parent.name}-{sources[0].stem}-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            objects = [Path(folder) / f"{source.stem}.o" for source in sources]
            run_all([[*command, "-c", str(source), "-o", str(out)] for source, out in zip(sources, objects)])
            run_all([[*command, "-shared", *map(str, objects), "-o", f"{folder}/library.so"]])
            Path(folder, "library.so").replace(library)
    return library


def run_all(commands):
    """Runs commands, as many at a time as there are processors."""

    def run(command):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stderr[:20000]}")

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(run, commands))


class _Memories(ctypes.Structure):
    _fields_ = [("gm", ctypes.c_void_p), ("gm_bytes", ctypes.c_uint64)] + [
        (name.lower(), ctypes.c_void_p) for name in ("UB", "L1", "L0A", "L0B", "L0C", "BT")
    ]


def parse(text):
    """The violations in the C interface's form: a line each, "kind|file|line|text"."""
    faults = []
    for line in text.splitlines():
        kind, file, number, message = line.split("|", 3)
        faults.append(Fault(kind, Path(file).name, int(number), message))
    return faults


def _flatten(arguments):
    lines = []
    for name, value in arguments.items():
        if value is None:
            continue
        if hasattr(value, "_asdict"):
            lines += [f"{name}.{key}={part}" for key, part in value._asdict().items()]
        elif isinstance(value, tuple):
            kind, *rest = value if isinstance(value[0], str) else (None, *value)
            lines += [] if kind is None else [f"{name}={kind}"]
            lines += [f"{name}.{index}={part}" for index, part in enumerate(rest)]
        elif isinstance(value, (bool, np.bool_)):
            lines.append(f"{name}={int(value)}")
        else:
            lines.append(f"{name}={value}")
    return "".join(line + "\n" for line in lines)


class Driver:
    def __init__(self):
        self._library = ctypes.CDLL(str(build(*sorted(Path(__file__).with_name("driver_src").glob("*.cpp")))))
        self._run = self._library.RunInstruction
        self._run.restype = ctypes.c_int64
        self._run.argtypes = [ctypes.c_char_p, ctypes.POINTER(_Memories), ctypes.c_char_p, ctypes.c_uint64]
        self._run.argtypes += [ctypes.POINTER(ctypes.c_double)]
        self.cycles = (ctypes.c_double * 2)()  # of the last call: the fast and the slow end of the model
        self._report = ctypes.create_string_buffer(1 << 16)

    def _aligned(self, gm):
        """A copy that starts where the device's allocator would: on a multiple of 512."""
        raw = np.empty(len(gm) + 512, np.uint8)
        start = -raw.ctypes.data % 512
        raw[start : start + len(gm)] = gm
        return raw[start : start + len(gm)]

    def __call__(self, op, memories, core="AIV", **arguments):
        """Runs `op` and changes `memories` as it does. Returns the faults."""
        call = _flatten({"op": op, "core": core, **arguments})
        gm = self._aligned(memories["gm"])
        pointers = _Memories(gm.ctypes.data, len(gm))
        for name in ("UB", "L1", "L0A", "L0B", "L0C", "BT"):
            if name in memories:
                setattr(pointers, name.lower(), memories[name].ctypes.data)
        count = self._run(call.encode(), ctypes.byref(pointers), self._report, len(self._report), self.cycles)
        memories["gm"][:] = gm
        text = self._report.value.decode()
        if count < 0:
            raise RuntimeError(f"{text}\n{call}")
        return parse(text)
