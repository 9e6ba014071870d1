"""Packages that only the export needs: imported on first use, with a clear message where they are missing."""

from __future__ import annotations

import importlib

_NAMES = {"onnx": "onnx", "onnxruntime": "onnxruntime"}


def need(name, func="export_onnx"):
    """The module `name`.

    Raises:
        ImportError: If the package is not installed, or does not load.
    """
    try:
        module = importlib.import_module(name)
        if name == "onnx":
            importlib.import_module("onnx.helper")
        return module
    except ImportError as error:
        raise ImportError(f"For '{func}', the package '{_NAMES.get(name, name)}' is needed, but it cannot be imported: "
                          f"{error}. Hint: pip install 'ms_flash[onnx]'.") from error
