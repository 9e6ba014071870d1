"""Builds the Ascend kernels over the host twin and calls them through ctypes, numpy in and out.

`build` takes the directory of the kernel sources, so that altered kernels can be built beside the real ones.
"""
from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import ClassVar

import driver
import native
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
OP_IMPL = ROOT / "op_impl"
ASCENDC = OP_IMPL / "ascendc"
KERNELS = ASCENDC / "op_kernel"
_FLAGS = ["-std=gnu++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
_library = None


def build(kernels=KERNELS, flags=(), where=None):
    """The shared library of these kernel sources; what was built from the same sources before is used again."""
    where = Path(where or os.environ.get("MS_FLASH_TEST_BUILD", ROOT / "build" / "ascendc"))
    where.mkdir(parents=True, exist_ok=True)
    with open(where / "lock", "w") as lock:  # of the test processes that want it at once, one builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build(Path(kernels), list(flags), where)


def _build(kernels, flags, where):
    cpu = ("address", "api", "cache", "call", "infer", "kernels", "kvcache", "matrix", "merge", "mha",
           "mindspore_aot", "threads", "view")
    headers = sorted([*kernels.glob("*.h"), *ASCENDC.rglob("*.h"), *(OP_IMPL / "common").glob("*.h"),
                      *(OP_IMPL / "cpu" / f"{name}.h" for name in cpu)])
    base = hashlib.sha256(repr((_FLAGS, flags)).encode())
    for header in headers:
        base.update(header.read_bytes())
    sources = [*sorted(kernels.glob("*.cpp")), *sorted((ASCENDC / "op_host").glob("*.cpp")),
               *sorted((ASCENDC / "twin_lib").glob("*.cpp")),
               *(OP_IMPL / "cpu" / f"{name}.cpp" for name in ("call", "kvcache", "memory", "merge", "mha"))]
    objects, missing = [], []
    for source in sources:
        key = base.copy()
        key.update(source.read_bytes())
        target = where / f"{source.stem}-{key.hexdigest()[:16]}.o"
        if not target.exists():
            missing.append((["g++", *_FLAGS, *flags, "-I", kernels, "-I", OP_IMPL, "-I", ASCENDC / "twin", "-c", source,
                             "-o", target.with_suffix(".part")], target))
        objects.append(target)
    _make(missing)
    name = hashlib.sha256(" ".join(str(o) for o in objects).encode()).hexdigest()[:16]
    library = where / f"libms_flash_ascend_twin-{name}.so"
    if not library.exists():
        _make([(["g++", "-shared", *objects, "-o", library.with_suffix(".part")], library)])
    return library


def _make(targets):
    """Runs the command of each target, which writes it under the name that ends in .part."""
    driver.run_all([[str(part) for part in command] for command, _ in targets])
    for _, target in targets:
        target.with_suffix(".part").rename(target)


def load(path):
    library = ctypes.CDLL(str(path))
    for name in ("last_error", "last_report", "plan"):
        getattr(library, f"msflash_ascend_{name}").restype = ctypes.c_char_p
    return library


def library():
    global _library
    if _library is None:
        _library = load(build())
    return _library


class Settings:
    """Settings of the twin and the tiling for the length of a `with` block."""

    DEFAULTS: ClassVar = {"soc": "910B3", "cores": 0, "effects": 1, "strict": 1, "reverse": 0, "block_m": 0,
                          "stack_n": 0, "depth": 0, "atomic": 0, "on_device": 0}

    def __init__(self, **settings):
        self.settings = settings

    def __enter__(self):
        for key, value in self.settings.items():
            configure(key, value)

    def __exit__(self, *_):
        for key in self.settings:
            configure(key, self.DEFAULTS[key])


def configure(key, value):
    if library().msflash_ascend_configure(key.encode(), str(value).encode()):
        raise ValueError(library().msflash_ascend_last_error().decode())


def _arguments(op, spec, arrays):
    count = len(arrays)
    shapes = [(ctypes.c_int64 * max(1, 0 if x is None else x.ndim))(*(() if x is None else x.shape)) for x in arrays]
    return (op.encode(), spec.encode(), count,
            (ctypes.c_void_p * count)(*(None if x is None else x.ctypes.data for x in arrays)),
            (ctypes.c_int * count)(*(0 if x is None else x.ndim for x in arrays)),
            (ctypes.POINTER(ctypes.c_int64) * count)(*(ctypes.cast(s, ctypes.POINTER(ctypes.c_int64)) for s in shapes)),
            (ctypes.c_char_p * count)(*(b"none" if x is None else x.dtype.name.encode() for x in arrays)))


def raw_call(op, spec, arrays, lib=None):
    lib = lib or library()
    if lib.msflash_ascend_call(*_arguments(op, spec, arrays)):
        raise RuntimeError(lib.msflash_ascend_last_error().decode())


BLOCK = ("x", "context", "context_v", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_o", "b_o", "attn_mask", "bias",
         "alibi_slopes", "sinks", "drop_mask")


def block(inputs, heads, kv_heads, **options):
    """Attention with its projections: arrays by name. Returns dict(y, lse, row_max, row_sum)."""
    x, w_o = inputs["x"], inputs.get("w_o")
    width = inputs["w_v"].shape[0] // kv_heads * heads if w_o is None else w_o.shape[0]
    rows = (x.shape[0], heads, x.shape[1])
    outputs = [native.Guarded((*x.shape[:2], width), x.dtype)] + [native.Guarded(rows, np.float32) for _ in range(3)]
    slots = {"query": x, "key": x, "value": x, **{name: inputs.get(name) for name in BLOCK[11:]}}
    spec = native.spec_text(slots, layout="BSH", heads=heads, kv_heads=kv_heads, **options)
    arrays = [None if inputs.get(name) is None else np.ascontiguousarray(inputs[name]) for name in BLOCK]
    if library().msflash_ascend_block(*_arguments("", spec, arrays + [output.array for output in outputs])[1:]):
        raise RuntimeError(library().msflash_ascend_last_error().decode())
    assert all(output.intact() for output in outputs), "the block wrote outside its outputs"
    return dict(zip(("y", "lse", "row_max", "row_sum"), (output.array for output in outputs)))


def report():
    """What the twin said of the last launch."""
    return json.loads(library().msflash_ascend_last_report())


def plan(op, spec, arrays):
    """The plan of the host tiling for a call."""
    text = library().msflash_ascend_plan(*_arguments(op, spec, arrays))
    if text is None:
        raise ValueError(library().msflash_ascend_last_error().decode())
    return json.loads(text)


def _call(op, spec, inputs, outputs, lib=None):
    guarded = [native.Guarded(shape, dtype) for shape, dtype in outputs]
    arrays = [None if x is None else np.ascontiguousarray(x) for x in inputs]
    raw_call(op, spec, arrays + [output.array for output in guarded], lib)
    assert all(output.intact() for output in guarded), f"{op} wrote outside its outputs"
    return [output.array for output in guarded]


def forward(inputs, lib=None, **options):
    """inputs: arrays by slot name. Returns dict(out, lse, row_max, row_sum)."""
    out, rows = native._result_shapes(inputs, **options)
    outputs = [(out, inputs["query"].dtype), (rows, np.float32), (rows, np.float32), (rows, np.float32)]
    results = _call("fwd", native.spec_text(inputs, **options), [inputs.get(slot) for slot in native.SLOTS], outputs,
                    lib)
    return dict(zip(("out", "lse", "row_max", "row_sum"), results))


def backward(inputs, saved, dout, dlse, lib=None, **options):
    """saved: what `forward` returned. Returns dict(dq, dk, dv[, dsinks][, dbias])."""
    query, sinks = inputs["query"], inputs.get("sinks")
    operands = [inputs.get(slot) for slot in native.SLOTS]
    operands += [saved["out"], saved["row_max"], saved["row_sum"], dout, dlse]
    packed = options.get("packed", False)
    key_shape, value_shape = ((1,), (1,)) if packed else (inputs["key"].shape, inputs["value"].shape)
    outputs = [(query.shape, query.dtype), (key_shape, query.dtype), (value_shape, query.dtype),
               ((1,), np.float32) if sinks is None else (sinks.shape, sinks.dtype)]
    spec, bias = native.spec_text(inputs, **options), inputs.get("bias")
    grads = dict(zip(("dq", "dk", "dv", "dsinks"), _call("bwd", spec, operands, outputs, lib)))
    if sinks is None:
        assert not grads.pop("dsinks").any(), "unused outputs must be zero"
    if bias is not None:
        grads["dbias"], = _call("bias_grad", spec, operands, [(bias.shape, bias.dtype)], lib)
    return grads
