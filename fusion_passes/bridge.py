"""The way into MindSpore's compiler: hands every graph to a Python function and applies the plan it returns."""

from __future__ import annotations

import ctypes
import functools
import json
import sys
import traceback
import warnings
from pathlib import Path

import mindspore

from .. import library
from . import bridge_build

_PASS = "ms_flash_fusion"
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_UNCHANGED, _CHANGED, _STOP = 0, 1, 2


class StopCompilation(RuntimeError):
    """Raised by a planner to end the compilation of the graph with its text as the error."""


class PlanRefused(ValueError):
    """The bridge found a plan to be wrong; the graph is as it was."""


def found() -> Path | None:
    """The compiled bridge for this MindSpore, from the package or the user's cache; ``None`` before the first use.

    Raises:
        RuntimeError: If this MindSpore is not supported.
    """
    version = mindspore.__version__
    if not version.startswith(bridge_build.MINDSPORE):
        raise RuntimeError(f"fusion supports MindSpore {bridge_build.MINDSPORE}*, but this is {version}. Hint: pip "
                           f"install 'mindspore=={bridge_build.MINDSPORE}*', or call ms_flash.flash_attention in the "
                           "model, which needs no fusion")
    name = bridge_build.file_name(version)
    for folder in (Path(library.__file__).resolve().parent / "lib", bridge_build.cache()):
        if (folder / name).exists():
            return folder / name
    return None


def path() -> Path:
    """The compiled bridge, compiled now if need be.

    Raises:
        RuntimeError: If this MindSpore is not supported, or the bridge cannot be compiled.
    """
    here = found()
    if here is None:
        here = bridge_build.cache() / bridge_build.file_name(mindspore.__version__)
        bridge_build.build(Path(mindspore.__file__).resolve().parent, mindspore.__version__, here)
    return here


@functools.lru_cache(None)
def _bridge() -> ctypes.PyDLL:
    """The bridge, loaded and registered with MindSpore: once per process, since a registration cannot be undone."""
    from mindspore.graph import CustomPassType, register_custom_pass

    file = path()
    bridge = ctypes.PyDLL(str(file))   # keeps the GIL: converting Python primitives needs it
    bridge.ms_flash_bridge_apply.restype = ctypes.c_char_p
    bridge.ms_flash_bridge_apply.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.py_object),
                                              ctypes.c_int]
    bridge.ms_flash_bridge_stop.argtypes = [ctypes.c_char_p]
    bridge.ms_flash_bridge_set_callback.argtypes = [ctypes.c_void_p]
    if not register_custom_pass(_PASS, str(file), "all", CustomPassType.FULL_GRAPH):
        raise RuntimeError(f"MindSpore did not accept the fusion bridge {file}")
    return bridge


def load() -> None:
    """Loads and registers the bridge; without a planner it does nothing.

    Raises:
        RuntimeError: As `path`, or if the bridge cannot be loaded.
    """
    try:
        _bridge()
    except OSError as error:
        raise RuntimeError(f"the fusion bridge cannot be loaded: {error}") from error


def set_planner(planner) -> None:
    """`planner(graph, apply)` is called for every graph that MindSpore compiles from now on; ``None`` for none.

    `graph` is a dict; ``apply(plan, primitives)`` changes the graph, or raises PlanRefused and leaves it alone. What
    the planner raises becomes a warning, except StopCompilation.
    """
    load()
    pointer = None if planner is None else ctypes.cast(_callback, ctypes.c_void_p)
    _planner[:] = [planner]
    _bridge().ms_flash_bridge_set_callback(pointer)


_planner = [None]
_applied = []   # primitives that MindSpore's graphs refer to


@_CALLBACK
def _callback(run, text):
    changed = []

    def apply(plan, primitives):
        objects = (ctypes.py_object * max(1, len(primitives)))(*primitives)
        wrong = _bridge().ms_flash_bridge_apply(run, json.dumps(plan).encode(), objects, len(primitives))
        if wrong:
            raise PlanRefused(wrong.decode(errors="replace"))
        _applied.extend(primitives)
        changed.append(True)

    try:
        graph = json.loads(text)
        if "error" in graph:
            raise RuntimeError(f"the graph could not be described: {graph['error']}")
        _attach_data(graph)
        _planner[0](graph, apply)
    except StopCompilation as stop:
        _bridge().ms_flash_bridge_stop(str(stop).encode())
        return _STOP
    except BaseException as error:  # nothing may pass through MindSpore's compiler
        _warn(error)
    return _CHANGED if changed else _UNCHANGED


def _attach_data(graph):
    """Contents of constant Tensors: views of MindSpore's memory, valid while the graph is planned."""
    for node in graph["nodes"]:
        place = node.get("data")
        if place is not None:
            buffer = (ctypes.c_char * place["bytes"]).from_address(place["address"])
            node["data"] = memoryview(buffer).cast("B").toreadonly()


def _warn(error):
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = f" ({Path(where[0].filename).name}:{where[0].lineno})" if where else ""
    text = (f"ms_flash: fusion failed and left the graph as it was: {type(error).__name__}: {error}{place}. "
            "Training goes on without fusion.")
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # warnings are errors here, and this is no place for one
        print(text, file=sys.stderr)
