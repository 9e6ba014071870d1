"""The memories of one core as byte arrays, and where the bytes of an operand lie in them."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {
    "half": np.dtype(np.float16),
    "bfloat16_t": np.dtype(ml_dtypes.bfloat16),
    "float": np.dtype(np.float32),
    "int8_t": np.dtype(np.int8),
    "uint8_t": np.dtype(np.uint8),
    "int16_t": np.dtype(np.int16),
    "uint16_t": np.dtype(np.uint16),
    "int32_t": np.dtype(np.int32),
    "uint32_t": np.dtype(np.uint32),
    "int64_t": np.dtype(np.int64),
    "uint64_t": np.dtype(np.uint64),
}
SIZES = {"UB": 192 << 10, "L1": 512 << 10, "L0A": 64 << 10, "L0B": 64 << 10, "L0C": 128 << 10, "BT": 1 << 10}
BLOCK = 32  # the unit of strides, in bytes
FRACTAL = 512  # the unit of LoadData


class Operand(NamedTuple):
    """A vector operand: byte address in UB, and the strides between its blocks and its repeats, in blocks."""

    at: int
    block: int = 1
    repeat: int = 8

    def addresses(self, reps, lane, size):
        """Byte address of each (repeat, lane)."""
        per_block = BLOCK // size
        return self.at + (reps * self.repeat + lane // per_block * self.block) * BLOCK + lane % per_block * size


class Memories(dict):
    """name -> uint8 array. Local memories have their real size; "gm" is one buffer of global memory."""

    def copy(self):
        return Memories({name: data.copy() for name, data in self.items()})

    def vector(self, operand, reps, lane, dtype):
        """The lanes of a vector operand."""
        return self.gather("UB", operand.addresses(reps, lane, dtype.itemsize), dtype)

    def set_vector(self, operand, reps, lane, values):
        self.scatter("UB", operand.addresses(reps, lane, values.dtype.itemsize), values)

    def read(self, name, offset, dtype, count):
        """`count` elements of `dtype` from byte `offset` on: a copy."""
        size = count * dtype.itemsize
        data = self[name][offset : offset + size]
        assert len(data) == size, f"{name} has {len(self[name])} bytes, asked for {offset}..{offset + size}"
        return data.copy().view(dtype)

    def write(self, name, offset, values):
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        assert offset + len(data) <= len(self[name])
        self[name][offset : offset + len(data)] = data

    def gather(self, name, offsets, dtype):
        """One element at every byte offset of the array `offsets`."""
        index = np.asarray(offsets)[..., None] + np.arange(dtype.itemsize)
        return self[name][index].reshape(-1).view(dtype).reshape(np.shape(offsets))

    def scatter(self, name, offsets, values):
        index = np.asarray(offsets)[..., None] + np.arange(values.dtype.itemsize)
        self[name][index] = np.ascontiguousarray(values).view(np.uint8).reshape(index.shape)


def lanes(mask, repeat, per_repeat):
    """The (repeat, lane) pairs that take part, in order.

    `mask`: ("first", n) leading lanes of every repeat, ("bits", low, high) a pattern; ("count", n), the overload
    for the first n elements, and ("total", n), counter mode set outside: for both, n decides the number of repeats.
    """
    kind = mask[0]
    if kind in ("count", "total"):
        return np.divmod(np.arange(mask[1]), per_repeat)
    if kind == "first":
        active = np.arange(min(mask[1], per_repeat))
    else:
        bits = mask[1] | mask[2] << 64
        active = np.array([lane for lane in range(per_repeat) if bits >> lane & 1], dtype=np.int64)
    return np.repeat(np.arange(repeat), len(active)), np.tile(active, repeat)
