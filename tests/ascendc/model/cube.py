"""L1 -> L0A/L0B, the matrix product, and the way out of L0C."""

from __future__ import annotations

import numpy as np

from .cast import to_dtype
from .memory import BLOCK, DTYPES, FRACTAL


def load_data(mem, *, dtype, dst, dst_at, src_at, start_index, repeat, src_stride, dst_gap, transpose=False, src="L1"):
    """LoadData, 2D: one 512-byte fractal per repeat, its 16x16 elements transposed on demand."""
    kind = DTYPES[dtype]
    for step in range(repeat):
        fractal = mem.read(src, src_at + (start_index + step * src_stride) * FRACTAL, kind, FRACTAL // kind.itemsize)
        if transpose:
            fractal = fractal.reshape(16, 16).T
        mem.write(dst, dst_at + step * (1 + dst_gap) * FRACTAL, fractal.copy())


def load_transposed(mem, *, dtype, dst, dst_at, src_at, start_index, repeat, src_stride, dst_gap, frac_gap):
    """LoadDataWithTranspose: a square of 16x16 (b16, b32) or 32x32 (b8) elements, transposed, cut into fractals."""
    kind = DTYPES[dtype]
    side = {1: 32, 2: 16, 4: 16}[kind.itemsize]
    width = BLOCK // kind.itemsize
    square_bytes = side * side * kind.itemsize
    for step in range(repeat):
        flat = mem.read("L1", src_at + (start_index + step * src_stride) * square_bytes, kind, side * side)
        # The fractals of a square lie side by side where they are narrower than it (b32), one below the other for b8.
        square = np.hstack(flat.reshape(-1, 16, width)) if width < side else flat.reshape(side, side)
        turned = square.T
        parts = np.hsplit(turned, side // width) if width < side else np.vsplit(turned, side // 16)
        for index, part in enumerate(parts):
            mem.write(dst, dst_at + (step * (1 + dst_gap) + index * (1 + frac_gap)) * FRACTAL, part.copy())


def unpack_a(mem, at, kind, m, k):
    """L0A as an m x k matrix: Zz, fractals of 16 rows x 32 bytes; a single row lies in plain order (GEMV)."""
    width = BLOCK // kind.itemsize
    if m == 1:
        return mem.read("L0A", at, kind, k).reshape(1, k)
    rows, cols = -(-m // 16), -(-k // width)
    tiles = mem.read("L0A", at, kind, rows * cols * 16 * width).reshape(rows, cols, 16, width)
    return tiles.transpose(0, 2, 1, 3).reshape(rows * 16, cols * width)[:m, :k]


def unpack_b(mem, at, kind, k, n):
    """L0B as a k x n matrix: Zn, fractals of 32 bytes of k x 16 columns, stored column by column."""
    depth = BLOCK // kind.itemsize
    rows, cols = -(-k // depth), -(-n // 16)
    tiles = mem.read("L0B", at, kind, rows * cols * 16 * depth).reshape(rows, cols, 16, depth)
    return tiles.transpose(0, 3, 1, 2).reshape(rows * depth, cols * 16)[:k, :n]


def c_addresses(at, m, n):
    """Byte address of every element of an m x n matrix in L0C: Nz, fractals of 16x16, columns of fractals first."""
    row, col = np.indices((m, n))
    fractal_rows = -(-m // 16)
    return at + ((col // 16 * fractal_rows + row // 16) * 256 + row % 16 * 16 + col % 16) * 4


def mmad(mem, *, dtype, c_at, a_at, b_at, m, n, k, init, bias_at=None):
    """Mmad: C = A B, or C += A B with `init` false, or bias + A B.

    Returns the addresses of C and the sum of |a||b| per element, which bounds the error of any order of summation.
    """
    kind = DTYPES[dtype]
    out = np.dtype(np.int32) if kind.kind == "i" else np.dtype(np.float32)
    a, b = (x.astype(np.float64) for x in (unpack_a(mem, a_at, kind, m, k), unpack_b(mem, b_at, kind, k, n)))
    where = c_addresses(c_at, m, n)
    start = np.zeros((m, n))
    if bias_at is not None:
        start = np.broadcast_to(mem.read("BT", bias_at, out, n).astype(np.float64), (m, n))
    elif not init:
        start = mem.gather("L0C", where, out).astype(np.float64)
    mem.scatter("L0C", where, (start + a @ b).astype(out))
    return where, np.abs(start) + np.abs(a) @ np.abs(b)


def fixpipe(
    mem, *, dtype, to, dst_at, src_at, n_size, m_size, src_stride, dst_stride, nz, relu=False, nd=(1, 0, 0), dst="gm"
):
    """Fixpipe: L0C -> GM or L1, converted to `to`: rows of `dst_stride` elements, or strips `dst_stride` blocks apart.

    `nd`: number of matrices, their distance in L0C in units of 16x16 elements, and at the target in elements.
    """
    kind, target = DTYPES[dtype], DTYPES[to]
    row, col = np.indices((m_size, n_size))
    for matrix in range(nd[0]):
        source = src_at + matrix * nd[1] * 256 * kind.itemsize
        values = mem.gather("L0C", source + (col // 16 * src_stride * 16 + row * 16 + col % 16) * kind.itemsize, kind)
        if relu:
            values = np.where(values > 0, values, kind.type(0))
        if nz:
            where = dst_at + col // 16 * dst_stride * BLOCK + (row * 16 + col % 16) * target.itemsize
        else:
            where = dst_at + (matrix * nd[2] + row * dst_stride + col) * target.itemsize
        mem.scatter(dst, where, to_dtype(values, to, "RINT") if kind != target else values)
