"""The block op, from hidden states to projected output: natively, and as a primitive of MindSpore."""
from __future__ import annotations

import zlib

import block_cases
import mindspore as ms
import native
import numpy as np
import pytest
import test_native as native_tests
from block_primitive import Block, parse_options, run_primitive, spec_of, tensor
from mindspore import Tensor

from ms_flash import backends, op_table
from ms_flash.mha_spec import MHA_SLOTS, MhaSpec
from ms_flash.spec import Arg

isa, threads = native_tests.isa, native_tests.threads  # fixtures

# name: (arguments of block_cases.draw, options of the attention)
CASES = {
    "plain": ({}, {}),
    "packed": ({"pack": "qkv"}, {"right": 0}),
    "packed-grouped": ({"pack": "qkv", "heads": 6, "kv_heads": 2, "d": 8}, {"left": 11, "right": 3}),
    "packed-interleaved": ({"pack": "qkv", "interleaved": True}, {}),
    "interleaved-conv1d": ({"pack": "qkv", "interleaved": True, "transposed": (True,) * 4, "d": 16}, {"right": 0}),
    "conv1d": ({"pack": "qkv", "transposed": (True, False, False, True)}, {"right": 0}),
    "transposed": ({"transposed": (True, False, True, False)}, {}),
    "no-bias": ({"biases": False}, {}),
    "some-biases": ({"biases": "qvo"}, {}),
    "no-output-projection": ({"w_o": False, "biases": "qkv"}, {"scale": 1.0}),
    "no-output-projection-recompute": ({"w_o": False, "biases": "qkv"}, {"recompute": True}),
    "cross": ({"cross": True, "k_len": 51, "mask": (2, 1, 1, 51)}, {}),
    "cross-kv-packed": ({"cross": True, "k_len": 19, "pack": "kv", "heads": 6, "kv_heads": 3}, {"right": 2}),
    "cross-kv-interleaved": ({"cross": True, "k_len": 19, "pack": "kv", "interleaved": True}, {"recompute": True}),
    "values-apart": ({"values_apart": True, "biases": "v"}, {}),
    "all-apart": ({"cross": True, "values_apart": True, "k_len": 65}, {"recompute": True}),
    "grouped-other-value-dim": ({"heads": 6, "kv_heads": 2, "d": 24, "dv": 10, "out": 17}, {"left": 5}),
    "one-head": ({"heads": 1, "d": 130, "e": 33, "q_len": 5}, {}),
    "one-token": ({"q_len": 1, "batch": 3, "cross": True, "k_len": 7}, {}),
    "single-channel": ({"heads": 1, "d": 1, "e": 1, "out": 1, "batch": 1, "q_len": 9}, {}),
    "long-rows": ({"q_len": 301, "e": 300, "d": 64, "heads": 2, "batch": 1}, {"right": 0}),
    "padding": ({"mask": (2, 1, 1, 37)}, {}),
    "fill": ({"mask": (37, 37)}, {"fill": -1e4}),
    "everything": ({"pack": "qkv", "mask": (2, 1, 1, 37), "bias": (4, 37, 37), "sinks": True, "alibi": True},
                   {"softcap": 5.0, "right": 0, "align": "top_left", "recompute": True}),
    "trained-bias": ({"bias": (1, 4, 37, 37)}, {"recompute": True}),
    "dropout": ({"pack": "qkv"}, {"dropout": 0.2, "seed": 77, "offset": 5, "recompute": True}),
    "sbh": ({"cross": True, "k_len": 21, "bias": (2, 4, 37, 21)}, {"layout": "SBH"}),
    "sbh-packed": ({"pack": "qkv"}, {"layout": "SBH", "recompute": True}),
    "float32-biases": ({"bias_dtype": np.float32}, {}),
}
_NOT_MATHS = ("recompute", "layout")


def problem(name, dtype):
    """Inputs, options of the reference, options of the native op, channels and the gradient of the output."""
    arguments, extra = CASES[name]
    rng = np.random.default_rng(zlib.crc32(f"{name} {dtype}".encode()))
    given, options, channels = block_cases.draw(rng, native.DTYPES[dtype], **arguments)
    dy = rng.standard_normal((*given["x"].shape[:2], channels[0])).astype(native.DTYPES[dtype])
    maths = {("dropout_p" if key == "dropout" else "mask_fill" if key == "fill" else key): value
             for key, value in extra.items() if key not in _NOT_MATHS}
    return given, {**options, **maths}, {**options, **extra}, channels, dy


