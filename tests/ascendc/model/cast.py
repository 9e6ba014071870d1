"""Conversions, in every rounding mode, by exact arithmetic on the spacing of the target's numbers."""

from __future__ import annotations

import numpy as np

from .memory import DTYPES, lanes

# Bits of the significand (with the leading one) and the exponent of the smallest normal number.
FLOATS = {"half": (11, -14), "bfloat16_t": (8, -126), "float": (24, -126)}

# Source, target: the rounding modes that the A2 table of the Cast page allows.
FIVE = ("RINT", "FLOOR", "CEIL", "ROUND", "TRUNC")
MODES = {
    ("half", "float"): ("NONE",),
    ("half", "int8_t"): FIVE + ("NONE",),
    ("half", "uint8_t"): FIVE + ("NONE",),
    ("half", "int16_t"): FIVE,
    ("half", "int32_t"): FIVE,
    ("bfloat16_t", "float"): ("NONE",),
    ("bfloat16_t", "int32_t"): FIVE,
    ("float", "half"): FIVE + ("ODD", "NONE"),
    ("float", "bfloat16_t"): FIVE,
    ("float", "int16_t"): FIVE,
    ("float", "int32_t"): FIVE,
    ("float", "int64_t"): FIVE,
    ("float", "float"): FIVE,
    ("int8_t", "half"): ("NONE",),
    ("uint8_t", "half"): ("NONE",),
    ("int16_t", "half"): FIVE + ("NONE",),
    ("int16_t", "float"): ("NONE",),
    ("int32_t", "float"): FIVE + ("NONE",),
    ("int32_t", "int16_t"): ("NONE",),
    ("int32_t", "int64_t"): ("NONE",),
    ("int64_t", "int32_t"): ("NONE",),
    ("int64_t", "float"): FIVE,
}


def round_to_integer(x, mode):
    """Whole numbers from exact halves and the like; `x` is float64 and exact."""
    low = np.floor(x)
    part = x - low
    if mode in ("RINT", "NONE"):
        return np.rint(x)
    if mode == "FLOOR":
        return low
    if mode == "CEIL":
        return np.ceil(x)
    if mode == "TRUNC":
        return np.trunc(x)
    if mode == "ROUND":  # the first dropped bit decides, on the magnitude
        return np.sign(x) * np.floor(np.abs(x) + 0.5)
    assert mode == "ODD"
    size = np.floor(np.abs(x))
    return np.sign(x) * np.where((part != 0) & (size % 2 == 0), size + 1, size)


def to_dtype(values, to, mode):
    """`values` in dtype `to`. Integers saturate."""
    target = DTYPES[to]
    if to in FLOATS:
        bits, smallest = FLOATS[to]
        if values.dtype == np.int64:  # beyond 2**53 float64 would round first; the tests stay below
            assert np.all(np.abs(values) < 1 << 53)
        x = values.astype(np.float64)
        finite = np.isfinite(x) & (x != 0)
        exponent = np.frexp(np.where(finite, x, 1.0))[1] - 1
        step = np.ldexp(1.0, np.maximum(exponent, smallest) - (bits - 1))
        rounded = np.where(finite, round_to_integer(np.where(finite, x, 0) / step, mode) * step, x)
        with np.errstate(over="ignore"):
            return np.where(rounded == 0, np.copysign(0.0, x), rounded).astype(target)
    if values.dtype.kind in "iu":
        return np.clip(values, np.iinfo(target).min, np.iinfo(target).max).astype(target)
    info = np.iinfo(target)
    rounded = round_to_integer(values.astype(np.float64), mode)
    inside = (rounded > info.min) & (rounded < info.max)
    limit = np.where(rounded <= info.min, info.min, info.max)
    return np.where(inside, np.where(inside, rounded, 0).astype(np.int64), limit).astype(target)


def cast(mem, *, src_type, dst_type, mode, dst, src, mask, repeat):
    """Cast: the wider of the two types counts the lanes of a repeat."""
    source, target = DTYPES[src_type], DTYPES[dst_type]
    reps, lane = lanes(mask, repeat, 256 // max(source.itemsize, target.itemsize))
    values = mem.vector(src, reps, lane, source)
    if src_type == dst_type:
        result = round_to_integer(values.astype(np.float64), mode).astype(target)
    else:
        result = to_dtype(values, dst_type, mode)
    mem.set_vector(dst, reps, lane, result)
