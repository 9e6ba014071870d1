"""The Ascend registration, checked with no CANN present: prototypes, inference, tiling, kernels, and what MindSpore
would call. Host sources are compiled over declarations of CANN's interface (cann/): what that proves is in
docs/ascend.md."""
from __future__ import annotations

import ctypes
import shutil
import subprocess

import ascend
import numpy as np
import pytest
from ascendc import registration

from ms_flash import op_table
from ms_flash.backends import ascend as backend
from ms_flash.kvcache_spec import KvCacheSpec, MergeSpec
from ms_flash.spec import OPTIONS, SLOTS, Arg, AttentionSpec

RESERVED = 16 << 20
DEFAULTS = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "softcap": 0.0, "layout": "BNSD",
            "causal_align": "bottom_right", "training": True, "deterministic": True, "precision_mode": "default",
            "block_m": None, "block_n": None, "num_heads": None, "num_kv_heads": None, "mask_fill": None}


def test_all_places_agree():
    assert registration.check() == []


# Where something is written in two ways, the dry run says so: (file, text, other text, part of the report).
MUTANTS = {
    "name": ("op_host/cann/op_def.h", '"attn_mask", ops', '"atten_mask", ops', "the inputs of the OpDef are"),
    "order": ("op_host/cann/op_def.h", 'input(op, "bias", ops::OPTIONAL, Kind::bias);', "", "the inputs of the OpDef"),
    "need": ("op_host/cann/op_def.h", '"key", ops::OPTIONAL', '"key", ops::REQUIRED', "'key' is required in the OpDef"),
    "dtype": ("op_host/cann/op_def.h", "? ge::DT_UINT8 : ge::DT_BOOL", "? ge::DT_BOOL : ge::DT_UINT8",
              "the dtypes of 'attn_mask' are"),
    "output": ("op_host/cann/ms_flash_bwd.cpp", '"dk"', '"dkey"', "the outputs of the OpDef are"),
    "output dtype": ("op_host/cann/ms_flash_fwd.cpp", '"lse", Kind::f32', '"lse", Kind::data', "the dtypes of 'lse'"),
    "attribute": ("op_host/cann/op_def.h", 'Attr("spec")', 'Attr("specs")', "not one string 'spec'"),
    "host input": ("op_host/cann/op_def.h", "ops::OPTIONAL, Kind::i64).ValueDepend(ops::OPTIONAL)",
                   "ops::OPTIONAL, Kind::i64)", "not read by the host"),
    "op": ("op_host/cann/ms_flash_fwd.cpp", "MsFlashFwd", "MsFlashForward", "there are OpDefs of"),
    "inference": ("op_host/cann/ms_flash_bwd.cpp", "SetInferShape(msf::infer_shape<msf::Op::backward>).", "",
                  "lacks inference"),
    "soc": ("op_host/cann/ms_flash_fwd.cpp", "ascend910b", "ascend310p", "the OpDef is for"),
    "binaries": ("op_host/cann/op_def.h", "column[i] = column[i % 2]",
                 "column[i] = column[kind == Kind::bias ? 1 - i % 2 : i % 2]", "looking up binaries"),
    "kernel": ("op_kernel/ms_flash_fwd.cpp", "GM_ADDR sinks, GM_ADDR seed", "GM_ADDR seed, GM_ADDR sinks",
               "the kernel's entry takes"),
    "kernel name": ("op_kernel/ms_flash_bwd.cpp", "void ms_flash_bwd(", "void ms_flash_backward(", "entry takes None"),
    "tiling struct": ("op_kernel/ms_flash_fwd.cpp", "(msf::ForwardTilingBuffer)", "(msf::ForwardTiling)",
                      "does not register its tiling struct with room"),
    "build": ("CMakeLists.txt", "MsFlashFwd MsFlashBwd MsFlashBiasGrad", "MsFlashFwd MsFlashBwd",
              "CMakeLists.txt builds"),
    "written": ("op_host/cann/ms_flash_kv_cache.cpp", 'msf::output(this, "v_cache", Kind::data);', "",
                "the outputs of the OpDef are"),
    "dtype of blocks": ("op_host/cann/op_def.h", "combination & 4 ? ge::DT_INT64", "combination & 2 ? ge::DT_INT64",
                        "the dtypes of 'block_table' are"),
    "kernel that writes": ("op_kernel/ms_flash_kv_cache.cpp", "GM_ADDR k_cache_ref,", "", "the kernel's entry takes"),
    "table of a cache": ("op_kernel/ms_flash_kv_cache.cpp", "(msf::DecodeTilingBuffer)", "(msf::DecodeTiling)",
                         "does not register its tiling struct with room"),
    "merge dtype": ("op_host/cann/ms_flash_merge.cpp", '"lses", ops::REQUIRED, Kind::f32',
                    '"lses", ops::REQUIRED, Kind::data', "the dtypes of 'lses' are"),
    "merge combinations": ("op_host/cann/ms_flash_merge.cpp", '"outs", ops::REQUIRED, Kind::data, msf::kOutputsAlone',
                           '"outs", ops::REQUIRED, Kind::data', "the dtypes of 'outs' are"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_disagrees_is_reported(mutant, tmp_path):
    file, text, other, report = MUTANTS[mutant]
    copy = tmp_path / "op_impl"
    shutil.copytree(ascend.OP_IMPL, copy, ignore=shutil.ignore_patterns("__pycache__", "build_out"))
    source = copy / "ascendc" / file
    assert text in source.read_text()
    source.write_text(source.read_text().replace(text, other))
    reports = registration.check(copy)
    assert any(report in line for line in reports), reports


def test_an_input_called_out_beside_a_single_output_is_reported():
    """CANN calls the only output of an op "out", whatever its OpDef calls it."""
    prototype = registration.prototypes(registration.build())["MsFlashBiasGrad"]
    header = registration.aclnn_header("MsFlashBiasGrad", prototype)
    assert "const aclTensor *out,\n" in header and registration.clashes(header) == []
    prototype["inputs"][11]["name"] = "out"
    assert registration.clashes(registration.aclnn_header("MsFlashBiasGrad", prototype)) == ["out"]


# --- inference and tiling, called as CANN would call them ---

def spec_of(inputs, **options):
    """(spec, inputs by slot) of a request: shapes and dtypes by slot name."""
    args = tuple(Arg(*inputs[name]) if name in inputs else None for name in SLOTS)
    window = options.pop("window_size", (-1, -1))
    return AttentionSpec.parse("test", args, window, tuple({**DEFAULTS, **options}[name] for name in OPTIONS))


def qkv(*shapes, dtype="float16"):
    return {name: (shape, dtype) for name, shape in zip(("query", "key", "value"), shapes)}


CALLS = {
    "BNSD": (qkv((2, 4, 70, 64), (2, 2, 90, 64), (2, 2, 90, 32)), {"causal": True}),
    "BSND bf16": (qkv((1, 33, 6, 128), (1, 47, 3, 128), (1, 47, 3, 128), dtype="bfloat16"),
                  {"layout": "BSND", "window_size": (16, 0)}),
    "BSH": (qkv((2, 70, 256), (2, 90, 128), (2, 90, 64)), {"layout": "BSH", "num_heads": 4, "num_kv_heads": 2}),
    "SBH": (qkv((70, 2, 256), (90, 2, 128), (90, 2, 64)), {"layout": "SBH", "num_heads": 4, "num_kv_heads": 2}),
    "TND": ({**qkv((150, 4, 64), (160, 2, 64), (160, 2, 64)), "cu_seqlens_q": ((4,), "int64"),
             "cu_seqlens_k": ((4,), "int64")}, {"layout": "TND", "causal": True}),
    "packed": ({"query": ((2, 50, 8, 32), "float16")}, {"layout": "BSND", "num_heads": 4, "num_kv_heads": 2}),
    "bias, sinks": ({**qkv((2, 4, 70, 64), (2, 2, 90, 64), (2, 2, 90, 64)), "bias": ((1, 4, 70, 90), "float16"),
                     "sinks": ((4,), "float32"), "attn_mask": ((2, 1, 70, 90), "bool")}, {}),
    "bias float32": ({**qkv((2, 4, 70, 64), (2, 2, 90, 64), (2, 2, 90, 64)), "bias": ((90,), "float32"),
                      "sinks": ((4,), "float16"), "alibi_slopes": ((4,), "float32")}, {}),
    "dropout": ({**qkv((1, 2, 40, 16), (1, 2, 40, 16), (1, 2, 40, 16)), "seed": ((2,), "int64")}, {"dropout_p": 0.1}),
    "decode": (qkv((1, 8, 1, 128), (1, 2, 5000, 128), (1, 2, 5000, 128)), {}),
}
_CODES = {name: code for code, name in registration.DTYPES.items()}


class HostCall:
    """One call of the functions that CANN would call."""

    def __init__(self, op, spec, capacity=None):
        self.library, self.op, self.spec = registration.build(), op.encode(), spec
        capacity = capacity or self.library.msf_capacity(self.op)
        assert self.library.msf_begin(self.op, spec.render().encode(), ctypes.c_int64(capacity)) == 0
        lengths = np.array([0, 40, 40, 150], np.int64), np.array([0, 60, 100, 160], np.int64)
        self.keep = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lengths))
        saved = [(spec.out_shape, spec.dtype), (spec.lse_shape, "float32"), (spec.lse_shape, "float32"),
                 (spec.out_shape, spec.dtype), (spec.lse_shape, "float32")]
        arrays = list(spec.inputs) + ([] if op == "MsFlashFwd" else saved)
        if spec.packed:     # the kernels look for key and value behind the pointer of the query
            arrays[1] = arrays[2] = arrays[0]
        for slot, (name, array) in enumerate(zip(op_table.slots(op)[0], arrays)):
            shape, dtype = array or ((), "float32")
            data = self.keep.get(name)
            self.library.msf_input(slot, -1 if array is None else len(shape), (ctypes.c_int64 * 8)(*shape),
                                   _CODES[dtype], None if data is None else data.ctypes.data_as(ctypes.c_void_p))

    def infer(self):
        assert self.library.msf_infer(self.op) == 0
        results = []
        for i in range(len(op_table.slots(self.op.decode())[1])):
            shape = (ctypes.c_int64 * 8)()
            rank = self.library.msf_output(i, shape)
            results.append((tuple(shape[:rank]), registration.DTYPES[self.library.msf_output_dtype(i)]))
        return results

    def tile(self):
        assert self.library.msf_tile(self.op) == 0
        size = self.library.msf_tiling(None, ctypes.c_int64(-1))
        buffer = (ctypes.c_uint8 * size)()
        self.library.msf_tiling(buffer, ctypes.c_int64(size))
        return bytes(buffer), self.library.msf_workspace(), self.library.msf_block_dim()


