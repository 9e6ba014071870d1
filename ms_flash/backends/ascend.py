"""The Ascend backend: custom operators installed into CANN."""

from __future__ import annotations

import os
from pathlib import Path

import mindspore

from .base import Backend


class AscendBackend(Backend):
    """Ascend C kernels, found through ASCEND_CUSTOM_OPP_PATH. This version holds none, so it is never available."""

    name = "ascend"

    def available(self):
        device = mindspore.get_context("device_target")
        if device != "Ascend":
            return False, f"the device target is {device}, not Ascend"
        folders = [Path(p) for p in os.environ.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if p]
        if not any("ms_flash" in f.name and f.is_dir() for f in folders):
            return False, "no operator package 'ms_flash' under ASCEND_CUSTOM_OPP_PATH"
        return False, "this version of ms_flash has no Ascend registration"

    def key(self, spec):
        return spec.render()

    def primitive(self, op, spec, bprop):
        raise RuntimeError(f"The backend 'ascend' cannot run '{op}': {self.available()[1]}.")