# ---------------------------------------------------------------------------------------------------------------------
# The native op
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", list(native.DTYPES))
@pytest.mark.parametrize("name", CASES)
def test_native(name, dtype):
    given, options, native_options, channels, dy = problem(name, dtype)
    got = block_cases.run_native(given, native_options, channels, dy)
    block_cases.check(got, given, options, dy)


@pytest.mark.parametrize("dtype", list(native.DTYPES))
def test_every_instruction_set(isa, dtype):
    given, options, native_options, channels, dy = problem("grouped-other-value-dim", dtype)
    block_cases.check(block_cases.run_native(given, native_options, channels, dy), given, options, dy)


@pytest.mark.parametrize("name", ["everything", "dropout", "cross", "long-rows"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_recomputing_nor_threads_change_a_bit(threads, name, dtype):
    given, _, options, channels, dy = problem(name, dtype)
    results = []
    for count, recompute in ((1, False), (1, True), (2, False), (3, True), (8, False)):
        threads(count)
        results.append(block_cases.run_native(given, {**options, "recompute": recompute}, channels, dy))
    for other in results[1:]:
        native_tests.assert_same(results[0], other)


def test_high_precision(isa):
    given, options, native_options, channels, dy = problem("plain", "float32")
    got = block_cases.run_native(given, {**native_options, "precision": "high"}, channels, dy)
    exact = block_cases.truth(given, options, dy)
    # q, k, v and their gradients are stored in float32, and nothing else is rounded
    assert block_cases.relative_error(got["y"], exact["y"], np.abs(exact["y"]).max()) <= 2e-7


@pytest.mark.parametrize("wanted", [("x",), ("w_q", "b_o"), ("w_o",), ("sinks",), ("context", "b_k"), ()])
def test_only_wanted_gradients_are_computed(wanted):
    rng = np.random.default_rng(len(wanted))
    given, options, channels = block_cases.draw(rng, np.float32, cross=True, k_len=23, sinks=True)
    dy = rng.standard_normal((2, 37, channels[0])).astype(np.float32)
    everything = block_cases.run_native(given, options, channels, dy)
    some = block_cases.run_native(given, options, channels, dy, grads=wanted)
    assert set(some) == {"y", *("d" + name for name in wanted)}
    native_tests.assert_same(some, {name: everything[name] for name in some})


def test_wrong_calls_are_refused_and_the_next_call_works():
    rng = np.random.default_rng(3)
    given, options, channels = block_cases.draw(rng, np.float32)
    wrong = [
        ({"x": given["x"][0]}, {}, "rank of 'x' must be 3"),
        ({"w_k": given["w_k"][:, 1:]}, {}, "input channels of 'w_k' must be those of 'x' 40, but got 39"),
        ({"w_k": given["w_k"][:-4]}, {}, "must be 52|head_dim of the keys must be equal|must be \\(48,\\)"),
        ({"w_q": given["w_q"][:-1], "b_q": None}, {}, "must be a multiple of its 4 heads, but got 51"),
        ({"w_o": given["w_o"][:, :-1]}, {}, "input channels of 'w_o' must be 52, but got 51"),
        ({"b_v": given["b_v"][:-1]}, {}, "shape of 'b_v' must be"),
        ({"w_o": None}, {}, "'b_o' needs a 'w_o'"),
        ({"w_k": None}, {}, "'w_v' needs a 'w_k'"),
        ({"context": given["x"][:1]}, {}, "batch size of 'context' must be equal to that of 'x' 2, but got 1"),
        ({"context_v": given["x"][:, :9]}, {}, "length of 'context_v' must be equal to that of the keys 37, but got 9"),
        ({"w_v": given["w_v"].astype(np.float16)}, {}, "dtype of 'w_v' must be that of 'x'"),
        ({"attn_mask": np.zeros((3, 37), bool)}, {}, "must broadcast to"),
        ({}, {"num_kv_heads": 3}, "multiple of its 3 heads"),
    ]
    for changed, changed_options, reason in wrong:
        with pytest.raises(RuntimeError, match=reason):
            native.mha_forward({**given, **changed}, channels=channels, **{**options, **changed_options})
        assert np.isfinite(native.mha_forward(given, channels=channels, **options)["y"]).all()


MEMORY = """
    import resource
    import numpy as np, native
    native.library().msflash_cpu_set_num_threads(2)
    s, e, heads, recompute = {length}, 256, 4, {recompute}
    draw = lambda *shape: np.random.default_rng(0).standard_normal(shape, np.float32)
    given = dict(x=draw(1, s, e), w_q=draw(3 * e, e), b_q=draw(3 * e), w_o=draw(e, e), b_o=draw(e))
    inputs = [given.get(name) for name in native.MHA_SLOTS]
    text = native._mha_text(given, num_heads=heads, recompute=recompute)
    kept = [np.ones((1, s, e), np.float32) for _ in range(3)]
    saved = kept + [np.ones((1, s, e), np.float32)] + [np.ones((1, heads, s), np.float32) for _ in range(2)]
    y, dy = np.ones((1, s, e), np.float32), draw(1, s, e)
    grads = [np.ones(given[n].shape if n in given else (1,), np.float32) for n in native.MHA_GRADIENTS]
    grads.append(np.ones(s * e * 4, np.float32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    native.raw_call("mha_fwd", text, inputs + [y] + saved)
    native.raw_call("mha_bwd", text, inputs + saved + [dy] + grads)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, y.nbytes)
"""


@pytest.mark.parametrize("recompute", [False, True])
def test_working_memory_is_linear_in_the_length(recompute):
    # what the op allocates beside its outputs is of fixed size, packed weights and tiles; scores would be 64 times as
    # large as one tensor
    grown, tensor = map(int, native_tests.in_a_fresh_process(
        MEMORY.format(length=4096, recompute=recompute)).split())
    assert grown < 2 * tensor + (24 << 20), f"{grown / 2**20:.1f} MiB, {tensor / 2**20:.1f} a tensor"


# ---------------------------------------------------------------------------------------------------------------------
# As a primitive of MindSpore
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, dtype", [
    ("packed", "float32"), ("packed", "float16"), ("packed", "bfloat16"), ("cross", "float32"), ("plain", "float16"),
    ("no-output-projection-recompute", "float32"), ("conv1d", "bfloat16"), ("everything", "float32"),
    ("trained-bias", "float16"), ("sbh", "float32"), ("fill", "float32"), ("grouped-other-value-dim", "float32"),
    ("packed-interleaved", "float32"), ("values-apart", "float32"), ("dropout", "float32")])
