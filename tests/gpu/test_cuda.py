"""The CUDA kernels on the host, over `host_shim.h`: against the float64 reference, and for what the shim finds."""
from __future__ import annotations

import ctypes
import shutil
import subprocess

import cuda_host
import flash_rule
import ml_dtypes
import numpy as np
import pytest

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def normal(rng, shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def random_call(rng, dtype, mask=None, **options):
    def pick(*values):
        return values[rng.integers(len(values))]

    batch, kv_heads, group = rng.integers(1, 3), rng.integers(1, 3), rng.integers(1, 4)
    sq, sk = (int(pick(1, 7, 31, 32, 33, 50, 65)) for _ in range(2))
    d, dv = (int(pick(1, 5, 32, 33, 64, 130)) for _ in range(2))
    call = {"q": normal(rng, (batch, kv_heads * group, sq, d), dtype),
            "k": normal(rng, (batch, kv_heads, sk, d), dtype), "v": normal(rng, (batch, kv_heads, sk, dv), dtype),
            "scale": pick(None, 0.3, -0.2, 1.0), "left": int(pick(-1, -1, 0, 5, 40)),
            "right": int(pick(-1, 0, 0, 3)), "align": pick("bottom_right", "top_left"), **options}
    shape = [1 if rng.random() < 0.4 else length for length in (batch, kv_heads * group, sq, sk)][-int(pick(1, 2, 4)):]
    if mask == "bool":
        call["attn_mask"] = rng.random(shape) < pick(0.3, 0.9)
    elif mask is not None:
        call["bias"] = normal(rng, shape, mask)
        call["bias"][rng.random(shape) < 0.2] = -np.inf
    return call


def gradients_of(rng, call):
    rows = (*call["q"].shape[:3],)
    return normal(rng, (*rows, call["v"].shape[3]), call["q"].dtype), normal(rng, rows)


def check(call, dout=None, dlse=None):
    got = cuda_host.attention(call, dout, dlse)
    exact = flash_rule.evaluate(call, dout, dlse)
    margins = {} if dout is None else flash_rule.unavoidable(call, dout, dlse, got["out"])
    flash_rule.check(got, exact, flash_rule.evaluate(call, dout, dlse, rounding=call["q"].dtype), margins)
    return got


@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"dropout_p": 0.3, "seed": -5, "offset": 3}], ids=str)
@pytest.mark.parametrize("mask", [None, "bool", *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_calls(dtype, mask, options):
    rng = np.random.default_rng()
    for _ in range(2):
        call = random_call(rng, dtype, mask, **options)
        check(call, *gradients_of(rng, call))


@pytest.mark.parametrize("shape", [(0, 2, 1, 3, 4, 8, 8), (1, 2, 2, 0, 4, 8, 8), (1, 2, 1, 3, 0, 8, 8),
                                   (1, 1, 1, 3, 4, 8, 0), (2, 0, 1, 3, 4, 8, 8)])
def test_nothing_to_do(shape):
    batch, heads, kv_heads, sq, sk, d, dv = shape
    rng = np.random.default_rng()
    call = {"q": normal(rng, (batch, heads, sq, d)), "k": normal(rng, (batch, kv_heads, sk, d)),
            "v": normal(rng, (batch, kv_heads, sk, dv))}
    check(call, *gradients_of(rng, call))


def test_rows_without_keys():
    """Causal with fewer keys than queries: whole blocks of queries see nothing."""
    rng = np.random.default_rng()
    call = {"q": normal(rng, (1, 2, 70, 16)), "k": normal(rng, (1, 2, 5, 16)), "v": normal(rng, (1, 2, 5, 16)),
            "right": 0}
    got = check(call, *gradients_of(rng, call))
    assert not got["out"][:, :, :65].any() and np.isneginf(got["lse"][:, :, :65]).all()


def test_what_is_masked_out_is_not_read():
    rng = np.random.default_rng()
    call = {"q": normal(rng, (1, 2, 40, 16)), "k": normal(rng, (1, 1, 50, 16)), "v": normal(rng, (1, 1, 50, 24)),
            "right": 3, "attn_mask": rng.random((1, 2, 40, 50)) < 0.2}
    hidden = rng.random(50) < 0.3
    call["attn_mask"][..., hidden] = True
    gradients = gradients_of(rng, call)
    clean = check(call, *gradients)
    call["k"][:, :, hidden], call["v"][:, :, hidden] = np.nan, np.inf
    for name, x in cuda_host.attention(call, *gradients).items():
        np.testing.assert_array_equal(x, clean[name])


def test_every_result_but_the_output_is_optional():
    call = random_call(np.random.default_rng(), DTYPES[0])
    whole, alone = cuda_host.attention(call), cuda_host.attention(call, statistics=False)
    np.testing.assert_array_equal(whole["out"], alone["out"])


@pytest.mark.parametrize(("change", "text"), [({"type": 4}, "'type'"), ({"d": 0}, "'d'"), ({"kv_heads": 3}, "'heads'"),
                                              ({"kv_heads": 0}, "'heads'"), ({"dropout": 1.0}, "'dropout'"),
                                              ({"dropout": float("nan")}, "'dropout'"), ({"batch": 2**40}, "blocks")])
@pytest.mark.parametrize("function", ["msflash_cuda_forward", "msflash_cuda_backward"])
def test_what_no_kernel_can_do_is_refused(function, change, text):
    buffers = cuda_host.HostBuffers()
    numbers = {"batch": 1, "heads": 4, "kv_heads": 2, "q_len": 1, "k_len": 1, "d": 8, "dv": 8, "type": 1, **change}
    for name, value in numbers.items():
        setattr(buffers.call, name, value)
    with pytest.raises(RuntimeError, match=text):
        buffers.run(function)


# --------------------------------------------------------------------------------------------------------------------
# What the shim finds
# --------------------------------------------------------------------------------------------------------------------
BARRIERS = [number for number, line in enumerate(cuda_host.SOURCE.read_text().splitlines(), 1)
            if "__syncthreads()" in line]


@pytest.mark.parametrize("line", BARRIERS)
def test_no_barrier_can_be_left_out(line):
    """Each one, skipped, is a race that the shim reports; else it would be one too many."""
    rng = np.random.default_rng()
    call = {"q": normal(rng, (1, 2, 40, 40)), "k": normal(rng, (1, 1, 70, 40)), "v": normal(rng, (1, 1, 70, 40))}
    empty = {"q": normal(rng, (1, 1, 40, 8)), "k": normal(rng, (1, 1, 0, 8)), "v": normal(rng, (1, 1, 0, 8))}
    gradients = gradients_of(rng, call)
    cuda_host.library().shim_skip_barrier(ctypes.c_long(line))
    try:
        with pytest.raises(RuntimeError, match=r"no barrier between|before it is written"):
            cuda_host.attention(call, *gradients)
            cuda_host.attention(empty)
    finally:
        cuda_host.library().shim_skip_barrier(ctypes.c_long(-1))
    check(call, *gradients)


FAULTS = """
#include "gpu/device.h"

struct Shared {
  Tile<float, 4, 4> x;
};
int global[16];

__global__ void kernel(int fault) {
  MSF_SHARED(Shared, sm);
  const int t = int(threadIdx.x);
  if (fault != 1 || t < 8) sm.x.put(t / 4, t % 4, 1.0f);
  if (fault == 2) sm.x.put(t / 4, 4, 0.0f);
  if (fault == 3) sm.x(-1, 0);
  if (fault == 4) sm.x(0, 0);
  if (fault == 5) sm.x.put(0, 0, 2.0f);
  if (fault == 6 && t < 8) __syncthreads();
  if (fault == 7 && t == 3) return;
  if (fault == 8 && t % 2)
    __syncthreads();
  else if (fault == 8)
    __syncthreads();
  __syncthreads();
  sm.x(t / 4, t % 4);
  if (fault == 9 && t == 0) sm.x.put(1, 1, 2.0f);
  if (fault == 10) read(global + 16 - t);
  if (fault == 11) write(global + t, 1);
  if (t == 0) write(global, 1);
}

extern "C" {
void shim_buffer(const void*, size_t, int);
void name_buffers() {
  shim_buffer(global, sizeof global, 0);
  shim_buffer(global, sizeof *global, 1);
}
const char* run_fault(int fault) { return launch(kernel, 1, 1, 16, nullptr, fault); }
}
"""


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "faults.cu").write_text(FAULTS)
    library = ctypes.CDLL(str(cuda_host.build(folder, source=folder / "faults.cu")))
    library.run_fault.restype = ctypes.c_char_p
    library.name_buffers()
    return library


@pytest.mark.parametrize(("fault", "text"), [
    (1, "read of element .* before it is written"), (2, r"element \(0, 4\) of a tile of 4 x 4"),
    (3, r"element \(-1, 0\)"), (4, "written by thread 0 and read by thread 1"), (5, "written by threads 0 and 1"),
    (6, "divergent barrier"), (7, "divergent barrier"), (8, "divergent barrier"),
    (9, "read by thread 5 and written by thread 0"), (10, "global memory read outside"),
    (11, "global memory written outside")])
def test_the_shim_finds(faults, fault, text):
    with pytest.raises(AssertionError, match=text):
        reason = faults.run_fault(fault)
        assert not reason, reason.decode()
    assert faults.run_fault(0) is None          # and goes on


# --------------------------------------------------------------------------------------------------------------------
# The same source with the real compiler
# --------------------------------------------------------------------------------------------------------------------
NEEDS_NVCC = pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc here")


@pytest.mark.slow
@NEEDS_NVCC
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvcc_compiles(architecture, tmp_path):
    include = [f"-I{cuda_host.ROOT / folder}" for folder in ("op_impl", "onnx_export")]
    subprocess.run(["nvcc", "-std=c++17", "-O3", "-Werror=all-warnings", f"-arch={architecture}", "-cubin", *include,
                    "-o", tmp_path / "kernels.cubin", cuda_host.SOURCE], check=True)
    assert (tmp_path / "kernels.cubin").stat().st_size > 10_000


@pytest.mark.slow
@NEEDS_NVCC
def test_the_library_loads_without_a_gpu(tmp_path):
    """Built as `make cuda` does. Where there is a GPU it runs, with nothing to do; elsewhere it says why not."""
    subprocess.run(["cmake", "-S", cuda_host.ROOT / "op_impl", "-B", tmp_path, "-DMSF_CUDA=ON"], check=True)
    subprocess.run(["cmake", "--build", tmp_path, "--target", "ms_flash_cuda"], check=True)
    library = ctypes.CDLL(str(tmp_path / "libms_flash_cuda.so"))
    library.msflash_cuda_forward.restype = ctypes.c_char_p
    call = cuda_host.Call(batch=1, heads=1, kv_heads=1, q_len=1, k_len=0, d=8, dv=8, type=1)
    reason = library.msflash_cuda_forward(ctypes.byref(call), None)
    assert reason is None or b"CUDA" in reason, reason
