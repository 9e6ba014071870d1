"""Copies between global memory, UB and L1, and within UB."""

from __future__ import annotations

import numpy as np

from .memory import BLOCK, DTYPES, FRACTAL, lanes


def data_copy(mem, *, dst, dst_at, src, src_at, block_count, block_len, src_gap=0, dst_gap=0):
    """DataCopy: bursts of `block_len` blocks; the gaps run from the end of a burst to the start of the next."""
    size = block_len * BLOCK
    for burst in range(block_count):
        start = src_at + burst * (size + src_gap * BLOCK)
        mem.write(dst, dst_at + burst * (size + dst_gap * BLOCK), mem[src][start : start + size].copy())


def pad_in(mem, *, dtype, dst_at, src_at, block_count, block_len, src_stride, dst_stride, pad=None):
    """DataCopyPad, GM -> UB. `pad`: None, or (left, right, value), in elements.

    Returns the byte ranges of UB on whose content nobody may rely: the filler up to 32 bytes where no padding was asked
    for. The hardware takes the first element of the burst there, whatever `value` is.
    """
    size = DTYPES[dtype].itemsize
    left, right, value = pad or (0, 0, None)
    payload = block_len + (left + right) * size
    step = -(-payload // BLOCK) * BLOCK
    filler = []
    for burst in range(block_count):
        source = src_at + burst * (block_len + src_stride)
        at = dst_at + burst * (step + dst_stride * BLOCK)
        if not left and not right:
            filler.append((at + payload, at + step))
        else:
            mem.write("UB", at, np.full(step // size, value, DTYPES[dtype]))
        mem.write("UB", at + left * size, mem["gm"][source : source + block_len].copy())
    return filler


def pad_out(mem, *, dst_at, src_at, block_count, block_len, src_stride, dst_stride):
    """DataCopyPad, UB -> GM: every burst starts on a block of UB; global memory gets `block_len` bytes, no filler."""
    step = -(-block_len // BLOCK) * BLOCK
    for burst in range(block_count):
        source = src_at + burst * (step + src_stride * BLOCK)
        mem.write("gm", dst_at + burst * (block_len + dst_stride), mem["UB"][source : source + block_len].copy())


def nd2nz(mem, *, dtype, dst_at, src_at, nd_num, n_value, d_value, src_matrix, src_row, strip, dst_row, dst_matrix):
    """DataCopy with Nd2NzParams: a row-major matrix becomes strips 32 bytes wide, the last one zero-filled.

    `src_matrix`, `src_row` and `dst_matrix` count elements; `strip` (dstNzC0Stride) and `dst_row` count blocks.
    """
    kind = DTYPES[dtype]
    width = BLOCK // kind.itemsize
    strips = -(-d_value // width)
    for matrix in range(nd_num):
        source = src_at + matrix * src_matrix * kind.itemsize
        target = dst_at + matrix * dst_matrix * kind.itemsize
        for row in range(n_value):
            line = np.zeros(strips * width, kind)
            line[:d_value] = mem.read("gm", source + row * src_row * kind.itemsize, kind, d_value)
            for index, part in enumerate(line.reshape(strips, width)):
                mem.write("L1", target + (index * strip + row * dst_row) * BLOCK, part)


def copy(mem, *, dtype, dst, src, mask, repeat):
    """Copy: UB -> UB on the vector pipe, element-wise under a mask."""
    reps, lane = lanes(mask, repeat, 256 // DTYPES[dtype].itemsize)
    mem.set_vector(dst, reps, lane, mem.vector(src, reps, lane, DTYPES[dtype]))


def fill(mem, *, dtype, dst, dst_at, repeat, block_num, dst_gap, scalar):
    """Fill: runs of blocks of one value; a block is 32 bytes of L1, 512 bytes of L0A and L0B."""
    block = BLOCK if dst == "L1" else FRACTAL
    run = np.full(block_num * block // DTYPES[dtype].itemsize, scalar, DTYPES[dtype])
    for step in range(repeat):
        mem.write(dst, dst_at + step * (block_num + dst_gap) * block, run)
