"""A net in float64: a copy with its parameters, constants and casts widened."""

from __future__ import annotations

import copy

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from . import steps


def copy_of(net):
    """The copy. Where it works in a smaller dtype after all, `is_wide` of its results tells."""
    net = copy.deepcopy(net)
    known = {}
    for _, cell in net.cells_and_names():
        for name, parameter in cell._params.items():
            if parameter is not None and parameter.dtype in steps.FLOATS:
                if id(parameter) not in known:      # tied weights stay tied
                    known[id(parameter)] = Parameter(Tensor(parameter.asnumpy().astype(np.float64)), parameter.name,
                                                     parameter.requires_grad)
                setattr(cell, name, known[id(parameter)])
        for name, value in list(cell.__dict__.items()):
            if isinstance(value, Tensor) and not isinstance(value, Parameter) and value.dtype in steps.FLOATS:
                setattr(cell, name, value.astype(ms.float64))
            elif isinstance(value, type(ms.float32)) and value in steps.FLOATS:     # what it casts to
                setattr(cell, name, ms.float64)
        for name, child in list(cell._cells.items()):
            if isinstance(child, nn.CrossEntropyLoss) and _CrossEntropy.stands_for(child):
                setattr(cell, name, _CrossEntropy(child.ignore_index))
    return net


def is_wide(value):
    """Whether no Tensor in `value` is of a smaller floating dtype."""
    if isinstance(value, (tuple, list, dict)):
        return all(is_wide(item) for item in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, Tensor) or value.dtype == ms.float64 or value.dtype not in steps.FLOATS


class _CrossEntropy(nn.Cell):
    """nn.CrossEntropyLoss, which refuses float64, for logits (N, C) and labels (N,)."""

    @staticmethod
    def stands_for(loss):
        return loss.weight is None and loss.reduction == "mean" and loss.label_smoothing == 0.0

    def __init__(self, ignore_index):
        super().__init__()
        self.ignore_index = ignore_index

    def construct(self, logits, labels):
        shifted = logits - logits.max(axis=-1, keepdims=True)
        logs = shifted - shifted.exp().sum(axis=-1, keepdims=True).log()
        counts = (labels != self.ignore_index).astype(logits.dtype)
        chosen = logs.gather_elements(1, ops.maximum(labels, 0).expand_dims(-1)).squeeze(-1)
        return -(chosen * counts).sum() / counts.sum()
