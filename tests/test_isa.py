"""The kernels for instruction sets that the machine at hand lacks: emulated, or in another form of the same source."""
from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


def build(name, target, *options):
    """Configures and builds into build/NAME, from scratch or what changed."""
    folder = ROOT / "build" / name
    subprocess.run(["cmake", "-S", ROOT / "op_impl", "-B", folder, *options], check=True)
    subprocess.run(["cmake", "--build", folder, "--target", target, "--parallel", str(os.cpu_count())], check=True)
    return folder


def fuzz(count, **environment):
    """The fuzz of tests/fuzz in a process of its own."""
    subprocess.run([sys.executable, "-m", "pytest", "-q", "--noconftest", ROOT / "tests" / "fuzz"], check=True,
                   env={**os.environ, "MS_FLASH_FUZZ": str(count), **environment})


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX2 is x86-64's")
def test_the_512_bit_form_compiled_for_avx2():
    folder = build("wide", "ms_flash_cpu", "-DMSF_WIDE=ON")
    fuzz(1000, MS_FLASH_CPU_LIB=str(folder / "libms_flash_cpu.so"), MS_FLASH_ISA="wide")


@pytest.mark.skipif(not (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64")),
                    reason="needs Debian's packages g++-aarch64-linux-gnu and qemu-user")
def test_neon_under_an_emulator():
    folder = build("neon", "ms_flash_runner", "-DMSF_RUNNER=ON", "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
                   "-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")
    fuzz(300, MS_FLASH_CPU_RUNNER=f"qemu-aarch64 {folder / 'ms_flash_runner'}", MS_FLASH_CPU_LIB=os.devnull)
