"""The Ascend twin: the Ascend C sources compiled for the host."""

from __future__ import annotations

import json

from .. import library
from ..mha_spec import MhaSpec
from ..spec import type_error
from .aot import AotBackend

_PROJECTION_BIASES = ("b_q", "b_k", "b_v", "b_o")


class AscendTwinBackend(AotBackend):
    """The kernels and the host tiling of the Ascend backend, over a host implementation of Ascend C that checks every
    instruction: what a kernel does against the rules of the chip is an error of the call."""

    name = "ascend-twin"
    library = library.ASCEND_TWIN

    def check(self, op, spec):
        super().check(op, spec)
        for name in _PROJECTION_BIASES if isinstance(spec, MhaSpec) else ():
            if spec.has(name) and spec.dtype_of(name) != spec.dtype:
                raise type_error(spec.func, f"the dtype of '{name}' must be that of 'x' {spec.dtype} for the backend "
                                            f"'{self.name}', but got {spec.dtype_of(name)}.")


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
