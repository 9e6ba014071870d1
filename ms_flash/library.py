"""Where the native libraries are, and how they are loaded. Needs no MindSpore, so that `doctor` can always tell."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import NamedTuple

from . import tuning


class Native(NamedTuple):
    """A native library of this package.

    Attributes:
        name (str): Its file, without the ending.
        variable (str): Environment variable that names another build of it (an instrumented one, for instance).
        results (tuple): Pairs of a function and what it returns, where that is no int.
    """

    name: str
    variable: str
    results: tuple

    def path(self) -> Path:
        """Where the library is."""
        other = os.environ.get(self.variable)
        return Path(other) if other else Path(__file__).resolve().parent / "lib" / f"{self.name}.so"

    def load(self) -> ctypes.CDLL:
        """The library, loaded.

        Raises:
            RuntimeError: If it is missing or cannot be loaded.
        """
        file = self.path()
        if not file.exists():
            raise RuntimeError(f"the native library {file} is missing; build it with 'pip install .' or 'make build'")
        try:
            return _loaded(self, file)
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"the native library {file} cannot be loaded: {error}") from error


@functools.lru_cache(None)
def _loaded(native: Native, file: Path) -> ctypes.CDLL:
    # Held for the life of the process: MindSpore opens and closes the library, and unmapping it would end its threads.
    library = ctypes.CDLL(str(file))
    for name, result in native.results:
        getattr(library, name).restype = result
    return library


CPU = Native("libms_flash_cpu", "MS_FLASH_CPU_LIB", (
    ("msflash_cpu_set_num_threads", None), ("msflash_cpu_get_num_threads", ctypes.c_int),
    *((f"msflash_cpu_{name}", ctypes.c_double) for name in ("fma_peak", "read_bandwidth")),
    *((f"msflash_cpu_{name}", ctypes.c_char_p) for name in ("last_error", "isa", "isa_list"))))
ASCEND_TWIN = Native("libms_flash_ascend_twin", "MS_FLASH_ASCEND_TWIN_LIB", tuple(
    (f"msflash_ascend_{name}", ctypes.c_char_p) for name in ("last_error", "last_report", "plan", "totals")))


def path() -> Path:
    """The CPU library."""
    return CPU.path()


def use_blocks() -> None:
    """Hands the block sizes in use to the CPU library.

    Raises:
        ValueError: If a table or a variable says what cannot be.
    """
    native = CPU.load()
    if native.msflash_cpu_set_block_rules(tuning.as_text(tuning.in_use()).encode()):
        raise ValueError(native.msflash_cpu_last_error().decode())


@functools.lru_cache(None)
def _tuned(file: Path) -> ctypes.CDLL:
    use_blocks()
    return CPU.load()


def load() -> ctypes.CDLL:
    """The CPU library, loaded.

    Raises:
        RuntimeError: If it is missing or cannot be loaded, or a table of block sizes cannot be used.
    """
    try:
        return _tuned(path())
    except ValueError as error:
        raise RuntimeError(str(error)) from error


def configure_twin(**settings) -> None:
    """Settings of the Ascend twin and of its tiling, for all threads: see msflash_ascend_configure in twin_lib/api.h.

    Args:
        settings: Values by name, ``cores=2`` for instance: fewer simulated cores are faster, and results do not depend
            on their number.

    Raises:
        ValueError: If there is no such setting, or the value is not one of it.
        RuntimeError: If the library is not there.
    """
    native = ASCEND_TWIN.load()
    for name, value in settings.items():
        if native.msflash_ascend_configure(name.encode(), str(value).encode()):
            raise ValueError(native.msflash_ascend_last_error().decode())
