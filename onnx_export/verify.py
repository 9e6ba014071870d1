"""Proof that a model computes what the net computes: ONNX's checker, ONNX Runtime, ONNX's reference evaluator."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import inputs as net_inputs
from . import schema
from .convert import ExportError
from .extras import need
from .mindir import array_of, evaluating
from .runtime import Runtime

TOLERANCES = {"float32": 1e-4, "float64": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}
_FUNC = "export_onnx"
_EVALUATOR_BYTES = 64 * 2**20       # ONNX's evaluator is plain NumPy: beyond this it would take minutes


@dataclass
class Certificate:
    """What was checked of a model, with which result; ``str`` of it is for people."""

    path: Path
    model: str = ""
    checks: list[str] = field(default_factory=list)
    runs: list[tuple[str, str, float, float]] = field(default_factory=list)    # what, shapes, error, tolerance
    notes: list[str] = field(default_factory=list)
    sites: list = field(default_factory=list)       # softmax of the net: fused, or left with a reason

    @property
    def passed(self) -> bool:
        """Whether every comparison stayed within its tolerance."""
        return all(error <= tolerance for _, _, error, tolerance in self.runs)

    @property
    def largest_error(self) -> float:
        """The largest error of all comparisons, relative to the largest value of its output."""
        return max((error for _, _, error, _ in self.runs), default=0.0)

    def __str__(self):
        lines = [f"{'certificate' if self.passed else 'NO certificate'} for {self.model}"]
        lines += [f"  {text}" for text in self.checks]
        lines += [f"  {what:<28} {shapes:<40} error {error:.2g}" + ("" if error <= tolerance else
                  f" > {tolerance:.2g}, TOO LARGE") for what, shapes, error, tolerance in self.runs]
        fused = sum(site.fused for site in self.sites)
        if fused:
            lines.append(f"  attention written out in the net, fused: {fused}")
        lines += [f"  softmax in {site.scope or 'the net itself'} is left as it is: {site.reason}"
                  for site in self.sites if not site.fused]
        lines += [f"  note: {text}" for text in self.notes]
        return "\n".join(lines)


def certify(path, proto, profile, net, args, found, verify, tolerance, shown, progress):
    """Checks the model at `path`.

    Raises:
        ExportError: If ONNX's checker rejects the model, or ONNX Runtime cannot load or run it.
    """
    onnx = need("onnx")
    progress("checking", 0.0)
    certificate = Certificate(path, _describe(path, proto, profile, shown))
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except Exception as error:
        raise ExportError(f"For '{_FUNC}', ONNX's checker rejects the model: {error}") from error
    certificate.checks.append(f"ONNX {onnx.__version__} checker, full check: passed")
    if verify is False:
        certificate.notes.append("not compared with the net: verify=False")
        return certificate
    if net is None:
        certificate.notes.append("not compared with the net: a .mindir file is not run")
        return certificate
    trials = _trials(net, args, found, verify, certificate)
    names = [output.name for output in proto.graph.output]
    references = []
    try:
        for index, (_, call) in enumerate(trials):
            progress("running the net in MindSpore", (index + 1) / (3 * len(trials)))
            references.append(run_net(net, call))
    except RuntimeError as error:       # primitives that MindSpore has for other devices only
        certificate.notes.append(f"MindSpore cannot run the net on this device ({_first_line(error)}): the runtimes "
                                 "are compared with each other")
        references = [evaluate(path, names, arrays) for arrays, _ in trials]
        net = None
    if profile.runs_in_onnxruntime:
        _compare_runtime(certificate, path, trials, references, names, tolerance, progress)
    else:
        certificate.notes.append(f"profile '{profile.name}' is not for ONNX Runtime: not run there")
    if net is not None:
        _compare_evaluator(certificate, path, trials, references, names, tolerance, progress)
    return certificate


def _describe(path, proto, profile, shown):
    data = path.with_name(path.name + ".data")
    megabytes = (path.stat().st_size + (data.stat().st_size if data.exists() else 0)) / 2**20
    nodes = sum(node.domain == schema.DOMAIN for node in proto.graph.node)
    kinds = f", {nodes} {schema.OP_TYPE} nodes" if nodes else ""
    return f"{shown}: {megabytes:.2f} MiB, profile {profile.name}, opset {profile.opset}{kinds}"


def _trials(net, args, found, verify, certificate):
    """[(arrays by input name, arguments of the net)]: the examples and a second shape, or what the user gave."""
    if verify is not True:
        trials = []
        for call in verify:
            call = call if isinstance(call, (tuple, list)) else (call,)
            again, _ = net_inputs.describe(net, call, [entry.name for entry in found], None)
            trials.append(({entry.name: entry.example for entry in again}, list(call)))
        return trials
    rng = np.random.default_rng(0)
    lengths = net_inputs.lengths_of(found)
    lengths = {name: 2 + i if n < 0 else n for i, (name, n) in enumerate(lengths.items())}
    first = {entry.name: entry.example for entry in found}
    if any(x is None for x in first.values()):
        first = net_inputs.redrawn(found, lengths, rng)
    other = {name: n + 1 if n < 3 else n - 1 for name, n in lengths.items()}
    second = net_inputs.redrawn(found, other, rng)
    constant = [entry.name for entry in found if entry.example is not None and entry.example.size > 1
                and "int" in entry.dtype and np.unique(entry.example).size == 1]
    if constant:
        certificate.notes.append(f"all values of the example of {', '.join(constant)} are equal: the comparison would "
                                 "say more with real ones")
    return [(arrays, net_inputs.substituted(args, found, arrays)) for arrays in (first, second)]


def run_net(net, args):
    """Arrays that the net returns, flat, None left out."""
    with evaluating(net), _score_on_cpu(), _one_by_one():
        return _flat_arrays(net(*args))


@contextlib.contextmanager
def _one_by_one():
    """A primitive without a kernel fails where it is called; launched ahead it may take the process down."""
    from mindspore._c_expression import ms_ctx_param
    from mindspore.context import _context

    # set_context warns at each call, and what is to replace it, runtime.launch_blocking(), has no way back
    context, key = _context(), ms_ctx_param.pynative_synchronize
    before = context.get_param(key)
    context.set_param(key, True)
    try:
        yield
    finally:
        context.set_param(key, before)


def _flat_arrays(value):
    from mindspore import Tensor

    if value is None:
        return []
    if isinstance(value, (tuple, list)):
        return [array for x in value for array in _flat_arrays(x)]
    return [array_of(value) if isinstance(value, Tensor) else np.asarray(value)]


@contextlib.contextmanager
def _score_on_cpu():
    """MindSpore has no CPU kernel for flash_attention_score: there the one of ms_flash stands in for it."""
    import mindspore as ms
    from mindspore import ops

    from ..compat import flash_attention_score

    if ms.get_context("device_target") != "CPU":
        yield
        return
    original = ops.flash_attention_score
    places = [(module, name) for module in list(sys.modules.values()) if module is not None
              for name, value in list(getattr(module, "__dict__", {}).items()) if value is original]
    for module, name in places:
        setattr(module, name, flash_attention_score)
    try:
        yield
    finally:
        for module, name in places:
            setattr(module, name, original)


def _compare_runtime(certificate, path, trials, references, names, tolerance, progress):
    onnxruntime = need("onnxruntime")
    try:
        running = Runtime(path)
    except Exception as error:
        if "NOT_IMPLEMENTED" in str(error) and _has_bfloat16(path):
            certificate.notes.append(f"ONNX Runtime {onnxruntime.__version__} lacks a bfloat16 kernel on the CPU, the "
                                     f"model was not run there: {_first_line(error)}")
            return
        raise ExportError(f"For '{_FUNC}', ONNX Runtime cannot load the model: {error}") from error
    for index, ((arrays, _), expected) in enumerate(zip(trials, references)):
        progress("running in ONNX Runtime", (len(trials) + index + 1) / (3 * len(trials)))
        try:
            got = running.run(arrays)
        except Exception as error:
            raise ExportError(f"For '{_FUNC}', ONNX Runtime cannot run the model with inputs {_shapes(arrays)}: "
                              f"{error}") from error
        _record(certificate, f"ONNX Runtime {onnxruntime.__version__}", arrays, got, expected, names, tolerance)


def _has_bfloat16(path):
    """Whether any node can have met bfloat16."""
    graph = need("onnx").load(str(path), load_external_data=False).graph
    return any(x.data_type == 16 for x in graph.initializer) or any(
        x.type.tensor_type.elem_type == 16 for x in (*graph.input, *graph.output)) or any(
        a.name == "to" and a.i == 16 for node in graph.node for a in node.attribute)


def _first_line(error):
    return str(error).strip().splitlines()[0]


def _compare_evaluator(certificate, path, trials, references, names, tolerance, progress):
    data = path.with_name(path.name + ".data")
    if path.stat().st_size + (data.stat().st_size if data.exists() else 0) > _EVALUATOR_BYTES:
        certificate.notes.append("too large for ONNX's reference evaluator: not run there")
        return
    progress("running in ONNX's reference evaluator", 0.9)
    arrays, expected = trials[-1][0], references[-1]
    try:
        got = evaluate(path, names, arrays)
    except Exception as error:      # gaps of the evaluator, such as operators of other domains
        certificate.notes.append(f"ONNX's reference evaluator does not run it: {_first_line(error)}")
        return
    _record(certificate, "ONNX reference evaluator", arrays, got, expected, names, tolerance)


def evaluate(path, names, arrays):
    """The model in ONNX's own evaluator, in NumPy, with the node computed by the float64 reference of ms_flash."""
    onnx = need("onnx")
    from onnx.reference import ReferenceEvaluator

    model = onnx.load(str(path))
    del model.functions[:]
    for node in model.graph.node:       # an input left out would get what the output left out of another node holds
        while node.domain == schema.DOMAIN and not node.input[-1]:
            del node.input[-1]
    return ReferenceEvaluator(model, new_ops=[op_run()]).run(names, arrays)


