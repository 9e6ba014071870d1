"""The custom-op library of ONNX Runtime: ``ai.msflash::FlashAttention`` with compiled kernels, in one file."""

from __future__ import annotations

import os
from pathlib import Path

import ms_flash

MINIMUM = (1, 17)


def library_path() -> Path:
    """The library of this package; MS_FLASH_ORT_LIB names another one (an instrumented build, for instance)."""
    other = os.environ.get("MS_FLASH_ORT_LIB")
    return Path(other) if other else Path(ms_flash.__file__).resolve().parent / "lib" / "libms_flash_ort.so"


def register(session_options):
    """Makes the compiled kernels of the node ``ai.msflash::FlashAttention`` known to sessions with these options.

    A session without them runs the function that the exported model carries; with them it runs the kernels of ms_flash:
    on the CPU with the threads of the session, and on a GPU where the session has the CUDA provider and
    ``libms_flash_cuda.so`` is built. C++ programs call ``RegisterCustomOpsLibrary_V2`` on the same file, which needs
    nothing beside it.

    Args:
        session_options (onnxruntime.SessionOptions): Options of sessions to be created.

    Returns:
        onnxruntime.SessionOptions, the same object.

    Raises:
        TypeError: If `session_options` is not an ``onnxruntime.SessionOptions``.
        RuntimeError: If ONNX Runtime is older than 1.17, or the library is missing or cannot be loaded.

    Supported Platforms:
        ``CPU``, ``GPU`` (compiled only)

    Examples:
        >>> import onnxruntime
        >>> from ms_flash import onnx_export
        >>> options = onnx_export.register(onnxruntime.SessionOptions())
        >>> session = onnxruntime.InferenceSession("model.onnx", options)
    """
    import onnxruntime

    if not isinstance(session_options, onnxruntime.SessionOptions):
        raise TypeError(f"For 'register', the 'session_options' must be an onnxruntime.SessionOptions, but got "
                        f"{type(session_options).__name__}.")
    if tuple(int(part) for part in onnxruntime.__version__.split(".")[:2]) < MINIMUM:
        raise RuntimeError(f"For 'register', ONNX Runtime must be {'.'.join(map(str, MINIMUM))} or newer, but got "
                           f"{onnxruntime.__version__}.")
    file = library_path()
    if not file.exists():
        raise RuntimeError(f"the native library {file} is missing; build it with 'pip install .' or 'make build'")
    try:
        session_options.register_custom_ops_library(str(file))
    except Exception as error:
        raise RuntimeError(f"the native library {file} cannot be loaded: {error}") from error
    return session_options
