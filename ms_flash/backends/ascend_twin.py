"""The Ascend twin: the Ascend C sources compiled for the host."""

from __future__ import annotations

import json

from .. import library
from .aot import AotBackend


class AscendTwinBackend(AotBackend):
    """The kernels and the host tiling of the Ascend backend, over a host implementation of Ascend C that checks every
    instruction: what a kernel does against the rules of the chip is an error of the call."""

    name = "ascend-twin"
    library = library.ASCEND_TWIN


configure = library.configure_twin


def totals(reset: bool = False) -> dict:
    """What the twin saw since the start, or the last reset.

    Args:
        reset (bool): Start anew. Default: ``False``.

    Returns:
        dict, from the kernel ("fwd", "bwd", "bias_grad", "block") to a dict of its `launches`, `violations` (of the
        chip's rules), `cycles` (the model's, at the fast and at the slow end of the published costs) and of the bytes
        `read` from and `written` to global memory.

    Raises:
        RuntimeError: If the library is not there.
    """
    return json.loads(library.ASCEND_TWIN.load().msflash_ascend_totals(int(reset)))