def ops_for(spec):
    return ["MsFlashFwd", "MsFlashBwd"] + (["MsFlashBiasGrad"] if spec.has("bias") else [])


@pytest.mark.parametrize("call", CALLS)
def test_inference_is_that_of_the_backend(call):
    inputs, options = CALLS[call]
    spec = spec_of(inputs, **options)
    for op in ops_for(spec):
        assert HostCall(op, spec).infer() == backend._results(op, spec), op


@pytest.mark.parametrize("call", CALLS)
def test_tiling_is_that_of_the_twin(call):
    inputs, options = CALLS[call]
    spec = spec_of(inputs, **options)
    names = {"MsFlashFwd": "fwd", "MsFlashBwd": "bwd", "MsFlashBiasGrad": "bias_grad"}
    for op in ops_for(spec):
        host = HostCall(op, spec)
        results = host.infer()
        data, workspace, blocks = host.tile()
        saved = [] if op == "MsFlashFwd" else [(spec.out_shape, spec.dtype), *[(spec.lse_shape, "float32")] * 2,
                                               (spec.out_shape, spec.dtype), (spec.lse_shape, "float32")]
        empty = lambda shape, dtype: np.broadcast_to(np.zeros(1, ascend.native.DTYPES.get(dtype, dtype)), shape)
        arrays = [None if x is None else host.keep.get(name, empty(*x))
                  for name, x in zip(SLOTS, spec.inputs)] + [empty(*x) for x in saved + results]
        with ascend.Settings(soc="910B3", cores=0):
            plan = ascend.plan(names[op], spec.render(), arrays)
        assert blocks == plan["cores"] == 20
        assert workspace == plan["workspace"] + RESERVED
        assert len(data) == plan["tiling_bytes"] and fnv(data) == plan["tiling_hash"]


