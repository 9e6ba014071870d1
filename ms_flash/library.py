"""Where the native CPU library is, and how it is loaded. Needs no MindSpore, so that `doctor` can always tell."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path


def path() -> Path:
    """The native library of this package; MS_FLASH_CPU_LIB names another one (an instrumented build, for instance)."""
    other = os.environ.get("MS_FLASH_CPU_LIB")
    return Path(other) if other else Path(__file__).resolve().parent / "lib" / "libms_flash_cpu.so"


@functools.lru_cache(None)
def _loaded(file: Path) -> ctypes.CDLL:
    # Held for the life of the process: MindSpore opens and closes the library, and unmapping it would end its threads.
    library = ctypes.CDLL(str(file))
    library.msflash_cpu_set_num_threads.argtypes = [ctypes.c_int]
    library.msflash_cpu_set_num_threads.restype = None
    library.msflash_cpu_get_num_threads.restype = ctypes.c_int
    for name in ("msflash_cpu_fma_peak", "msflash_cpu_read_bandwidth"):
        getattr(library, name).restype = ctypes.c_double
    for name in ("msflash_cpu_last_error", "msflash_cpu_isa", "msflash_cpu_isa_list"):
        getattr(library, name).restype = ctypes.c_char_p
    return library


def load() -> ctypes.CDLL:
    """The native library, loaded.

    Raises:
        RuntimeError: If it is missing or cannot be loaded.
    """
    file = path()
    if not file.exists():
        raise RuntimeError(f"the native library {file} is missing; build it with 'pip install .' or 'make build'")
    try:
        return _loaded(file)
    except (OSError, AttributeError) as error:
        raise RuntimeError(f"the native library {file} cannot be loaded: {error}") from error
