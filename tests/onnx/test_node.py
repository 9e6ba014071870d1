"""The node through its function body, the inlined body, ai.onnx Attention and ONNX's evaluator: on every `Attention`
case of ONNX's own backend tests, and on the inputs on which other implementations have failed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import flash_rule
import nodes
import numpy as np
import onnx
import pytest
from ms_flash.onnx_export import verify
from ms_flash.onnx_export.runtime import Runtime

_FILE = Path(__file__).resolve().parents[1] / "conformance" / "test_onnx.py"
_SPEC = importlib.util.spec_from_file_location("conformance_onnx", _FILE)
conformance = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(conformance)
CASES = conformance.CASES


def run(call, how):
    """dict(out, lse) of one attention."""
    if how == "evaluator":
        proto, feeds = nodes.model_of(call)
        del proto.functions[:]
        out, lse = onnx.reference.ReferenceEvaluator(proto, new_ops=[verify.op_run()]).run(None, feeds)
    else:
        proto, feeds = nodes.model_of(call, how)
        out, lse = Runtime(proto.SerializeToString()).run(feeds)
    return {"out": out, "lse": lse}


HOW = ["portable", "inlined", "standard", "evaluator"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", CASES)
def test_case_of_onnx(name, how):
    adapter = conformance.Adapter(CASES[name])
    call = {key: value for key, value in adapter.call.items() if value is not None}
    if how == "standard" and adapter.dtype not in (np.float32, np.float16):
        with pytest.raises(Exception, match="NOT_IMPLEMENTED"):     # ONNX Runtime's CPU has no bfloat16 Attention
            run(call, how)
        return
    got = run(call, how)
    exact, naive = flash_rule.evaluate(call, None), flash_rule.evaluate(call, None, rounding=adapter.dtype)
    flash_rule.check({"out": got["out"], "lse": got["lse"]}, exact, naive)
    if adapter.dtype == np.float32:
        np.testing.assert_allclose(adapter.back(got["out"]), adapter.expected["Y"].astype(np.float64),
                                   rtol=CASES[name].rtol, atol=CASES[name].atol)


def draw(rng, shapes, dtype=np.float32):
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def tensors(b=2, n=4, nk=2, sq=5, sk=7, d=8, dv=6, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = draw(rng, [(b, n, sq, d), (b, nk, sk, d), (b, nk, sk, dv)], dtype)
    return {"q": q, "k": k, "v": v}


def check(call, how):
    got = run(call, how)
    dtype = call["q"].dtype
    flash_rule.check(got, flash_rule.evaluate(call, None), flash_rule.evaluate(call, None, rounding=dtype))
    assert not np.isnan(got["out"]).any() and not np.isnan(got["lse"]).any()
    return got


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("sizes", [(3, 5), (5, 3), (1, 8), (4, 4), (9, 1)])
@pytest.mark.parametrize("align", ["bottom_right", "top_left"])
def test_causal_alignment(sizes, align, how):
    check({**tensors(sq=sizes[0], sk=sizes[1]), "right": 0, "align": align}, how)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("window", [(0, 0), (2, 0), (2, 1), (-1, 2), (3, -1), (100, 100)])
def test_window(window, how):
    check({**tensors(sq=7, sk=6), "left": window[0], "right": window[1]}, how)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_row_without_keys(how, dtype):
    """A row that the mask empties gives 0 and LSE -inf, with a bool mask and with one of -inf."""
    call = tensors(dtype=dtype)
    mask = np.zeros((2, 1, 5, 7), bool)
    mask[0, 0, 1] = True
    mask[1, 0, 2, 3:] = True
    got = check({**call, "attn_mask": mask}, how)
    assert not got["out"][0, :, 1].any() and np.isneginf(got["lse"][0, :, 1]).all()
    got = check({**call, "bias": np.where(mask, -np.inf, 0.5).astype(dtype)}, how)
    assert not got["out"][0, :, 1].any()


@pytest.mark.parametrize("how", HOW)
def test_lowest_number_of_float16_is_a_number(how):
    call = tensors(dtype=np.float16, nk=4)
    bias = np.zeros((1, 1, 5, 7), np.float16)
    bias[..., 3:] = np.finfo(np.float16).min
    bias[..., 1, :] = np.finfo(np.float16).min     # a row of it: the plain softmax, not an empty one
    got = check({**call, "bias": bias}, how)
    assert got["out"][:, :, 1].any()


@pytest.mark.parametrize("how", ["portable", "inlined", "evaluator"])
def test_what_is_stored_in_hidden_keys_stays_there(how):
    call = tensors()
    mask = np.zeros((2, 1, 1, 7), bool)
    mask[..., 5:] = True
    poisoned = {**call, "k": call["k"].copy(), "v": call["v"].copy()}
    poisoned["k"][:, :, 5:], poisoned["v"][:, :, 5:] = np.nan, np.inf
    expected = run({**call, "attn_mask": mask}, how)
    got = run({**poisoned, "attn_mask": mask}, how)
    np.testing.assert_array_equal(got["out"], expected["out"])
    bias = np.where(mask, -np.inf, 0.0).astype(np.float32)
    np.testing.assert_array_equal(run({**poisoned, "bias": bias}, how)["out"], expected["out"])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape", [(7,), (5, 7), (1, 7), (4, 5, 7), (2, 1, 1, 7), (1, 4, 1, 7), (2, 4, 5, 7),
                                   (2, 1, 5, 1), (5, 1)])
def test_mask_shapes(shape, how):
    rng = np.random.default_rng(3)
    call = tensors()
    check({**call, "attn_mask": rng.random(shape) < 0.3}, how)
    check({**call, "bias": rng.standard_normal(shape).astype(np.float32)}, how)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("options", [{"scale": 0.3}, {"scale": -2.0}, {"softcap": 1.5}, {"softcap": 0.7, "scale": 3.0},
                                     {"scale": 1e-30}])
def test_scale_and_softcap(options, how):
    check({**tensors(), **options}, how)


@pytest.mark.parametrize("how", ["portable", "inlined"])
def test_mask_of_another_dtype_than_the_query(how):
    call = tensors(dtype=np.float16)
    bias = np.random.default_rng(1).standard_normal((2, 1, 5, 7)).astype(np.float32)
    check({**call, "bias": bias}, how)


def test_reference_evaluator_without_the_function_gives_the_same_as_with_it():
    call = tensors()
    proto, feeds = nodes.model_of(call)
    with_body = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    for x, y in zip(with_body, run(call, "evaluator").values()):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def test_two_kinds_of_mask_in_one_model():
    """Bodies of several kinds are overloads of one function."""
    from ms_flash.onnx_export import profiles
    from ms_flash.onnx_export.builder import Builder, Tensor

    chosen = profiles.make("portable", None)
    b = Builder(chosen.opset)
    b.profile = chosen
    x = Tensor("float32", (1, 2, -1, 8), b.unique("x"))
    mask = Tensor("bool", (-1, -1), b.unique("mask"))
    y, _ = chosen.attend(b, profiles.Attention(x, x, x, mask))
    chosen.attend(b, profiles.Attention(y, y, y, None))
    assert sorted(f.overload for f in chosen.functions()) == ["", "plain"]


def test_the_schema_is_what_the_node_has():
    from ms_flash.onnx_export import schema

    proto, _ = nodes.model_of({**tensors(), "softcap": 2.0})
    node = next(n for n in proto.graph.node if n.domain == schema.DOMAIN)
    assert node.op_type == schema.OP_TYPE and len(node.output) == len(schema.OUTPUTS)
    assert {a.name for a in node.attribute} == set(schema.DEFAULTS)
    function = proto.functions[0]
    assert list(function.input) == [t.name for t in schema.INPUTS]
    assert list(function.output) == [t.name for t in schema.OUTPUTS]
    assert list(function.attribute) == list(schema.DEFAULTS)




def test_the_contract_in_the_docs_is_the_schema():
    from ms_flash.onnx_export import schema

    text = (Path(__file__).resolve().parents[2] / "docs" / "onnx.md").read_text(encoding="utf-8")
    contract = text.partition("## The node: a contract")[2].partition("\n## ")[0]
    lines = [line for line in contract.splitlines() if line.startswith("| `")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    tensors = {cells[0].split("`")[1]: (cells[1], cells[2], "(optional)" in cells[0]) for cells in rows
               if len(cells) == 4}
    kinds = {"E": "E", "M": "M", "float32": "F"}
    for tensor in (*schema.INPUTS, *schema.OUTPUTS):
        kind, shape, optional = tensors.pop(tensor.name)
        assert kinds[kind] == tensor.type and optional == tensor.optional, tensor
        assert shape.replace(" ", "").removeprefix("right-alignedwith").startswith(tensor.shape), tensor
    assert not tensors
    defaults = {name.strip("` "): float(cells[1]) for cells in rows if len(cells) == 3 for name in cells[0].split(",")}
    assert defaults == schema.DEFAULTS