def fnv(data):
    """As op_host/describe.cpp has it."""
    value = 2166136261
    for byte in data:
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


def inferred(library, op, count):
    """(shape, dtype) of the first results of `op`, of the inputs that were set."""
    assert library.msf_infer(op) == 0
    results = []
    for i in range(count):
        dims = (ctypes.c_int64 * 8)()
        rank = library.msf_output(i, dims)
        results.append((tuple(dims[:rank]), registration.DTYPES[library.msf_output_dtype(i)]))
    return results


@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_merge_is_inferred_and_tiled(layout, dtype):
    library, op, shape = registration.build(), b"MsFlashMerge", (3, 2, 5, 70, 40)
    capacity = library.msf_capacity(op)
    assert library.msf_begin(op, f"layout={layout}".encode(), ctypes.c_int64(capacity)) == 0
    heads, rows = (5, 70) if layout == "BNSD" else (70, 5)
    for slot, (dims, code) in enumerate([(shape, _CODES[dtype]), ((3, 2, heads, rows), _CODES["float32"])]):
        library.msf_input(slot, len(dims), (ctypes.c_int64 * 8)(*dims), code, None)
    results = inferred(library, op, 2)
    outs, lses = Arg(shape, dtype), Arg((3, 2, heads, rows), "float32")
    assert results == backend._merged(MergeSpec.parse("test", (outs, lses), layout))
    assert library.msf_tile(op) == 0
    data = (ctypes.c_uint8 * (capacity - 8))()
    assert library.msf_tiling(data, ctypes.c_int64(capacity)) == capacity - 8
    numbers = np.frombuffer(bytes(data), np.int64)
    assert tuple(numbers[:6]) == (3, 2, heads, rows, 2 * 5 * 70 * 40, 2 * 5 * 70)
    cores = 40      # vector cores
    assert tuple(np.frombuffer(bytes(data), np.int32)[-4:-1]) == (40, dtype == "bfloat16", cores)
    assert library.msf_workspace() == RESERVED and library.msf_block_dim() == cores


