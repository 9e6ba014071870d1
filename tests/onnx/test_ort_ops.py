"""The custom-op library in stock ONNX Runtime, against the float64 reference."""
from __future__ import annotations

import threading

import flash_rule
import node_model
import numpy as np
import onnxruntime
import pytest
from conformance.test_onnx import CASES, Adapter
from ms_flash.onnx_export import ort_ops
from onnx import TensorProto, helper

DTYPES = [np.dtype(np.float32), np.dtype(np.float16), node_model.BFLOAT16]
onnxruntime.set_default_logger_severity(4)      # what fails on purpose need not be printed


def session(proto, **options):
    settings = onnxruntime.SessionOptions()
    for name, value in options.items():
        setattr(settings, name, value)
    return onnxruntime.InferenceSession(node_model.save(proto), ort_ops.register(settings),
                                        providers=["CPUExecutionProvider"])


def run(call, runner=None, lse=True):
    runner = runner or session(node_model.model_for(call, lse=lse))
    results = runner.run(None, node_model.feeds_for(call))
    results[0] = results[0].astype(call["q"].dtype)
    return dict(zip(("out", "lse"), results))


def random_call(rng, dtype, mask=None, softcap=0.0):
    """A legal call: odd lengths, grouped heads, windows, both alignments, rows without keys."""
    def pick(*values):
        return values[rng.integers(len(values))]

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)

    batch, kv_heads, group = rng.integers(1, 4), rng.integers(1, 4), rng.integers(1, 4)
    sq, sk = (int(pick(1, 2, 7, 16, 33, 64, 65, 130)) for _ in range(2))
    d, dv = (int(pick(1, 5, 8, 16, 33, 64, 72, 130)) for _ in range(2))
    call = {"q": draw(batch, kv_heads * group, sq, d), "k": draw(batch, kv_heads, sk, d),
            "v": draw(batch, kv_heads, sk, dv), "softcap": softcap, "scale": pick(None, 0.3, -0.2, 1.0),
            "left": int(pick(-1, -1, 0, 5, 64)), "right": int(pick(-1, 0, 0, 3)),
            "align": pick("bottom_right", "top_left")}
    full = (batch, kv_heads * group, sq, sk)
    shape = [1 if rng.random() < 0.4 else length for length in full][-int(pick(1, 2, 4, 4)):]
    if mask == "bool":
        call["attn_mask"] = rng.random(shape) < pick(0.3, 0.9)
    elif mask is not None:
        call["bias"] = rng.standard_normal(shape).astype(np.float32).astype(mask)
        call["bias"][rng.random(shape) < 0.2] = -np.inf
    return call