def test_primitive(name, dtype, mode):
    given, options, native_options, _, dy = problem(name, dtype)
    if native_options.get("layout") == "SBH":
        turned = {key: x.swapaxes(0, 1) if key in ("x", "context") else x for key, x in given.items()}
        got = run_primitive(turned, dy.swapaxes(0, 1), spec_of(turned, **parse_options(native_options)))
        got = {key: x.swapaxes(0, 1) if x.ndim == 3 and key != "dbias" else x for key, x in got.items()}
    elif "dropout" in native_options:
        seeded = {**given, "seed": np.array([native_options["seed"], native_options["offset"]])}
        got = run_primitive(seeded, dy, spec_of(seeded, **parse_options(native_options)))
    else:
        got = run_primitive(given, dy, spec_of(given, **parse_options(native_options)))
    block_cases.check(got, given, options, dy)


def test_shapes_unknown_when_the_graph_is_compiled(mode):
    given, options, native_options, _, _ = problem("packed", "float32")
    inputs = [None if given.get(name) is None else Arg(given[name].shape, "float32") for name in MHA_SLOTS]
    inputs[0] = Arg((-1, -1, 40), "float32")
    spec = MhaSpec.parse("fuse", tuple(inputs), **parse_options(native_options))
    assert spec.out_shape == (-1, -1, 40)
    net = Block(backends.select("fuse", "cpu").mha_forward(spec))
    args = [tensor(given.get(name)) for name in MHA_SLOTS]
    net.set_inputs(Tensor(shape=[None, None, 40], dtype=ms.float32), *args[1:])
    for length in (37, 5):
        x = given["x"][:, :length]
        expected, _ = block_cases.flash_rule.reference.mha_forward({**given, "x": x}, **options)
        got = net(tensor(x), *args[1:]).asnumpy()
        assert block_cases.relative_error(got, expected, np.abs(expected).max()) <= 1e-5


def test_second_order_gradients_are_an_error():
    given, _, native_options, _, _ = problem("packed", "float32")
    net = Block(backends.select("fuse", "cpu").mha_forward(spec_of(given, **parse_options(native_options))))
    args = [tensor(given.get(name)) for name in MHA_SLOTS]
    with pytest.raises(RuntimeError, match="second order"):
        ms.grad(ms.grad(lambda x: net(x, *args[1:]).sum()))(args[0])


# ---------------------------------------------------------------------------------------------------------------------
# The spec
# ---------------------------------------------------------------------------------------------------------------------
def parse(changes=None, **options):
    """A legal request, changed."""
    shapes = {"x": (2, 5, 12), "w_q": (12, 12), "w_k": (12, 12), "w_v": (12, 12), "b_q": (12,), "w_o": (10, 12),
              "b_o": (10,), **(changes or {})}
    inputs = tuple(None if shapes.get(name) is None else shapes[name] if isinstance(shapes[name], Arg)
                   else Arg(shapes[name], "float32") for name in MHA_SLOTS)
    return MhaSpec.parse("fuse", inputs, **{"num_heads": 3, **options})