def op_run():
    """The node for ``onnx.reference.ReferenceEvaluator(model, new_ops=[op_run()])``: float64, from reference.py."""
    need("onnx")
    from onnx.reference.op_run import OpRun

    from .. import reference

    class FlashAttention(OpRun):
        op_domain = schema.DOMAIN

        def _run(self, q, k, v, attn_mask=None, **attributes):
            values = {**schema.DEFAULTS, **{n: x for n, x in attributes.items() if x is not None}}
            right = 0 if values["is_causal"] else values["right_window_size"]
            call: dict[str, Any] = {
                "scale": values["scale"] or None, "softcap": values["softcap"], "left": values["left_window_size"],
                "right": right, "align": "bottom_right" if values["causal_alignment"] else "top_left"}
            if attn_mask is not None:
                key = "attn_mask" if attn_mask.dtype == bool else "bias"
                call[key] = ~attn_mask if key == "attn_mask" else attn_mask.astype(np.float64)
            out, lse, _ = reference.forward(q, k, v, **call)
            return out.astype(q.dtype), lse.astype(np.float32)

    return FlashAttention


def _record(certificate, what, arrays, got, expected, names, tolerance):
    if len(got) != len(expected):
        raise ExportError(f"For '{_FUNC}', the model has {len(got)} outputs, but the net returned {len(expected)}.")
    worst, bound = -1.0, 0.0
    for name, x, y in zip(names, got, expected):
        if tuple(x.shape) != tuple(y.shape):
            raise ExportError(f"For '{_FUNC}', the output '{name}' has shape {tuple(x.shape)} in {what}, but "
                              f"{tuple(y.shape)} in MindSpore, for inputs {_shapes(arrays)}.")
        error, allowed = difference(x, y), TOLERANCES.get(str(y.dtype), 0.0) if tolerance is None else tolerance
        if worst < 0 or error - allowed > worst - bound:
            worst, bound = error, allowed
    certificate.runs.append((what, _shapes(arrays), worst, bound))


def difference(got, expected):
    """Largest difference, relative to the largest value; infinite where NaN or infinity stand in other places."""
    if not np.asarray(expected).size:
        return 0.0
    x, y = (np.asarray(a).astype(np.float64) for a in (got, expected))
    finite = np.isfinite(y)
    if (np.isnan(x) != np.isnan(y)).any() or (x[~finite & ~np.isnan(y)] != y[~finite & ~np.isnan(y)]).any():
        return float("inf")
    if not finite.any():
        return 0.0
    error = np.abs(x[finite] - y[finite]).max()
    if not np.isfinite(error):
        return float("inf")
    return float(error / max(np.abs(y[finite]).max(), 1e-30)) if error else 0.0


def _shapes(arrays):
    shown = [f"{name} {'x'.join(map(str, x.shape)) or 'scalar'}" for name, x in arrays.items()]
    return ", ".join(shown if len(shown) < 5 else [*shown[:3], f"and {len(shown) - 3} more"])
