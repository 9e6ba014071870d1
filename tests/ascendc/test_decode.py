"""Attention over caches and the merge of parts: the Ascend kernels on the host twin, against the float64 reference."""
from __future__ import annotations

import ascend
import flash_rule
import kvcases
import native
import numpy as np
import pytest
from test_tiling import L1, UB


@pytest.fixture(autouse=True, scope="module")
def _two_cores():
    with ascend.Settings(cores=2):
        yield


def draw(rng, dtype, **fixed):
    return kvcases.draw(rng, dtype, **{"precision": "default", **fixed})


def check(case, layout="BSND"):
    got, caches = kvcases.native_call(case, layout, ascend.raw_call)
    kvcases.check(case, got, caches, narrow=True)
    return got, caches


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_random_ragged_calls(layout, dtype):
    """Caches hold NaN wherever no token is, and block tables name no block behind those in use."""
    for seed in range(80):
        case = draw(np.random.default_rng((seed, 11, layout == "BSND", len(dtype))), dtype)
        try:
            check(case, layout)
        except AssertionError as error:
            raise AssertionError(f"case {seed}: {error}\n{case.options}") from error


PIECES = {
    "plain": {}, "groups": {"kv_heads": 2, "group": 7}, "window": {"window": (20, 0)}, "window, all": {"causal": False},
    "softcap": {"softcap": 2.0}, "sinks": {"sinks": True}, "alibi": {"alibi": True}, "rotary": {"rotary": "half"},
    "rotary interleaved": {"rotary": "interleaved"}, "window and softcap": {"window": (5, 0), "softcap": 2.0},
    "everything": {"window": (20, 3), "softcap": 2.0, "sinks": True, "alibi": True, "rotary": "half", "group": 3},
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("block_size", [0, 16, 32, 64, 128, 256])
def test_decoding_with_every_piece_and_page_size(name, block_size):
    plain = {"rotary": None, "alibi": False, "sinks": False, "window": (-1, -1), "softcap": 0.0, "scale": None,
             "causal": True, "d": 64, "dv": 64, "batch": 3}
    for index, sq in enumerate((1, 2, 7, 16)):
        rng = np.random.default_rng((block_size, sq, len(name)))
        dtype = ("float16", "bfloat16")[index % 2]
        fixed = {**plain, **PIECES[name], "block_size": block_size, "sq": sq, "new_len": sq if index < 3 else 0}
        check(draw(rng, dtype, length=[300, 17, sq], **fixed))


LONG = {"block_size": 64, "group": 4, "kv_heads": 2, "d": 64, "dv": 64, "rotary": None, "new_len": 1, "sq": 1,
        "batch": 3}


@pytest.mark.parametrize("splits", [0, 1, 5])
def test_a_long_cache_is_cut_into_parts_and_merged(splits):
    case = draw(np.random.default_rng(splits), "float16", length=[2000, 3, 777], num_splits=splits, **LONG)
    check(case)
    results = []
    for cores, reverse in ((1, 0), (3, 0), (3, 1), (20, 0)):
        with ascend.Settings(cores=cores, reverse=reverse):
            results.append(check(case)[0])
    for other in results[1:]:
        for name, array in other.items():
            assert array.tobytes() == results[0][name].tobytes(), name


@pytest.mark.parametrize("sq", [17, 100])
def test_a_prompt_goes_through_the_same_kernel(sq):
    rng = np.random.default_rng(sq)
    check(draw(rng, "float16", length=[0, 40], batch=2, block_size=16, new_len=sq, sq=sq, rotary=None, causal=True))


def test_nan_in_a_token_reaches_those_who_see_it_and_nobody_else():
    """The last of four new tokens is NaN: of four queries only the last may know. Then the first page of a sequence,
    which a window leaves behind: nobody may know."""
    fixed = {"batch": 2, "new_len": 4, "sq": 4, "block_size": 16, "rotary": None, "alibi": False, "sinks": False,
             "softcap": 0.0, "causal": True, "shared": False}
    case = draw(np.random.default_rng(1), "float16", length=[30, 50], window=(-1, -1), **fixed)
    case.inputs["v"][:, :, 3] = np.nan
    out = kvcases.native_call(case, "BSND", ascend.raw_call)[0]["out"].astype(np.float64)
    assert np.isfinite(out[:, :, :3]).all() and np.isnan(out[:, :, 3]).all()
    for sq in (1, 4):
        case = draw(np.random.default_rng(2), "float16", length=[33, 50], window=(5, 0), **{**fixed, "sq": sq})
        clean = check(case)[0]
        for slot in ("k_cache", "v_cache"):
            for blocks in case.inputs["block_table"]:
                case.inputs[slot][blocks[0]] = np.nan
        got = kvcases.native_call(case, "BSND", ascend.raw_call)[0]
        for name, array in got.items():
            np.testing.assert_array_equal(array, clean[name])


WRONG = {"negative length": ("cache_seqlens", -1), "one token too many": ("cache_seqlens", "room"),
         "length beyond 2^32": ("cache_seqlens", 1 << 40), "negative block": ("block_table", -1),
         "the block behind the last": ("block_table", "room"), "block beyond 2^32": ("block_table", (1 << 40) + 1)}


@pytest.mark.parametrize("sq", [1, 3])
@pytest.mark.parametrize("name, block_size", [(n, s) for n in WRONG for s in (0, 16) if s
                                              or WRONG[n][0] == "cache_seqlens"])
def test_wrong_lengths_and_blocks_make_nan_of_their_sequence_and_harm_nothing(name, block_size, sq):
    """On a device nobody looks at them before the kernel does. The second of three sequences is the wrong one."""
    slot, value = WRONG[name]
    case = draw(np.random.default_rng(len(name) + sq), "float16", block_size=block_size, length=[300, 40, 77], batch=3,
                kv_heads=2, group=2, d=64, dv=64, sq=sq, new_len=sq, rotary=None, shared=False, num_splits=3 * (sq > 1),
                sinks=sq > 1)
    inputs = case.inputs
    inputs["cache_seqlens"] = inputs["cache_seqlens"].astype(np.int64)
    right, right_caches = kvcases.native_call(case, "BSND", ascend.raw_call)
    if block_size:
        inputs["block_table"] = inputs["block_table"].astype(np.int64)
    room = len(inputs["k_cache"]) if slot == "block_table" else (
        inputs["k_cache"].shape[2] * (inputs["block_table"].shape[1] if block_size else 1) - sq + 1)
    wrong = room if value == "room" else value
    inputs[slot][(1, 40 // 16) if slot == "block_table" else 1] = wrong    # the block that is appended to
    with ascend.Settings(on_device=1):
        got, caches = kvcases.native_call(case, "BSND", ascend.raw_call)
    for result, array in got.items():
        assert np.isnan(array[1].astype(np.float64)).all(), result
        np.testing.assert_array_equal(array[[0, 2]], right[result][[0, 2]])
    for cache, as_right, before in zip(caches, right_caches, (inputs["k_cache"], inputs["v_cache"])):
        bits = lambda x: x.view(np.uint16)
        written, expected = bits(cache) != bits(before), bits(as_right) != bits(before)
        assert not (written & ~expected).any() and written.any() and (expected & ~written).any()


def test_only_pages_in_use_are_read():
    """Bytes out of the caches: those of the tokens, each once for each of two KV heads."""
    case = draw(np.random.default_rng(3), "float16", length=[100, 10], **{**LONG, "batch": 2}, window=(-1, -1),
                alibi=False, sinks=False)
    kvcases.native_call(case, "BSND", ascend.raw_call)
    buffers = ascend.report()["buffers"]
    assert buffers["k_cache"] == buffers["v_cache"] == [(101 + 11) * 2 * 64 * 2, 2 * 2 * 64 * 2]


def test_what_the_kernels_do_not_take():
    case = draw(np.random.default_rng(4), "float16", d=272, dv=16, rotary=None)
    with pytest.raises(RuntimeError, match=r"'head_dim' of 'query' must be .* from 16 to 256, but got 272"):
        kvcases.native_call(case, "BSND", ascend.raw_call)
    case = draw(np.random.default_rng(4), "float32")
    with pytest.raises(RuntimeError, match="'query' must be float16 or bfloat16"):
        kvcases.native_call(case, "BSND", ascend.raw_call)
    case = draw(np.random.default_rng(4), "float16", precision="high")
    with pytest.raises(RuntimeError, match="precision_mode='high' is not supported"):
        kvcases.native_call(case, "BSND", ascend.raw_call)


# ---------------------------------------------------------------------------------------------------------------------
# Tiling
# ---------------------------------------------------------------------------------------------------------------------
def plan(lengths, sq=1, heads=8, kv_heads=2, d=128, block_size=128, left=-1, right=0, splits=0, room=0):
    """The plan for sequences that have `lengths` tokens and caches for `room` or as many as that takes, untouched. The
    keys of its items are those that the kernel makes of these lengths."""
    batch, pages = len(lengths), max(1, -(-max(room, *lengths) // block_size))
    empty = lambda *shape: np.broadcast_to(np.zeros(1, np.float16), shape)
    cache = empty(batch * pages, block_size, kv_heads, d)
    table = np.arange(batch * pages, dtype=np.int64).reshape(batch, pages)
    query = empty(batch, sq, heads, d)
    arrays = [query, cache, cache, None, None, np.array(lengths, np.int64), table, None, None, None, None, query,
              np.empty((batch, heads, sq), np.float32)]
    digits = "".join("0" if x is None else "1" for x in arrays[:11])
    given = {"query": 1, "key": 1, "value": 1}
    spec = f"inputs={digits};interleaved=0;splits={splits}|"
    spec += native.spec_text(given, layout="BSND", left=left, right=right)
    return ascend.plan("kvcache", spec, arrays)


def test_every_key_that_is_seen_is_given_to_one_part_and_no_other_key():
    rng = np.random.default_rng()
    for _ in range(1500):
        sq = int(rng.integers(1, 17)) if rng.random() < 0.8 else int(rng.integers(17, 300))
        lengths = [int(n) for n in rng.integers(0, 60 if rng.random() < 0.3 else 9000, rng.integers(1, 9))]
        left, splits = (int(rng.choice([-1, -1, 0, 7, 500])), int(rng.choice([0, 0, 1, 3, 16])))
        kv_heads, d = int(rng.integers(1, 4)), int(rng.choice([16, 64, 128, 256]))
        group = int(rng.choice([1, 2, 4, 7]))
        p = plan(lengths, sq, kv_heads * group, kv_heads, d, int(rng.choice([16, 64, 256])), left, splits=splits,
                 room=int(rng.choice([0, 10000, 40000])))
        assert p["ub"] <= UB and p["l1"] <= L1
        assert p["pack"] == (group if sq * group <= 64 else 1)
        merges = {(b, row0): (slot, parts) for b, row0, rows, slot, parts in p["merges"]}
        for b, length in enumerate(lengths):
            diagonal = np.arange(sq) + length - sq
            begin = np.clip(diagonal - left, 0, length) if left >= 0 else np.zeros(sq, np.int64)
            end = np.clip(diagonal + 1, 0, length)
            covered = np.zeros(sq, np.int64)
            items = {}
            for _, row0, rows, key0, key1, slot in (item for item in p["items"] if item[0] == b):
                items.setdefault((row0, rows), []).append((key0, key1, slot))
            for (row0, rows), parts in items.items():
                covered[row0:row0 + rows] += 1
                live = end[row0:row0 + rows] > begin[row0:row0 + rows]
                low = begin[row0:row0 + rows][live].min() if live.any() else 0
                high = end[row0:row0 + rows][live].max() if live.any() else 0
                parts.sort()
                assert all(a[1] == b[0] for a, b in zip(parts, parts[1:]))
                assert parts[-1][1] == high and parts[0][0] == (low if sq == 1 or not live.any() else low // 16 * 16)
                if splits:
                    assert len(parts) <= splits
                if len(parts) > 1:
                    slot, count = merges.pop((b, row0))
                    assert [part[2] for part in parts] == list(range(slot, slot + count))
                else:
                    assert parts[0][2] == -1
            assert (covered == 1).all()
        assert not merges


def test_a_given_number_of_parts_cuts_a_sequence_alike_in_any_batch():
    rng = np.random.default_rng()
    for _ in range(200):
        lengths = [int(n) for n in rng.integers(1, 9000, 5)]
        splits, sq = int(rng.integers(1, 20)), int(rng.integers(1, 17))
        together = plan(lengths, sq, splits=splits)
        for b, length in enumerate(lengths):
            alone = plan([length], sq, splits=splits)
            own = lambda p, which: sorted(item[1:5] for item in p["items"] if item[0] == which and item[3] < item[4])
            assert own(together, b) == own(alone, 0) and together["stack_n"] == alone["stack_n"]


def test_the_plan_does_not_depend_on_the_lengths():
    """MindSpore asks for it before a graph has them."""
    rng = np.random.default_rng()
    for _ in range(50):
        batch, sq, splits = int(rng.integers(1, 9)), int(rng.integers(1, 20)), int(rng.choice([0, 1, 3, 16]))
        plans = [plan([int(n) for n in rng.integers(0, 9000, batch)], sq, splits=splits,
                      room=9000) for _ in range(3)]
        assert len({(p["tiling_hash"], p["workspace"]) for p in plans}) == 1


def busiest(p):
    """Blocks of keys that the busiest core multiplies, over the mean."""
    cores = np.zeros(p["cores"])
    for unit, core in enumerate(p["core_of"]):
        item = p["items"][unit // p["heads_per_item"]]
        cores[core] += -(-(item[4] - item[3]) // p["block_n"])
    return cores.max() / cores.mean()


@pytest.mark.parametrize("lengths, room, most", [
    ([32768], 0, 1.05), ([4096] * 16, 0, 1.05), ([1000] * 64, 0, 1.05), ([4096] * 16, 32768, 1.06),
    # each sequence is cut into as many parts, whatever it has; parts of it are whole blocks
    ([16000, 3000, 9000, 12000], 0, 1.4), ([16000, 3000, 9000, 12000], 32768, 1.5)])
def test_cores_share_what_a_batch_has(lengths, room, most):
    with ascend.Settings(cores=0):
        p = plan(lengths, room=room)
        assert busiest(p) <= most and p["imbalance"] <= 0.05
        assert len(p["items"]) * p["heads_per_item"] >= p["cores"]


def test_offsets_beyond_2_to_the_31_do_not_wrap():
    p = plan([1 << 20] * 16, sq=1, heads=64, kv_heads=64, d=256, block_size=256)  # 2^38 elements of cache
    assert max(item[4] for item in p["items"]) == 1 << 20 and p["workspace"] > 0


# ---------------------------------------------------------------------------------------------------------------------
# Merge
# ---------------------------------------------------------------------------------------------------------------------
def merge(outs, lses, layout):
    batch_axes = (0, 1, 3, 2, 4) if layout == "BSND" else (0, 1, 2, 3, 4)
    given = np.ascontiguousarray(outs.transpose(batch_axes))
    out, lse = native.Guarded(given.shape[1:], outs.dtype), native.Guarded(lses.shape[1:], np.float32)
    ascend.raw_call("merge", f"layout={layout}", [given, lses, out.array, lse.array])
    assert out.intact() and lse.intact()
    return {"out": native.from_layout(out.array, layout, outs.shape[2]), "lse": lse.array}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_merge_against_the_reference(layout, dtype):
    """Parts without keys hold NaN, and some rows have no part with a key."""
    rng = np.random.default_rng()
    for _ in range(20):
        parts, batch, heads = (int(rng.integers(1, n)) for n in (7, 4, 5))
        rows, dv = int(rng.choice([1, 2, 9, 64, 70, 150])), int(rng.choice([1, 5, 16, 33, 64, 128, 256]))
        outs = rng.standard_normal((parts, batch, heads, rows, dv)).astype(native.DTYPES[dtype])
        lses = rng.standard_normal((parts, batch, heads, rows)) * rng.choice([1, 30]) - rng.choice([0, 200])
        lses = lses.astype(np.float32)
        gone = rng.random(lses.shape) < 0.3
        lses[gone] = -np.inf
        outs[gone] = np.nan
        out, lse = flash_rule.reference.merge(outs, lses)
        got = merge(outs, lses, layout)
        rounded = out.astype(outs.dtype).astype(np.float64)
        flash_rule.check(got, {"out": out, "lse": lse}, {"out": rounded, "lse": lse})


def test_merge_refuses_what_does_not_fit():
    outs, lses = np.zeros((1, 1, 1, 1, 1040), np.float16), np.zeros((1, 1, 1, 1), np.float32)
    with pytest.raises(RuntimeError, match="the 'head_dim' of 'outs' must be at most 1024, but got 1040"):
        merge(outs, lses, "BNSD")
