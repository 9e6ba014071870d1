"""`onnx_export/gpu/triton_forward.py` in Triton's interpreter, loaded by its path so that no MindSpore is needed."""
from __future__ import annotations

import importlib.util
import os
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"        # read when a kernel is defined

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

FILE = Path(__file__).resolve().parents[2] / "onnx_export" / "gpu" / "triton_forward.py"
_SPEC = importlib.util.spec_from_file_location("triton_forward", FILE)
kernels = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kernels)
flash_attention = kernels.flash_attention


def _as_float(handle):
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _repair_products():
    """Triton 3.9's interpreter keeps bfloat16 as integers of its bits, and `tl.dot` multiplies those."""
    product = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: product(
        self, _as_float(a), _as_float(b), *rest)


_repair_products()
