"""Compiles the bridge, the C++ plugin that MindSpore loads. Standard library only: setup.py runs it too."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "bridge"
PACKAGE_LIB = Path("ms_flash", "lib")
MINDSPORE = "2.10."  # the plugin uses C++ interfaces that change from one minor version to the next
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w",
          # as MindSpore itself was compiled, or its classes have another layout
          "-D_GLIBCXX_USE_CXX11_ABI=0", "-DENABLE_FAST_HASH_TABLE=1")
_INCLUDES = ("..", ".", "third_party", "third_party/robin_hood_hashing", "mindspore", "mindspore/include",
             "mindspore/core/include", "mindspore/core/mindrt", "mindspore/core/mindrt/include", "mindspore/ops",
             "mindspore/ops/include", "mindspore/ops/kernel/include", "mindspore/ccsrc", "mindspore/ccsrc/include")
_LIBRARIES = ("mindspore_core", "mindspore_common", "mindspore_frontend")


def mindspore() -> tuple[Path, str] | None:
    """Folder and version of the installed MindSpore, found without importing it."""
    found = importlib.util.find_spec("mindspore")
    if found is None or not found.origin:
        return None
    folder = Path(found.origin).parent
    try:
        version = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", (folder / "version.py").read_text(encoding="utf-8"))
    except OSError:
        return None
    return (folder, version[1]) if version else None


def file_name(version: str) -> str:
    """Name of the compiled bridge: it changes with MindSpore's version, the sources and the flags."""
    digest = hashlib.sha256(" ".join(_FLAGS + _LIBRARIES).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + source.read_bytes())
    return f"libms_flash_bridge-{version}-{digest.hexdigest()[:12]}.so"


def cache() -> Path:
    """Where a bridge goes that is compiled on first use: MS_FLASH_CACHE, or the user's cache folder."""
    chosen = os.environ.get("MS_FLASH_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ms_flash"


def build(folder: Path, version: str, target: Path) -> None:
    """Compiles the bridge against the MindSpore in `folder` and puts it at `target`, whole or not at all.

    Raises:
        RuntimeError: If there is no compiler, or it fails.
    """
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("c++")
    if compiler is None:
        raise RuntimeError("the fusion bridge has to be compiled once, and there is no C++ compiler. "
                           "Hint: install g++, or name one in the environment variable CXX")
    with _only_one(target):
        if target.exists():     # another process was first
            return
        partial = target.with_suffix(f".{os.getpid()}.partial")
        includes = [f"-I{folder / 'include' / name}" for name in _INCLUDES]
        command = [compiler, *_FLAGS, *includes, str(SOURCES / "bridge.cpp"), "-o", str(partial),
                   f"-L{folder / 'lib'}", *(f"-l{name}" for name in _LIBRARIES)]
        try:
            _run(command, f"ms_flash: compiling the fusion bridge for MindSpore {version}, once")
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _only_one(target):
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command, title):
    """Runs the compiler; on a terminal the line counts seconds."""
    start = time.monotonic()
    counts = sys.stderr.isatty()
    print(f"{title} ...", end="" if counts else "\n", file=sys.stderr, flush=True)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while True:
            try:
                failed = process.wait(timeout=1)
                break
            except subprocess.TimeoutExpired:
                if counts:
                    print(f"\r{title} ... {time.monotonic() - start:.0f} s", end="", file=sys.stderr, flush=True)
            except BaseException:
                process.kill()
                process.wait()
                raise
        seconds = time.monotonic() - start
        print(f"\r{title} ... {'FAILED' if failed else 'done'} in {seconds:.0f} s", file=sys.stderr, flush=True)
        if failed:
            log.seek(0)
            raise RuntimeError(f"the fusion bridge could not be compiled:\n{log.read()[-4000:]}")


def main(folder: str) -> int:
    """Compiles the bridge into `folder` if a MindSpore is installed that it fits; older builds of it go."""
    found = mindspore()
    if found is None or not found[1].startswith(MINDSPORE):
        print(f"ms_flash: no MindSpore {MINDSPORE}* here; the fusion bridge is compiled on first use", file=sys.stderr)
        return 0
    target = Path(folder) / file_name(found[1])
    if not target.exists():
        build(*found, target)
    for other in target.parent.glob("libms_flash_bridge-*"):
        if other.name != target.name:
            other.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