CACHES = {
    "rows of its own": {}, "pages": {"paged": True, "window": (20, 0)}, "nothing new": {"new": 0, "sinks": "float32"},
    "a prompt": {"new": 100, "queries": 100}, "bf16": {"dtype": "bfloat16", "paged": True, "lengths": "int64"},
    "BNSD, splits": {"layout": "BNSD", "splits": 3, "paged": True, "table": "int64", "sinks": "float16"},
}


def cache_request(dtype="float16", layout="BSND", paged=False, new=1, queries=1, splits=0, lengths="int32",
                  table="int32", window=(-1, -1), sinks=None, rotary=False):
    """A request over caches for 3 sequences, of 4096 tokens at most."""
    heads = lambda batch, rows, count, channels: Arg(
        (batch, rows, count, channels) if layout == "BSND" else (batch, count, rows, channels), dtype)
    outer = (100, 64) if paged else (3, 4096)
    cos = Arg((4096, 32), dtype) if rotary else None
    inputs = (heads(3, queries, 8, 128), heads(*outer, 2, 128), heads(*outer, 2, 64),
              heads(3, new, 2, 128) if new else None, heads(3, new, 2, 64) if new else None, Arg((3,), lengths),
              Arg((3, 64), table) if paged else None, cos, cos, None, Arg((8,), sinks) if sinks else None)
    return KvCacheSpec.parse("test", inputs, (False, None, True, window, 0.0, layout, splits, "default"))


def begin_over_caches(spec):
    """Starts a call of the op; the host sees no lengths and no blocks."""
    library, op = registration.build(), b"MsFlashKvCache"
    assert library.msf_begin(op, spec.render().encode(), ctypes.c_int64(library.msf_capacity(op))) == 0
    for slot, arg in enumerate(spec.inputs):
        shape, dtype = arg or ((), "float32")
        library.msf_input(slot, -1 if arg is None else len(shape), (ctypes.c_int64 * 8)(*shape), _CODES[dtype], None)
    return library, op


