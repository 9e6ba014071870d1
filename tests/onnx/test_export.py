"""What users complain of in exporters, each made impossible; and wrong calls."""

from __future__ import annotations

import builtins
import re

import flash_rule
import mindspore as ms
import ml_dtypes
import numpy as np
import onnx
import pytest
import zoo
from mindspore import Tensor, nn, ops
from ms_flash.onnx_export import ExportError, verify
from ms_flash.onnx_export.rules import RULES, register
from ms_flash.onnx_export.runtime import Runtime

import ms_flash
from ms_flash import export_onnx


def small(**options):
    """A net of one attention."""
    class Net(nn.Cell):
        def construct(self, q, k, v):
            return ms_flash.flash_attention(q, k, v, **options)

    return Net()


def qkv(sq=3, sk=5, dtype=ms.float32, heads=2):
    return [zoo.floats(2, heads, n, 8, dtype=dtype, seed=i) for i, n in enumerate((sq, sk, sk))]


FREE = {"q": {0: "b", 2: "s"}, "k": {0: "b", 2: "t"}, "v": {0: "b", 2: "t"}}


# ---- lengths ---------------------------------------------------------------------------------------------------------
def test_free_lengths_stay_free(tmp_path):
    """B43: sizes other than those of the export."""
    net, inputs, options = zoo.build("llama")
    export_onnx(net, *inputs, file_name=tmp_path / "net", verify=False, **options)
    running = Runtime(tmp_path / "net.onnx")
    for batch, length in ((1, 3), (2, 7), (3, 64), (1, 1)):
        ids = zoo.ids(batch, length, seed=length)
        (got,), expected = running.run({"ids": ids.asnumpy()}), net(ids).asnumpy()
        assert verify.difference(got, expected) <= 1e-5


def test_outputs_carry_the_names_of_free_lengths(tmp_path):
    export_onnx(small(), *qkv(), file_name=tmp_path / "n.onnx", dynamic_axes=FREE, verify=False,
                output_names=["attended"])
    graph = onnx.load(tmp_path / "n.onnx").graph
    dims = lambda value: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
    assert dims(graph.input[0]) == ["b", 2, "s", 8] and dims(graph.output[0])[1::2] == [2, 8]
    assert graph.output[0].name == "attended" and "" not in [i.name for i in graph.input]


def test_free_length_of_an_output_can_be_named(tmp_path):
    export_onnx(small(), *qkv(), file_name=tmp_path / "n.onnx", verify=False,
                dynamic_axes={**FREE, "output": {0: "b", 2: "s"}})
    dims = onnx.load(tmp_path / "n.onnx").graph.output[0].type.tensor_type.shape.dim
    assert [d.dim_param for d in dims] == ["b", "", "s", ""]


@pytest.mark.parametrize("profile", ["portable", "inlined", "standard"])
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_alignment_of_causal_is_that_of_the_net(align, profile, tmp_path):
    """B44, in both directions, in every profile."""
    net = small(causal=True, causal_align=align)
    shapes = [tuple(qkv(*sizes)) for sizes in ((3, 5), (5, 3), (1, 8), (4, 4))]
    certificate = export_onnx(net, *qkv(), file_name=tmp_path / "n.onnx", dynamic_axes=FREE, verify=shapes,
                              tolerance=1e-5, profile=profile)
    assert len(certificate.runs) >= 4


def test_decoder_with_cache_writes_what_it_writes_without(tmp_path):
    """One graph for the prompt, on a past of length 0, and for every step."""
    ms.set_seed(1)
    net, inputs, options = zoo.build("llama_decoder")
    export_onnx(net, *inputs, file_name=tmp_path / "d.onnx", verify=False, **options)
    plain = zoo.Llama()
    ms.load_param_into_net(plain, net.parameters_dict())
    running = Runtime(tmp_path / "d.onnx")
    prompt = zoo.ids(2, 4, seed=3).asnumpy()
    cache = [np.zeros((2, 2, 0, 8), np.float32)] * 4
    ids, tokens = prompt, prompt
    for _ in range(6):
        logits, *cache = running.run({"ids": ids, **{f"past_{i}": x for i, x in enumerate(cache)}})
        expected = plain(Tensor(tokens)).asnumpy()
        assert verify.difference(logits, expected[:, -logits.shape[1]:]) <= 1e-5
        ids = logits[:, -1:].argmax(-1).astype(np.int32)
        np.testing.assert_array_equal(ids, expected[:, -1:].argmax(-1))
        tokens = np.concatenate([tokens, ids], 1)
        assert cache[0].shape[2] == tokens.shape[1] - 1


