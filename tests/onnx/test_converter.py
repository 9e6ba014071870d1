"""Single primitives against NumPy, above all those that MindSpore has no CPU kernel for, so that no net shows them."""

from __future__ import annotations

import importlib.util
import math
import sys

import numpy as np
import pytest
import zoo
from mindspore import Tensor, nn
from ms_flash.onnx_export import verify
from ms_flash.onnx_export.rules import RULES
from ms_flash.onnx_export.runtime import Runtime

from ms_flash import export_onnx

X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
I = np.array([[1, 0], [2, 2]], np.int32)  # noqa: E741


def erf(x):
    return np.vectorize(math.erf)(x)


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# name: (MindSpore, NumPy) of X. MindSpore reads the source of a net, so its side becomes a file.
CASES = {
    "gelu": ("mint.nn.functional.gelu(x)", lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2)))),
    "gelu tanh": ('mint.nn.functional.gelu(x, approximate="tanh")', gelu_tanh),
    "ops gelu tanh": ('ops.gelu(x, approximate="tanh")', gelu_tanh),
    "silu": ("mint.nn.functional.silu(x)", lambda x: x * sigmoid(x)),
    "layer norm": ("mint.nn.functional.layer_norm(x, (4,))",
                   lambda x: (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)),
    "rms norm": ("ops.rms_norm(x, Tensor([1.0, 2.0, 3.0, 4.0], ms.float32), 1e-6)[0]",
                 lambda x: x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-6) * np.array([1, 2, 3, 4])),
    "cumsum": ("mint.cumsum(x, 1)", lambda x: x.cumsum(1)),
    "var": ("mint.var(x, -1)", lambda x: x.var(-1, ddof=1)),
    "std": ("mint.std(x, 1, correction=0)", lambda x: x.std(1)),
    "argmax": ("mint.argmax(x, -1)", lambda x: x.argmax(-1)),
    "tril": ("mint.tril(x, 1)", lambda x: np.tril(x, 1)),
    "triu": ("mint.triu(x)", np.triu),
    "stack": ("mint.stack((x, -x), 1)", lambda x: np.stack((x, -x), 1)),
    "zeros_like": ("mint.zeros_like(x) + x", lambda x: x),
    "roll": ("ops.roll(x, (1, -2), (1, 2))", lambda x: np.roll(x, (1, -2), (1, 2))),
    "roll far": ("ops.roll(x, 7, 1)", lambda x: np.roll(x, 7, 1)),
    "unstack": ("ops.unstack(x, 1)[2]", lambda x: x[:, 2]),
    "chunk": ("ops.chunk(x, 2, -1)[1]", lambda x: x[..., 2:]),
    "split sizes": ("ops.split(x, [1, 3], -1)[1]", lambda x: x[..., 1:]),
    "strided": ("x[:, ::2, 1:-1]", lambda x: x[:, ::2, 1:-1]),
    "backwards": ("ops.flip(x, (0, 2))", lambda x: x[::-1, :, ::-1]),
    "new axis": ("x[:, None, ..., 1]", lambda x: x[:, None, ..., 1]),
    "ellipsis": ("x[..., -1:]", lambda x: x[..., -1:]),
    "narrow": ("mint.narrow(x, 2, 1, 2)", lambda x: x[..., 1:3]),
    "index select": ("ops.index_select(x, 1, Tensor([2, 0], ms.int32))", lambda x: x[:, [2, 0]]),
    "tensor index": ("x[Tensor([1, 0, 1], ms.int32)]", lambda x: x[[1, 0, 1]]),
    "embedding": ("mint.nn.functional.embedding(Tensor(I), x[0])", lambda x: x[0][I]),
    "gather": ("ops.gather(x, Tensor(I), 1)", lambda x: x[:, I]),
    "gather elements": ("ops.gather_elements(x, 1, Tensor(np.zeros((2, 1, 4)), ms.int32))", lambda x: x[:, :1]),
    "gather_nd": ("ops.gather_nd(x, Tensor([[0, 2], [1, 1]], ms.int32))", lambda x: x[[0, 1], [2, 1]]),
    "scatter": ("ops.TensorScatterUpdate()(x, Tensor([[1]], ms.int32), Tensor(np.zeros((1, 3, 4)), ms.float32))",
                lambda x: x * np.array([1, 0]).reshape(2, 1, 1)),
    "one hot": ("ops.one_hot(Tensor(I), 3, Tensor(2.0), Tensor(-1.0))", lambda x: np.where(np.eye(3)[I] > 0, 2, -1)),
    "where": ("ops.where(x > 0, x, 0.5)", lambda x: np.where(x > 0, x, 0.5)),
    "masked fill": ("x.masked_fill(x > 0, -2.0)", lambda x: np.where(x > 0, -2, x)),
    "comparisons": ("ops.cast((x > 0).logical_and(x <= 1).logical_or(x < -1).logical_xor(x == 0), ms.int32)",
                    lambda x: (((x > 0) & (x <= 1) | (x < -1)) ^ (x == 0)).astype(np.int32)),
    "not equal": ("ops.cast(ops.not_equal(x, x[0]), ms.int32)", lambda x: (x != x[0]).astype(np.int32)),
    "floor div": ("ops.floor_divide(x, 0.3)", lambda x: np.floor(x / np.float32(0.3))),
    "int floor div": ("Tensor(I - 2) // 3", lambda x: (I - 2) // 3),
    "int modulo": ("Tensor(I - 2) % 3", lambda x: (I - 2) % 3),
    "modulo": ("ops.floor_mod(x, 0.75)", lambda x: x - np.floor(x / 0.75) * 0.75),
    "div trunc": ('ops.div(x, 0.3, rounding_mode="trunc")', lambda x: np.trunc(x / np.float32(0.3))),
    "pow": ("ops.pow(x, 3)", lambda x: x ** 3),
    "scalar pow": ("mint.pow(2.0, x)", lambda x: 2.0 ** x),
    "rsqrt": ("ops.rsqrt(x * x + 1)", lambda x: 1 / np.sqrt(x * x + 1)),
    "addcmul": ("ops.addcmul(x, x, x, 0.5)", lambda x: x + 0.5 * x * x),
    "clamp": ("ops.clamp(x, -0.5, 0.25)", lambda x: np.clip(x, -0.5, 0.25)),
    "softplus": ("ops.softplus(x)", lambda x: np.log1p(np.exp(x))),
    "elu": ("ops.elu(x)", lambda x: np.where(x > 0, x, np.expm1(x))),
    "leaky relu": ("ops.leaky_relu(x, 0.2)", lambda x: np.where(x > 0, x, 0.2 * x)),
    "hard swish": ("ops.hardswish(x)", lambda x: x * np.clip(x + 3, 0, 6) / 6),
    "glu": ("ops.glu(x, -1)", lambda x: x[..., :2] * sigmoid(x[..., 2:])),
    "log softmax": ("ops.log_softmax(x, 1)", lambda x: x - np.log(np.exp(x).sum(1, keepdims=True))),
    "softmax axis": ("ops.softmax(x, 1)", lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True)),
    "mean all": ("x.mean()", lambda x: x.mean()),
    "sum keep": ("x.sum((0, 2), keepdims=True)", lambda x: x.sum((0, 2), keepdims=True)),
    "max min": ("ops.amax(x, 1) - ops.amin(x, 1)", lambda x: x.max(1) - x.min(1)),
    "max index": ("ops.max(x, 1)[0]", lambda x: x.max(1)),
    "prod": ("ops.prod(x, 1)", lambda x: x.prod(1)),
    "any": ("ops.cast(ops.any(x > 1, 1), ms.int32)", lambda x: (x > 1).any(1).astype(np.int32)),
    "norm": ("ops.norm(x, dim=-1)", lambda x: np.sqrt((x ** 2).sum(-1))),
    "repeat": ("ops.repeat_interleave(x, 2, 1)", lambda x: x.repeat(2, 1)),
    "tile": ("ops.tile(x, (2, 1, 3, 1))", lambda x: np.tile(x, (2, 1, 3, 1))),
    "pad": ("ops.pad(x, (1, 2, 0, 1), value=0.5)", lambda x: np.pad(x, ((0, 0), (0, 1), (1, 2)), constant_values=0.5)),
    "einsum": ('ops.einsum("bij,bkj->bik", x, x)', lambda x: np.einsum("bij,bkj->bik", x, x)),
    "baddbmm": ("ops.baddbmm(x[:, :, :3], x, x.swapaxes(1, 2), beta=0.5, alpha=2)",
                lambda x: 0.5 * x[:, :, :3] + 2 * x @ x.swapaxes(1, 2)),
    "transposed products": ("ops.BatchMatMul(transpose_a=True)(x, x)", lambda x: x.swapaxes(1, 2) @ x),
    "matrix product": ("ops.MatMul(transpose_b=True)(x[0], x[1])", lambda x: x[0] @ x[1].T),
    "outer": ("ops.outer(x[0, 0], x[1, 0])", lambda x: np.outer(x[0, 0], x[1, 0])),
    "arange": ("ops.arange(2, 11, 3) + x.shape[0]", lambda x: np.arange(2, 11, 3) + 2),
    "eye": ("ops.eye(3, 4, ms.float32)", lambda x: np.eye(3, 4)),
    "full": ("ops.full((2, 70), 1.5, dtype=ms.float32) * ops.ones((x.shape[0], 70)) + x[0, 0, 0] * 0",
             lambda x: np.full((2, 70), 1.5)),
    "meshgrid": ('ops.meshgrid(x[0, 0], x[0, 1], indexing="ij")[1]',
                 lambda x: np.meshgrid( x[0, 0], x[0, 1], indexing="ij")[1]),
    "topk": ("ops.topk(x, 2)[0]", lambda x: -np.sort(-x, -1)[..., :2]),
    "floor ceil": ("ops.floor(x) + ops.ceil(x) + ops.trunc(x)", lambda x: np.floor(x) + np.ceil(x) + np.trunc(x)),
    "square": ("ops.square(x) + ops.exp(x) + ops.log1p(ops.abs(x)) + ops.expm1(x)",
               lambda x: x * x + np.exp(x) + np.log1p(np.abs(x)) + np.expm1(x)),
    "logic on ints": ("ops.bitwise_and(Tensor(I), 2) + ops.bitwise_or(Tensor(I), 4)", lambda x: (I & 2) + (I | 4)),
    "swapaxes": ("x.swapaxes(0, -1)", lambda x: x.swapaxes(0, -1)),
    "flatten": ("ops.flatten(x, start_dim=1)", lambda x: x.reshape(2, -1)),
    "is finite": ("ops.cast(ops.isfinite(x / (x - x[0])), ms.int32)",
                  lambda x: np.isfinite(x / (x - x[0])).astype(np.int32)),
}


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    """One Cell class per case, by name."""
    file = tmp_path_factory.mktemp("rules") / "rules_as_nets.py"
    lines = ["import mindspore as ms", "import numpy as np", "from mindspore import Tensor, mint, nn, ops",
             f"I = np.array({I.tolist()}, np.int32)"]
    for number, (text, _) in enumerate(CASES.values()):
        lines += [f"class Net{number}(nn.Cell):", "    def construct(self, x):", f"        return {text}"]
    file.write_text("\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return {name: getattr(module, f"Net{number}") for number, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_primitive(name, nets, tmp_path):
    _, expected = CASES[name]
    certificate = export_onnx(nets[name](), Tensor(X), file_name=tmp_path / "n.onnx", verify=False)
    (got,) = Runtime(certificate.path).run({"x": X})
    with np.errstate(all="ignore"):
        wanted = np.asarray(expected(X.astype(np.float64)))
    assert got.shape == wanted.shape
    assert verify.difference(got, wanted) <= 2e-6


LAYERS = {
    "conv same": (nn.Conv2d(3, 5, 3, stride=2, pad_mode="same", has_bias=True), (2, 3, 7, 9)),
    "conv groups": (nn.Conv2d(4, 8, 3, pad_mode="pad", padding=(1, 1, 2, 0), group=2, dilation=2), (1, 4, 9, 9)),
    "conv 1d": (nn.Conv1d(3, 5, 3, pad_mode="valid"), (2, 3, 9)),
    "average same": (nn.AvgPool2d(3, 2, pad_mode="same"), (1, 2, 7, 8)),
    "maximum": (nn.MaxPool2d(2, 2), (1, 2, 6, 8)),
    "global": (nn.AdaptiveAvgPool2d(1), (1, 2, 6, 8)),
    "adaptive": (nn.AdaptiveAvgPool2d((3, 4)), (1, 2, 6, 8)),
    "batch norm": (nn.BatchNorm2d(3), (2, 3, 4, 5)),
    "group norm": (nn.GroupNorm(2, 6), (2, 6, 4, 5)),
    "dense": (nn.Dense(5, 7, activation="relu"), (2, 3, 5)),
    "prelu": (nn.PReLU(3), (2, 3, 4, 5)),
    "fast gelu": (nn.FastGelu(), (3, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, tmp_path):
    layer, shape = LAYERS[name]
    certificate = export_onnx(layer, zoo.floats(*shape), file_name=tmp_path / "n.onnx", tolerance=1e-5,
                              dynamic_axes={"x": [0]} if name == "dense" else None)
    assert len(certificate.runs) == 3


def test_every_rule_is_documented_by_its_name():
    assert len(RULES) > 250 and all(name.strip() == name for name in RULES)
