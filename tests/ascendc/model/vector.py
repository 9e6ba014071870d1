"""Element-wise vector instructions, and those that fill, spread, select and pick elements."""

from __future__ import annotations

import numpy as np

from .memory import BLOCK, DTYPES, lanes


def _exact(dtype):
    """Integers stay integers; a float result is formed in double and rounded once."""
    return np.int64 if dtype.kind in "iu" else np.float64


UNARY = {
    "Exp": np.exp,
    "Ln": np.log,
    "Abs": np.abs,
    "Reciprocal": lambda x: 1 / x,
    "Rsqrt": lambda x: 1 / np.sqrt(x),
    "Sqrt": np.sqrt,
    "Relu": lambda x: np.maximum(x, 0),
    "Not": np.invert,
}
BINARY = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Max": np.maximum,
    "Min": np.minimum,
    "And": np.bitwise_and,
    "Or": np.bitwise_or,
}
SCALAR = {
    "Adds": np.add,
    "Muls": np.multiply,
    "Maxs": np.maximum,
    "Mins": np.minimum,
    "LeakyRelu": lambda x, s: np.where(x >= 0, x, x * s),
    "ShiftLeft": lambda x, s: x << s,
    "ShiftRight": lambda x, s: x >> s,
}
COMPARE = {
    "LT": np.less,
    "GT": np.greater,
    "EQ": np.equal,
    "LE": np.less_equal,
    "GE": np.greater_equal,
    "NE": np.not_equal,
}
# What the A2 row of each page allows.
REAL = ("half", "float")
NUMBER = ("half", "float", "int16_t", "int32_t")
BITS = ("int16_t", "uint16_t")
WORDS = ("int16_t", "uint16_t", "int32_t", "uint32_t")
MOVED = ("int16_t", "uint16_t", "half", "bfloat16_t", "int32_t", "uint32_t", "float")
TYPES = {
    **dict.fromkeys(("Exp", "Ln", "Abs", "Reciprocal", "Rsqrt", "Sqrt", "Div", "LeakyRelu"), REAL),
    "Relu": ("half", "float", "int32_t"),
    **dict.fromkeys(("Not", "And", "Or"), BITS),
    **dict.fromkeys(("Add", "Sub", "Mul", "Max", "Min", "Adds", "Muls", "Maxs", "Mins"), NUMBER),
    **dict.fromkeys(("ShiftLeft", "ShiftRight"), WORDS),
}


def _apply(function, dtype, *operands):
    with np.errstate(all="ignore"):
        work = _exact(dtype)
        return function(*[x.astype(work) for x in operands]).astype(dtype)


def unary(mem, op, *, dtype, dst, src, mask, repeat, scalar=None):
    """Exp and its kin; with `scalar` Adds and its kin."""
    kind = DTYPES[dtype]
    reps, lane = lanes(mask, repeat, 256 // kind.itemsize)
    x = mem.vector(src, reps, lane, kind)
    if scalar is None:
        result = UNARY[op](x) if op == "Not" else _apply(UNARY[op], kind, x)
    elif op.startswith("Shift"):
        result = SCALAR[op](x.astype(np.int64), scalar).astype(kind)
    else:
        result = _apply(SCALAR[op], kind, x, np.asarray(scalar, kind))
    mem.set_vector(dst, reps, lane, result)


def binary(mem, op, *, dtype, dst, src0, src1, mask, repeat):
    kind = DTYPES[dtype]
    reps, lane = lanes(mask, repeat, 256 // kind.itemsize)
    a, b = mem.vector(src0, reps, lane, kind), mem.vector(src1, reps, lane, kind)
    mem.set_vector(dst, reps, lane, BINARY[op](a, b) if op in ("And", "Or") else _apply(BINARY[op], kind, a, b))


def multiply_add(mem, *, dtype, dst_type, dst, src0, mask, repeat, scalar=None, src1=None, fused=True):
    """Axpy (dst += src * scalar) and MulAddDst (dst += src0 * src1), rounded once or twice."""
    source, target = DTYPES[dtype], DTYPES[dst_type]
    reps, lane = lanes(mask, repeat, 256 // target.itemsize)
    a = mem.vector(src0, reps, lane, source)
    b = np.full(a.shape, scalar, source) if src1 is None else mem.vector(src1, reps, lane, source)
    product = a.astype(np.float64) * b.astype(np.float64)
    if not fused:
        product = product.astype(target).astype(np.float64)
    mem.set_vector(dst, reps, lane, (product + mem.vector(dst, reps, lane, target).astype(np.float64)).astype(target))


def duplicate(mem, *, dtype, dst, scalar, mask, repeat):
    reps, lane = lanes(mask, repeat, 256 // DTYPES[dtype].itemsize)
    mem.set_vector(dst, reps, lane, np.full(reps.shape, scalar, DTYPES[dtype]))


def brcb(mem, *, dtype, dst, src_at, repeat):
    """Brcb: each of 8 elements fills a block."""
    kind = DTYPES[dtype]
    for step in range(repeat):
        for index, value in enumerate(mem.read("UB", src_at + step * 8 * kind.itemsize, kind, 8)):
            at = dst.at + (step * dst.repeat + index * dst.block) * BLOCK
            mem.write("UB", at, np.full(BLOCK // kind.itemsize, value, kind))


def compare(mem, *, dtype, mode, dst_at, src0, repeat, src1=None, scalar=None):
    """Compare and CompareScalar: one bit per element, the first element in the lowest bit.

    Whole repeats only: on this chip a mask argument is without effect, and a count must fill repeats.
    """
    kind = DTYPES[dtype]
    reps, lane = lanes(("first", 256), repeat, 256 // kind.itemsize)
    a = mem.vector(src0, reps, lane, kind)
    b = np.asarray(scalar, kind) if src1 is None else mem.vector(src1, reps, lane, kind)
    mem.write("UB", dst_at, np.packbits(COMPARE[mode](a, b), bitorder="little"))


def select(mem, *, dtype, mode, dst, bits_at, src0, mask, repeat, src1=None, scalar=None):
    """Select: bit set -> src0, clear -> src1 or the scalar. Mode 0 uses the bits of the first repeat for all."""
    kind = DTYPES[dtype]
    per_repeat = 256 // kind.itemsize
    reps, lane = lanes(mask, repeat, per_repeat)
    index = lane if mode == 0 else reps * per_repeat + lane
    picked = (mem["UB"][bits_at + index // 8] >> (index % 8) & 1).astype(bool)
    a = mem.vector(src0, reps, lane, kind)
    b = np.full(a.shape, scalar, kind) if src1 is None else mem.vector(src1, reps, lane, kind)
    mem.set_vector(dst, reps, lane, np.where(picked, a, b))


def index(mem, *, dtype, dst_at, scalar, count):
    """CreateVecIndex: scalar, scalar + 1, ..."""
    mem.write("UB", dst_at, (scalar + np.arange(count)).astype(DTYPES[dtype]))
