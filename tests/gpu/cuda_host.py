"""`onnx_export/gpu/flash_attention.cu` compiled for the host over `host_shim.h`, called with NumPy arrays."""
from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SOURCE = ROOT / "onnx_export" / "gpu" / "flash_attention.cu"
TYPES = {np.dtype(np.float32): 1, np.dtype(np.float16): 2, np.dtype(ml_dtypes.bfloat16): 3, np.dtype(bool): 4}


class Call(ctypes.Structure):
    """MsFlashCudaCall of onnx_export/gpu/flash_attention.h"""

    _fields_ = [*((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "q_len", "k_len", "d", "dv")),
                ("type", ctypes.c_int32), *((name, ctypes.c_void_p) for name in "qkv"),
                ("mask_type", ctypes.c_int32), ("mask", ctypes.c_void_p), ("mask_strides", ctypes.c_int64 * 4),
                ("scale", ctypes.c_double), ("softcap", ctypes.c_double), ("left", ctypes.c_int64),
                ("right", ctypes.c_int64), ("bottom_right", ctypes.c_int32), ("dropout", ctypes.c_double),
                ("seed", ctypes.c_uint64), ("offset", ctypes.c_uint64),
                *((name, ctypes.c_void_p) for name in ("out", "lse", "row_max", "row_sum", "dout", "dlse", "delta",
                                                       "dq", "dk", "dv_"))]


def build(folder, source=SOURCE):
    """Compiles a .cu over the shim; the path of the library."""
    target = Path(folder) / f"lib{source.stem}.so"
    include = [f"-I{folder}" for folder in (ROOT / "op_impl", ROOT / "onnx_export", HERE)]
    subprocess.run([os.environ.get("CXX") or "g++", "-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra",
                    *include, "-o", target, "-x", "c++", source, HERE / "host_shim.cpp"], check=True)
    return target


@functools.lru_cache(None)
def library():
    with tempfile.TemporaryDirectory() as folder:
        loaded = ctypes.CDLL(str(build(folder)))
    for name in ("msflash_cuda_forward", "msflash_cuda_backward"):
        getattr(loaded, name).restype = ctypes.c_char_p
    loaded.shim_barriers_seen.restype = ctypes.c_long
    return loaded


class HostBuffers:
    """The arrays of one call, known to the shim as all the memory that there is."""

    def __init__(self):
        self.call, self.kept = Call(), {}
        library().shim_forget_buffers()

    def give(self, name, x, writable=False):
        x = self.kept[name] = np.ascontiguousarray(x)
        library().shim_buffer(ctypes.c_void_p(x.ctypes.data), ctypes.c_size_t(x.nbytes), int(writable))
        setattr(self.call, name, x.ctypes.data)

    def result(self, name, shape, dtype):
        self.give(name, np.full(shape, np.nan, dtype), True)

    def array(self, name):
        return self.kept[name]

    def run(self, function):
        reason = getattr(library(), function)(ctypes.byref(self.call), None)
        if reason:
            raise RuntimeError(reason.decode())


def attention(call, dout=None, dlse=None, statistics=True, buffers=None):
    """A call in the words of `ms_flash/reference.py` -> dict of out, lse and, with dout, of dq, dk, dv."""
    q, k, v = call["q"], call["k"], call["v"]
    batch, heads, q_len, d = q.shape
    buffers = buffers or HostBuffers()
    c = buffers.call
    c.batch, c.heads, c.q_len, c.d, c.kv_heads, c.k_len, c.dv = batch, heads, q_len, d, *k.shape[1:3], v.shape[3]
    c.type = TYPES[q.dtype]
    for name in "qkv":
        buffers.give(name, call[name])
    mask = call.get("bias")
    if call.get("attn_mask") is not None:
        mask = ~call["attn_mask"] if mask is None else np.where(call["attn_mask"], np.array(-np.inf, mask.dtype), mask)
    if mask is not None:
        mask = np.ascontiguousarray(mask.reshape((1,) * (4 - mask.ndim) + mask.shape))
        buffers.give("mask", mask)
        c.mask_type = TYPES[mask.dtype]
        c.mask_strides[:] = [0 if length == 1 else step // mask.itemsize
                             for length, step in zip(mask.shape, mask.strides)]
    c.scale = d ** -0.5 if call.get("scale") is None else call["scale"]
    c.softcap, c.left, c.right = call.get("softcap", 0.0), call.get("left", -1), call.get("right", -1)
    c.bottom_right = call.get("align") != "top_left"
    c.dropout, c.seed, c.offset = call.get("dropout_p", 0.0), call.get("seed", 0), call.get("offset", 0)
    rows = (batch, heads, q_len)
    buffers.result("out", (*rows, v.shape[3]), q.dtype)
    for name in ("lse",) * statistics + ("row_max", "row_sum", "delta") * (dout is not None):
        buffers.result(name, rows, np.float32)
    buffers.run("msflash_cuda_forward")
    results = {"out": "out", **({"lse": "lse"} if statistics else {})}
    if dout is not None:
        buffers.give("dout", dout)
        if dlse is not None:
            buffers.give("dlse", dlse)
        for name, x in (("dq", q), ("dk", k), ("dv_", v)):
            buffers.result(name, x.shape, x.dtype)
        buffers.run("msflash_cuda_backward")
        results.update(dq="dq", dk="dk", dv="dv_")
    return {name: buffers.array(slot) for name, slot in results.items()}
