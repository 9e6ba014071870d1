"""Element-wise vector instructions of the host twin against the numpy model: at most one unit in the last place."""

from __future__ import annotations

import numpy as np
import pytest
from ascendc.compare import differences
from ascendc.draws import Pool, place, vector
from ascendc.model import vector as model
from ascendc.model.memory import BLOCK, DTYPES, SIZES, Operand

CASES = 1000
# Where a function is defined and its result is a normal number; elsewhere -4..4. Products of integers stay in range.
DOMAIN = {
    ("Exp", "half"): (-9.0, 10.0),
    ("Exp", "float"): (-80.0, 80.0),
    ("Ln", "half"): (1e-3, 1000.0),
    ("Ln", "float"): (1e-6, 1e6),
    ("Sqrt", "half"): (1e-3, 1000.0),
    ("Sqrt", "float"): (1e-6, 1e6),
    ("Rsqrt", "half"): (1e-3, 1000.0),
    ("Rsqrt", "float"): (1e-6, 1e6),
    ("Reciprocal", "half"): (1e-2, 100.0),
    ("Reciprocal", "float"): (1e-6, 1e6),
    ("Div", "half"): (0.25, 16.0),
    ("Div", "float"): (1e-3, 1e3),
}
INTEGERS = {"int16_t": (-150, 150), "uint16_t": (0, 65535), "int32_t": (-40000, 40000), "uint32_t": (0, (1 << 32) - 1)}


def _choice(rng, *values):
    return values[int(rng.integers(len(values)))]


def _domain(op, dtype):
    if dtype in INTEGERS:
        return INTEGERS[dtype]
    return DOMAIN.get((op, dtype), (-4.0, 4.0))


def check(driver, op, memories, expected, dtype=None, **arguments):
    ulp = 1 if dtype in ("half", "float") else 0
    call = {"dtype": dtype, **arguments}
    faults = driver(op, memories, **call)
    assert not faults, f"{op} {call}: {faults[0].text}"
    wrong = differences(memories, expected, dtype=arguments.get("dst_type", dtype), ulp=ulp)
    assert not wrong, f"{op} {call}: {wrong}"


def test_unary(driver):
    """Exp, Ln, Abs, Reciprocal, Rsqrt, Sqrt, Relu, Not: by count, number of lanes, pattern, counter mode; in place."""
    rng = np.random.default_rng()
    pool = Pool(rng)
    for _ in range(CASES):
        op = _choice(rng, *model.UNARY)
        dtype = _choice(rng, *model.TYPES[op])
        mask, repeat, (dst, src) = vector(rng, [DTYPES[dtype].itemsize] * 2)
        memories = pool.memories(dtype, *_domain(op, dtype))
        expected = memories.copy()
        shape = {"dtype": dtype, "dst": dst, "src": src, "mask": mask, "repeat": repeat}
        model.unary(expected, op, **shape)
        check(driver, op, memories, expected, family="unary", **shape)


def test_scalar(driver):
    """Adds, Muls, Maxs, Mins, LeakyRelu, ShiftLeft, ShiftRight."""
    rng = np.random.default_rng()
    pool = Pool(rng)
    for _ in range(CASES):
        op = _choice(rng, *model.SCALAR)
        dtype = _choice(rng, *model.TYPES[op])
        mask, repeat, (dst, src) = vector(rng, [DTYPES[dtype].itemsize] * 2)
        memories = pool.memories(dtype, *_domain(op, dtype))
        expected = memories.copy()
        real = dtype in ("half", "float")
        if op.startswith("Shift"):
            scalar = int(rng.integers(0, 8 * DTYPES[dtype].itemsize))
        elif op == "LeakyRelu":
            scalar = 0.125
        else:
            scalar = float(np.asarray(rng.uniform(-4, 4), DTYPES[dtype])) if real else int(rng.integers(-150, 150))
        shape = {"dtype": dtype, "dst": dst, "src": src, "mask": mask, "repeat": repeat, "scalar": scalar}
        model.unary(expected, op, **shape)
        check(driver, op, memories, expected, family="scalar", **shape)


