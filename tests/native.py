"""Calls libms_flash_cpu.so through ctypes, numpy in and out: no MindSpore, so that it also runs under sanitizers.

Outputs are filled with NaN (integers with 0xFF) before a kernel runs, between guard bytes that must survive it.
`MS_FLASH_CPU_LIB` names another build of the library. With `MS_FLASH_CPU_RUNNER`, the command of a program built from
runner.cpp (under an emulator, say), calls of ops go there instead.
"""
from __future__ import annotations

import ctypes
import functools
import os
import shlex
import struct
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np

SLOTS = ("query", "key", "value", "attn_mask", "bias", "alibi_slopes", "sinks", "seed", "drop_mask", "cu_q", "cu_k")
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_GUARD = 64
_library = None


def library_path():
    default = Path(__file__).resolve().parents[1] / "ms_flash" / "lib" / "libms_flash_cpu.so"
    return Path(os.environ.get("MS_FLASH_CPU_LIB", default))


def library():
    global _library
    if _library is None:
        _library = ctypes.CDLL(str(library_path()))
        _library.msflash_cpu_last_error.restype = ctypes.c_char_p
        _library.msflash_cpu_isa.restype = ctypes.c_char_p
        _library.msflash_cpu_isa_list.restype = ctypes.c_char_p
    return _library


# Layouts: tests think in (B, N, S, D); TND is (T, N, D) on both sides
def to_layout(x, layout):
    if layout == "BSND":
        x = x.transpose(0, 2, 1, 3)
    elif layout == "BSH":
        x = x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3])
    elif layout == "SBH":
        x = x.transpose(2, 0, 1, 3).reshape(x.shape[2], x.shape[0], x.shape[1] * x.shape[3])
    return np.ascontiguousarray(x)


