"""The GPU half of the custom-op library without a GPU: it runs the CUDA kernels compiled for the host."""
from __future__ import annotations

import os
import subprocess
import sys

import node_model
import numpy as np
import onnxruntime
import pytest
from gpu import cuda_host
from ms_flash.onnx_export import ort_ops
from test_ort_ops import DTYPES, check, random_call, run, session

# Stands in for cpu_kernel.cpp: the CPU provider, the only one here, hands its calls to the CUDA side. It keeps the
# attributes in one of the texts that the class has for them.
BRIDGE = """
#include <cstring>
#include "ort_ops/kernels.h"
namespace ort_ops {
CpuKernel::CpuKernel(const Attributes& a) : plain_(reinterpret_cast<const char*>(&a), sizeof a) {}
void CpuKernel::run(const Call& call, const ort::Api*, const ort::KernelContext*) const {
  if (cuda_unavailable()) throw Error(cuda_unavailable());
  Attributes a;
  std::memcpy(&a, plain_.data(), sizeof a);
  run_on_cuda(a, call, nullptr);
}
}  // namespace ort_ops
"""


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ort_cuda")
    (folder / "bridge.cpp").write_text(BRIDGE)
    ours = cuda_host.ROOT / "onnx_export" / "ort_ops"
    sources = [ours / f"{name}.cpp" for name in ("register", "node", "cuda_kernel")]
    subprocess.run([os.environ.get("CXX") or "g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra",
                    f"-I{ours.parent}", "-o", folder / "libort.so", folder / "bridge.cpp", *sources,
                    "-ldl"], check=True)
    return folder / "libort.so", cuda_host.build(folder)


@pytest.fixture
def libraries(build, monkeypatch):
    """The library under test, with the kernels beside it as MS_FLASH_CUDA_LIB."""
    monkeypatch.setenv("MS_FLASH_ORT_LIB", str(build[0]))
    monkeypatch.setenv("MS_FLASH_CUDA_LIB", str(build[1]))


@pytest.mark.parametrize("mask", [None, "bool", *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_calls(libraries, dtype, mask):
    rng = np.random.default_rng()
    call = random_call(rng, dtype, mask, softcap=float(rng.integers(2)))
    check(call, run(call, lse=bool(rng.integers(2))))


def test_without_a_gpu_the_cpu_kernels_run(build, tmp_path):
    """Whether the CUDA library is there, missing or damaged. In processes of their own: it is looked for once."""
    script = tmp_path / "load.py"
    script.write_text("import sys, onnxruntime, numpy as np\n"
                      "options = onnxruntime.SessionOptions()\n"
                      "options.register_custom_ops_library(sys.argv[1])\n"
                      "session = onnxruntime.InferenceSession(sys.argv[2], options)\n"
                      "x = np.ones((1, 1, 2, 4), np.float32)\n"
                      "assert (session.run(None, dict(Q=x, K=x, V=x))[0] == 1).all()\n")
    model = tmp_path / "model.onnx"
    model.write_bytes(node_model.save(node_model.model(np.float32)))
    for library in (build[1], tmp_path / "none.so", script):
        subprocess.run([sys.executable, script, ort_ops.library_path(), model], check=True,
                       env={**os.environ, "MS_FLASH_CUDA_LIB": str(library)})


def test_a_kernel_that_fails_is_an_error_of_the_run(libraries):
    runner = session(node_model.model(np.float32))
    x = np.ones((1, 1, 2, 4), np.float32)
    loaded = cuda_host.ctypes.CDLL(os.environ["MS_FLASH_CUDA_LIB"])
    loaded.shim_buffer(x.ctypes.data_as(cuda_host.ctypes.c_void_p), cuda_host.ctypes.c_size_t(0), 0)
    try:
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException, match="global memory read"):
            runner.run(None, {"Q": x, "K": x, "V": x})
    finally:
        loaded.shim_forget_buffers()
    assert (runner.run(None, {"Q": x, "K": x, "V": x})[0] == 1).all()
