"""The Ascend backend's MindSpore side, without an NPU: the CPU library's ops stand in for the aclnn functions. They are
called in the same form, with the attribute as the last argument, from PyNative and from graphs."""
from __future__ import annotations

import os
import subprocess
import sys

import kvcases
import mindspore as ms
import native
import numpy as np
import public_api
import pytest

import ms_flash
from ms_flash import backends, kvcache_spec, library, op_table, spec
from ms_flash.backends import ascend
from ms_flash.backends.ascend_op import entries
from ms_flash.kvcache_spec import KVCACHE_SLOTS

pytestmark = pytest.mark.usefixtures("stand_in")


class StandIn(ascend.AscendBackend):
    """The backend, but for what it calls."""

    def __init__(self, library_path):
        self.library_path, self.calls = library_path, []

    def available(self):
        return True, ""

    def form(self, spec):
        attribute, _, *rest = super().form(spec)
        return (attribute, False, *rest)    # the CPU library finds packed keys and values by itself

    def custom(self, op, kind, out_shape, out_dtype, bprop):
        from mindspore.ops import CustomRegOp, DataType

        info = CustomRegOp(op)
        for index, entry in enumerate(entries(op)):
            info.input(index, entry["name"], "optional")
        info.attr("spec", "required", "str")
        outputs = op_table.slots(op)[1]
        for index, name in enumerate(outputs):
            info.output(index, name, "required" if len(outputs) > 1 else "dynamic")
        info.dtype_format(*[DataType.None_None] * (len(entries(op)) + len(outputs)))
        self.calls.append(op)
        return kind(f"{self.library_path}:{op}", out_shape, out_dtype, "aot", bprop,
                    info.target("CPU").get_op_info())


@pytest.fixture(scope="session")
def another_path(tmp_path_factory):
    """The CPU library by another name: MindSpore keeps one registration per name, and the CPU backend has one."""
    path = tmp_path_factory.mktemp("stand_in") / "libstand_in.so"
    path.symlink_to(library.path())
    return path


@pytest.fixture
def stand_in(monkeypatch, another_path):
    monkeypatch.setitem(backends.BACKENDS, "ascend", StandIn(another_path))
    backends._checked.cache_clear()
    for parsed in (spec, kvcache_spec):     # specs keep the primitives of a backend by its name
        parsed._parse_cached.cache_clear()
    yield backends.BACKENDS["ascend"]
    backends._checked.cache_clear()
    for parsed in (spec, kvcache_spec):
        parsed._parse_cached.cache_clear()


def tensor(rng, *shape, dtype=ms.float16):
    return ms.Tensor(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def loss_of(attention):
    def loss(*args):
        return (attention(*args).astype(ms.float32) ** 2).sum()

    return loss


def compare(call, inputs, mode, grads=(0, 1, 2)):
    """Output and gradients, from the backend `ascend` and from `cpu`, which computes the same."""
    results = []
    for backend in ("ascend", "cpu"):
        run = ms.value_and_grad(loss_of(call(backend)), grads)
        if mode == "graph":
            run = ms.jit(run)
        value, gradients = run(*inputs)
        results.append([value.asnumpy(), *(g.astype(ms.float32).asnumpy() for g in gradients)])
    for ours, theirs in zip(*results):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3 * np.abs(theirs).max())


CASES = {
    "plain": ([(2, 4, 33, 64), (2, 2, 47, 64), (2, 2, 47, 32)], {"causal": True}),
    "head_dim 40 of 24": ([(1, 4, 33, 40), (1, 2, 47, 40), (1, 2, 47, 24)], {}),
    "BSND": ([(2, 33, 4, 72), (2, 47, 2, 72), (2, 47, 2, 72)], {"layout": "BSND", "window_size": (8, 0)}),
    "BSH": ([(2, 33, 160), (2, 47, 80), (2, 47, 80)], {"layout": "BSH", "num_heads": 4, "num_kv_heads": 2}),
    "SBH": ([(33, 2, 128), (47, 2, 64), (47, 2, 64)], {"layout": "SBH", "num_heads": 4, "num_kv_heads": 2}),
}


@pytest.mark.parametrize("mode", ["pynative", "graph"])
@pytest.mark.parametrize("case", CASES)
def test_layouts_and_head_dims(case, mode, stand_in):
    shapes, options = CASES[case]
    rng = np.random.default_rng(len(case))
    def call(backend):
        return ms_flash.nn.FlashAttention(backend=backend, **options)

    compare(call, [tensor(rng, *shape) for shape in shapes], mode)
    assert stand_in.calls == ["MsFlashBwd", "MsFlashFwd"], "one primitive each: the gradient's first"


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_bias_and_sinks_have_gradients(mode):
    rng = np.random.default_rng(1)
    inputs = [tensor(rng, *shape) for shape in ((1, 2, 33, 40), (1, 2, 47, 40), (1, 2, 47, 40), (1, 2, 33, 47), (2,))]
    def call(backend):
        def attention(q, k, v, bias, sinks):
            return ms_flash.flash_attention(q, k, v, bias=bias, sinks=sinks, backend=backend)

        return attention

    compare(call, inputs, mode, grads=(0, 1, 2, 3, 4))


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_packed(mode):
    rng = np.random.default_rng(2)
    def call(backend):
        def attention(qkv):
            return ms_flash.flash_attention(qkv, layout="BSND", num_heads=4, num_kv_heads=2, backend=backend)

        return attention

    compare(call, [tensor(rng, 2, 33, 8, 48)], mode, grads=(0,))


