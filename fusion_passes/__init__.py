"""Graph fusion, imported as ``ms_flash.fusion_passes``: attention in unmodified models, put on ms_flash's ops."""

from .explain import explain
from .session import fuse, fusion, unfuse
from .verify import verify

__all__ = ["explain", "fuse", "fusion", "unfuse", "verify"]