def test_binary(driver):
    """Add, Sub, Mul, Div, Max, Min, And, Or; a source may be spread by stride 0."""
    rng = np.random.default_rng()
    pool = Pool(rng)
    for _ in range(CASES):
        op = _choice(rng, *model.BINARY)
        dtype = _choice(rng, *model.TYPES[op])
        mask, repeat, (dst, src0, src1) = vector(rng, [DTYPES[dtype].itemsize] * 3, sources=2)
        memories = pool.memories(dtype, *_domain(op, dtype))
        expected = memories.copy()
        shape = {"dtype": dtype, "dst": dst, "src0": src0, "src1": src1, "mask": mask, "repeat": repeat}
        model.binary(expected, op, **shape)
        check(driver, op, memories, expected, family="binary", **shape)


@pytest.mark.parametrize("op", ["Axpy", "MulAddDst"])
def test_multiply_add(driver, op):
    """dst += src * scalar, dst += src0 * src1, half into float too; rounded once or twice: the manual allows both."""
    rng = np.random.default_rng()
    pool = Pool(rng)
    for _ in range(CASES):
        dtype, dst_type = _choice(rng, ("half", "half"), ("float", "float"), ("half", "float"))
        sources = 1 if op == "Axpy" else 2
        sizes = [DTYPES[dst_type].itemsize] + [DTYPES[dtype].itemsize] * sources
        mask, repeat, (dst, *src) = vector(rng, sizes, sources=sources, in_place=False)
        memories = pool.memories(dtype)
        if dtype != dst_type:  # dst holds floats
            per_repeat = 64
            reps, lane = model.lanes(mask, repeat, per_repeat)
            memories.set_vector(dst, reps, lane, rng.uniform(-4, 4, len(reps)).astype(np.float32))
        shape = {"dtype": dtype, "dst_type": dst_type, "dst": dst, "src0": src[0], "mask": mask, "repeat": repeat}
        if op == "Axpy":
            shape["scalar"] = float(np.asarray(rng.uniform(-4, 4), DTYPES[dtype]))
        else:
            shape["src1"] = src[1]
        expected = [memories.copy(), memories.copy()]
        for copy, fused in zip(expected, (True, False)):
            model.multiply_add(copy, fused=fused, **shape)
        check(driver, op, memories, expected, family="multiply", **shape)


def test_duplicate(driver):
    rng = np.random.default_rng()
    pool = Pool(rng)
    for _ in range(CASES):
        dtype = _choice(rng, *model.MOVED)
        mask, repeat, (dst,) = vector(rng, [DTYPES[dtype].itemsize], sources=0, in_place=False)
        memories = pool.memories("uint16_t", 0, 65535)
        shape = {"dtype": dtype, "dst": dst, "scalar": int(rng.integers(0, 100)), "mask": mask, "repeat": repeat}
        expected = memories.copy()
        model.duplicate(expected, **shape)
        check(driver, "Duplicate", memories, expected, family="", **shape)


def test_brcb(driver):
    rng = np.random.default_rng()
    pool = Pool(rng)
    done = 0
    while done < CASES:
        dtype = _choice(rng, *model.MOVED)
        repeat = int(rng.integers(1, 60))
        dst = Operand(0, _choice(rng, 1, 1, 2, 3), _choice(rng, 8, 8, 17, 24))
        blocks = (np.arange(repeat)[:, None] * dst.repeat + np.arange(8) * dst.block).reshape(-1)
        if len(np.unique(blocks)) < blocks.size:
            continue
        placed = place(rng, [(int(blocks.max()) + 1) * BLOCK, repeat * 8 * DTYPES[dtype].itemsize])
        if placed is None:
            continue
        memories = pool.memories("uint16_t", 0, 65535)
        shape = {"dtype": dtype, "dst": dst._replace(at=placed[0]), "src_at": placed[1], "repeat": repeat}
        expected = memories.copy()
        model.brcb(expected, **shape)
        check(driver, "Brcb", memories, expected, family="", **shape)
        done += 1


