"""ms_flash: exact attention for MindSpore in memory linear in the length."""

import importlib

from .version import __version__

# Imported when first used.
_LATER = {"explain": ".fusion_passes", "export_onnx": ".onnx_export", "fuse": ".fusion_passes",
          "fusion": ".fusion_passes", "unfuse": ".fusion_passes", "verify": ".fusion_passes"}
__all__ = ["__version__", "available_backends", "explain", "export_onnx", "flash_attention", "flash_attention_score",
           "flash_attention_varlen", "flash_attention_with_kvcache", "fuse", "fusion", "get_num_threads",
           "merge_attention", "nn", "set_num_threads", "unfuse", "verify"]

_reason = None
try:
    from . import nn
    from .backends import available_backends
    from .backends.cpu import get_num_threads, set_num_threads
    from .compat import flash_attention_score
    from .functional import flash_attention, flash_attention_varlen
    from .kvcache import flash_attention_with_kvcache, merge_attention
except Exception as error:  # a broken MindSpore raises anything; `python -m ms_flash doctor` must be able to say so
    _reason = error


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module 'ms_flash' has no attribute {name!r}")
    if _reason is None and name in _LATER:
        return getattr(importlib.import_module(_LATER[name], __name__), name)
    raise ImportError(f"ms_flash.{name} is not available: {type(_reason).__name__}: {_reason}. "
                      "Hint: run 'python -m ms_flash doctor'.") from _reason
