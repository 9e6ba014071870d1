"""Backends whose ops are in a native library."""

from __future__ import annotations

import functools

import numpy as np
from mindspore.ops import signature as sig

from .. import op_table
from ..kvcache_spec import KVCACHE_SLOTS
from ..library import Native
from .base import Backend, Custom


class _Writing(Custom):
    """The op that appends to a cache in place.

    MindSpore 2.10 hands a Custom the memory of a Parameter itself, so the kernel may write there. Without the attribute
    side_effect_mem a graph runs the op before or after other readers of the Parameter as it likes and drops it where
    its output is not used (30 of 30 graphs were wrong); with it, 0 of 30, and PyNative is right either way. A graph
    refuses a view, of which it would make a copy.
    """

    __mindspore_signature__ = tuple(
        sig.make_sig(name, sig.sig_rw.RW_WRITE if name in ("k_cache", "v_cache") else sig.sig_rw.RW_READ)
        for name in KVCACHE_SLOTS)


class AotBackend(Backend):
    """Ops of a native library, registered as AOT custom ops.

    Attributes:
        library (Native): Where they are.
    """

    library: Native

    def available(self):
        try:
            self.library.load()
        except RuntimeError as error:
            return False, str(error)
        return True, ""

    def key(self, spec):
        return spec.render()

    def hands_over(self, x):
        # MindSpore 2.10 copies views, contiguous ones too, and no attribute of a Tensor tells: so an op is asked.
        at = x.data_ptr()
        if getattr(x, "_ms_flash_handed_over", None) != at:
            seen = self._address(x)[0].asnumpy().view(np.int64)[0]
            if seen != at:
                return False
            x._ms_flash_handed_over = at
        return True

    @functools.cached_property
    def _address(self):
        return Custom(f"{self.library.path()}:MsFlashAddress", None, None, "aot", None,
                       op_table.registration("MsFlashAddress", "CPU")).add_prim_attr("spec", "")

    def primitive(self, op, spec, bprop):
        registration = op_table.registration(op, "CPU")
        writes = op == "MsFlashKvCache" and spec.appends
        kind = _Writing if writes else Custom
        custom = kind(f"{self.library.path()}:{op}", None, None, "aot", bprop, registration)
        custom.add_prim_attr("spec", spec.render())
        if writes:
            custom.add_prim_attr("side_effect_mem", True)
        return custom