def from_layout(x, layout, heads):
    if layout == "BSND":
        return x.transpose(0, 2, 1, 3)
    if layout in ("BSH", "SBH"):
        x = x.reshape(*x.shape[:2], heads, x.shape[2] // heads)
        return x.transpose(0, 2, 1, 3) if layout == "BSH" else x.transpose(1, 2, 0, 3)
    return x


def spec_text(inputs, *, layout="BNSD", heads=0, kv_heads=0, packed=False, scale=None, left=-1, right=-1,
              align="bottom_right", softcap=0.0, dropout=0.0, seed=0, offset=0, fill=None, precision="default",
              block_m=0, block_n=0):
    """The op's attribute: everything about a call that is not a tensor."""
    fields = {"layout": layout, "heads": heads, "kv_heads": kv_heads, "packed": int(packed),
              "scale": "default" if scale is None else float(scale).hex(), "left": left, "right": right, "align": align,
              "softcap": float(softcap).hex(), "dropout": float(dropout).hex(), "seed": seed, "offset": offset}
    if fill is not None:
        fields["fill"] = float(fill).hex()
    fields.update(precision=precision, block_m=block_m, block_n=block_n,
                  present="".join("0" if inputs.get(slot) is None else "1" for slot in SLOTS))
    return ";".join(f"{name}={value}" for name, value in fields.items())


class Guarded:
    """An output array with guard bytes on both sides."""

    def __init__(self, shape, dtype):
        dtype = np.dtype(dtype)
        size = int(np.prod(shape)) * dtype.itemsize
        self.raw = np.full(size + 2 * _GUARD, 0xA5, np.uint8)
        self.array = self.raw[_GUARD:_GUARD + size].view(dtype).reshape(shape)
        self.array[...] = np.nan if dtype in DTYPES.values() else -1

    def intact(self):
        return (self.raw[:_GUARD] == 0xA5).all() and (self.raw[self.raw.size - _GUARD:] == 0xA5).all()


def raw_call(op, spec, arrays):
    """Runs op on contiguous arrays (or None), inputs then outputs, as they are: no copies, no checks."""
    if "MS_FLASH_CPU_RUNNER" in os.environ:
        return _runner().call(op, spec, arrays)
    count = len(arrays)
    shapes = [(ctypes.c_int64 * max(1, 0 if x is None else x.ndim))(*(() if x is None else x.shape)) for x in arrays]
    status = library().msflash_cpu_call(
        op.encode(), spec.encode(), count,
        (ctypes.c_void_p * count)(*(None if x is None else x.ctypes.data for x in arrays)),
        (ctypes.c_int * count)(*(0 if x is None else x.ndim for x in arrays)),
        (ctypes.POINTER(ctypes.c_int64) * count)(*(ctypes.cast(s, ctypes.POINTER(ctypes.c_int64)) for s in shapes)),
        (ctypes.c_char_p * count)(*(b"none" if x is None else x.dtype.name.encode() for x in arrays)))
    if status:
        raise RuntimeError(library().msflash_cpu_last_error().decode())


class _Runner:
    """The other end of runner.cpp."""

    def __init__(self, command):
        self.process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def call(self, op, spec, arrays):
        text = lambda s: struct.pack("i", len(s)) + s.encode()
        send, receive = self.process.stdin, self.process.stdout
        send.write(text(op) + text(spec) + struct.pack("i", len(arrays)))
        for x in arrays:
            shape = () if x is None else x.shape
            send.write(text("none" if x is None else x.dtype.name))
            send.write(struct.pack(f"=i{len(shape)}q", len(shape), *shape))
            send.write(struct.pack("q", 0 if x is None else x.nbytes) + (b"" if x is None else x.tobytes()))
        send.flush()
        status, = struct.unpack("i", receive.read(4))
        if status:
            raise RuntimeError(receive.read(struct.unpack("i", receive.read(4))[0]).decode())
        for x in arrays:
            if x is not None:
                data = np.frombuffer(receive.read(x.nbytes), np.uint8)
                if data.tobytes() != x.tobytes():    # inputs come back too, and stay what they were
                    x.view(np.uint8).reshape(-1)[...] = data


@functools.lru_cache(None)
def _runner():
    return _Runner(os.environ["MS_FLASH_CPU_RUNNER"])


def call(op, spec, inputs, outputs):
    """Runs op on a list of arrays (or None) and returns arrays of the given [(shape, dtype), ...]."""
    guarded = [Guarded(shape, dtype) for shape, dtype in outputs]
    arrays = [None if x is None else np.ascontiguousarray(x) for x in inputs]
    untouched = [None if x is None else x.tobytes() for x in arrays]
    raw_call(op, spec, arrays + [output.array for output in guarded])
    assert all(output.intact() for output in guarded), f"{op} wrote outside its outputs"
    assert all(x is None or x.tobytes() == old for x, old in zip(arrays, untouched)), f"{op} wrote to its inputs"
    return [output.array for output in guarded]


def _result_shapes(inputs, layout="BNSD", heads=0, kv_heads=0, packed=False, **_):
    """Shapes of the output and of the row statistics."""
    batch, head, row = {"BNSD": (0, 1, 2), "BSND": (0, 2, 1), "BSH": (0, None, 1), "SBH": (1, None, 0),
                        "TND": (None, 1, 0)}[layout]
    query, value = inputs["query"], inputs.get("value")
    if head is not None and not packed:
        heads, kv_heads = query.shape[head], value.shape[head]
    out = list(query.shape)
    if head is None:
        out[2] = heads * (query.shape[2] // (heads + 2 * kv_heads) if packed else value.shape[2] // kv_heads)
    else:
        out[head], out[-1] = heads, query.shape[-1] if packed else value.shape[-1]
    rows = (heads, query.shape[row]) if batch is None else (query.shape[batch], heads, query.shape[row])
    return tuple(out), rows


def forward(inputs, **options):
    """inputs: arrays by slot name, in the layout of the call. Returns dict(out, lse, row_max, row_sum)."""
    out, rows = _result_shapes(inputs, **options)
    outputs = [(out, inputs["query"].dtype), (rows, np.float32), (rows, np.float32), (rows, np.float32)]
    results = call("fwd", spec_text(inputs, **options), [inputs.get(slot) for slot in SLOTS], outputs)
    return dict(zip(("out", "lse", "row_max", "row_sum"), results))


def backward(inputs, saved, dout, dlse, **options):
    """saved: what `forward` returned. Returns dict(dq, dk, dv[, dsinks][, dbias])."""
    query, packed = inputs["query"], options.get("packed", False)
    spec, sinks = spec_text(inputs, **options), inputs.get("sinks")
    operands = [inputs.get(slot) for slot in SLOTS] + [saved["out"], saved["row_max"], saved["row_sum"], dout, dlse]
    key_shape, value_shape = ((1,), (1,)) if packed else (inputs["key"].shape, inputs["value"].shape)
    outputs = [(query.shape, query.dtype), (key_shape, query.dtype), (value_shape, query.dtype),
               ((1,), np.float32) if sinks is None else (sinks.shape, sinks.dtype)]
    grads = dict(zip(("dq", "dk", "dv", "dsinks"), call("bwd", spec, operands, outputs)))
    if packed:
        assert not grads["dk"].any() and not grads["dv"].any(), "unused outputs must be zero"
    if sinks is None:
        assert not grads.pop("dsinks").any(), "unused outputs must be zero"
    if inputs.get("bias") is not None:
        bias = inputs["bias"]
        grads["dbias"], = call("bias_grad", spec, operands, [(bias.shape, bias.dtype)])
    return grads


# The block op: projections around attention. Activations are (B, S, E) here, whatever the layout of the call.
MHA_SLOTS = ("x", "context", "context_v", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "w_o", "b_o", "attn_mask", "bias",
             "alibi_slopes", "sinks", "seed", "drop_mask")
MHA_GRADIENTS = MHA_SLOTS[:11] + ("sinks",)


def _mha_text(inputs, *, num_heads, num_kv_heads=None, transposed=(False,) * 4, interleaved=False, recompute=False,
              grads=MHA_GRADIENTS, layout="BSH", **options):
    digits = lambda flags: "".join("1" if flag else "0" for flag in flags)
    inner = {**dict.fromkeys(("query", "key", "value"), 1), **{slot: inputs.get(slot) for slot in MHA_SLOTS[11:]}}
    text = spec_text(inner, layout=layout, heads=num_heads, kv_heads=num_kv_heads or num_heads, **options)
    return (f"inputs={digits(inputs.get(slot) is not None for slot in MHA_SLOTS)};recompute={int(recompute)};"
            f"interleaved={int(interleaved)};transposed={digits(transposed)};"
            f"grads={digits(name in grads for name in MHA_GRADIENTS)}|{text}")


def _turned(inputs, layout):
    """(B, S, E) to (S, B, E) and back."""
    if layout == "BSH":
        return inputs
    turns = lambda name, x: x is not None and x.ndim == 3 and name in _ACTIVATIONS
    return {name: np.ascontiguousarray(x.swapaxes(0, 1)) if turns(name, x) else x for name, x in inputs.items()}


_ACTIVATIONS = ("x", "context", "context_v", "y", "q", "k", "v", "attn", "dx", "dcontext", "dcontext_v")


def mha_forward(inputs, *, channels, layout="BSH", **options):
    """inputs: arrays by slot name. channels: those of y, q, k, v, attn. Returns these and the statistics by name."""
    given = _turned(inputs, layout)
    x, keys = given["x"], given["x"] if given.get("context") is None else given["context"]
    no_w_o = given.get("w_o") is None
    rows = (inputs["x"].shape[0], options["num_heads"], inputs["x"].shape[1])
    sizes = dict(zip(("y", "q", "k", "v", "attn"), channels))
    outputs = [((*(keys if name in "kv" else x).shape[:2], n), x.dtype) for name, n in sizes.items()]
    outputs = [((1,), x.dtype) if name == "attn" and no_w_o else output for name, output in zip(sizes, outputs)]
    results = call("mha_fwd", _mha_text(given, layout=layout, **options), [given.get(slot) for slot in MHA_SLOTS],
                   outputs + [(rows, np.float32)] * 2)
    saved = dict(zip(("y", "q", "k", "v", "attn", "row_max", "row_sum"), results))
    assert all(saved[name].any() == 0 for name in saved if saved[name].shape == (1,)), "unused outputs must be zero"
    return _turned(saved, layout)


def mha_backward(inputs, saved, dy, *, channels, layout="BSH", **options):
    """saved: what `mha_forward` returned. Returns gradients by "d" and name; absent ones are left out."""
    del channels
    given, saved = _turned(inputs, layout), _turned({**saved, "dy": dy}, layout)
    dy = np.ascontiguousarray(dy.swapaxes(0, 1)) if layout == "SBH" else dy
    wanted = [name for name in options.get("grads", MHA_GRADIENTS) if inputs.get(name) is not None]
    text = _mha_text(given, layout=layout, **options)
    attn = saved["y" if inputs.get("w_o") is None else "attn"]
    operands = [given.get(slot) for slot in MHA_SLOTS] + [
        saved["q"], saved["k"], saved["v"], attn, saved["row_max"], saved["row_sum"], dy]
    outputs = [(given[name].shape, given[name].dtype) if name in wanted else ((1,), given["x"].dtype)
               for name in MHA_GRADIENTS]
    pieces = [saved[name] for name in "qkv"]
    pieces += [] if inputs.get("w_o") is None else [saved["attn"]]
    work = sum((piece.size + 31) // 32 * 32 for piece in pieces)
    if options.get("recompute"):    # what is handed over in their place is not looked at
        operands[len(MHA_SLOTS):len(MHA_SLOTS) + 3] = [np.full(1, np.nan, given["x"].dtype)] * 3
    outputs.append(((work,), given["x"].dtype))
    grads = {"d" + name: grad for name, grad in zip(MHA_GRADIENTS, call("mha_bwd", text, operands, outputs))}
    assert all(not grads.pop("d" + name).any() for name in MHA_GRADIENTS if name not in wanted)
    if inputs.get("bias") is not None:
        bias = inputs["bias"]
        grads["dbias"], = call("mha_bias_grad", text, operands, [(bias.shape, bias.dtype)])
    return _turned(grads, layout)
