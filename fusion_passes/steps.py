"""One training or inference step of a user's net as a graph of its own: what `explain` compiles and `verify` runs."""

from __future__ import annotations

import contextlib

import mindspore as ms
from mindspore import Tensor, nn

FLOATS = (ms.float16, ms.float32, ms.float64, ms.bfloat16)


class ForwardStep(nn.Cell):
    """The net alone."""

    def __init__(self, net):
        super().__init__(auto_prefix=False)     # else the net's parameters would be renamed for good
        self.net = net

    def construct(self, *inputs):
        return self.net(*inputs)


class GradStep(nn.Cell):
    """Value of the net, and the gradients of its parameters and floating inputs: a joint forward and backward graph."""

    def __init__(self, net, positions, weights):
        super().__init__(auto_prefix=False)
        self.net = net
        self.gradient = ms.value_and_grad(net, positions, weights)

    def construct(self, *inputs):
        return self.gradient(*inputs)


def is_training_cell(net):
    """Whether the net holds its optimizer: calling it changes weights."""
    return any(isinstance(cell, nn.Optimizer) for _, cell in net.cells_and_names())


def checked(func, net, inputs):
    """Checks the arguments of `func`."""
    if not isinstance(net, nn.Cell):
        raise TypeError(f"For '{func}', the type of 'net' must be Cell, but got {type(net).__name__}.")
    for index, value in enumerate(inputs):
        if not isinstance(value, (Tensor, int, float, bool, tuple, list, type(None))):
            raise TypeError(f"For '{func}', the type of input {index} must be Tensor or a number, but got "
                            f"{type(value).__name__}. Hint: inputs follow the net: {func}(net, x, y).")


def make(net, inputs, train):
    """The step, and the names of what it returns the gradients of. Those of inputs are called "input 0" and so on."""
    if not train:
        return ForwardStep(net), []
    positions = tuple(i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.dtype in FLOATS) or None
    weights = net.trainable_params() or None
    if positions is None and weights is None:
        return ForwardStep(net), []
    names = [f"input {i}" for i in positions or ()] + [p.name for p in weights or ()]
    return GradStep(net, positions, weights), names


@contextlib.contextmanager
def graph_mode():
    """GRAPH_MODE for the block."""
    mode = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=mode)


@contextlib.contextmanager
def training(net, flag):
    """Every cell of the net in training or not for the block."""
    cells = [cell for _, cell in net.cells_and_names()]
    before = [cell.training for cell in cells]
    net.set_train(flag)
    try:
        yield
    finally:
        net.set_train(before[0])
        for cell, was in zip(cells, before):
            cell.add_flags(training=was)
