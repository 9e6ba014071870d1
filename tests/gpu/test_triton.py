"""The Triton kernel in Triton's interpreter, against the float64 reference. Needs torch and triton.

Where they are not installed these tests are skipped; where they are, an import that fails fails them.
`make test-triton` installs them (requirements.txt) beside the project's environment and runs the tests.
"""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import flash_rule
import ml_dtypes
import numpy as np
import pytest

if not all(importlib.util.find_spec(name) for name in ("torch", "triton")):
    pytest.skip("torch and triton are not installed: make test-triton", allow_module_level=True)

import torch
from triton_kernel import FILE, flash_attention

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
BLOCKS = (32, 16, 4, 1)     # small, so that short lengths have inner, edge and empty blocks


def tensor(x):
    """NumPy to torch; bfloat16 by its bits, which is all that the two share."""
    x = np.ascontiguousarray(x)
    if x.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def array(x):
    return x.view(torch.int16).numpy().view(DTYPES["bfloat16"]) if x.dtype == torch.bfloat16 else x.numpy()


def run(call, blocks=BLOCKS):
    mask = call.get("bias")
    if call.get("attn_mask") is not None:
        mask = ~call["attn_mask"]
    out, lse = flash_attention(
        *(tensor(call[name]) for name in "qkv"), None if mask is None else tensor(mask), scale=call.get("scale"),
        softcap=call.get("softcap", 0.0), left_window_size=call.get("left", -1),
        right_window_size=call.get("right", -1), causal_alignment=int(call.get("align") != "top_left"),
        return_lse=True, blocks=blocks)
    return {"out": array(out), "lse": array(lse)}


def check(call, **options):
    got = run(call, **options)
    exact = flash_rule.evaluate(call, None)
    flash_rule.check(got, exact, flash_rule.evaluate(call, None, rounding=call["q"].dtype))
    return got


