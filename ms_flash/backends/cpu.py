"""The CPU backend: the native library, registered as AOT custom ops."""

from __future__ import annotations

import threading

from mindspore import ops

from .. import library, op_table
from .base import Backend


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


_launching = threading.Lock()


class _Custom(ops.Custom):
    """MindSpore's primitive for one caller at a time: it mixes up the tensors of Custom ops that several Python threads
    launch at once in PyNative (seen in 2.10; a graph does not come here)."""

    def __call__(self, *args):
        with _launching:
            return super().__call__(*args)


class CpuBackend(Backend):
    """SIMD kernels on the host's cores."""

    name = "cpu"

    def available(self):
        try:
            library.load()
        except RuntimeError as error:
            return False, str(error)
        return True, ""

    def key(self, spec):
        return spec.render()

    def primitive(self, op, spec, bprop):
        registration = op_table.registration(op, "CPU")
        custom = _Custom(f"{library.path()}:{op}", None, None, "aot", bprop, registration)
        custom.add_prim_attr("spec", spec.render())
        return custom
