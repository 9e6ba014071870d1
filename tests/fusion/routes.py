"""The ways a graph reaches the fusion pass, and what comes out: losses, gradients, sites by cell.

Many cells share one graph, because compiling is what takes time; a gradient belongs to the cell of its parameter.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from ms_flash.fusion_passes import ir, plan
from spellings import BATCH, CONTEXT, HIDDEN, LENGTH

import ms_flash


class Bundle(nn.Cell):
    """All cells on the same inputs; the losses, one by one, and their sum."""

    def __init__(self, cells):
        super().__init__()
        self.members = nn.CellList(cells)

    def construct(self, x, context, pad):
        losses = ()
        for cell in self.members:
            out = cell(x, context, pad).astype(ms.float32)
            losses += ((out * ops.cos(out)).sum(),)
        return ops.stack(losses).sum(), losses


class TrainStep(nn.TrainOneStepCell):
    """TrainOneStepCell that keeps the single losses."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, (ops.ones_like(loss[0]), tuple(
            ops.zeros_like(one) for one in loss[1])))
        return ops.depend(loss, self.optimizer(grads))


@dataclass
class Result:
    """One run. `sites` by the number of the cell."""

    losses: np.ndarray
    grads: dict
    sites: dict = field(default_factory=dict)


def inputs(seed=0, dtype=np.float32):
    """x, context and pad; the first key of a row is never padding."""
    rng = np.random.default_rng(seed)
    pad = rng.random((BATCH, LENGTH)) < 0.3
    pad[:, 0] = False
    return (Tensor(rng.normal(size=(BATCH, LENGTH, HIDDEN)).astype(dtype)),
            Tensor(rng.normal(size=(BATCH, CONTEXT, HIDDEN)).astype(dtype)), Tensor(pad))


def build(classes, change=None):
    """A Bundle of new cells with the same parameters at every call, after `change` of each cell."""
    cells = []
    for number, cls in enumerate(classes):
        ms.set_seed(number + 1)
        np.random.seed(number + 1)
        cell = cls()
        cell.set_train()
        cells.append(change(cell) if change else cell)
    return Bundle(cells)


@contextlib.contextmanager
def _sites(net, fused, options):
    """Runs with fusion and sorts the sites by cell: that of the nearest parameters."""
    found = {}
    if not fused:
        yield found
        return
    planner = plan.plan_graph

    def seen(described, settings):
        made, sites = planner(described, settings)
        graph = ir.Graph(described)
        for site in sites:
            found.setdefault(_cell(graph.by_id[site["node"]]), []).append(site)
        return made, sites

    plan.plan_graph = seen
    try:
        with ms_flash.fusion(**options):
            yield found
    finally:
        plan.plan_graph = planner


def _cell(node):
    level, seen = [node], set()
    while level:
        names = [n.name for n in level if n.op == "Parameter" and "members." in n.name]
        if names:
            return int(names[0].split("members.")[1].split(".")[0])
        seen.update(level)
        level = [n for at in level for n in at.inputs if n is not None and n not in seen and n.dtype != "umonad"]
    return None


def jit_gradient(net, args, fused, **options):
    """GRAPH_MODE, ``jit(value_and_grad)``: forward and backward in one graph."""
    ms.set_context(mode=ms.GRAPH_MODE)
    parameters = net.trainable_params()
    gradient = ms.value_and_grad(net, (0, 1), parameters, has_aux=True)

    @ms.jit
    def step(x, context, pad):
        return gradient(x, context, pad)

    with _sites(net, fused, options) as sites:
        (_, losses), (dx, dp) = step(*args)
    return _result(net, losses, [*dx, *dp], ["x", "context"], sites)


def jit_forward(net, args, fused, **options):
    """PyNative, ``value_and_grad`` over a compiled forward: the pass sees the forward alone."""
    ms.set_context(mode=ms.PYNATIVE_MODE)

    @ms.jit
    def forward(x, context, pad):
        return net(x, context, pad)

    with _sites(net, fused, options) as sites:
        (_, losses), (dx, dp) = ms.value_and_grad(forward, (0, 1), net.trainable_params(), has_aux=True)(*args)
    return _result(net, losses, [*dx, *dp], ["x", "context"], sites)


def train_step(net, args, fused, **options):
    """GRAPH_MODE, a TrainOneStepCell with plain SGD of rate 1: the gradient is what the parameters lose."""
    ms.set_context(mode=ms.GRAPH_MODE)
    before = {p.name: p.asnumpy().copy() for p in net.trainable_params()}
    step = TrainStep(net, nn.SGD(net.trainable_params(), 1.0))
    step.set_train()
    with _sites(net, fused, options) as sites:
        _, losses = step(*args)
    grads = {p.name: before[p.name] - p.asnumpy() for p in net.trainable_params()}
    return Result(np.array([float(loss) for loss in losses]), grads, sites)


def inference(net, args, fused, **options):
    """GRAPH_MODE, forward only."""
    ms.set_context(mode=ms.GRAPH_MODE)
    with _sites(net, fused, options) as sites:
        _, losses = net(*args)
    return _result(net, losses, [], [], sites)


ROUTES = {route.__name__: route for route in (jit_gradient, jit_forward, train_step, inference)}


def _result(net, losses, grads, names, sites):
    names = [*names, *(p.name for p in net.trainable_params())]
    return Result(np.array([float(loss) for loss in losses]),
                  {name: grad.astype(ms.float32).asnumpy() for name, grad in zip(names, grads)}, sites)


def of_cell(grads, number):
    """The gradients of one cell, by the names of its parameters before mixed precision put it into another Cell."""
    return {name.replace("._backbone", ""): grad for name, grad in grads.items() if f"members.{number}." in name}


def worst(got, expected):
    """Largest error, relative to the largest element of its gradient; gradients that are zero but for rounding, such
    as that of a key's bias, count against 1% of the largest gradient of the cell."""
    top = max((np.abs(g).max() for g in expected.values()), default=0.0)
    return max((np.abs(got[name] - grad).max() / max(np.abs(grad).max(), 0.01 * top, 1e-30)
                for name, grad in expected.items()), default=0.0)