def test_dropout_with_a_seed_tensor():
    rng = np.random.default_rng(3)
    seed = ms.Tensor([7, 3], ms.int64)
    def call(backend):
        def attention(q, k, v):
            return ms_flash.flash_attention(q, k, v, dropout_p=0.3, seed=seed, backend=backend)

        return attention

    compare(call, [tensor(rng, 1, 2, 33, 32) for _ in range(3)], "pynative")


@pytest.mark.parametrize(("wrong", "error", "text"), [
    ({"dtype": ms.float32}, TypeError, "must be one of float16, bfloat16 for the backend 'ascend', but got float32"),
    ({"shape": (1, 2, 16, 272)}, ValueError, "must be at most 256 for the backend 'ascend', but got 272"),
    ({"precision_mode": "high"}, ValueError, "must be 'default' for the backend 'ascend', but got 'high'"),
])
def test_what_the_kernels_do_not_take_is_refused(wrong, error, text):
    rng = np.random.default_rng(4)
    x = tensor(rng, *wrong.pop("shape", (1, 2, 16, 32)), dtype=wrong.pop("dtype", ms.float16))
    with pytest.raises(error, match=text):
        ms_flash.flash_attention(x, x, x, backend="ascend", **wrong)


def test_sequences_of_different_lengths_are_refused():
    x = tensor(np.random.default_rng(5), 40, 2, 32)
    cu = ms.Tensor([0, 10, 40], ms.int32)
    with pytest.raises(ValueError, match=r"'layout' must be one of 'BNSD', .* for the backend 'ascend', but got 'TND'"):
        ms_flash.flash_attention_varlen(x, x, x, cu, cu, backend="ascend")


@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_merge(layout, mode, stand_in):
    rng = np.random.default_rng(7)
    outs = [tensor(rng, 2, 3, 33, 40) for _ in range(3)]
    shape = (2, 3, 33) if layout == "BNSD" else (2, 33, 3)
    lses = [tensor(rng, *shape, dtype=ms.float32) for _ in range(3)]
    def merged(backend):
        return lambda: ms_flash.merge_attention(outs, lses, layout=layout, backend=backend)

    for ours, theirs in zip(*((ms.jit(merged(b)) if mode == "graph" else merged(b))() for b in ("ascend", "cpu"))):
        np.testing.assert_allclose(ours.float().asnumpy(), theirs.float().asnumpy(), rtol=1e-3, atol=1e-3)
    assert stand_in.calls == ["MsFlashMerge"]


def test_a_gradient_of_the_merge_is_an_error():
    outs, lses = tensor(np.random.default_rng(8), 2, 1, 2, 5, 16), ms.ops.zeros((2, 1, 2, 5), ms.float32)
    with pytest.raises(RuntimeError, match="For 'merge_attention', gradients are not supported"):
        ms.grad(lambda x: ms_flash.merge_attention(x, lses, backend="ascend")[0].astype(ms.float32).sum())(outs)


CACHES = {
    "one token": {"new_len": 1, "sq": 1, "block_size": 0}, "pages": {"new_len": 3, "sq": 3, "block_size": 16},
    "nothing new": {"new_len": 0, "sq": 2, "block_size": 32, "sinks": True}, "alibi": {"sq": 5, "alibi": True},
    "rotary": {"new_len": 1, "sq": 1, "rotary": "half"}, "a longer prompt": {"new_len": 7, "sq": 9, "rotary": "half"},
    "rotary interleaved": {"new_len": 4, "sq": 4, "rotary": "interleaved", "block_size": 16},
}


class OverCaches(ms.nn.Cell):
    """Attention over caches of its own, whose rows are read after it."""

    def __init__(self, k_cache, v_cache, **options):
        super().__init__()
        self.k_cache, self.v_cache = ms.Parameter(k_cache, name="k_cache"), ms.Parameter(v_cache, name="v_cache")
        self.options = options

    def construct(self, query, k, v, cache_seqlens, block_table, rotary_cos, rotary_sin, alibi_slopes, sinks):
        out, lse = ms_flash.flash_attention_with_kvcache(
            query, self.k_cache, self.v_cache, k, v, cache_seqlens=cache_seqlens, block_table=block_table,
            rotary_cos=rotary_cos, rotary_sin=rotary_sin, alibi_slopes=alibi_slopes, sinks=sinks, return_lse=True,
            backend="ascend", **self.options)
        return out, lse, self.k_cache.astype(ms.float32), self.v_cache.astype(ms.float32)


