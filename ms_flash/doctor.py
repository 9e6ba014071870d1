"""``doctor``: the environment, the backends present, and a self-test of each, to read or to paste into a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from pathlib import Path

from . import library, op_table, tuning
from .version import __version__

PACKAGES = ("mindspore", "numpy", "ml_dtypes", "pyyaml")
SWITCHES = ("MS_FLASH_BACKEND", "MS_FLASH_ASCEND_TWIN_LIB", "MS_FLASH_CPU_LIB", "MS_FLASH_ISA", "MS_FLASH_NUM_THREADS",
            "MS_FLASH_TUNING", "MS_FLASH_BLOCK_M", "MS_FLASH_BLOCK_N")

# Largest error allowed, as a share of the largest magnitude in the exact result: a few roundings of the dtype.
TOLERANCE = {"float32": 5e-6, "float16": 4e-3, "bfloat16": 3e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 if anything in it is broken."""
    report = diagnose()
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 1 if report["problems"] else 0


def environment() -> dict:
    """Versions and hardware: no import beyond the standard library's, so nothing broken stops it."""
    return {
        "ms_flash": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "settings": {name: os.environ[name] for name in SWITCHES if name in os.environ},
    }


def diagnose() -> dict:
    """The whole report; ``problems`` lists in words what is broken, and is empty when all is well."""
    report = environment()
    problems = report["problems"] = []
    if not (3, 9) <= sys.version_info[:2] < (3, 12):
        problems.append(f"Python {report['python']} is not supported. Hint: use 3.9, 3.10 or 3.11.")
    numpy = report["packages"]["numpy"]
    if numpy and int(numpy.split(".")[0]) >= 2:
        problems.append(f"MindSpore 2.10 is built against NumPy 1, with NumPy {numpy} some of its operators fail. "
                        "Hint: pip install 'numpy<2'.")

    report["library"] = _library(problems)
    threads = os.environ.get("MS_FLASH_NUM_THREADS", "1")
    if not (threads.isdigit() and int(threads) > 0):
        problems.append("The environment variable MS_FLASH_NUM_THREADS must be a positive integer, but got "
                        f"{threads!r}.")
    report["backends"], report["self_test"] = {}, {}
    try:
        import mindspore
    except Exception as error:  # a broken wheel raises anything from ImportError to AttributeError
        problems.append(f"MindSpore cannot be imported: {type(error).__name__}: {error}. Hint: pip install "
                        "'mindspore==2.10.*'.")
        return report
    if not mindspore.__version__.startswith("2.10."):
        problems.append(f"MindSpore {mindspore.__version__} is untested. Hint: pip install 'mindspore==2.10.*'.")

    import ms_flash

    report["backends"] = ms_flash.available_backends()
    wanted = os.environ.get("MS_FLASH_BACKEND")
    if wanted and report["backends"].get(wanted, "there is none of this name"):
        problems.append(f"The environment variable MS_FLASH_BACKEND names {wanted!r}, which cannot run here: "
                        f"{report['backends'].get(wanted, 'there is none of this name')}.")
    report["fusion"] = _fusion()
    for name, reason in report["backends"].items():
        if not reason:
            report["self_test"][name] = self_test(name, problems)
    return report


def _fusion():
    """Where the bridge of fusion is, or what is in its way."""
    from .fusion_passes import bridge

    try:
        return str(bridge.found() or "the bridge is compiled at the first call of ms_flash.fuse()")
    except RuntimeError as error:
        return str(error)


def self_test(backend: str, problems: list[str]) -> dict:
    """Forward and backward of one small problem per dtype of the backend, against the float64 reference.

    Returns:
        dict, from the dtype to the largest error of the output, LSE and gradients, each as a share of the largest
        magnitude of the exact result; and the time it took, in seconds.
    """
    start, errors = time.perf_counter(), {}
    for dtype in op_table.table()["backends"][backend]["dtypes"]:
        tolerance = TOLERANCE[dtype]
        try:
            errors[dtype] = _largest_error(backend, dtype)
        except Exception as error:  # whatever it raises is the finding
            problems.append(f"The backend '{backend}' fails in {dtype}: {type(error).__name__}: {error}")
            continue
        if not errors[dtype] <= tolerance:  # NaN too
            problems.append(f"The backend '{backend}' computes wrong results in {dtype}: error {errors[dtype]:.2g}, "
                            f"at most {tolerance:.0e} is right.")
    return {"errors": errors, "seconds": round(time.perf_counter() - start, 2)}


