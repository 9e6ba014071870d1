"""ms_flash: exact attention for MindSpore in memory linear in the length."""

from . import nn
from .backends import available_backends
from .backends.cpu import get_num_threads, set_num_threads
from .compat import flash_attention_score
from .functional import flash_attention, flash_attention_varlen
from .version import __version__

__all__ = ["__version__", "available_backends", "flash_attention", "flash_attention_score", "flash_attention_varlen",
           "get_num_threads", "nn", "set_num_threads"]