# ---- masks and numbers -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("profile", ["portable", "inlined", "standard"])
def test_row_without_keys_is_zero(profile, tmp_path):
    """B45: not NaN, in any profile."""
    class Net(nn.Cell):
        def construct(self, q, k, v, mask):
            return ms_flash.flash_attention(q, k, v, mask)

    mask = np.zeros((2, 1, 3, 5), bool)
    mask[0, :, 1] = True
    certificate = export_onnx(Net(), *qkv(), Tensor(mask), file_name=tmp_path / "n.onnx", profile=profile,
                              tolerance=1e-5)
    q, k, v = (x.asnumpy() for x in qkv())
    (out,) = Runtime(certificate.path).run({"q": q, "k": k, "v": v, "mask": mask})
    assert not np.isnan(out).any() and not out[0, :, 1].any()


@pytest.mark.parametrize("mask_dtype", [ms.bool_, ms.uint8])
@pytest.mark.parametrize("bias_dtype", [ms.float16, ms.float32])
def test_every_dtype_of_mask_and_bias(mask_dtype, bias_dtype, tmp_path):
    class Net(nn.Cell):
        def construct(self, q, k, v, mask, bias):
            return ms_flash.flash_attention(q, k, v, mask, bias=bias)

    mask = Tensor(np.random.default_rng(0).integers(0, 2, (3, 5)), mask_dtype)
    bias = zoo.floats(2, 1, 3, 5, dtype=bias_dtype, seed=4)
    certificate = export_onnx(Net(), *qkv(dtype=ms.float16), mask, bias, file_name=tmp_path / "n.onnx")
    assert certificate.passed and len(certificate.runs) == 3


@pytest.mark.parametrize("profile", ["portable", "inlined", "standard", "plugin"])
def test_float16_follows_the_rule_of_the_kernels(profile, tmp_path):
    """As in tests/flash_rule.py: at most twice the error of the naive computation in float16."""
    inputs = qkv(17, 33, ms.float16)
    certificate = export_onnx(small(causal=True), *inputs, file_name=tmp_path / "n.onnx", profile=profile)
    q, k, v = (x.asnumpy() for x in inputs)
    call = {"q": q, "k": k, "v": v, "right": 0}
    if profile == "plugin":
        (out,) = verify.evaluate(certificate.path, ["output"], {"q": q, "k": k, "v": v})
    else:
        (out,) = Runtime(certificate.path).run({"q": q, "k": k, "v": v})
    flash_rule.check({"out": out}, flash_rule.evaluate(call, None), flash_rule.evaluate(call, None, rounding=q.dtype))


@pytest.mark.parametrize("name", ["vit", "detr_decoder"])
def test_float16_net(name, tmp_path):
    net, inputs, options = zoo.build(name)
    net.to_float(ms.float16)
    certificate = export_onnx(net, *inputs, file_name=tmp_path / "n.onnx", **options)
    assert certificate.passed and len(certificate.runs) == 3


def test_float16_weights(tmp_path):
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense, self.norm = nn.Dense(32, 96, dtype=ms.float16), nn.LayerNorm((32,), dtype=ms.float16)

        def construct(self, x):
            q, k, v = ops.split(self.dense(self.norm(x)), 32, -1)
            return ms_flash.flash_attention(q, k, v, layout="BSH", num_heads=4)

    certificate = export_onnx(Net(), zoo.floats(2, 5, 32, dtype=ms.float16), file_name=tmp_path / "n.onnx",
                              dynamic_axes={"x": [0, 1]})
    assert certificate.passed
    model = onnx.load(certificate.path)
    assert {t.data_type for t in model.graph.initializer if len(t.dims) == 2} == {onnx.TensorProto.FLOAT16}


def test_bfloat16(tmp_path):
    inputs = qkv(5, 7, ms.bfloat16)
    certificate = export_onnx(small(causal=True), *inputs, file_name=tmp_path / "n.onnx", dynamic_axes=FREE)
    assert certificate.passed and len(certificate.runs) == 3, certificate
    (out,) = Runtime(certificate.path).run({n: verify.array_of(x) for n, x in zip("qkv", inputs)})
    assert out.dtype == ml_dtypes.bfloat16


def test_infinity_and_nan_in_constants(tmp_path):
    class Net(nn.Cell):
        def construct(self, x):
            return ops.where(x > 0, x, Tensor(-np.inf, ms.float32))

    assert export_onnx(Net(), zoo.floats(3, 4), file_name=tmp_path / "n.onnx").passed