@pytest.mark.parametrize("name", CACHES)
def test_attention_over_caches_is_inferred_and_tiled_without_their_lengths(name):
    """The tiling is bit by bit that of the twin, which has the lengths, and does not depend on them."""
    spec = cache_request(**CACHES[name])
    library, op = begin_over_caches(spec)
    results = inferred(library, op, 4)
    assert results == [*backend._cached(spec), tuple(spec.inputs[1]), tuple(spec.inputs[2])]
    assert library.msf_tile(op) == 0
    size = library.msf_tiling(None, ctypes.c_int64(-1))
    data = (ctypes.c_uint8 * size)()
    library.msf_tiling(data, ctypes.c_int64(size))
    empty = lambda shape, dtype: np.broadcast_to(np.zeros(1, ascend.native.DTYPES.get(dtype, dtype)), shape)
    for lengths in ([0, 0, 0], [3000, 7, 40]):
        arrays = [None if x is None else empty(*x) for x in spec.inputs] + [empty(*x) for x in results[:2]]
        arrays[5] = np.array(lengths, spec.inputs[5].dtype)
        if spec.inputs[6] is not None:
            arrays[6] = np.arange(3 * 64, dtype=spec.inputs[6].dtype).reshape(3, 64) % 100
            arrays[6][1:] = 50 + np.arange(2 * 64).reshape(2, 64) % 2      # what is written is there once
            arrays[6][1, 0], arrays[6][2, :2] = 60, (61, 62)
        with ascend.Settings(soc="910B3", cores=0):
            plan = ascend.plan("kvcache", spec.render(), arrays)
        assert library.msf_block_dim() == plan["cores"] == 20
        assert library.msf_workspace() == plan["workspace"] + RESERVED
        assert size == plan["tiling_bytes"] and fnv(bytes(data)) == plan["tiling_hash"]


def test_a_rotary_embedding_is_not_for_the_kernel(capfd):
    library, op = begin_over_caches(cache_request(rotary=True))
    assert library.msf_infer(op) == 0 and library.msf_tile(op) == 3
    assert "'query' and 'k' must come rotated to a device, but got 'rotary_cos'" in capfd.readouterr().err


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(("batch", "heads", "length"), [(1, 40, 2048), (4, 16, 4096), (2, 16, 8192), (1, 16, 32768)])
def test_the_table_of_benchmark_shapes_fits_its_buffer(batch, heads, length, d):
    shape = (batch, heads, length, d)
    for op in ("MsFlashFwd", "MsFlashBwd"):
        host = HostCall(op, spec_of(qkv(shape, shape, shape), causal=True))
        host.infer()
        host.tile()


def test_a_table_that_does_not_fit_its_buffer_is_an_error(capfd):
    spec = spec_of(qkv((8, 4, 4096, 64), (8, 4, 4096, 64), (8, 4, 4096, 64)))
    host = HostCall("MsFlashFwd", spec, capacity=2048)
    host.infer()
    assert host.library.msf_tile(host.op) == 3
    assert "bytes, but the tiling buffer holds 2048" in capfd.readouterr().err


def test_an_unknown_attribute_is_an_error(capfd):
    spec = spec_of(qkv((1, 4, 64, 64), (1, 4, 64, 64), (1, 4, 64, 64)))
    host = HostCall("MsFlashFwd", spec)
    host.library.msf_begin(host.op, b"colour=red", ctypes.c_int64(1 << 20))
    assert host.library.msf_infer(host.op) == 1
    assert "unknown key 'colour'" in capfd.readouterr().err


def test_blocks_come_from_the_environment_and_from_presets(monkeypatch, tmp_path):
    spec = spec_of(qkv((1, 4, 2048, 64), (1, 4, 2048, 64), (1, 4, 2048, 64)))

    def size():
        host = HostCall("MsFlashFwd", spec)
        host.infer()
        return len(host.tile()[0])

    plain = size()
    presets = tmp_path / "presets.yaml"
    presets.write_text("# half as many rows\n- {op: forward, max_head_dim: 64, block_m: 64}\n")
    monkeypatch.setenv("MS_FLASH_PRESETS", str(presets))
    by_preset = size()
    monkeypatch.setenv("MS_FLASH_BLOCK_M", "32")
    assert len({plain, by_preset, size()}) == 3


# --- the sources as CANN would get them ---

def test_kernels_are_staged_into_one_folder(tmp_path):
    stage = tmp_path / "ms_flash"
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(ascend.ROOT / ".venv" / "bin"))
    subprocess.run([cmake, f"-DMSF_ROOT={ascend.OP_IMPL}", f"-DMSF_STAGE={stage}", "-P",
                    ascend.KERNELS / "stage.cmake"], check=True)
    for op in op_table.table()["backends"]["ascend"]["ops"]:
        source = stage / f"{registration.ascend_op.snake_case(op)}.cpp"
        assert not any(f'"{folder}/' in x.read_text() for x in stage.iterdir() for folder in ("ascendc", "common"))
        subprocess.run(["g++", "-std=gnu++17", "-fsyntax-only", "-I", ascend.ASCENDC / "twin", source], check=True)
