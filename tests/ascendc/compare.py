"""Are the twin's memories those of the model: to the bit, or to so many units in the last place."""

from __future__ import annotations

import numpy as np
from ascendc.model.memory import DTYPES


def _ordered(values):
    """Floats as integers that count units in the last place."""
    bits = values.view({2: np.int16, 4: np.int32}[values.itemsize]).astype(np.int64)
    return np.where(bits < 0, -(bits & (1 << (8 * values.itemsize - 1)) - 1), bits)


def distance(a, b):
    """Units in the last place between two arrays; 0 where both are NaN."""
    gap = np.abs(_ordered(a) - _ordered(b))
    return np.where(np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32)), 0, gap)


def differences(actual, expected, dtype=None, ulp=0, free=()):
    """Lines that say where memories differ, at most one per memory.

    `expected`: the model's memories, or a list of them where the manual allows several results. `free`: byte ranges of
    UB that may hold anything. Bytes that nobody wrote have to keep their old content, so whole memories are compared.
    """
    options = expected if isinstance(expected, list) else [expected]
    lines = []
    for name, data in actual.items():
        wrong = np.logical_and.reduce([data != option[name] for option in options])
        for start, end in free if name == "UB" else ():
            wrong[start:end] = False
        if not wrong.any():
            continue
        where = np.flatnonzero(wrong)
        if dtype is None or not ulp:
            at = where[0]
            lines.append(f"{name}: {len(where)} bytes, first {at}: {data[at]} for {options[0][name][at]}")
            continue
        kind = DTYPES[dtype]
        index = np.unique(where // kind.itemsize)
        got = data.view(kind)[index]
        gap = np.minimum.reduce([distance(got, option[name].view(kind)[index]) for option in options])
        if gap.max() > ulp:
            worst = gap.argmax()
            want = options[0][name].view(kind)[index[worst]]
            lines.append(f"{name}: {len(index)} differ, [{index[worst]}] {got[worst]} for {want}: {gap.max()} ulp")
    return lines