def check(call, got):
    exact = flash_rule.evaluate(call, None)
    naive = flash_rule.evaluate(call, None, rounding=call["q"].dtype)
    flash_rule.check(got, exact, naive)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("mask", [None, "bool", *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_calls(dtype, mask, softcap):
    rng = np.random.default_rng()
    for _ in range(8):
        call = random_call(rng, dtype, mask, softcap)
        check(call, run(call, lse=bool(rng.integers(2))))


@pytest.mark.parametrize("name", CASES)
def test_the_cases_of_onnx(name):
    """ONNX's own Attention cases, through the adapter of the op's conformance tests."""
    adapter = Adapter(CASES[name])
    check(adapter.call, run(adapter.call))


def test_one_session_takes_any_length():
    rng, runner = np.random.default_rng(), session(node_model.model(np.float32, is_causal=1))
    for batch, heads, kv_heads, sq, sk, d, dv in ((1, 2, 1, 2, 2, 8, 8), (2, 6, 3, 7, 5, 8, 3),
                                                  (3, 4, 4, 64, 300, 33, 8), (1, 1, 1, 1, 1000, 64, 64)):
        call = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (
            ("q", (batch, heads, sq, d)), ("k", (batch, kv_heads, sk, d)), ("v", (batch, kv_heads, sk, dv)))}
        call["right"] = 0
        check(call, run(call, runner))


def test_unknown_lengths_keep_their_names():
    outputs = session(node_model.model(np.float16)).get_outputs()
    assert [output.shape for output in outputs] == [["B", "H", "S", "E"], ["B", "H", "S"]]
    assert [output.type for output in outputs] == ["tensor(float16)", "tensor(float)"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths_without_a_name_stay_open(dtype):
    """As after a Reshape to computed lengths: what follows the node must not meet a length of -1."""
    proto = node_model.model(dtype)
    for given in proto.graph.input:
        for axis in given.type.tensor_type.shape.dim:
            axis.Clear()
    output = proto.graph.output[0].name
    proto.graph.node.extend([helper.make_node("Constant", [], ["flat"], value_ints=[1, 2, -1]),
                             helper.make_node("Reshape", [output, "flat"], ["reshaped"])])
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info(
        "reshaped", proto.graph.output[0].type.tensor_type.elem_type, [1, 2, None]))
    call = {name: np.ones((1, 2, 3, 4)).astype(dtype) for name in "qkv"}
    assert session(proto).run(None, node_model.feeds_for(call))[0].shape == (1, 2, 12)


@pytest.mark.parametrize("shape", [(0, 2, 2, 3, 4), (1, 2, 2, 0, 4), (1, 2, 1, 3, 0), (1, 0, 2, 3, 4)])
def test_nothing_to_do(shape):
    batch, heads, kv_heads, sq, sk = shape
    call = {"q": np.ones((batch, heads, sq, 8), np.float32), "k": np.ones((batch, kv_heads, sk, 8), np.float32),
            "v": np.ones((batch, kv_heads, sk, 5), np.float32)}
    got = run(call)
    assert got["out"].shape == (batch, heads, sq, 5) and not got["out"].any()
    assert got["lse"].shape == (batch, heads, sq) and np.isneginf(got["lse"]).all()


def test_what_is_masked_out_is_not_read():
    rng = np.random.default_rng()
    for mask in ("bool", np.dtype(np.float32)):
        call = random_call(rng, np.dtype(np.float32), mask)
        hidden = rng.random(call["k"].shape[2]) < 0.5
        where = "attn_mask" if mask == "bool" else "bias"
        call[where] = np.broadcast_to(call[where], (*call["q"].shape[:3], call["k"].shape[2])).copy()
        call[where][..., hidden] = True if mask == "bool" else -np.inf
        clean = run(call)
        poisoned = dict(call, k=call["k"].copy(), v=call["v"].copy())
        poisoned["k"][:, :, hidden], poisoned["v"][:, :, hidden] = np.nan, np.inf
        for name, x in run(poisoned).items():
            np.testing.assert_array_equal(x, clean[name])


def test_defaults_are_those_of_the_schema():
    from ms_flash.onnx_export import schema

    call = random_call(np.random.default_rng(), np.dtype(np.float32))
    written = run(call, session(node_model.model(np.float32, **schema.DEFAULTS)))
    for name, x in run(call, session(node_model.model(np.float32))).items():
        np.testing.assert_array_equal(x, written[name])


def test_the_library_comes_before_a_function_of_the_model():
    """A model carries the function for runtimes without the library; here it is wrong on purpose."""
    wrong = helper.make_function("ai.msflash", "FlashAttention", ["Q", "K", "V", "attn_mask"], ["Y", "LSE"], [
        helper.make_node("Constant", [], ["axis"], value_ints=[-1]),
        helper.make_node("Sub", ["Q", "Q"], ["Y"]),
        helper.make_node("ReduceSum", ["Y", "axis"], ["LSE"], keepdims=0)], [helper.make_opsetid("", 23)])
    proto = node_model.model(np.float32, functions=[wrong])
    call = {name: np.random.default_rng().standard_normal((1, 2, 3, 4)).astype(np.float32) for name in "qkv"}
    plain = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert not plain.run(None, node_model.feeds_for(call))[0].any()
    check(call, run(call, session(proto)))


@pytest.mark.parametrize("attribute", [
    {"scale": float("nan")}, {"softcap": -1.0}, {"softcap": float("inf")}, {"left_window_size": -2},
    {"right_window_size": -7}, {"is_causal": 2}, {"causal_alignment": -1}, {"scale": 1}, {"is_causal": 1.0},
    {"softcap": "a"}, {"left_window_size": [3, 4]}], ids=str)
def test_a_wrong_attribute_is_an_error_of_the_session(attribute):
    with pytest.raises(Exception, match=r"For 'ai\.msflash::FlashAttention', the attribute") as failure:
        session(node_model.model(np.float32, **attribute))
    assert next(iter(attribute)) in str(failure.value)


BAD_SHAPES = {
    "batch size of 'K'": {"K": (1, 2, 5, 8)},
    "batch size of 'V'": {"V": (3, 2, 5, 8)},
    "head_dim of 'K'": {"K": (2, 2, 5, 7)},
    "same heads and length": {"V": (2, 2, 6, 8)},
    "multiple of those of 'K'": {"Q": (2, 3, 3, 8)},
    "head_dim of 'Q'": {"Q": (2, 4, 3, 0), "K": (2, 2, 5, 0)},
    "attn_mask.* must broadcast": {"attn_mask": (2, 4, 3, 4)},
    "attn_mask.*must broadcast": {"attn_mask": (4, 2, 3, 5)},
}


@pytest.mark.parametrize("text", BAD_SHAPES)
def test_shapes_that_do_not_fit(text):
    shapes = {"Q": (2, 4, 3, 8), "K": (2, 2, 5, 8), "V": (2, 2, 5, 8), "attn_mask": (2, 4, 3, 5), **BAD_SHAPES[text]}
    proto = node_model.model(np.float32, np.float32)
    for given in proto.graph.input:     # the names of axes are promises that the runtime would check itself
        for axis in given.type.tensor_type.shape.dim:
            axis.ClearField("dim_param")
    runner = session(proto)
    with pytest.raises(Exception, match=text):
        runner.run(None, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    good = {"Q": (2, 4, 3, 8), "K": (2, 2, 5, 8), "V": (2, 2, 5, 8), "attn_mask": (1, 1, 1, 5)}
    results = runner.run(None, {name: np.zeros(shape, np.float32) for name, shape in good.items()})
    assert np.isfinite(results[1]).all()     # the session goes on after an error


@pytest.mark.parametrize("rank", [0, 3, 5])
def test_a_wrong_rank(rank):
    proto = node_model.model(np.float32)
    shape = proto.graph.input[1].type.tensor_type.shape
    while len(shape.dim) != rank:
        shape.dim.pop() if len(shape.dim) > rank else shape.dim.add()
    shapes = {"Q": (1, 1, 1, 1), "K": rank * (1,), "V": (1, 1, 1, 1)}
    with pytest.raises(Exception, match="rank of 'K' must be 4, but got the shape"):
        session(proto).run(None, {name: np.ones(x, np.float32) for name, x in shapes.items()})


def test_dtypes_that_are_not_supported():
    def with_type(name, kind):
        proto = node_model.model(np.float32, np.float32)
        next(x for x in proto.graph.input if x.name == name).type.tensor_type.elem_type = kind
        return proto

    runner = session(with_type("attn_mask", TensorProto.INT64))
    feeds = {name: np.ones((1, 1, 2, 2), np.float32) for name in "QKV"}
    with pytest.raises(Exception, match=r"'attn_mask' must be bool \(True = keep\).*but got int64"):
        runner.run(None, dict(feeds, attn_mask=np.ones((1, 1, 2, 2), np.int64)))
    for name, kind in (("Q", TensorProto.DOUBLE), ("V", TensorProto.FLOAT16)):
        with pytest.raises(Exception, match="FlashAttention"):
            session(with_type(name, kind))


def test_any_number_of_threads_gives_the_same_bits():
    rng = np.random.default_rng()
    call = {"q": rng.standard_normal((2, 4, 300, 40)).astype(np.float32), "right": 0,
            "k": rng.standard_normal((2, 2, 500, 40)).astype(np.float32),
            "v": rng.standard_normal((2, 2, 500, 24)).astype(np.float32)}
    proto = node_model.model_for(call)
    first, *others = (run(call, session(proto, intra_op_num_threads=n)) for n in (1, 2, 5))
    check(call, first)
    for other in others:
        for name in first:
            np.testing.assert_array_equal(first[name], other[name])


def test_many_callers_of_one_session():
    rng, runner, wrong = np.random.default_rng(), session(node_model.model(np.float32, is_causal=1)), []
    calls = [{name: rng.standard_normal((1, 2, 60 + i, 16)).astype(np.float32) for name in "qkv"} for i in range(4)]
    alone = [run(call, runner) for call in calls]

    def hammer(i):
        for _ in range(50):
            got = run(calls[i], runner)
            if any((got[name] != alone[i][name]).any() for name in got):
                wrong.append(i)

    threads = [threading.Thread(target=hammer, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_sessions_outlive_their_options():
    runners = [session(node_model.model(np.float32)) for _ in range(5)]
    call = {name: np.ones((1, 1, 2, 4), np.float32) for name in "qkv"}
    del runners[:3]
    for runner in runners:
        np.testing.assert_array_equal(run(call, runner)["out"], call["v"])


def test_register_says_what_is_wrong(monkeypatch, tmp_path):
    options = onnxruntime.SessionOptions()
    with pytest.raises(TypeError, match=r"must be an onnxruntime\.SessionOptions, but got dict"):
        ort_ops.register({})
    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime, "__version__", "1.16.3")
        with pytest.raises(RuntimeError, match=r"must be 1\.17 or newer, but got 1\.16\.3"):
            ort_ops.register(options)
    monkeypatch.setenv("MS_FLASH_ORT_LIB", str(tmp_path / "none.so"))
    with pytest.raises(RuntimeError, match="is missing; build it"):
        ort_ops.register(options)
    (tmp_path / "none.so").write_bytes(b"no library")
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        ort_ops.register(options)
