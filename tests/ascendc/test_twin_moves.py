"""Copies of the host twin against the numpy model: every byte of every memory, on random legal parameters."""

from __future__ import annotations

import numpy as np
from ascendc.compare import differences
from ascendc.draws import GM_BYTES, place, random_bytes, vector
from ascendc.model import moves
from ascendc.model.memory import BLOCK, DTYPES, FRACTAL, SIZES

CASES = 1000


def check(driver, op, memories, expected, core="AIV", free=(), **arguments):
    faults = driver(op, memories, core=core, **arguments)
    assert not faults, f"{op} {arguments}: {faults[0].text}"
    wrong = differences(memories, expected, free=free)
    assert not wrong, f"{op} {arguments}: {wrong}"


def _choice(rng, *values):
    return values[int(rng.integers(len(values)))]


def _bursts(rng, most_blocks):
    """blockCount, blockLen, gaps: mostly small, sometimes long bursts, sometimes many."""
    while True:
        count, length = int(rng.integers(1, 20)), int(rng.integers(1, 30))
        if rng.random() < 0.1:
            count, length = int(rng.integers(1, 2)), int(rng.integers(1, 2000))
        if rng.random() < 0.1:
            count, length = int(rng.integers(1, 1500)), 1
        gaps = [int(rng.integers(0, 12)) if rng.random() < 0.7 else 0 for _ in range(2)]
        if all(count * (length + gap) <= most_blocks for gap in gaps):
            return count, length, *gaps


