"""Which thread can do what: the forward's tasks cover the work once, and no sequence of a ragged batch is one task."""

from __future__ import annotations

import ctypes
import heapq
import os
import subprocess
from pathlib import Path

import kvcases
import native
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
FIELDS = ("b", "head", "row0", "row1", "key0", "key1", "part", "parts", "slot")
BLOCK_M, KEYS_PER_PART = 192, 1024


@pytest.fixture(scope="session")
def plan(tmp_path_factory):
    """Function: lengths of queries and keys, heads -> tasks in the order in which they start, dicts with their cost."""
    library = tmp_path_factory.mktemp("plan") / "plan.so"
    subprocess.run([os.environ.get("CXX") or "g++", "-std=gnu++17", "-O0", "-Wall", "-Wextra", "-Werror", "-fPIC",
                    "-shared", f"-I{ROOT / 'op_impl'}", str(ROOT / "tests" / "forward_plan.cpp"), "-o", str(library)],
                   check=True)
    native_plan = ctypes.CDLL(str(library)).plan
    native_plan.restype = ctypes.c_int64

    def call(q_lens, k_lens, heads=1, kv_heads=1, right=-1, splits=0, threads=2):
        room = 20000
        fields, costs = np.full((room, len(FIELDS)), -7, np.int64), np.full(room, np.nan)
        numbers = lambda x: np.ascontiguousarray(x, np.int64).ctypes.data_as(ctypes.c_void_p)
        i64 = ctypes.c_int64
        q_lens, k_lens = np.array(q_lens, np.int64), np.array(k_lens, np.int64)
        count = native_plan(i64(len(q_lens)), numbers(q_lens), numbers(k_lens), i64(heads), i64(kv_heads), i64(right),
                            i64(splits), i64(BLOCK_M), i64(KEYS_PER_PART), i64(threads), i64(room),
                            numbers(fields), costs.ctypes.data_as(ctypes.c_void_p))
        assert count <= room
        return [{**dict(zip(FIELDS, row)), "cost": cost} for row, cost in zip(fields[:count].tolist(), costs.tolist())]

    return call


def busiest(tasks, threads):
    """Work of the thread that has most, where each takes the next task when it is done; 1: an equal share."""
    loads = [0.0] * threads
    for task in tasks:
        heapq.heappush(loads, heapq.heappop(loads) + task["cost"])
    return max(loads) / (sum(loads) / threads)


RAGGED = {"one long among short": [16384] + [40] * 63, "one long among few": [8192, 100, 7],
          "two long": [9000] + [64] * 30 + [12000], "powers of two": [1 << n for n in range(4, 15)],
          "alone": [16384], "all the same": [1000] * 40}


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("threads", [2, 3, 4, 8])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_a_ragged_batch_of_decoding_is_shared_out_by_work(plan, lengths, threads, kv_heads):
    tasks = plan([1] * len(lengths), lengths, 4 * kv_heads, kv_heads, threads=threads)
    assert busiest(tasks, threads) < 1.25


@pytest.mark.parametrize("heads, length", [(8, 512), (8, 1024), (8, 4096), (32, 1024), (3, 3333), (1, 5000)])
@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("threads", [0, 1, 2, 3, 8])     # 0: not known, one is taken for granted
def test_a_dense_batch_is_shared_out_by_work_and_each_thread_stays_with_its_keys(plan, heads, length, right, threads):
    tasks = plan([length], [length], heads, heads, right, threads=threads)
    threads = max(threads, 1)
    assert busiest(tasks, threads) < 1.1 + 0.25 * (threads == 8)
    heaviest, rest, changes = max(task["cost"] for task in tasks), sum(task["cost"] for task in tasks), 0
    of_head = rest / heads
    for before, task in zip(tasks, tasks[threads:]):
        rest -= before["cost"]
        if rest < 2 * threads * heaviest + (threads + 1) * of_head:
            break   # from here on by weight
        changes += before["head"] != task["head"]
    assert changes <= heads


def test_no_long_part_holds_more_than_two_shares(plan):
    rng = np.random.default_rng()
    for _ in range(50):
        batch, kv_heads = int(rng.integers(1, 70)), int(rng.integers(1, 4))
        k_lens = np.exp(rng.uniform(0, np.log(30000), batch)).astype(np.int64)
        q_lens = rng.integers(1, 4, batch)
        tasks = plan(q_lens, k_lens, 2 * kv_heads, kv_heads)
        share = sum(task["cost"] for task in tasks) / 32
        for task in tasks:
            assert task["cost"] < 2 * share or task["key1"] - task["key0"] < 2 * KEYS_PER_PART, (task, k_lens)


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("right", [-1, 0])
def test_tasks_cover_every_row_and_its_keys_once(plan, right, splits):
    rng = np.random.default_rng()
    for _ in range(20):
        batch, kv_heads, group = int(rng.integers(1, 6)), int(rng.integers(1, 3)), int(rng.integers(1, 4))
        q_lens, k_lens = rng.integers(0, 500, batch), rng.integers(0, 4000, batch)
        tasks = plan(q_lens, k_lens, kv_heads * group, kv_heads, right, splits)
        slots = [t["slot"] for t in tasks if t["parts"] > 1]
        assert sorted(slots) == list(range(len(slots)))     # places of their own, without gaps
        blocks = {}
        for t in sorted(tasks, key=lambda t: t["part"]):
            blocks.setdefault((t["b"], t["head"], t["row0"], t["row1"]), []).append(t)
        for (b, _, _row0, row1), parts in blocks.items():
            assert [t["part"] for t in parts] == list(range(parts[0]["parts"]))
            assert [t["slot"] for t in parts] == list(range(parts[0]["slot"], parts[0]["slot"] + len(parts)))
            assert all(a["key1"] == z["key0"] for a, z in zip(parts, parts[1:]))
            # the band's rule by itself: the last query of the block sees most
            last = min(k_lens[b], (row1 - 1) // group + k_lens[b] - q_lens[b] + 1) if right == 0 else k_lens[b]
            assert parts[0]["key0"] == 0 and parts[-1]["key1"] == max(last, 0)
        for b in range(batch):
            for head in range(kv_heads):
                rows = sorted((row0, row1) for at, h, row0, row1 in blocks if (at, h) == (b, head))
                assert [row0 for row0, _ in rows] == [0, *(row1 for _, row1 in rows)][:len(rows)]
                assert (rows[-1][1] if rows else 0) == q_lens[b] * group


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_ragged_batch_has_the_same_bits_with_any_number_of_threads(dtype):
    rng = np.random.default_rng()
    case = kvcases.draw(rng, dtype, length=[6000, *rng.integers(1, 60, 40).tolist()], batch=41, kv_heads=1, group=4,
                        d=16, dv=16, new_len=1, sq=1, block_size=16, num_splits=0, shared=False, window=(-1, -1))
    library, outs = native.library(), []
    before = library.msflash_cpu_get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            library.msflash_cpu_set_num_threads(threads)
            got, caches = kvcases.native_call(case, "BSND")
            kvcases.check(case, got, caches)
            outs.append(got)
    finally:
        library.msflash_cpu_set_num_threads(before)
    for other in outs[1:]:
        assert other.keys() == outs[0].keys()
        assert all(other[name].tobytes() == outs[0][name].tobytes() for name in other)
