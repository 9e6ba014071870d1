"""Reductions and conversions of the host twin against the numpy model."""

from __future__ import annotations

import numpy as np
from ascendc.compare import differences
from ascendc.draws import Pool, vector
from ascendc.model import cast, reduce
from ascendc.model.memory import DTYPES, SIZES, Memories

CASES = 1000
ORDERS = ("VALUE_INDEX", "INDEX_VALUE", "ONLY_VALUE", "ONLY_INDEX")
ROUND = ("NONE", "RINT", "FLOOR", "CEIL", "ROUND", "TRUNC", "ODD")


def _choice(rng, *values):
    return values[int(rng.integers(len(values)))]


def _draw(rng, elements=None, unit=None):
    """A reduction's arguments: sources in the lower, results in the upper part of UB.

    `elements` or `unit`: what dst_repeat counts, in elements or in bytes.
    """
    dtype = _choice(rng, "half", "float")
    room = 128 << 10
    sources = vector(rng, [DTYPES[dtype].itemsize], ("first", "bits"), 0, room, in_place=False)
    mask, repeat, (src,) = sources
    step = unit or elements * DTYPES[dtype].itemsize
    dst_repeat = _choice(rng, 1, 1, 2, 5)
    if repeat * dst_repeat * step > 60 << 10:
        dst_repeat = 1
    dst_at = room + step * int(rng.integers(0, (SIZES["UB"] - room - repeat * dst_repeat * step) // step))
    return {"dtype": dtype, "dst_at": dst_at, "dst_repeat": dst_repeat, "src": src, "mask": mask, "repeat": repeat}


def check(driver, op, memories, expected, shape, ulp, **extra):
    faults = driver(op, memories, family="", **shape, **extra)
    assert not faults, f"{op} {shape} {extra}: {faults[0].text}"
    wrong = differences(memories, expected, dtype=shape["dtype"], ulp=ulp)
    assert not wrong, f"{op} {shape} {extra}: {wrong}"


def test_whole(driver):
    """WholeReduceMax, Min (value and lane, in every order) and Sum."""
    rng = np.random.default_rng()
    pool = Pool(rng)
    for _ in range(CASES):
        which = _choice(rng, "Max", "Min", "Sum")
        order = _choice(rng, *ORDERS)
        pair = which != "Sum" and order in ("VALUE_INDEX", "INDEX_VALUE")
        lone = which != "Sum" and order == "ONLY_INDEX"
        shape = _draw(rng, elements=2 if pair else 1, unit=4 if lone else None)
        memories = pool.memories(shape["dtype"])
        expected = memories.copy()
        reduce.whole(expected, which, order=order, **shape)
        check(driver, f"WholeReduce{which}", memories, expected, shape, int(which == "Sum"), order=ORDERS.index(order))


def test_block(driver):
    """BlockReduceMax, Min, Sum: eight results per repeat."""
    rng = np.random.default_rng()
    pool = Pool(rng)
    for _ in range(CASES):
        which = _choice(rng, "Max", "Min", "Sum")
        shape = _draw(rng, elements=8)
        memories = pool.memories(shape["dtype"])
        expected = memories.copy()
        reduce.block(expected, which, **shape)
        check(driver, f"BlockReduce{which}", memories, expected, shape, int(which == "Sum"))


def test_pair_sum(driver):
    """PairReduceSum: neighbours."""
    rng = np.random.default_rng()
    pool = Pool(rng)
    for _ in range(CASES):
        shape = _draw(rng, unit=128)
        memories = pool.memories(shape["dtype"])
        expected = memories.copy()
        reduce.pair_sum(expected, **shape)
        check(driver, "PairReduceSum", memories, expected, shape, 1)


def _sources(rng, src_type, dst_type):
    """Values that show rounding: halves, neighbours of them, numbers around the target's limits."""
    kind, target = DTYPES[src_type], DTYPES[dst_type]
    count = SIZES["UB"] // kind.itemsize
    if kind.kind in "iu":
        info = np.iinfo(kind)
        low, high = max(info.min, -(1 << 50)), min(info.max, 1 << 50)
        wide = rng.integers(low, high, count)
        return np.where(rng.random(count) < 0.5, wide, np.clip(wide >> 12, -4000, 4000)).astype(kind)
    if target.kind in "iu":
        values = rng.integers(-200, 400, count) / _choice(rng, 1, 2, 4)
        far = rng.uniform(-1.5, 1.5, count) * min(np.iinfo(target).max, 1e9 if kind.itemsize == 4 else 6e4)
        far = np.clip(far, -6e4, 6e4) if src_type == "half" else far
        return np.where(rng.random(count) < 0.7, values, far).astype(kind)
    # To a narrower float: within the range of half, ties included.
    steps = np.ldexp(rng.integers(1 << 9, 1 << 13, count).astype(np.float64), rng.integers(-20, 3, count))
    sizes = np.where(rng.random(count) < 0.5, steps, rng.uniform(0, 1000, count))
    return (sizes * rng.choice([-1, 1], count)).astype(kind)


def test_cast(driver):
    """Every conversion of the A2 table in every rounding mode it has."""
    rng = np.random.default_rng()
    table = [(src, dst, mode) for (src, dst), modes in cast.MODES.items() for mode in modes]
    images = {pair: _sources(rng, *pair).view(np.uint8) for pair in cast.MODES}
    for index in range(max(CASES, 20 * len(table))):
        src_type, dst_type, mode = table[index % len(table)]
        sizes = [DTYPES[dst_type].itemsize, DTYPES[src_type].itemsize]
        mask, repeat, (dst, src) = vector(rng, sizes, in_place=False)
        image = np.roll(images[src_type, dst_type], 32 * int(rng.integers(0, 6144)))
        memories = Memories(gm=np.zeros(64, np.uint8), UB=image)
        shape = {"src_type": src_type, "dst_type": dst_type, "dst": dst, "src": src, "mask": mask, "repeat": repeat}
        expected = memories.copy()
        cast.cast(expected, mode=mode, **shape)
        faults = driver("Cast", memories, mode=ROUND.index(mode), **shape)
        assert not faults, f"{mode} {shape}: {faults[0].text}"
        wrong = differences(memories, expected)
        assert not wrong, f"{mode} {shape}: {wrong}"
