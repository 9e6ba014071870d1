"""Graph fusion, imported as ``ms_flash.fusion_passes``: attention in unmodified models, put on ms_flash's ops."""

from .session import fuse, fusion, unfuse

__all__ = ["fuse", "fusion", "unfuse"]