def test_data_copy(driver):
    """GM <-> UB, GM -> L1, UB -> UB, with bursts and gaps or with a count."""
    rng = np.random.default_rng()
    for _ in range(CASES):
        source, target = _choice(rng, ("gm", "UB"), ("UB", "gm"), ("gm", "L1"), ("UB", "UB"))
        dtype = _choice(rng, "half", "bfloat16_t", "float", "int32_t", "uint8_t")
        size = DTYPES[dtype].itemsize
        counted = rng.random() < 0.3
        count, length, src_gap, dst_gap = _bursts(rng, 2800)
        if counted:
            count, src_gap, dst_gap = 1, 0, 0
        core = "AIC" if target == "L1" else "AIV"
        memories = random_bytes(rng, *{source, target} - {"gm"})
        spans = [(count * (length + gap)) * BLOCK for gap in (dst_gap, src_gap)]
        if source == target:
            dst_at, src_at = place(rng, spans)
        else:
            dst_at = BLOCK * int(rng.integers(0, (len(memories[target]) - spans[0]) // BLOCK))
            src_at = BLOCK * int(rng.integers(0, (len(memories[source]) - spans[1]) // BLOCK))
            if source == "gm":  # any multiple of the element
                src_at += size * int(rng.integers(0, BLOCK // size))
            if target == "gm":
                dst_at += size * int(rng.integers(0, BLOCK // size))
        where = {"dst": target, "dst_at": dst_at, "src": source, "src_at": src_at}
        shape = {"block_count": count, "block_len": length, "src_gap": src_gap, "dst_gap": dst_gap}
        expected = memories.copy()
        moves.data_copy(expected, **where, **shape)
        arguments = {"count": length * BLOCK // size} if counted else shape
        check(driver, "DataCopy", memories, expected, core=core, dtype=dtype, **where, **arguments)


def test_data_copy_pad_in(driver):
    """GM -> UB of any number of bytes, with padding on both sides; without, the filler is nobody's business."""
    rng = np.random.default_rng()
    for _ in range(CASES):
        dtype = _choice(rng, "half", "bfloat16_t", "float", "int32_t", "uint8_t")
        size = DTYPES[dtype].itemsize
        count = int(rng.integers(1, 24))
        length = size * int(rng.integers(1, 1 + 1600 // size))
        src_stride, dst_stride = int(rng.integers(0, 200)), int(rng.integers(0, 6))
        pad = None
        if rng.random() < 0.6:
            left, right = (int(rng.integers(0, BLOCK // size + 1)) if rng.random() < 0.5 else 0 for _ in range(2))
            pad = (left, right, int(rng.integers(0, 100)))
        memories = random_bytes(rng, "UB")
        shape = {
            "dtype": dtype,
            "dst_at": BLOCK * int(rng.integers(0, 1000)),
            "src_at": int(rng.integers(0, GM_BYTES - count * (length + src_stride))),
            "block_count": count,
            "block_len": length,
            "src_stride": src_stride,
            "dst_stride": dst_stride,
            "pad": pad,
        }
        expected = memories.copy()
        free = moves.pad_in(expected, **shape)
        check(driver, "DataCopyPad", memories, expected, free=free, dst="UB", src="gm", **shape)


def test_data_copy_pad_out(driver):
    """UB -> GM of any number of bytes to any byte address."""
    rng = np.random.default_rng()
    for _ in range(CASES):
        dtype = _choice(rng, "half", "bfloat16_t", "float", "int32_t", "uint8_t")
        size = DTYPES[dtype].itemsize
        count = int(rng.integers(1, 24))
        length = size * int(rng.integers(1, 1 + 1600 // size))
        memories = random_bytes(rng, "UB")
        shape = {
            "dst_at": int(rng.integers(0, 100_000)),
            "src_at": BLOCK * int(rng.integers(0, 1000)),
            "block_count": count,
            "block_len": length,
            "src_stride": int(rng.integers(0, 6)),
            "dst_stride": int(rng.integers(0, 200)),
        }
        expected = memories.copy()
        moves.pad_out(expected, **shape)
        check(driver, "DataCopyPad", memories, expected, dtype=dtype, dst="gm", src="UB", **shape)


def test_nd2nz(driver):
    """Rows into strips of 32 bytes: several matrices, any pitch, odd widths."""
    rng = np.random.default_rng()
    done = 0
    while done < CASES:
        dtype = _choice(rng, "half", "bfloat16_t", "float", "int8_t")
        kind = DTYPES[dtype]
        width = BLOCK // kind.itemsize
        matrices = int(rng.integers(1, 4)) if rng.random() < 0.4 else 1
        rows, cols = int(rng.integers(1, 50)), int(rng.integers(1, 150))
        row = cols + int(rng.integers(0, 40))
        dst_row = _choice(rng, 1, 1, 1, 2, 3)
        strip = rows * dst_row + _choice(rng, 0, 0, 1, 7)
        strips = -(-cols // width)
        matrix = strips * strip * width  # elements
        shape = {
            "dtype": dtype,
            "dst_at": BLOCK * int(rng.integers(0, 500)),
            "src_at": int(rng.integers(0, 64)),
            "nd_num": matrices,
            "n_value": rows,
            "d_value": cols,
            "src_matrix": rows * row + int(rng.integers(0, 50)) if matrices > 1 else 0,
            "src_row": row,
            "strip": strip,
            "dst_row": dst_row,
            "dst_matrix": matrix if matrices > 1 else 0,
        }
        if matrix > 16384 or shape["src_matrix"] > 65535:
            continue
        if shape["dst_at"] + matrices * matrix * kind.itemsize > SIZES["L1"]:
            continue
        memories = random_bytes(rng, "L1")
        expected = memories.copy()
        moves.nd2nz(expected, **shape)
        check(driver, "Nd2Nz", memories, expected, core="AIC", **shape)
        done += 1


def test_copy(driver):
    """UB -> UB under a mask, by number of lanes and by pattern."""
    rng = np.random.default_rng()
    for _ in range(CASES):
        dtype = _choice(rng, "half", "bfloat16_t", "float", "int16_t", "uint16_t", "int32_t", "uint32_t")
        mask, repeat, (dst, src) = vector(rng, [DTYPES[dtype].itemsize] * 2, forms=("first", "bits"), in_place=False)
        memories = random_bytes(rng, "UB", gm=64)
        shape = {"dtype": dtype, "dst": dst, "src": src, "mask": mask, "repeat": repeat}
        expected = memories.copy()
        moves.copy(expected, **shape)
        check(driver, "Copy", memories, expected, **shape)


def test_fill(driver):
    """Constants into L1, L0A and L0B."""
    rng = np.random.default_rng()
    done = 0
    while done < CASES:
        target = _choice(rng, "L1", "L0A", "L0B")
        block = BLOCK if target == "L1" else FRACTAL
        shape = {
            "dtype": _choice(rng, "half", "bfloat16_t", "float"),
            "dst": target,
            "dst_at": block * int(rng.integers(0, 50)),
            "repeat": int(rng.integers(1, 20)),
            "block_num": int(rng.integers(1, 40)),
            "dst_gap": _choice(rng, 0, 0, 1, 13),
            "scalar": int(rng.integers(-100, 100)),
        }
        if shape["dst_at"] + shape["repeat"] * (shape["block_num"] + shape["dst_gap"]) * block > SIZES[target]:
            continue
        memories = random_bytes(rng, target, gm=64)
        expected = memories.copy()
        moves.fill(expected, **shape)
        check(driver, "Fill", memories, expected, core="AIC", family="", **shape)
        done += 1
