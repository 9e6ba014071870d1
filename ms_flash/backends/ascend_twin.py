"""The Ascend twin: the Ascend C sources compiled for the host."""

from __future__ import annotations

from .base import Backend


class AscendTwinBackend(Backend):
    """The kernel sources of the Ascend backend over a host implementation of Ascend C. This version holds none."""

    name = "ascend-twin"

    def available(self):
        return False, "the twin of the Ascend kernels is not built"

    def key(self, spec):
        return spec.render()

    def primitive(self, op, spec, bprop):
        raise RuntimeError(f"The backend 'ascend-twin' cannot run '{op}': {self.available()[1]}.")