@pytest.mark.parametrize(("layout", "dtype"), [("BSND", "float16"), ("BNSD", "bfloat16")])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache(name, layout, dtype, mode, stand_in):
    """Rotated by MindSpore's ops before the op, which appends in place, in a graph before the caches are read."""
    for seed in range(2):
        case = kvcases.draw(np.random.default_rng((seed, len(name))), dtype,
                            **{"d": 32, "dv": 16, "precision": "default", "num_splits": 0, "rotary": None,
                               **CACHES[name]})
        for table in ("rotary_cos", "rotary_sin") if "rotary_cos" in case.inputs and dtype == "bfloat16" else ():
            case.inputs[table] = case.inputs[table].astype(np.float32)  # MindSpore has no Gather of bfloat16 on the CPU
        arrays = {slot: None if x is None else public_api.tensor(x) for slot, x in case.laid_out(layout).items()}
        net = OverCaches(arrays.pop("k_cache"), arrays.pop("v_cache"), layout=layout, **case.options)
        out, lse, *read = net(arrays.pop("query"), *(arrays[slot] for slot in KVCACHE_SLOTS[3:]))
        heads, kv_heads = case.inputs["query"].shape[1], case.inputs["k_cache"].shape[1]
        given = [public_api.numpy_of(x) for x in (net.k_cache, net.v_cache)]
        kvcases.check(case, {"out": native.from_layout(public_api.numpy_of(out), layout, heads), "lse": lse.asnumpy()},
                      [np.ascontiguousarray(native.from_layout(x, layout, kv_heads)) for x in given], narrow=True)
        for x, seen in zip(given, read):
            np.testing.assert_array_equal(seen.asnumpy(), x.astype(np.float32))
    assert set(stand_in.calls) == {"MsFlashKvCache"}


def test_what_the_kernels_do_not_take_of_a_cache_is_refused():
    rng = np.random.default_rng(9)
    def call(channels, kind=ms.Parameter, new=None):
        x, cache = tensor(rng, 1, 1, 2, channels), tensor(rng, 1, 8, 2, channels)
        new = x if new else None
        return ms_flash.flash_attention_with_kvcache(x, kind(cache), kind(cache + 0), new, new, backend="ascend",
                                                     cache_seqlens=ms.Tensor([3], ms.int32))

    with pytest.raises(ValueError, match="'head_dim' of 'k_cache' must be a multiple of 16 for the backend 'ascend'"):
        call(24)
    with pytest.raises(ValueError, match=r"must have memory of its own, .* but got a Tensor, which the graph"):
        call(16, ms.Tensor, True)
    assert call(16, ms.Tensor).shape == (1, 1, 2, 16)


def test_a_gradient_over_a_cache_is_an_error():
    cache = tensor(np.random.default_rng(8), 1, 8, 2, 16)
    def loss(x):
        return ms_flash.flash_attention_with_kvcache(x, cache, cache, cache_seqlens=ms.Tensor([8], ms.int32),
                                                     backend="ascend").astype(ms.float32).sum()

    with pytest.raises(RuntimeError, match="For 'flash_attention_with_kvcache', gradients are not supported"):
        ms.grad(loss)(tensor(np.random.default_rng(8), 1, 1, 2, 16))


def test_second_order_is_an_error():
    x = tensor(np.random.default_rng(6), 1, 1, 8, 16)
    inner = ms.grad(lambda x: ms_flash.flash_attention(x, x, x, backend="ascend").astype(ms.float32).sum())
    with pytest.raises(RuntimeError, match="second order"):
        ms.grad(lambda x: inner(x).astype(ms.float32).sum())(x)


# --- where the operator package is ---

def package(folder):
    """A folder that looks like an installed package of ours."""
    for file in ascend.lacks(folder):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("")
    return folder


def test_a_package_is_put_into_the_path(monkeypatch, tmp_path):
    own = package(tmp_path / "opp" / "vendors" / "ms_flash")
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", "/elsewhere")
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path / "opp"))
    ascend.prepare()
    assert os.environ["ASCEND_CUSTOM_OPP_PATH"] == f"{own}:/elsewhere"
    ascend.prepare()
    assert os.environ["ASCEND_CUSTOM_OPP_PATH"] == f"{own}:/elsewhere", "not twice"


def test_a_package_that_is_listed_stays_where_it_is(monkeypatch, tmp_path):
    own = package(tmp_path / "ms_flash")
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"/elsewhere:{own}")
    ascend.prepare()
    assert os.environ["ASCEND_CUSTOM_OPP_PATH"] == f"/elsewhere:{own}"


def test_an_incomplete_package_is_named(monkeypatch, tmp_path):
    own = package(tmp_path / "ms_flash")
    (own / "op_api" / "include" / "aclnn_ms_flash_bwd.h").unlink()
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(own))
    monkeypatch.setattr(ascend.mindspore, "get_context", lambda _: "Ascend")
    present, reason = ascend.AscendBackend().available()
    assert not present
    assert reason == f"the operator package {own} lacks op_api/include/aclnn_ms_flash_bwd.h"


def test_without_an_npu_the_backend_says_why():
    code = ("import numpy, mindspore, ms_flash; x = mindspore.Tensor(numpy.zeros((1, 1, 4, 16), numpy.float16));"
            "ms_flash.flash_attention(x, x, x, backend='ascend')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "'ascend': the device target is CPU, not Ascend" in done.stderr