def test_compare(driver):
    """Compare and CompareScalar, all six relations, with repeats and with a count; int32 knows EQ alone."""
    rng = np.random.default_rng()
    pool = Pool(rng)
    for _ in range(CASES):
        op = _choice(rng, "Compare", "CompareScalar")
        dtype = _choice(rng, "half", "float", "int32_t")
        mode = "EQ" if dtype == "int32_t" else _choice(rng, *model.COMPARE)
        counted = rng.random() < 0.5
        sources = 1 if op == "CompareScalar" else 2
        size = DTYPES[dtype].itemsize
        _, _, (_, *src) = vector(rng, [size] * (1 + sources), ("first",), sources, in_place=False, most=20)
        repeat = int(rng.integers(1, 20))
        src = [Operand(0) if counted else one for one in src]
        spans = [((repeat - 1) * one.repeat + 7 * one.block + 1) * BLOCK for one in src]
        dst_at, *addresses = place(rng, [repeat * 256 // size // 8, *spans])
        src = [one._replace(at=at) for one, at in zip(src, addresses)]
        # Few values, so that equality happens.
        memories = pool.memories(dtype, -3, 3) if dtype == "int32_t" else pool.memories(dtype, -2, 2)
        if dtype != "int32_t":
            memories["UB"][:] = np.rint(memories["UB"].view(DTYPES[dtype])).view(np.uint8)
        shape = {"dtype": dtype, "dst_at": dst_at, "src0": src[0]}
        if op == "Compare":
            shape["src1"] = src[1]
        else:
            shape["scalar"] = int(rng.integers(-2, 3))
        expected = memories.copy()
        model.compare(expected, mode=mode, repeat=repeat, **shape)
        number = list(model.COMPARE).index(mode)
        extra = {"count": repeat * 256 // size} if counted else {"mask": ("first", 256 // size), "repeat": repeat}
        check(driver, op, memories, expected, family="", mode=number, **shape, **extra)


def test_select(driver):
    """Modes 0, 1 and 2, by count and with repeats; the top 8 KB of UB stay free for modes 1 and 2."""
    rng = np.random.default_rng()
    pool = Pool(rng)
    for _ in range(CASES):
        dtype, mode = _choice(rng, "half", "float"), int(rng.integers(3))
        size = DTYPES[dtype].itemsize
        sources = 1 if mode == 1 else 2
        # The bits are read in order: a region of their own, behind the operands.
        room = SIZES["UB"] - (8 << 10) - 4096
        mask, repeat, (dst, *src) = vector(rng, [size] * (1 + sources), ("count", "first", "bits"), sources, room)
        memories = pool.memories(dtype)
        bits_at = room
        memories["UB"][bits_at : bits_at + 4096] = rng.integers(0, 256, 4096, dtype=np.uint8)
        shape = {"dtype": dtype, "mode": mode, "dst": dst, "bits_at": bits_at, "src0": src[0], "mask": mask}
        shape["repeat"] = repeat
        if mode == 1:
            shape["scalar"] = 0.75
        else:
            shape["src1"] = src[1]
        expected = memories.copy()
        model.select(expected, **shape)
        scratch = slice(SIZES["UB"] - (8 << 10), None)
        if mode:
            expected["UB"][scratch] = 0
        faults = driver("Select", memories, family="", **shape)
        assert not faults, f"{shape}: {faults[0].text}"
        if mode:  # the instruction may leave anything there
            memories["UB"][scratch] = 0
        wrong = differences(memories, expected)
        assert not wrong, f"{shape}: {wrong}"


def test_index(driver):
    """CreateVecIndex."""
    rng = np.random.default_rng()
    pool = Pool(rng)
    for _ in range(CASES):
        dtype = _choice(rng, "half", "float", "int16_t", "int32_t")
        count = int(rng.integers(1, 2000))
        shape = {"dtype": dtype, "dst_at": BLOCK * int(rng.integers(0, 5000)), "count": count}
        shape["scalar"] = int(rng.integers(-1000, 48 if dtype == "half" else 1000))  # half is exact up to 2048
        memories = pool.memories("uint16_t", 0, 65535)
        expected = memories.copy()
        model.index(expected, **shape)
        check(driver, "CreateVecIndex", memories, expected, family="", **shape)
