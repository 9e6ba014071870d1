"""ONNX export, imported as ``ms_flash.onnx_export``.

``ms_flash.export_onnx`` is the entry. ``register(session_options)`` gives ONNX Runtime the kernels of the node.
``rules.register("Name")`` makes a function the rule for a MindSpore primitive. The packages onnx and onnxruntime are
imported only when they are needed.
"""

from .api import export_onnx
from .convert import ExportError
from .ort_ops import register
from .verify import Certificate

__all__ = ["Certificate", "ExportError", "export_onnx", "register"]
