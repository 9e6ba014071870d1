"""Every way to install gives the same working package, in fresh environments and away from the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "Makefile", "LICENSE", "README.md", "README_CN.md",
           "CONTRIBUTING.md", ".clang-format", "ms_flash", "op_impl", "fusion_passes", "onnx_export", "tests",
           "samples", "docs", "benchmarks")

# Runs in the fresh environment; prints where the package is and what it holds.
PROBE = """
import json, pathlib
import ms_flash, ms_flash.fusion_passes, ms_flash.onnx_export, ms_flash.op_impl, ms_flash.library, ms_flash.op_table
import mindspore as ms, numpy as np
x = ms.Tensor(np.ones((1, 2, 3, 4)), ms.float32)
grad = ms.grad(lambda q: ms_flash.flash_attention(q, x, x, causal=True).sum())(x)
assert ms_flash.flash_attention(x, x, x).shape == grad.shape == (1, 2, 3, 4)
assert ms_flash.library.path().is_file() and ms_flash.op_table.path().is_file()
root = pathlib.Path(ms_flash.__file__).parent
assert (root / "py.typed").is_file()
files = [str(f.relative_to(root)) for f in root.rglob("*") if f.is_file() and f.suffix != ".pyc"]
print(json.dumps({"root": str(root), "op_impl": str(pathlib.Path(ms_flash.op_impl.__file__).parent),
                  "files": sorted(files)}))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources without anything built; what is built in it serves all tests."""
    folder = tmp_path_factory.mktemp("checkout")
    built = shutil.ignore_patterns("__pycache__", "lib", "*.so")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=built)
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture
def fresh(tmp_path):
    """The Python of a new environment that sees the packages ms_flash depends on, but no ms_flash."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True,
                          capture_output=True, text=True).stdout.strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def call(*command, cwd="/", **environment):
    """stdout of a command that must succeed; it knows nothing of this checkout."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MS_FLASH_CPU_LIB")}
    clean["PATH"] = os.pathsep.join([clean.get("PATH", ""), str(Path(sys.executable).parent)])   # CMake and ninja
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env={**clean, **environment})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def pip(python, *arguments, cwd):
    return call(python, "-m", "pip", *arguments[:1], "-q", "--no-deps", "--no-build-isolation", *arguments[1:], cwd=cwd)


def probe(python, tmp_path):
    """What PROBE prints, run from a folder where nothing of ms_flash lies, with no compiler on the PATH."""
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    return json.loads(call(python, script, cwd=tmp_path, PATH="").splitlines()[-1])


def content(wheel):
    """Files of the package in a wheel."""
    return sorted(n[len("ms_flash/"):] for n in zipfile.ZipFile(wheel).namelist() if n.startswith("ms_flash/"))


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    """The wheel that `pip wheel .` builds."""
    folder = tmp_path_factory.mktemp("dist")
    pip(sys.executable, "wheel", "-w", folder, ".", cwd=checkout)
    (found,) = folder.glob("*.whl")
    return found


def test_wheel(wheel, fresh, tmp_path):
    name = wheel.stem.split("-")
    assert name[2:4] == ["py3", "none"] and name[4].startswith("linux_")    # no Python API in the library
    pip(fresh, "install", wheel, cwd=tmp_path)
    found = probe(fresh, tmp_path)
    assert str(tmp_path / "venv") in found["root"]
    assert content(wheel) == found["files"]
    assert {"lib/libms_flash_cpu.so", "op_impl/ops.yaml", "fusion_passes/__init__.py", "onnx_export/__init__.py",
            "py.typed"} <= set(found["files"])
    assert not [f for f in found["files"] if f.endswith((".cpp", ".h", ".txt"))]
    assert json.loads(call(tmp_path / "venv" / "bin" / "ms-flash", "doctor", "--json"))["problems"] == []


def test_install(wheel, checkout, fresh, tmp_path):
    pip(fresh, "install", ".", cwd=checkout)
    found = probe(fresh, tmp_path)
    assert str(tmp_path / "venv") in found["root"]
    assert found["files"] == content(wheel)


def test_editable_install(wheel, checkout, fresh, tmp_path):
    pip(fresh, "install", "-e", ".", cwd=checkout)
    found = probe(fresh, tmp_path)
    assert found["root"] == str(checkout / "ms_flash") and found["op_impl"] == str(checkout / "op_impl")
    assert "lib/libms_flash_cpu.so" in found["files"]
    assert json.loads(call(tmp_path / "venv" / "bin" / "ms-flash", "doctor", "--json"))["problems"] == []


def test_sdist(wheel, checkout, fresh, tmp_path):
    """The source distribution builds by itself what the checkout builds."""
    call(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path, cwd=checkout)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"op_impl/CMakeLists.txt", "op_impl/cpu/kernels.cpp", "op_impl/common/band.h", "LICENSE"} <= names
    assert not [n for n in names if n.endswith(".so")]
    pip(fresh, "install", archive, cwd=tmp_path)
    assert probe(fresh, tmp_path)["files"] == content(wheel)


def test_a_removed_module_does_not_ship(wheel, checkout, tmp_path):
    """Nothing of an earlier build stays in the build folder."""
    stray = checkout / "ms_flash" / "stray.py"
    stray.write_text('"""Here today."""\n')
    pip(sys.executable, "wheel", "-w", tmp_path / "one", ".", cwd=checkout)
    stray.unlink()
    pip(sys.executable, "wheel", "-w", tmp_path / "two", ".", cwd=checkout)
    one, two = (content(next((tmp_path / n).glob("*.whl"))) for n in ("one", "two"))
    assert "stray.py" in one and "stray.py" not in two
