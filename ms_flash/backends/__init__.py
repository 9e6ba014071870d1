"""The backends, one small class each, and the choice among them."""

from __future__ import annotations

import functools
import os

import mindspore

from ..spec import Unknown, type_error, type_name, value_error
from .ascend import AscendBackend
from .ascend_twin import AscendTwinBackend
from .base import Backend
from .cpu import CpuBackend
from .reference import ReferenceBackend

BACKENDS: dict[str, Backend] = {b.name: b for b in (
    CpuBackend(), ReferenceBackend(), AscendBackend(), AscendTwinBackend())}
_BY_DEVICE = {"CPU": "cpu", "Ascend": "ascend"}


def available_backends() -> dict[str, str]:
    """
    Tells which backends can run here.

    Returns:
        dict, from the name of every backend to ``""`` if it can run, otherwise to the reason why not.

    Supported Platforms:
        ``Ascend`` / ``CPU``

    Examples:
        >>> import ms_flash
        >>> ms_flash.available_backends()["reference"]
        ''
    """
    return {name: backend.available()[1] for name, backend in BACKENDS.items()}


def select(func: str, backend: str | None) -> Backend:
    """The backend for a call of `func`: the argument, else MS_FLASH_BACKEND, else that of the device.

    Raises:
        ValueError: If there is no such backend, or it cannot run here.
        TypeError: If `backend` is neither ``None`` nor a str.
    """
    if backend is not None and (not isinstance(backend, str) or isinstance(backend, Unknown)):
        raise type_error(func, f"the type of 'backend' must be str or None, but got {type_name(backend)}.")
    source = "'backend'"
    if backend is None:
        backend, source = os.environ.get("MS_FLASH_BACKEND"), "the environment variable MS_FLASH_BACKEND"
    if not backend:
        backend, source = _of_device(), "the backend of this device"
    return _checked(func, backend, source)


@functools.lru_cache(None)
def _of_device():
    """Looked up once: a process keeps its device, and the question takes as long as a small op."""
    return _BY_DEVICE.get(mindspore.get_context("device_target"), "cpu")


@functools.lru_cache(None)
def _checked(func, name, source):
    reasons = available_backends()
    if reasons.get(name) == "":
        return BACKENDS[name]
    here = ", ".join(repr(n) for n, reason in reasons.items() if not reason)
    missing = "; ".join(f"{n!r}: {reason}" for n, reason in reasons.items() if reason)
    raise value_error(func, f"{source} must be one of {here}, but got {name!r}. Not available here: {missing}.")
