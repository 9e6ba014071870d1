"""Reductions over a repeat, a block, or neighbouring pairs."""

from __future__ import annotations

import numpy as np

from .memory import DTYPES, lanes


def tree(values, active):
    """Sum along the last axis by halves of neighbours, in the operand's precision; inactive lanes count as zero."""
    total = np.where(active, values, values.dtype.type(0))
    while total.shape[-1] > 1:
        total = (total[..., 0::2].astype(np.float64) + total[..., 1::2].astype(np.float64)).astype(values.dtype)
    return total[..., 0]


def _operand(mem, dtype, src, mask, repeat):
    """(repeat, lane) arrays of the values and of what takes part."""
    kind = DTYPES[dtype]
    per_repeat = 256 // kind.itemsize
    reps, lane = lanes(mask, repeat, per_repeat)
    values = np.zeros((repeat, per_repeat), kind)
    active = np.zeros((repeat, per_repeat), bool)
    values[reps, lane] = mem.vector(src, reps, lane, kind)
    active[reps, lane] = True
    return kind, values, active


def _best(which, values, active):
    """Value and lowest index of the extreme."""
    wide = np.where(active, values.astype(np.float64), -np.inf if which == "Max" else np.inf)
    index = wide.argmax(-1) if which == "Max" else wide.argmin(-1)
    return np.take_along_axis(values, index[..., None], -1)[..., 0], index


def whole(mem, which, *, dtype, dst_at, dst_repeat, src, mask, repeat, order="VALUE_INDEX"):
    """WholeReduceMax, Min and Sum (ReduceRepeat): one result, or a result and its lane, per repeat."""
    kind, values, active = _operand(mem, dtype, src, mask, repeat)
    if not active.any():
        return
    if which == "Sum":
        results, unit = tree(values, active)[:, None], kind.itemsize
    else:
        best, index = _best(which, values, active)
        lane = index.astype({2: np.uint16, 4: np.uint32}[kind.itemsize]).view(kind)
        if order == "ONLY_INDEX":  # an index alone is 32 bits wide whatever the operand
            results, unit = index.astype(np.uint32)[:, None], 4
        else:
            columns = {"VALUE_INDEX": (best, lane), "INDEX_VALUE": (lane, best), "ONLY_VALUE": (best,)}[order]
            results, unit = np.stack(columns, -1), len(columns) * kind.itemsize
    for step in range(repeat):
        mem.write("UB", dst_at + step * dst_repeat * unit, results[step])


def block(mem, which, *, dtype, dst_at, dst_repeat, src, mask, repeat):
    """BlockReduceMax, Min and Sum (ReduceDataBlock): 8 results per repeat; a block without active lanes writes none."""
    kind, values, active = _operand(mem, dtype, src, mask, repeat)
    values, active = (x.reshape(repeat, 8, -1) for x in (values, active))
    results = tree(values, active) if which == "Sum" else _best(which, values, active)[0]
    step, index = np.nonzero(active.any(-1))
    mem.scatter("UB", dst_at + (step * dst_repeat * 8 + index) * kind.itemsize, results[step, index])


def pair_sum(mem, *, dtype, dst_at, dst_repeat, src, mask, repeat):
    """PairReduceSum (ReducePairElem): 128 bytes of results per repeat; an idle pair writes none."""
    kind, values, active = _operand(mem, dtype, src, mask, repeat)
    values, active = (x.reshape(repeat, -1, 2) for x in (values, active))
    results = tree(values, active)
    step, index = np.nonzero(active.any(-1))
    mem.scatter("UB", dst_at + step * dst_repeat * 128 + index * kind.itemsize, results[step, index])
