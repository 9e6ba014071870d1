"""``verify``: the same step as written and fused, in one process, compared value by value: the parity certificate."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import asdict, dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from . import session, steps, target, wide
from .explain import compiled

# Largest error that passes, as a share of the largest magnitude of a value, by the coarsest dtype of the attention.
BOUNDS = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass
class Row:
    """One compared value: the loss or a gradient. Errors are largest absolute differences."""

    name: str
    largest: float              # magnitude of the value as written
    difference: float           # fused against as written
    error: float | None         # fused against the float64 run
    error_unfused: float | None
    allowed: float
    passed: bool


class Certificate:
    """
    The result of `verify`.

    Attributes:
        passed (bool): Whether the attention was fused somewhere, and every value is within its bound.
        rows (list): One Row for the loss and for each gradient.
        report (Report): What was fused.
        reference (str): ``""`` when a float64 run was the reference, otherwise why there is none.
        notes (list): What else the reader should know.
    """

    def __init__(self, rows, report, reference, notes):
        self.rows, self.report, self.reference, self.notes = rows, report, reference, notes

    @property
    def passed(self) -> bool:
        """Whether it holds."""
        return bool(self.report.fused) and all(row.passed for row in self.rows)

    def to_json(self, indent: int | None = 2) -> str:
        """All of it, for programs."""
        return json.dumps({"passed": self.passed, "reference": self.reference or "float64", "notes": self.notes,
                           "values": [asdict(row) for row in self.rows],
                           "report": json.loads(self.report.to_json(None))}, indent=indent)

    def __str__(self):
        lines = [str(self.report), ""]
        exact = not self.reference
        lines.append(f"{'':40}{'largest':>10}{'difference':>12}" +
                     (f"{'error':>12}{'as written':>12}" if exact else "") + f"{'allowed':>12}")
        worst = sorted(self.rows[1:], key=lambda row: -row.difference / row.allowed if row.allowed else 0)
        shown = [row for row in worst if not row.passed] + [row for row in worst if row.passed][:8]
        for row in self.rows[:1] + shown:
            name = row.name if len(row.name) <= 38 else "..." + row.name[-35:]
            lines.append(f"{name:40}{row.largest:10.2e}{row.difference:12.2e}" +
                         (f"{row.error:12.2e}{row.error_unfused:12.2e}" if exact else "") + f"{row.allowed:12.2e}" +
                         ("" if row.passed else "  TOO LARGE"))
        if len(shown) < len(worst):
            lines.append(f"... and {len(worst) - len(shown)} more gradients, further inside their bounds")
        lines.append("")
        lines += self.notes
        lines.append("Reference: " + ("the net as written, in float64" if exact else
                                      f"the net as written ({self.reference})"))
        failed = sum(not row.passed for row in self.rows)
        if not self.report.fused:
            lines.append("FAILED: nothing was fused")
        elif failed:
            lines.append(f"FAILED: {failed} of {len(self.rows)} values differ by more than rounding")
        else:
            lines.append(f"PASSED: the loss and {len(self.rows) - 1} gradients agree, fused and as written")
        return "\n".join(lines)

    def __repr__(self):
        return f"<Certificate: {str(self).splitlines()[-1]}>"


def verify(net, *inputs, level="auto", dropout=True, memory="keep"):
    """
    Runs one step of a net as written and fused, in one process and both as compiled graphs, prints how far the loss
    and every gradient are apart, and says whether that is rounding.

    Where the net runs in float64 as well, that run is the reference; otherwise the net as written is. What passes is a
    small share of the value (1e-5 for float32, 5e-3 for float16), four times what the net as written moves by when its
    weights move in their last place, and twice its own error. Parameters are left as they were, and dropout is off
    while numbers are compared.

    Args:
        net (Cell): The net; its value is taken as the loss. Of a training cell the net in it is taken.
        inputs (tuple): What the net is called with.

    Keyword Args:
        level (str, optional): As in `fuse`. Default: ``"auto"``.
        dropout (bool, optional): As in `fuse`. Default: ``True``.
        memory (str, optional): As in `fuse`. Default: ``"keep"``.

    Returns:
        Certificate, whose `passed` is the verdict.

    Raises:
        TypeError: If the type of an argument is wrong.
        ValueError: If a value is not one of those that `fuse` names.
        RuntimeError: If this version of MindSpore is not supported, or the bridge into it cannot be compiled.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> import ms_flash
        >>> from mindspore import nn
        >>> net = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = ms.Tensor(np.random.randn(1, 3, 8), ms.float32)
        >>> certificate = ms_flash.verify(net, x, x, x, None, False)   # need_weights=False
        ms_flash fusion: 1 of 1 attention sites fused in 1 graph
        ...
        Reference: the net as written, in float64
        PASSED: the loss and 7 gradients agree, fused and as written
    """
    steps.checked("verify", net, inputs)
    certificate = _certify(net, inputs, {"level": level, "dropout": dropout, "memory": memory})
    print(certificate)
    return certificate


def _certify(net, inputs, options):
    if steps.is_training_cell(net):
        inner = getattr(net, "network", None)
        if not isinstance(inner, nn.Cell) or steps.is_training_cell(inner):
            raise TypeError("For 'verify', 'net' must be the net without its optimizer, because running that changes "
                            f"the weights, but got {type(net).__name__}.")
        net = inner
    notes = []
    report = compiled(net, inputs, train=True, **options)
    random = sorted({op for graph in report.graphs for op in graph.random})
    train = not random
    if random:
        notes.append(f"Compared with dropout off, because {', '.join(random)} draws anew at each run.")
        notes += [_keep_rate(p) for p in sorted({site.get("dropout") or 0.0 for site in report.fused}) if p]
    coarsest = max((site.get("dtype", "float32") for site in report.fused), key=lambda d: _ULP.get(d, 0),
                   default="float32")
    with steps.graph_mode(), steps.training(net, train), _parameters_kept(net):
        step, names = steps.make(net, inputs, True)
        with session.suspended():
            unfused = _run(step, inputs)
            truth, reference = _float64(net, inputs, len(unfused))
            moved = _moved(step, net, inputs, _ULP.get(coarsest, 2.0**-24))
        with session.fusion(**options) as ran:
            fused = _run(step, inputs)
    if not all(np.isfinite(value).all() for value in unfused):
        notes.append("As written, the net gives inf or NaN here, which nothing can be compared with: verify it on "
                     "other inputs, such as without a row that is masked out altogether.")
    if random:
        notes.append(f"In that run {len(ran.fused)} of {len(ran.sites)} sites were fused.")
    names = ["loss" if i == 0 else f"output {i}" for i in range(len(unfused) - len(names))] + names
    bound = BOUNDS.get(coarsest, BOUNDS["float32"])
    with np.errstate(invalid="ignore"):     # of inf, which is in the notes
        rows = [_row(name, *values, bound) for name, *values in
                zip(names, unfused, fused, moved, truth or [None] * len(names))]
    return Certificate(rows, report, reference, notes)


def _row(name, unfused, fused, moved, truth, bound):
    largest = _largest(unfused)
    difference = _largest(fused - unfused)
    # A gradient that is zero but for rounding has no size of its own to compare with: hence the second term.
    allowed = bound * largest + 4 * _largest(moved - unfused)
    if truth is None:
        return Row(name, largest, difference, None, None, allowed, bool(difference <= allowed))
    error, error_unfused = _largest(fused - truth), _largest(unfused - truth)
    allowed += 2 * error_unfused
    return Row(name, largest, difference, error, error_unfused, allowed, bool(error <= allowed))


def _largest(x):
    return float(np.max(np.abs(x), initial=0.0))


def _run(step, inputs):
    """All values of a step, flat, as float64."""
    values = []

    def collect(value):
        if isinstance(value, (tuple, list, dict)):
            for item in value.values() if isinstance(value, dict) else value:
                collect(item)
        elif isinstance(value, Tensor):
            values.append(value.astype(ms.float32).asnumpy() if value.dtype == ms.bfloat16 else value.asnumpy())

    collect(step(*inputs))
    return [np.asarray(value, np.float64) for value in values]


@contextlib.contextmanager
def _parameters_kept(net):
    """Statistics that a run updates are put back."""
    before = [(p, p.copy()) for p in net.get_parameters()]
    try:
        yield
    finally:
        for parameter, value in before:
            parameter.set_data(value)


def _moved(step, net, inputs, ulp):
    """The step as written after every weight moved by at most `ulp` of itself."""
    rng = np.random.default_rng(0)
    for parameter in net.get_parameters():
        if parameter.dtype in steps.FLOATS and parameter.dtype != ms.bfloat16:
            value = parameter.asnumpy()
            value = value * (1 + ulp * rng.uniform(-1, 1, value.shape))
            parameter.set_data(Tensor(value.astype(np.float64), parameter.dtype))
    return _run(step, inputs)


def _float64(net, inputs, count):
    """(values of the step in float64, ""), or (None, why not)."""
    try:
        net = wide.copy_of(net)
        inputs = tuple(x.astype(ms.float64) if isinstance(x, Tensor) and x.dtype in steps.FLOATS else x for x in inputs)
        with _quiet():
            results = steps.make(net, inputs, True)[0](*inputs)
        whole = wide.is_wide(results)
        values = _run(lambda *_: results, ())
    except Exception as error:  # MindSpore raises anything for a missing kernel
        return None, f"it does not run in float64: {str(error).strip().splitlines()[0][:120]}"
    if not whole or len(values) != count or not all(np.isfinite(v).all() for v in values):
        return None, "it casts to a smaller dtype by itself"
    return values, ""


@contextlib.contextmanager
def _quiet():
    """MindSpore's own log of a failed compilation, which is no failure here, does not reach the terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _keep_rate(p):
    """The share of weights that the op's generator keeps, over 2^20 of them."""
    from ms_flash import flash_attention

    query = Tensor(np.zeros((1, 1, 1024, 8)), ms.float32)
    ones = Tensor(np.ones((1, 1, 1024, 8)), ms.float32)
    kept = float(flash_attention(query, query, ones, dropout_p=p, seed=1).mean().asnumpy()) * (1 - p)
    ok = abs(kept - (1 - p)) < 5 * (p * (1 - p) / 2**20) ** 0.5
    return (f"Dropout {p:g}: ms_flash draws by its own generator; it keeps {kept:.4f} of the weights, "
            f"{1 - p:.4f} expected{'' if ok else ': WRONG'}.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    target.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the certificate; 1 if it does not hold."""
    net, inputs = target.load("verify", args.target)
    certificate = _certify(net, inputs, target.options(args))
    print(certificate.to_json() if args.json else certificate)
    return 0 if certificate.passed else 1
