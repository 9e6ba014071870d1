"""Random legal arguments, and memories to run them on."""

from __future__ import annotations

import numpy as np
from ascendc.model.memory import BLOCK, DTYPES, SIZES, Memories, Operand, lanes

GM_BYTES = 256 << 10


def random_bytes(rng, *names, gm=GM_BYTES):
    """Memories full of random bytes."""
    sizes = {"gm": gm, **{name: SIZES[name] for name in names}}
    return Memories({name: rng.integers(0, 256, size, dtype=np.uint8) for name, size in sizes.items()})


class Pool:
    """Random images of UB per dtype, drawn once and rotated for each case: drawing 192 KB anew would cost more than the
    rest of a case."""

    def __init__(self, rng):
        self._rng = rng
        self._images = {}

    def memories(self, dtype, low=-4.0, high=4.0):
        key = dtype, low, high
        if key not in self._images:
            kind = DTYPES[dtype]
            count = SIZES["UB"] // kind.itemsize
            if kind.kind in "iu":
                values = self._rng.integers(int(low), int(high) + 1, count)
            else:
                values = self._rng.uniform(low, high, count)
            self._images[key] = values.astype(kind).view(np.uint8)
        turn = BLOCK * int(self._rng.integers(0, SIZES["UB"] // BLOCK))
        return Memories({"gm": np.zeros(64, np.uint8), "UB": np.roll(self._images[key], turn)})


def _pick(rng, values):
    return values[int(rng.integers(len(values)))]


def mask(rng, per_repeat, forms=("count", "first", "bits", "total"), most=40):
    """(mask, repeat). `forms`: which ways of saying it the instruction has."""
    form = _pick(rng, forms)
    repeat = int(rng.integers(1, most)) if rng.random() < 0.9 else int(rng.integers(1, 256))
    if form in ("count", "total"):
        return (form, int(rng.integers(1, per_repeat * repeat + 1))), 1
    if form == "first":
        return (form, int(rng.integers(1, per_repeat + 1))), repeat
    low = int(rng.integers(1, 1 << 63)) << 1 | 1
    return (form, low % (1 << 64), int(rng.integers(0, 1 << 63)) if per_repeat > 64 else 0), repeat


def operand(rng, role, mask_, contiguous):
    """Strides of an operand: `contiguous` is the repeat stride of data without gaps."""
    if mask_[0] == "count":
        return Operand(0, 1, contiguous)
    if rng.random() < 0.3:
        return Operand(0, 1, contiguous)
    if role == "dst":
        return Operand(0, _pick(rng, (1, 1, 2, 3, 4)), _pick(rng, (contiguous, contiguous + 1, 16, 24, 33)))
    return Operand(0, _pick(rng, (0, 1, 1, 2, 5)), _pick(rng, (0, 1, contiguous, contiguous, 9, 16, 40)))


def extent(op, mask_, repeat, per_repeat, size):
    """(one past the last byte, no byte twice) of an operand at address 0."""
    reps, lane = lanes(mask_, repeat, per_repeat)
    where = op._replace(at=0).addresses(reps, lane, size)
    return int(where.max()) + size, len(np.unique(where)) == where.size


def place(rng, sizes, room=SIZES["UB"], align=BLOCK):
    """Addresses for regions of `sizes` bytes that do not touch each other, in random order; None if they do not fit."""
    rounded = [-(-size // align) * align for size in sizes]
    slack = room - sum(rounded)
    if slack < 0:
        return None
    gaps = np.sort(rng.integers(0, slack // align + 1, len(sizes))) * align
    addresses, at = [0] * len(sizes), 0
    for gap, index in zip(gaps, rng.permutation(len(sizes))):
        addresses[index] = int(at + gap)
        at += rounded[index]
    return addresses


def vector(rng, sizes, forms=("count", "first", "bits", "total"), sources=1, room=SIZES["UB"], in_place=True,
           most=40):  # fmt: skip
    """Mask, repeat and operands of an instruction: `sizes` are the element sizes of dst and of each source."""
    per_repeat = 256 // max(sizes)
    while True:
        chosen, repeat = mask(rng, per_repeat, forms, most)
        contiguous = [per_repeat * size // BLOCK for size in sizes]
        operands = [operand(rng, "dst", chosen, contiguous[0])]
        operands += [operand(rng, "src", chosen, contiguous[1 + i]) for i in range(sources)]
        shared = in_place and rng.random() < 0.2 and sizes[0] == sizes[1]
        if shared:
            operands[1] = operands[0]
        spans = [extent(op, chosen, repeat, per_repeat, size) for op, size in zip(operands, sizes)]
        if not spans[0][1]:
            continue
        addresses = place(rng, [span for span, _ in spans], room)
        if addresses is None:
            continue
        if shared:
            addresses[1] = addresses[0]
        return chosen, repeat, [op._replace(at=at) for op, at in zip(operands, addresses)]
