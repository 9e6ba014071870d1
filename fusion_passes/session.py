"""Switches fusion on and off: ``fuse``, ``unfuse`` and the block form ``fusion``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import mindspore
from mindspore.graph import api as graph_api

from .. import library
from . import bridge, places
from .report import GraphReport, Report

LEVELS = ("auto", "core", "layout", "block")
MEMORY = ("keep", "recompute")
# First letters of the operators that draw random numbers.
_RANDOM = ("Dropout", "DropPath", "Uniform", "StandardNormal", "StandardLaplace", "Gamma", "Poisson", "Multinomial",
           "Bernoulli", "Rand", "Normal", "GenMask", "TruncatedNormal")


@dataclass(frozen=True)
class Options:
    """What the user asked for; see `fuse`."""

    level: str = "auto"
    dropout: bool = True
    memory: str = "keep"
    strict: bool = False


class _State:
    """What is on: the innermost of `fuse` and the open `fusion` blocks. An entry of ``None`` is off."""

    def __init__(self):
        self.entries = [None]
        self.cache_path = None
        self.sites = []     # of the compilation that goes on

    @property
    def current(self):
        return self.entries[-1]


_state = _State()


def fuse(level="auto", *, dropout=True, memory="keep", strict=False):
    """
    From now on, attention written with MindSpore's own ops runs on ms_flash in every graph that is compiled.

    The model stays as it is. Graphs compiled before are compiled anew at their next call. Calling it again with the
    same arguments changes nothing; `unfuse` undoes it. Compiled are the cells and functions under GRAPH_MODE or
    ``mindspore.jit``; code that PyNative mode runs op by op is never seen. (What ``jit(capture_mode="bytecode")`` has
    compiled stays as it is: there, call `fuse` first.)

    Args:
        level (str, optional): How much around the attention is taken in: ``"core"`` the attention alone, ``"layout"``
            also the splitting and merging of heads, ``"block"`` also the projections, ``"auto"`` what is fastest for
            each site. Default: ``"auto"``.

    Keyword Args:
        dropout (bool, optional): Whether attention with dropout is fused. It then draws from ms_flash's generator:
            other numbers than MindSpore's, with the same distribution. Default: ``True``.
        memory (str, optional): At level block, ``"keep"`` the projected query, key and value for the backward or
            ``"recompute"`` them. Default: ``"keep"``.
        strict (bool, optional): Whether compiling a graph is an error when it holds attention, or what looks like it,
            and none of it could be fused. Default: ``False``.

    Returns:
        Report, which grows as graphs are compiled; print it.

    Raises:
        TypeError: If the type of an argument is wrong.
        ValueError: If a value is not one of those named.
        RuntimeError: If this version of MindSpore is not supported, or the bridge into it cannot be compiled.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> import ms_flash
        >>> ms.set_context(mode=ms.GRAPH_MODE)
        >>> report = ms_flash.fuse()
        >>> print(report)
        ms_flash fusion: no graph was compiled
        >>> ms_flash.unfuse()
    """
    options = _checked("fuse", level, dropout, memory, strict)
    if len(_state.entries) > 1:
        raise RuntimeError("For 'fuse', it must not be called inside a 'with ms_flash.fusion()' block.")
    if _state.entries[0] and _state.entries[0][0] == options:
        return _state.entries[0][1]
    report = Report()
    bridge.load()
    _change(lambda entries: entries.__setitem__(0, (options, report)))
    if mindspore.get_context("mode") == mindspore.PYNATIVE_MODE:
        warnings.warn("ms_flash.fuse(): the mode is PyNative, where only what is under mindspore.jit is compiled and "
                      "fused; the rest runs as written.", stacklevel=2)
    return report


def unfuse():
    """
    Undoes `fuse`: graphs that were fused are compiled anew, as written, at their next call.

    Raises:
        RuntimeError: If it is called inside a ``with ms_flash.fusion()`` block.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import ms_flash
        >>> ms_flash.unfuse()
    """
    if len(_state.entries) > 1:
        raise RuntimeError("For 'unfuse', it must not be called inside a 'with ms_flash.fusion()' block.")
    if _state.entries[0] is not None:
        _change(lambda entries: entries.__setitem__(0, None))


@contextlib.contextmanager
def fusion(level="auto", *, dropout=True, memory="keep", strict=False):
    """
    Fusion for the calls inside a block: ``with ms_flash.fusion() as report:``.

    What is called inside runs fused, what is called outside as written. A function that is called on both sides is
    compiled anew each time it changes sides, so a training loop belongs inside as a whole.

    Args:
        level (str, optional): As in `fuse`. Default: ``"auto"``.

    Keyword Args:
        dropout (bool, optional): As in `fuse`. Default: ``True``.
        memory (str, optional): As in `fuse`. Default: ``"keep"``.
        strict (bool, optional): Whether it is an error, as in `fuse`, and at the end of the block too, that nothing
            was fused. Default: ``False``.

    Returns:
        Context manager, whose value is the Report.

    Raises:
        TypeError: If the type of an argument is wrong.
        ValueError: If a value is not one of those named.
        RuntimeError: As in `fuse`, and for `strict` if nothing was fused in the block.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> import ms_flash
        >>> from mindspore import nn
        >>> ms.set_context(mode=ms.GRAPH_MODE)
        >>> net = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = ms.Tensor(np.ones((1, 3, 8)), ms.float32)
        >>> with ms_flash.fusion() as report:
        ...     out = net(x, x, x, None, False)     # need_weights=False
        >>> print(len(report.fused))
        1
    """
    options = _checked("fusion", level, dropout, memory, strict)
    report = Report()
    bridge.load()
    with _entry((options, report)):
        yield report
        idle = not report.compiled and not _compiled.any()  # a loop comes back to what it compiled at first
    if idle:
        text = ("no graph was compiled in the block. Hint: PyNative mode runs op by op; put the forward function under "
                "mindspore.jit, or set mode=mindspore.GRAPH_MODE.")
        if strict:
            raise RuntimeError(f"For 'fusion', {text}")
        warnings.warn(f"ms_flash.fusion(): {text}", stacklevel=3)
    elif strict and report.compiled and not report.fused:
        raise RuntimeError(f"For 'fusion', nothing was fused: {_reasons(report.left)}")


def suspended():
    """Context manager: everything runs as written."""
    return _entry(None)


@contextlib.contextmanager
def _entry(entry):
    _change(lambda entries: entries.append(entry))
    try:
        yield
    finally:
        _change(lambda entries: entries.pop())


def _checked(func, level, dropout, memory, strict):
    for name, value, allowed in (("level", level, LEVELS), ("memory", memory, MEMORY)):
        if not isinstance(value, str):
            raise TypeError(f"For '{func}', the type of '{name}' must be str, but got {type(value).__name__}.")
        if value not in allowed:
            raise ValueError(f"For '{func}', the '{name}' must be one of {list(allowed)}, but got {value!r}.")
    for name, value in (("dropout", dropout), ("strict", strict)):
        if not isinstance(value, bool):
            raise TypeError(f"For '{func}', the type of '{name}' must be bool, but got {type(value).__name__}.")
    return Options(level, dropout, memory, strict)


def _change(edit):
    """Edits the entries, and sees to it that compiled graphs follow."""
    before = _state.current and _state.current[0]
    edit(_state.entries)
    after = _state.current and _state.current[0]
    if before == after:
        return
    _compiled.switch(before, after)
    _use_own_cache_folder(after is not None)
    if after is not None:
        bridge.set_planner(_plan)
    elif before is not None:
        bridge.set_planner(None)


class _Compiled:
    """MindSpore finds a compiled graph by the arguments of the call and knows nothing of this pass: after a change it
    would go on with the old graph. So it is shown those compiled under the options of now only.

    A graph compiled anew takes the place of the old one, so each belongs to the options it was last compiled under.
    """

    def __init__(self):
        self.owners = {}

    @staticmethod
    def _sets():
        return {0: graph_api.ms_compile_cache, **graph_api.cells_compile_cache}

    def any(self):
        """Whether there are graphs compiled under the options of now."""
        return any(self._sets().values())

    def switch(self, before, after):
        sets = self._sets()
        for cell, phases in sets.items():
            self.owners.update(((cell, phase), before) for phase in phases)
            phases.clear()
        for (cell, phase), owner in list(self.owners.items()):
            if cell not in sets:    # gone
                del self.owners[cell, phase]
            elif owner == after:
                sets[cell].add(phase)


_compiled = _Compiled()


def _use_own_cache_folder(fused):
    """Compiled graphs that MindSpore stores on disk: fused ones go into a folder of their own, named by this pass."""
    enabled = mindspore.get_context("enable_compile_cache")
    if enabled is None:
        enabled = os.environ.get("MS_COMPILER_CACHE_ENABLE") == "1"
    if not enabled:
        return
    here = mindspore.get_context("compile_cache_path") or os.environ.get("MS_COMPILER_CACHE_PATH") or "."
    if fused and _state.cache_path is None:
        _state.cache_path = here
        here = str(Path(here) / f"ms_flash-{_fingerprint(_state.current[0])}")
    elif not fused and _state.cache_path is not None:
        here, _state.cache_path = _state.cache_path, None
    else:
        return
    mindspore.set_context(compile_cache_path=here)


def _fingerprint(options):
    """Of all that decides what a fused graph is: the options, the code of the pass, the library its ops are in."""
    digest = hashlib.sha256(f"{options} {mindspore.__version__} {library.path()}".encode())
    for source in sorted(Path(__file__).resolve().parent.rglob("*")):
        if source.suffix in (".py", ".cpp", ".h"):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _plan(graph, apply):
    """What the bridge calls for every graph."""
    from . import plan  # the matcher is not needed before

    if _exporting():
        return
    options, report = _state.current
    report.compiled += graph["root"]    # the others are its branches and loop bodies
    start = time.thread_time()  # of the processor: what compilation takes longer by, on a busy machine too
    primitives = []

    def handle(primitive):
        primitives.append(primitive)
        return len(primitives) - 1

    try:
        made, sites = plan.plan_graph(graph, {"level": options.level, "dropout": options.dropout,
                                              "memory": options.memory, "handle": handle})
    except Exception as error:
        report.failed.append(f"{type(error).__name__}: {error}")
        if options.strict:
            raise bridge.StopCompilation(f"For 'fuse', fusion failed: {report.failed[-1]}") from error
        raise
    refused = None
    if made["replace"]:
        try:
            apply(made, primitives)
        except bridge.PlanRefused as error:
            refused = error
    for site in sites:
        site["place"] = places.name(graph, site)
        if refused and site["fused"]:
            site.update(fused=False, level="", reason=f"the plan was refused: {refused}")
    if sites:
        random = sorted({node["op"] for node in graph["nodes"]
                         if node["op"].startswith(_RANDOM) and not node["op"].endswith("Grad")})
        report.graphs.append(GraphReport(graph["graph"], len(graph["nodes"]), time.thread_time() - start, sites,
                                         random))
    if refused:
        raise refused
    if graph["root"]:
        _state.sites = []
    _state.sites += sites
    if options.strict and graph["last"] and _state.sites and not any(site["fused"] for site in _state.sites):
        raise bridge.StopCompilation(f"For 'fuse', nothing was fused: {_reasons(_state.sites)}")


def _exporting():
    """Whether MindSpore compiles what it writes to a file. That stays as written: it is read where ms_flash is not."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile" and frame.f_globals.get("__name__") == graph_api.__name__:
            return str(frame.f_locals.get("phase")).startswith("export")
        frame = frame.f_back
    return False


def _reasons(sites):
    if not sites:
        return "there is no softmax in the graphs."
    return "; ".join(f"{site['place'] or site.get('line')}: {site.get('reason')}" for site in sites)
