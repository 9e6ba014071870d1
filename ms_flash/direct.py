"""Ops of the native libraries called directly, with no MindSpore in between: what the kernels alone do."""

from __future__ import annotations

import ctypes

from . import library, op_table

INPUTS = len(op_table.input_names())


class Call:
    """A call of an op by the shapes and dtypes of its arrays, in layout BNSD.

    Args:
        op (str): "fwd", "bwd" or "bias_grad".
        arrays (list): By slot of the op, inputs and then outputs: (shape, dtype), or ``None`` for one that is absent.
        window (tuple): (left, right), -1 for unlimited; causal is right 0.
    """

    def __init__(self, op, arrays, window=(-1, -1)):
        self.op, self.arrays = op, arrays
        fields = {"layout": "BNSD", "heads": 0, "kv_heads": 0, "packed": 0, "scale": "default", "left": window[0],
                  "right": window[1], "align": "bottom_right", "softcap": "0x0p+0", "dropout": "0x0p+0", "seed": 0,
                  "offset": 0, "precision": "default", "block_m": 0, "block_n": 0,
                  "present": "".join("01"[array is not None] for array in arrays[:INPUTS])}
        self.spec = ";".join(f"{key}={value}" for key, value in fields.items())

    def arguments(self, pointers) -> tuple:
        """The arguments of a library's `call`, with an address or ``None`` for each array."""
        count = len(self.arrays)
        shapes = [(ctypes.c_int64 * 4)(*(array[0] if array else ())) for array in self.arrays]
        return (self.op.encode(), self.spec.encode(), count, (ctypes.c_void_p * count)(*pointers),
                (ctypes.c_int * count)(*(len(array[0]) if array else 0 for array in self.arrays)),
                (ctypes.POINTER(ctypes.c_int64) * count)(*(ctypes.cast(s, ctypes.POINTER(ctypes.c_int64))
                                                           for s in shapes)),
                (ctypes.c_char_p * count)(*(array[1].encode() if array else b"none" for array in self.arrays)))


def with_inputs(query, key, value, **others) -> list:
    """The input slots of an op, of which those not given are ``None``."""
    given = {"query": query, "key": key, "value": value, **others}
    return [given.get(name) for name in op_table.input_names()]


class Attention:
    """Attention by the CPU library over numpy arrays, into memory that stays the same from call to call.

    Args:
        dtype (str): "float32", "float16" or "bfloat16".
        query (numpy.ndarray): (B, N, Sq, D), of `dtype`; bfloat16 as the 16 bits of each number, uint16.
        key (numpy.ndarray): (B, Nk, Sk, D).
        value (numpy.ndarray): (B, Nk, Sk, D).
        window (tuple): (left, right), -1 for unlimited; causal is right 0.
    """

    def __init__(self, dtype, query, key, value, window=(-1, -1)):
        import numpy as np

        self.out, self.dout = np.zeros_like(query), np.zeros_like(query)
        self.grads = [np.zeros_like(x) for x in (query, key, value)]
        rows = lambda: np.zeros(query.shape[:3], np.float32)
        inputs, lse, saved = with_inputs(query, key, value), rows(), [rows(), rows()]
        # the LSE has no gradient, and there are no sinks: their gradient is one number
        self._forward = self._call("fwd", dtype, window, [*inputs, self.out, lse, *saved])
        self._backward = self._call("bwd", dtype, window, [*inputs, self.out, *saved, self.dout, rows(), *self.grads,
                                                           np.zeros(1, np.float32)])

    @staticmethod
    def _call(op, dtype, window, memory):
        described = [None if x is None else (x.shape, "float32" if x.itemsize == 4 else dtype) for x in memory]
        arguments = Call(op, described, window).arguments([None if x is None else x.ctypes.data for x in memory])
        native = library.load()

        def run(_keep=memory):
            if native.msflash_cpu_call(*arguments):
                raise RuntimeError(native.msflash_cpu_last_error().decode())
        return run

    def forward(self):
        """Computes `out` and returns it."""
        self._forward()
        return self.out

    def backward(self):
        """Computes `grads`, of query, key and value, from `dout`, after a forward, and returns them."""
        self._backward()
        return self.grads


def stored(array, dtype):
    """A float32 array as arrays of `dtype` are stored here."""
    import numpy as np

    if dtype == "bfloat16":     # to nearest; there is no NaN
        bits = np.ascontiguousarray(array).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.ascontiguousarray(array, dtype)