def _largest_error(backend, dtype):
    import mindspore as ms
    import numpy as np

    import ms_flash

    from . import reference

    # grouped heads, more keys than queries, lengths and a head_dim that fill no SIMD register
    rng = np.random.default_rng(0)
    shapes = {"q": (1, 4, 33, 40), "k": (1, 2, 47, 40), "v": (1, 2, 47, 40), "bias": (1, 4, 33, 47)}
    inputs = [ms.Tensor(rng.standard_normal(shape, np.float32)).astype(getattr(ms, dtype)) for shape in shapes.values()]
    exact = [x.astype(ms.float32).asnumpy() for x in inputs]
    dout = rng.standard_normal((1, 4, 33, 40), np.float32)
    weight = ms.Tensor(dout)

    def loss(query, key, value, bias):
        out, lse = ms_flash.flash_attention(query, key, value, bias=bias, causal=True, return_lse=True, backend=backend)
        return (out.astype(ms.float32) * weight).sum(), out, lse

    (_, out, lse), grads = ms.value_and_grad(loss, grad_position=(0, 1, 2, 3), has_aux=True)(*inputs)
    want_out, want_lse, saved = reference.forward(*exact[:3], bias=exact[3], right=0)
    want = reference.backward(dout, None, saved)
    pairs = [(out, want_out), (lse, want_lse), *zip(grads, (want[name] for name in ("dq", "dk", "dv", "dbias")))]
    return max(float(np.abs(got.astype(ms.float32).asnumpy() - right).max() / np.abs(right).max())
               for got, right in pairs)


def _library(problems):
    """What the native library says of itself."""
    found = {"path": str(library.path())}
    try:
        native = library.load()
    except RuntimeError as error:
        problems.append(f"{str(error)[0].upper()}{str(error)[1:]}.")
        return found
    found["simd"] = native.msflash_cpu_isa().decode()
    found["simd_usable"] = native.msflash_cpu_isa_list().decode().split(",")
    found["threads"] = native.msflash_cpu_get_num_threads()
    found["block_sizes"] = tuning.sources()
    wanted = os.environ.get("MS_FLASH_ISA")
    if wanted and wanted not in found["simd_usable"]:
        problems.append(f"The environment variable MS_FLASH_ISA must be one of {', '.join(found['simd_usable'])}, "
                        f"but got {wanted!r}.")
    return found


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name as the kernel gives it, or the architecture."""
    try:
        found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def as_text(report: dict) -> str:
    """The report for people."""
    lines = [("ms_flash", report["ms_flash"]), ("python", report["python"])]
    lines += [(name, version or "not installed") for name, version in report["packages"].items()]
    lines += [("platform", report["platform"]), ("cpu", f"{report['cpu']}, {report['cores']} cores for this process")]
    lines += list(report["settings"].items())
    native = report["library"]
    lines.append(("library", native["path"]))
    if "simd" in native:
        lines.append(("simd", f"{native['simd']} (usable here: {', '.join(native['simd_usable'])})"))
        lines.append(("threads", native["threads"]))
        lines.append(("block sizes", ", ".join(native["block_sizes"]) or "the kernels' own"))
    lines += [(f"backend {name}", reason or "present") for name, reason in report["backends"].items()]
    if "fusion" in report:
        lines.append(("fusion", report["fusion"]))
    for name, test in report["self_test"].items():
        errors = ", ".join(f"{dtype} {error:.1e}" for dtype, error in test["errors"].items())
        lines.append((f"self-test {name}", f"largest error {errors or 'unknown'} ({test['seconds']} s)"))
    width = max(len(name) for name, _ in lines) + 2
    text = [f"{name:<{width}}{value}" for name, value in lines]
    text += ["", *(f"BROKEN: {problem}" for problem in report["problems"])] if report["problems"] else ["", "All well."]
    return "\n".join(text)