# ---- one error -------------------------------------------------------------------------------------------------------
def test_everything_unsupported_is_in_one_error(tmp_path):
    class Inner(nn.Cell):
        def construct(self, x):
            return ops.dropout(x, 0.5, training=True)

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def construct(self, x):
            return ops.bessel_j0(self.inner(x)) + ops.igamma(x, x) + ops.bessel_j1(x)

    with pytest.raises(ExportError) as raised:
        export_onnx(Net(), zoo.floats(3, 4), file_name=tmp_path / "n.onnx", verify=False)
    text = str(raised.value)
    assert {r.op for r in raised.value.refusals} >= {"BesselJ1", "Igamma"}
    assert "BesselJ1: no rule for this primitive" in text and "Igamma" in text and "rules.register" in text
    assert "drops at random" in text and "(in inner)" in text
    assert not list(tmp_path.iterdir())


def test_dropout_in_the_call_is_refused_with_advice(tmp_path):
    with pytest.raises(ExportError, match=r"if .* dropout is active, give the call training=self\.training"):
        export_onnx(small(dropout_p=0.5), *qkv(), file_name=tmp_path / "n.onnx", verify=False)


def test_a_rule_of_the_user_is_used(tmp_path):
    class Net(nn.Cell):
        def construct(self, x):
            return ops.bessel_j0(x) * 2

    @register("BesselJ0")
    def rule(b, node, x):
        return b.op("Cos", x)

    try:
        certificate = export_onnx(Net(), zoo.floats(3, 4), file_name=tmp_path / "n.onnx", verify=False)
        assert "Cos" in [n.op_type for n in onnx.load(certificate.path).graph.node]
    finally:
        del RULES["BesselJ0"]


def test_a_rule_that_fails_is_named(tmp_path):
    class Net(nn.Cell):
        def construct(self, x):
            return ops.bessel_j0(x)

    @register("BesselJ0")
    def rule(b, node, x):
        raise KeyError("oops")

    try:
        with pytest.raises(ExportError, match="BesselJ0: its rule failed: KeyError: 'oops'"):
            export_onnx(Net(), zoo.floats(3, 4), file_name=tmp_path / "n.onnx", verify=False)
    finally:
        del RULES["BesselJ0"]


def test_a_model_that_computes_something_else_is_not_written(tmp_path):
    original = RULES["Tanh"]
    register("Tanh")(lambda b, node, x: b.op("Sigmoid", x))
    try:
        class Net(nn.Cell):
            def construct(self, x):
                return ops.tanh(x)

        with pytest.raises(ExportError, match=r"(?s)does not compute what the net computes.*TOO LARGE"):
            export_onnx(Net(), zoo.floats(3, 4), file_name=tmp_path / "n.onnx")
        assert not list(tmp_path.iterdir())
    finally:
        RULES["Tanh"] = original


def test_state_is_refused(tmp_path):
    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.cache = ms.Parameter(Tensor(np.zeros((2, 3)), ms.float32), name="cache")

        def construct(self, x):
            self.cache = self.cache + x
            return self.cache * 2

    with pytest.raises(ExportError, match="it changes the parameter 'cache', but a model keeps nothing"):
        export_onnx(Net(), zoo.floats(2, 3), file_name=tmp_path / "n.onnx", verify=False)


# ---- wrong calls -----------------------------------------------------------------------------------------------------
class Twice(nn.Cell):
    def construct(self, x, y=None):
        return x * 2


@pytest.mark.parametrize(("options", "kind", "text"), [
    ({"profile": "fast"}, ValueError, "the 'profile' must be one of 'portable', 'inlined', .*, but got 'fast'"),
    ({"profile": 3}, TypeError, "the type of 'profile' must be str, but got int"),
    ({"opset": 11}, ValueError, r"the 'opset' must be in the range \[18, 25\] for profile 'portable', but got 11"),
    ({"opset": "18"}, TypeError, "the type of 'opset' must be int, but got str"),
    ({"file_name": 7}, TypeError, "the type of 'file_name' must be str or Path, but got int"),
    ({"input_names": ["a", "b"]}, ValueError, "'input_names' must hold one name per Tensor among the inputs: 1"),
    ({"input_names": "a"}, TypeError, "'input_names' must be a list of str"),
    ({"output_names": ["a", "b"]}, ValueError, "'output_names' must hold 1 names, as many as the net returns"),
    ({"input_names": ["a"], "output_names": ["a"]}, ValueError, "'output_names' must differ"),
    ({"dynamic_axes": {"z": {0: "n"}}}, ValueError, r"'dynamic_axes' must hold names of inputs \(x\) or outputs"),
    ({"dynamic_axes": {"x": {2: "n"}}}, ValueError, r"must be in the range \[-2, 1\], but got 2"),
    ({"dynamic_axes": {"x": {"a": "n"}}}, TypeError, "the axes in .* must be int"),
    ({"dynamic_axes": {"x": "n"}}, TypeError, "must be a dict from axis to name, or a list of axes"),
])
def test_wrong_argument(options, kind, text, tmp_path):
    with pytest.raises(kind, match="For 'export_onnx', .*" + text):
        export_onnx(Twice(), zoo.floats(2, 3), **{"file_name": tmp_path / "n.onnx", "verify": False, **options})


