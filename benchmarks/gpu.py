"""The GPU kernels on a GPU: checks them against the float64 reference, then times them against PyTorch.

    python benchmarks/gpu.py             # a table; less than five minutes
    python benchmarks/gpu.py --write     # and into docs/gpu.md
    python benchmarks/gpu.py --rehearse  # without a GPU: the same script on tiny shapes, with Triton's interpreter and
                                         # the CUDA kernels compiled for the host; its times mean nothing

Needs torch, triton, ml_dtypes and, for the CUDA kernels, nvcc; flash-attn is a peer if it is installed. No MindSpore.
Exit code 1 if a check fails.
"""
from __future__ import annotations

import argparse
import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "gpu"))
import cuda_host  # noqa: E402  found by the lines above
import flash_rule  # noqa: E402

PAGE, BEGIN, END = ROOT / "docs" / "gpu.md", "<!-- begin gpu -->", "<!-- end gpu -->"
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# name: batch, query heads, key heads, queries, keys, head_dim, dtype, causal, left window
SHAPES = {
    "train-1k": (8, 16, 16, 1024, 1024, 64, "bfloat16", False, -1),
    "train-4k": (2, 16, 16, 4096, 4096, 128, "bfloat16", False, -1),
    "causal-4k": (2, 16, 16, 4096, 4096, 128, "bfloat16", True, -1),
    "causal-4k-fp16": (2, 16, 16, 4096, 4096, 64, "float16", True, -1),
    "gqa-8k": (1, 32, 8, 8192, 8192, 128, "bfloat16", True, -1),
    "window-8k": (1, 16, 16, 8192, 8192, 128, "bfloat16", True, 1024),
    "decode-8k": (8, 32, 8, 1, 8192, 128, "bfloat16", True, -1),
    "float32-1k": (2, 16, 16, 1024, 1024, 64, "float32", True, -1),
}
TINY = {"tiny-causal": (1, 2, 2, 40, 40, 16, "float32", True, -1),
        "tiny-gqa": (1, 4, 2, 33, 50, 16, "float16", True, 20)}


