"""The CPU backend: the native library, registered as AOT custom ops."""

from __future__ import annotations

from .. import library
from .aot import AotBackend


def set_num_threads(num_threads: int) -> None:
    """
    Sets how many threads the CPU kernels use, from the next call on. Results do not depend on it.

    Args:
        num_threads (int): Number of threads, 1 or greater.

    Raises:
        TypeError: If `num_threads` is not an int.
        ValueError: If `num_threads` is less than 1.
        RuntimeError: If the native library is not there.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import ms_flash
        >>> ms_flash.set_num_threads(2)
        >>> ms_flash.get_num_threads()
        2
    """
    if isinstance(num_threads, bool) or not isinstance(num_threads, int):
        raise TypeError("For 'set_num_threads', the type of 'num_threads' must be int, "
                        f"but got {type(num_threads).__name__}.")
    if not 1 <= num_threads <= 4096:
        raise ValueError(f"For 'set_num_threads', 'num_threads' must be in the range [1, 4096], but got {num_threads}.")
    library.load().msflash_cpu_set_num_threads(num_threads)


def get_num_threads() -> int:
    """
    Tells how many threads the CPU kernels use.

    Returns:
        int, the number of threads.

    Raises:
        RuntimeError: If the native library is not there.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import ms_flash
        >>> ms_flash.set_num_threads(1)
        >>> ms_flash.get_num_threads()
        1
    """
    return library.load().msflash_cpu_get_num_threads()


class CpuBackend(AotBackend):
    """SIMD kernels on the host's cores."""

    name = "cpu"
    library = library.CPU