def test_spec():
    spec = parse(causal=True, recompute=True, transposed=(False, False, False, True), grads=("x", "w_o"),
                 changes={"w_o": (12, 10)})
    assert spec.out_shape == (2, 5, 10) and spec.saved == (5, 5, 5, 4, 5, 6)
    head, _, attention = spec.render().partition("|")
    assert head == "inputs=10011110011000000;recompute=1;interleaved=0;transposed=0001;grads=100000000100"
    assert attention == spec.attention.render() and "layout=BSH;heads=3;kv_heads=3" in attention
    keys = [field.split("=")[0] for field in head.split(";")]
    assert keys == list(op_table.table()["mha_attributes"])
    assert parse({"w_o": None, "b_o": None}).saved == (1, 2, 3, 0, 5, 6)
    assert parse({"w_k": None, "w_v": None, "w_q": (20, 12), "b_q": None}, num_kv_heads=1).attention.k_len == 5


@pytest.mark.parametrize("changes, options, error, reason", [
    ({"x": None}, {}, TypeError, "type of 'x' must be Tensor, but got NoneType"),
    ({"w_q": None}, {}, TypeError, "type of 'w_q' must be Tensor"),
    ({"w_k": None}, {}, ValueError, "'w_v' must be None where 'w_k' is"),
    ({"w_o": None}, {}, ValueError, r"'b_o' must be None where 'w_o' is, but got \(10,\)"),
    ({"w_k": (12, 11)}, {}, ValueError, "input channels of 'w_k' must be 12, but got 11"),
    ({"w_q": (11, 12), "b_q": None}, {}, ValueError, "must be a multiple of the 3 heads it makes, but got 11"),
    ({"w_k": (15, 12)}, {}, ValueError, "hidden size of 'key' must be num_kv_heads"),
    ({"w_o": (10, 11)}, {}, ValueError, "input channels of 'w_o' must be 12, but got 11"),
    ({"b_q": (11,)}, {}, ValueError, "length of 'b_q' must be 12, but got 11"),
    ({"b_o": (12,)}, {}, ValueError, "length of 'b_o' must be 10, but got 12"),
    ({"x": (10, 12)}, {}, ValueError, r"rank of 'x' must be 3, but got 2, shape \(10, 12\)"),
    ({"w_q": (12,)}, {}, ValueError, "rank of 'w_q' must be 2"),
    ({"w_v": Arg((12, 12), "float16")}, {}, TypeError, "dtype of 'w_v' must be float32, but got float16"),
    ({"b_q": Arg((12,), "float16")}, {}, TypeError, "dtype of 'b_q' must be float32, but got float16"),
    ({"context": (3, 4, 12)}, {}, ValueError, "batch size of 'key' must be equal"),
    ({"context_v": (2, 4, 12)}, {}, ValueError, "length of 'value' must be equal"),
    ({"attn_mask": Arg((3, 5), "bool")}, {}, ValueError, "shape of 'attn_mask' must be broadcastable"),
    ({"attn_mask": (5, 5)}, {}, TypeError, "pass it as 'bias'"),
    ({"sinks": (4,)}, {}, ValueError, "shape of 'sinks'"),
    ({}, {"num_heads": 0}, ValueError, "'num_heads' must be 1 or greater"),
    ({}, {"num_heads": 3.0}, TypeError, "type of 'num_heads' must be int, but got float"),
    ({"w_o": None, "b_o": None}, {"num_kv_heads": 1}, ValueError, "hidden size of 'key' must be num_kv_heads"),
    ({}, {"layout": "BNSD"}, ValueError, "'layout' must be one of 'BSH', 'SBH', but got 'BNSD'"),
    ({}, {"grads": ("w_x",)}, ValueError, "'grads' must hold names of x, context, .*, but got 'w_x'"),
    ({}, {"scale": 1.0}, ValueError, "no option 'scale'"),
    ({}, {"dropout_p": 1.0}, ValueError, r"'dropout_p' must be in the range \[0, 1\)"),
    ({"w_k": None, "w_v": None, "w_q": (20, 12), "b_q": None}, {"num_kv_heads": 1, "interleaved": True}, ValueError,
     "'num_kv_heads' must be equal to 'num_heads' 3 where packed weights are interleaved"),
])
def test_bad_input(changes, options, error, reason):
    with pytest.raises(error, match=reason):
        parse(changes, **options)