# ---------------------------------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------------------------------
def load_triton():
    spec = importlib.util.spec_from_file_location("triton_forward", ROOT / "onnx_export" / "gpu" / "triton_forward.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.flash_attention


def load_cuda():
    """The CUDA kernels for the GPU at hand, or why there are none."""
    if not shutil.which("nvcc"):
        return None, "no nvcc"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "libms_flash_cuda.so"
        done = subprocess.run(["nvcc", "-std=c++17", "-O3", "-arch=native", "-shared", "-Xcompiler", "-fPIC",
                               f"-I{ROOT / 'op_impl'}", f"-I{ROOT / 'onnx_export'}", "-o", target, cuda_host.SOURCE],
                              capture_output=True, text=True)
        if done.returncode:
            return None, done.stderr.strip()[-300:]
        library = ctypes.CDLL(str(target))
    for name in ("msflash_cuda_forward", "msflash_cuda_backward"):
        getattr(library, name).restype = ctypes.c_char_p
        getattr(library, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return library, ""


class DeviceBuffers:
    """The arrays of one call of the CUDA kernels, on the GPU."""

    def __init__(self, torch, library):
        self.torch, self.library, self.call, self.kept = torch, library, cuda_host.Call(), {}

    def keep(self, name, x):
        self.kept[name] = x
        setattr(self.call, name, x.data_ptr())

    def give(self, name, x):
        self.keep(name, to_torch(self.torch, x, "cuda"))

    def result(self, name, shape, dtype):
        self.give(name, np.full(shape, np.nan, dtype))

    def array(self, name):
        return to_numpy(self.torch, self.kept[name])

    def run(self, function):
        stream = self.torch.cuda.current_stream().cuda_stream
        reason = getattr(self.library, function)(ctypes.addressof(self.call), stream)
        if reason:
            raise RuntimeError(reason.decode())


def to_torch(torch, x, device):
    x = np.ascontiguousarray(x)
    if x.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def to_numpy(torch, x):
    if x.dtype == torch.bfloat16:
        return x.cpu().view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return x.cpu().numpy()


# ---------------------------------------------------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------------------------------------------------
def calls(rng, tiny):
    """(name, reference call) over everything that the node can do. Each kind of mask, dtype and head_dim is a Triton
    kernel of its own, which takes seconds to compile: not all of them are tried with all."""
    sq, sk = (40, 50) if tiny else (333, 500)
    sizes = {"float16": ((64, 64), (40, 24), (128, 128), (256, 256)), "bfloat16": ((64, 64), (128, 128)),
             "float32": ((64, 64), (128, 128))}
    for dtype, channels in sizes.items():
        for d, dv in channels[:2] if tiny else channels:
            def draw(heads, rows, channels, dtype=dtype):
                return rng.standard_normal((2, heads, rows, channels)).astype(np.float32).astype(DTYPES[dtype])

            base = {"q": draw(4, sq, d), "k": draw(2, sk, d), "v": draw(2, sk, dv)}
            variants = {"causal": {"right": 0}, "bool mask": {"attn_mask": rng.random((2, 1, sq, sk)) < 0.4}}
            if (d, dv) == (64, 64):
                variants.update({
                    "full": {}, "causal top left": {"right": 0, "align": "top_left"},
                    "window": {"left": 37, "right": 5}, "softcap": {"softcap": 2.0, "right": 0},
                    "float mask": {"bias": rng.standard_normal((4, sq, sk)).astype(DTYPES[dtype])},
                    "rows without keys": {"k": draw(2, sq // 3, d), "v": draw(2, sq // 3, dv), "right": 0}})
            for name, more in variants.items():
                yield f"{dtype}, D {d}, Dv {dv}, {name}", {**base, **more}


def triton_result(torch, attention, call, device):
    mask = call.get("bias") if call.get("attn_mask") is None else ~call["attn_mask"]
    out, lse = attention(*(to_torch(torch, call[name], device) for name in "qkv"),
                         None if mask is None else to_torch(torch, mask, device), softcap=call.get("softcap", 0.0),
                         left_window_size=call.get("left", -1), right_window_size=call.get("right", -1),
                         causal_alignment=int(call.get("align") != "top_left"), return_lse=True)
    return {"out": to_numpy(torch, out), "lse": to_numpy(torch, lse)}


def run_checks(torch, attention, new_buffers, device, tiny):
    rng, failures, count = np.random.default_rng(), 0, {"triton": 0, "cuda": 0}
    for name, call in calls(rng, tiny):
        rows = call["q"].shape[:3]
        dout = rng.standard_normal((*rows, call["v"].shape[3])).astype(np.float32).astype(call["q"].dtype)
        dlse = rng.standard_normal(rows).astype(np.float32)
        exact = flash_rule.evaluate(call, dout, dlse)
        naive = flash_rule.evaluate(call, dout, dlse, rounding=call["q"].dtype)
        runs = {"triton": lambda call=call: triton_result(torch, attention, call, device)}
        if new_buffers:
            runs["cuda"] = lambda call=call, dout=dout, dlse=dlse: cuda_host.attention(call, dout, dlse,
                                                                                       buffers=new_buffers())
        for kernel, run in runs.items():
            try:
                flash_rule.check(run(), exact, naive)
                count[kernel] += 1
            except Exception as error:
                failures += 1
                print(f"FAILED {kernel}: {name}: {type(error).__name__}: {error}", flush=True)
    print(f"checks: triton forward {count['triton']} passed, CUDA forward and backward {count['cuda']} passed, "
          f"{failures} failed", flush=True)
    return failures, count


# ---------------------------------------------------------------------------------------------------------------------
# Times
# ---------------------------------------------------------------------------------------------------------------------
def measure(torch, run, device, seconds=0.4):
    """Median milliseconds of one run."""
    def once():
        if device == "cpu":
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    run()
    first = once()
    more = 0 if device == "cpu" else max(3, min(200, int(1e3 * seconds / max(first, 1e-3))))
    return float(np.median([first, *(once() for _ in range(more))]))


def peers(torch, attention, new_buffers, shape, device):
    """name -> a function that runs the forward once."""
    batch, heads, kv_heads, sq, sk, d, dtype, causal, left = shape
    kind = getattr(torch, dtype)
    q, k, v = (torch.randn(batch, n, rows, d, device=device, dtype=kind) for n, rows in (
        (heads, sq), (kv_heads, sk), (kv_heads, sk)))
    options = {"is_causal": causal, "left_window_size": left}
    runs = {"triton": lambda: attention(q, k, v, **options)}
    if new_buffers:
        buffers = new_buffers()
        c = buffers.call
        c.batch, c.heads, c.kv_heads, c.q_len, c.k_len, c.d, c.dv = batch, heads, kv_heads, sq, sk, d, d
        c.type, c.scale, c.left, c.right, c.bottom_right = cuda_host.TYPES[DTYPES[dtype]], d ** -0.5, left, -1, 1
        if causal:
            c.right = 0
        if device == "cpu":
            for name, x in (("q", q), ("k", k), ("v", v)):
                buffers.give(name, to_numpy(torch, x))
            buffers.result("out", q.shape, DTYPES[dtype])
        else:
            for name, x in (("q", q), ("k", k), ("v", v), ("out", torch.empty_like(q))):
                buffers.keep(name, x)
        runs["cuda"] = lambda: buffers.run("msflash_cuda_forward")

    sdpa = torch.nn.functional.scaled_dot_product_attention
    extra = {"enable_gqa": True} if heads != kv_heads else {}
    if left >= 0 or (causal and sq != sk):
        i, j = torch.arange(sq, device=device)[:, None] + sk - sq, torch.arange(sk, device=device)[None, :]
        keep = (j <= i) if causal else torch.ones(sq, sk, dtype=torch.bool, device=device)
        if left >= 0:
            keep &= j >= i - left
        if keep.all():      # a single query at the end sees every key
            runs["torch sdpa"] = lambda: sdpa(q, k, v, **extra)
        else:
            runs["torch sdpa"] = lambda: sdpa(q, k, v, attn_mask=keep, **extra)
    else:
        runs["torch sdpa"] = lambda: sdpa(q, k, v, is_causal=causal, **extra)
    if importlib.util.find_spec("flash_attn") and dtype != "float32" and device != "cpu":
        from flash_attn import flash_attn_func

        flat = [x.transpose(1, 2) for x in (q, k, v)]
        runs["flash-attn"] = lambda: flash_attn_func(*flat, causal=causal, window_size=(left, 0 if causal else -1))
    return runs


def operations(shape):
    """Floating-point operations of the two products, for the keys that are seen."""
    batch, heads, _, sq, sk, d, _, causal, left = shape
    i = np.arange(sq) + sk - sq
    seen = (np.minimum(i + 1, sk) if causal else np.full(sq, sk)) - (np.maximum(i - left, 0) if left >= 0 else 0)
    return 4.0 * batch * heads * d * float(np.maximum(seen, 0).sum())


def table(torch, attention, new_buffers, shapes, device):
    names = ["triton", "torch sdpa", "flash-attn", "cuda"]
    lines = ["| shape | B × H/G × S × T × D | dtype | mask | " + " | ".join(f"{name} ms" for name in names)
             + " | triton TFLOP/s | sdpa ÷ triton |", "|" + "---|" * (len(names) + 6)]
    for label, shape in shapes.items():
        batch, heads, kv_heads, sq, sk, d, dtype, causal, left = shape
        times = {}
        for name, run in peers(torch, attention, new_buffers, shape, device).items():
            try:
                times[name] = measure(torch, run, device)
            except Exception as error:
                print(f"{label}: {name}: {type(error).__name__}: {error}", flush=True)
        mask = ("causal" if causal else "full") + (f", window {left}" if left >= 0 else "")
        cells = [f"{times[name]:.3f}" if name in times else "–" for name in names]
        rate = f"{operations(shape) / times['triton'] / 1e9:.1f}" if "triton" in times else "–"
        ratio = f"{times['torch sdpa'] / times['triton']:.2f}×" if {"torch sdpa", "triton"} <= set(times) else "–"
        lines.append(f"| {label} | {batch} × {heads}/{kv_heads} × {sq} × {sk} × {d} | {dtype} | {mask} | "
                     + " | ".join(cells) + f" | {rate} | {ratio} |")
        print(lines[-1], flush=True)
    return lines


def write(lines):
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    PAGE.write_text(head + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.split(END)[1], encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description="Checks and times the GPU kernels.")
    parser.add_argument("--write", action="store_true", help="write the results into docs/gpu.md")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU, to try the script itself")
    options = parser.parse_args()
    start = time.time()
    if options.rehearse:
        if options.write:
            parser.error("--rehearse measures nothing that could be written")
        from triton_kernel import flash_attention as attention
    import torch

    if options.rehearse:
        device, new_buffers = "cpu", cuda_host.HostBuffers
    else:
        if not torch.cuda.is_available():
            parser.error("torch sees no GPU; --rehearse runs without one")
        device, attention = "cuda", load_triton()
        library, reason = load_cuda()
        new_buffers = (lambda: DeviceBuffers(torch, library)) if library else None
        if not library:
            print(f"without the CUDA kernels: {reason}")
    name = "the CPU, a rehearsal" if options.rehearse else torch.cuda.get_device_name()
    import triton

    about = f"{name}; PyTorch {torch.__version__}, CUDA {torch.version.cuda}, Triton {triton.__version__}."
    print(about, flush=True)
    failures, count = run_checks(torch, attention, new_buffers, device, options.rehearse)
    lines = table(torch, attention, new_buffers, TINY if options.rehearse else SHAPES, device)
    print("\n".join(["", *lines]))
    if options.write and not failures:
        write([f"Run on {about} Checked against the float64 reference there: {count['triton']} calls of the Triton "
               f"forward, {count['cuda']} of the CUDA forward and backward. Milliseconds of one forward, medians.", "",
               *lines])
    print(f"{time.time() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