def normal(rng, shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def random_call(rng, dtype, mask=None, softcap=0.0):
    def pick(*values):
        return values[rng.integers(len(values))]

    batch, kv_heads, group = 1 + rng.integers(2), 1 + rng.integers(2), 1 + rng.integers(2)
    sq, sk = int(pick(1, 7, 32, 33, 50)), int(pick(1, 7, 16, 33, 70))
    d, dv = (int(pick(1, 5, 16, 33, 64)) for _ in range(2))
    call = {"q": normal(rng, (batch, kv_heads * group, sq, d), dtype), "softcap": softcap,
            "k": normal(rng, (batch, kv_heads, sk, d), dtype), "v": normal(rng, (batch, kv_heads, sk, dv), dtype),
            "scale": pick(None, 0.3, -0.2, 1.0), "left": int(pick(-1, -1, 0, 5, 20)), "right": int(pick(-1, 0, 0, 3)),
            "align": pick("bottom_right", "top_left")}
    shape = [1 if rng.random() < 0.4 else length for length in (batch, kv_heads * group, sq, sk)][-int(pick(1, 2, 4)):]
    if mask == "bool":
        call["attn_mask"] = rng.random(shape) < pick(0.3, 0.9)
    elif mask is not None:
        call["bias"] = normal(rng, shape, DTYPES[mask])
        call["bias"][rng.random(shape) < 0.2] = -np.inf
    return call


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("mask", [None, "bool", *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_calls(dtype, mask, softcap):
    rng = np.random.default_rng()
    for _ in range(2):
        check(random_call(rng, DTYPES[dtype], mask, softcap))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [8, 128, 200])
def test_the_built_in_blocks(dtype, d):
    rng = np.random.default_rng()
    call = {"q": normal(rng, (1, 2, 200, d), DTYPES[dtype]), "k": normal(rng, (1, 1, 300, d), DTYPES[dtype]),
            "v": normal(rng, (1, 1, 300, d), DTYPES[dtype]), "right": 0}
    check(call, blocks=None)


def test_the_lowest_number_is_no_mask():
    """A row of float32's lowest numbers is arithmetic: the scores vanish beside them, and the row is no empty one."""
    rng = np.random.default_rng()
    call = {name: normal(rng, (1, 1, 4, 16)) for name in "qkv"}
    call["bias"] = np.full((4, 4), np.finfo(np.float32).min)
    got = run(call)
    np.testing.assert_allclose(got["out"], np.broadcast_to(call["v"].mean(2, keepdims=True), (1, 1, 4, 16)), rtol=1e-5,
                               atol=1e-6)


@pytest.mark.parametrize("mask", [None, "bool", "float32"])
def test_what_is_masked_out_is_not_read(mask):
    rng = np.random.default_rng()
    call = {"q": normal(rng, (1, 2, 40, 16)), "k": normal(rng, (1, 1, 50, 16)), "v": normal(rng, (1, 1, 50, 24)),
            "right": 3 if mask else -1, "left": 10}
    hidden = rng.random(50) < 0.3
    if mask is None:        # by the band alone: row 39 sees keys from 39 on
        hidden = np.arange(50) < 10
    elif mask == "bool":
        call["attn_mask"] = np.broadcast_to(hidden, (40, 50))
    else:
        call["bias"] = np.where(hidden, -np.inf, normal(rng, (40, 50))).astype(np.float32)
    clean = run(call)
    call["k"][:, :, hidden], call["v"][:, :, hidden] = np.nan, np.inf
    got = run(call)
    rows = slice(None) if mask else slice(10, None)     # rows that see none of the hidden keys
    for name, x in got.items():
        np.testing.assert_array_equal(x[:, :, rows], clean[name][:, :, rows])


def test_nan_and_infinity_that_are_seen_reach_their_rows():
    rng = np.random.default_rng()
    call = {name: normal(rng, (1, 1, 40, 16)) for name in "qkv"}
    call["right"] = 0
    call["v"][0, 0, 20, 3], call["v"][0, 0, 5, 4], call["v"][0, 0, 7, 5] = np.nan, np.inf, -np.inf
    got = run(call)["out"][0, 0]
    assert np.isnan(got[20:, 3]).all() and np.isposinf(got[5:, 4]).all() and np.isneginf(got[7:, 5]).all()
    got[20:, 3] = got[5:, 4] = got[7:, 5] = 0
    assert np.isfinite(got).all()


@pytest.mark.parametrize("shape", [(0, 2, 1, 3, 4, 8), (1, 2, 2, 0, 4, 8), (1, 2, 1, 3, 0, 8), (1, 2, 1, 3, 4, 0)])
def test_nothing_to_do(shape):
    batch, heads, kv_heads, sq, sk, dv = shape
    call = {"q": np.ones((batch, heads, sq, 8), np.float32), "k": np.ones((batch, kv_heads, sk, 8), np.float32),
            "v": np.ones((batch, kv_heads, sk, dv), np.float32)}
    check(call)


def test_any_strides():
    rng = np.random.default_rng()
    q, k, v = (torch.from_numpy(normal(rng, (2, 30, 3, 16))).transpose(1, 2) for _ in range(3))
    wide = torch.from_numpy(normal(rng, (2, 3, 30, 32)))[..., ::2]
    expected = flash_attention(q.contiguous(), k.contiguous(), wide.contiguous(), is_causal=True)
    torch.testing.assert_close(flash_attention(q, k, wide, is_causal=True), expected, rtol=0, atol=0)
    assert torch.isfinite(v).all()


@pytest.mark.parametrize(("change", "kind", "text"), [
    ({"q": (2, 3, 8)}, ValueError, "rank of 'q' must be 4"), ({"k": (1, 2, 5, 8)}, ValueError, "shape of 'k' must be"),
    ({"v": (2, 2, 6, 8)}, ValueError, "shape of 'v' must be"), ({"q": (2, 3, 3, 8)}, ValueError, "multiple of those"),
    ({"q": (2, 4, 3, 0), "k": (2, 2, 5, 0)}, ValueError, "head_dim of 'q'"),
    ({"mask": (2, 4, 3, 4)}, ValueError, "must broadcast to"), ({"k": torch.float16}, TypeError, "dtype of 'q'"),
    ({"mask": torch.int64}, TypeError, "must be bool"), ({"q": torch.float64}, TypeError, "'q'|'k'")], ids=str)
def test_wrong_calls(change, kind, text):
    shapes = {"q": (2, 4, 3, 8), "k": (2, 2, 5, 8), "v": (2, 2, 5, 8), "mask": (2, 4, 3, 5)}
    tensors = {name: torch.zeros(change.get(name, shape)) if isinstance(change.get(name, shape), tuple)
               else torch.zeros(shape, dtype=change[name]) for name, shape in shapes.items()}
    with pytest.raises(kind, match=text):
        flash_attention(*tensors.values())


COMPILE = """
import importlib.util, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

spec = importlib.util.spec_from_file_location("triton_forward", sys.argv[1])
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
fixed = dict(MASK=int(sys.argv[4]), SOFTCAP=sys.argv[4] == "2", WRITE_LSE=True, TO_LOG2=1.0)
channels = int(sys.argv[5])
block_m, block_n, warps, stages = kernels._blocks(kernels.torch.float32 if sys.argv[3] == "fp32" else None,
                                                   channels)
fixed.update(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=channels, BLOCK_DV=channels)
kernel = kernels._forward
types = {name: "*" + sys.argv[3] for name in "QKVY"}
types.update(M="*u8" if sys.argv[4] != "2" else "*fp32", LSE="*fp32", scale="fp32", inverse_cap="fp32", cap="fp32")
types = {name: types.get(name, "i32") for name in kernel.arg_names if name not in fixed}
compiled = triton.compile(ASTSource(kernel, types, constexprs=fixed), target=GPUTarget("cuda", int(sys.argv[2]), 32),
                          options={"num_warps": warps, "num_stages": stages})
print(compiled.metadata.shared, len(compiled.asm["cubin"]), "mma" in compiled.asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype", "mask", "channels"), [
    (80, "fp16", 0, 128), (80, "bf16", 0, 64), (80, "fp32", 0, 128), (80, "fp16", 1, 256), (80, "bf16", 2, 128),
    (80, "fp16", 0, 512), (80, "fp32", 1, 256), (90, "fp16", 0, 64), (90, "bf16", 1, 128), (90, "fp32", 2, 64)])
def test_compiles_for_gpus(capability, dtype, mask, channels, tmp_path):
    """To machine code, with no GPU; in a process of its own, since in this one kernels are interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE, FILE, *map(str, (capability, dtype, mask, channels))],
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shared, size, tensor_cores = done.stdout.split()
    assert int(shared) <= (163 if capability == 80 else 227) * 1024 and int(size) > 1000
    assert dtype == "fp32" or tensor_cores == "True"


@pytest.mark.slow
def test_the_benchmark_can_be_rehearsed():
    """The script that checks and times the kernels on a GPU, on the CPU: all but the GPU's own calls."""
    script = FILE.parents[2] / "benchmarks" / "gpu.py"
    done = subprocess.run([sys.executable, script, "--rehearse"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert " 0 failed" in done.stdout and "| tiny-causal |" in done.stdout