def test_wrong_net(tmp_path):
    with pytest.raises(TypeError, match="the type of 'net' must be Cell, but got function"):
        export_onnx(lambda x: x, zoo.floats(2, 3), file_name=tmp_path / "n.onnx", verify=False)
    with pytest.raises(ValueError, match="at least one of 'inputs' must be a Tensor"):
        export_onnx(Twice(), file_name=tmp_path / "n.onnx", verify=False)
    with pytest.raises(TypeError, match=r"the inputs must be Tensors, numbers, .* but 'x' is ndarray"):
        export_onnx(Twice(), np.zeros(3), file_name=tmp_path / "n.onnx", verify=False)


def test_names_and_inputs_that_are_not_used(tmp_path):
    certificate = export_onnx(Twice(), zoo.floats(2, 3), None, file_name=tmp_path / "n.onnx", input_names=["values"],
                              output_names=["twice"])
    graph = onnx.load(certificate.path).graph
    assert [i.name for i in graph.input] == ["values"] and [o.name for o in graph.output] == ["twice"]


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_missing_package(missing, tmp_path, monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] == missing:
            raise ImportError(f"No module named '{name}'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setattr("importlib.import_module", lambda name, *a: refuse(name) if name == missing else real(name))
    with pytest.raises(ImportError, match=rf"the package '{missing}' is needed.*pip install 'ms_flash\[onnx\]'"):
        export_onnx(Twice(), zoo.floats(2, 3), file_name=tmp_path / "n.onnx")


def test_the_net_comes_back_as_it_was(tmp_path):
    net, inputs, options = zoo.build("gpt2")
    net.set_train(True)
    net.norm.set_train(False)
    modes = [cell.training for _, cell in net.cells_and_names()]
    export_onnx(net, *inputs, file_name=tmp_path / "n.onnx", verify=False, **options)
    assert [cell.training for _, cell in net.cells_and_names()] == modes


def test_both_alignments_of_the_compat_call_name_the_stand_in(tmp_path):
    """MindSpore has no CPU kernel for its own flash_attention_score: the net is run with that of ms_flash."""
    original = ops.flash_attention_score
    net, inputs, options = zoo.build("score_causal")
    assert export_onnx(net, *inputs, file_name=tmp_path / "n.onnx", tolerance=1e-5, **options).passed
    assert ops.flash_attention_score is original


@pytest.mark.parametrize("profile", ["plugin", "mslite"])
def test_profiles_for_other_runtimes(profile, tmp_path):
    certificate = export_onnx(small(causal=True), *qkv(4, 4), file_name=tmp_path / "n.onnx", profile=profile)
    model = onnx.load(certificate.path)
    assert not model.functions
    node = next(n for n in model.graph.node if "FlashAttention" in n.op_type)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if profile == "plugin":
        assert attributes["plugin_version"] == b"1" and attributes["is_causal"] == 1
    else:
        assert attributes["num_heads"] == attributes["num_key_value_heads"] == 2
        assert attributes["input_layout"] == b"BNSD" and attributes["scale_value"] == pytest.approx(8 ** -0.5)
    assert "is not for ONNX Runtime" in str(certificate)


def test_certificate_reads_well(tmp_path):
    certificate = export_onnx(small(), *qkv(), file_name=tmp_path / "n.onnx", dynamic_axes=FREE)
    assert re.match(r"certificate for n\.onnx: 0\.\d\d MiB, profile portable, opset 18, 1 FlashAttention nodes\n"
                    r"  ONNX \S+ checker, full check: passed\n"
                    r"  ONNX Runtime \S+ +q 2x2x3x8, k 2x2x5x8, v 2x2x5x8 +error \S+\n", str(certificate)), certificate
