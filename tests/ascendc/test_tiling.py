"""The host tiling: what it plans is what has to be computed, it fits the chip, and the cores share it evenly."""
from __future__ import annotations

import ascend
import native
import numpy as np
import pytest

UB, L1, SELECT_SCRATCH = 192 * 1024, 512 * 1024, 8 * 1024


class Problem:
    """Shapes only: the tiling reads no data but cumulative lengths."""

    def __init__(self, batch, heads, kv_heads, q_len, k_len, d, dv=None, layout="BNSD", cu=None, dtype="float16",
                 present=(), bias=None, **options):
        self.batch, self.heads, self.kv_heads, self.cu = batch, heads, kv_heads, cu
        self.q_len, self.k_len, self.d, self.dv, self.options = q_len, k_len, d, dv or d, options
        empty = lambda *shape: np.broadcast_to(np.zeros(1, native.DTYPES.get(dtype, dtype)), shape)
        if cu is None:
            self.inputs = {"query": empty(batch, heads, q_len, d), "key": empty(batch, kv_heads, k_len, d),
                           "value": empty(batch, kv_heads, k_len, self.dv)}
            self.lengths = [(q_len, k_len)] * batch
            rows = (batch, heads, q_len)
        else:
            layout = "TND"
            self.inputs = {"query": empty(cu[0][-1], heads, d), "key": empty(cu[1][-1], kv_heads, d),
                           "value": empty(cu[1][-1], kv_heads, self.dv), "cu_q": np.array(cu[0], np.int64),
                           "cu_k": np.array(cu[1], np.int64)}
            self.lengths = list(zip(np.diff(cu[0]).tolist(), np.diff(cu[1]).tolist()))
            rows = (heads, cu[0][-1])
        mask = np.broadcast_to(np.zeros(1, bool), (1, 1, q_len, k_len))
        for name in present:
            self.inputs[name] = mask if name == "attn_mask" else mask.astype(np.float32)
        if bias is not None:
            self.inputs["bias"] = empty(*bias).astype(np.float32)
        self.layout = layout
        self.excludes_keys = bool(present) or options.get("left", -1) >= 0 or options.get("right", -1) >= 0
        out = self.inputs["query"].shape[:-1] + (self.dv,)
        self.outputs = [np.broadcast_to(np.zeros(1, np.float16), out)] + [
            np.broadcast_to(np.zeros(1, np.float32), rows)] * 3

    def spec(self):
        return native.spec_text(self.inputs, layout=self.layout, heads=self.heads, kv_heads=self.kv_heads,
                                **self.options)

    def plan(self):
        return ascend.plan("fwd", self.spec(), [self.inputs.get(slot) for slot in native.SLOTS] + self.outputs)

    def plan_backward(self, op="bwd"):
        saved = [self.outputs[0], *self.outputs[2:], self.outputs[0], self.outputs[1]]
        grads = [self.inputs[name] for name in ("query", "key", "value")] + [np.zeros(1, np.float32)]
        if op == "bias_grad":
            grads = [self.inputs["bias"]]
        return ascend.plan(op, self.spec(), [self.inputs.get(slot) for slot in native.SLOTS] + saved + grads)

    def bounds(self, b):
        """First and last key + 1 of every query of sequence b, by the rule of `reference.band`."""
        sq, sk = self.lengths[b]
        left, right = self.options.get("left", -1), self.options.get("right", -1)
        diagonal = np.arange(sq) + (sk - sq if self.options.get("align", "bottom_right") == "bottom_right" else 0)
        begin = np.zeros(sq, np.int64) if left < 0 else np.clip(diagonal - left, 0, sk)
        end = np.full(sq, sk) if right < 0 else np.clip(diagonal + right + 1, 0, sk)
        return begin, end


def check_covers(problem, plan):
    """Every (row block, key block of 16) that some row needs is computed exactly once, and no other one."""
    unit = 16
    for b, (sq, _) in enumerate(problem.lengths):
        begin, end = problem.bounds(b)
        blocks = {}
        for item in (item for item in plan["items"] if item[0] == b):
            _, row0, rows, key0, key1, slot = item
            assert key0 % unit == 0 and rows > 0 and rows * plan["pack"] <= plan["block_m"]
            blocks.setdefault((row0, rows), []).append((key0, key1, slot))
        covered = np.zeros(sq, np.int64)
        merges = {(row0, rows): (slot, parts) for batch, row0, rows, slot, parts in plan["merges"] if batch == b}
        for (row0, rows), parts in blocks.items():
            covered[row0:row0 + rows] += 1
            live = end[row0:row0 + rows] > begin[row0:row0 + rows]
            low = begin[row0:row0 + rows][live].min() if live.any() else 0
            high = end[row0:row0 + rows][live].max() if live.any() else 0
            parts.sort()
            if len(parts) == 1:
                assert parts[0][2] == -1 and (row0, rows) not in merges
            else:
                first, count = merges.pop((row0, rows))
                assert [slot for _, _, slot in parts] == list(range(first, first + count))
            for (_, stop, _), (start, _, _) in zip(parts, parts[1:]):
                assert stop == start, "parts of the keys overlap or leave a gap"
            if high > low:
                assert parts[0][0] == low // unit * unit, "starts at another block than the first that is needed"
                assert parts[-1][1] == high, "ends at another key than the last that is needed"
            else:
                assert [part[:2] for part in parts] == [(0, 0)], "keys are computed that no row needs"
        assert (covered == 1).all(), "a row is covered twice or not at all"
        assert not merges, "a merge without parts"


def check_fits(problem, plan):
    assert plan["ub"] <= UB and plan["l1"] <= L1
    assert plan["stack_n"] & (plan["stack_n"] - 1) == 0 and plan["ub_tile"] // 4 >= 8 * plan["stack_n"]
    ring = plan["cores"] * (plan["depth"] + 1) * plan["block_m"]
    slots = sum(parts for *_, parts in plan["merges"]) * plan["heads_per_item"]
    slot = -(-plan["block_m"] * (problem.dv + 2) * 4 // 512) * 512
    exact = ring * (plan["stack_n"] * 6 + problem.dv * 4)
    if problem.excludes_keys:  # room for copies of K and V without NaN, and what the cores found
        keys = problem.kv_heads * sum(sk for _, sk in problem.lengths)
        exact = -(-(exact + 3 * plan["cores"] * 32 + keys * (problem.d + problem.dv) * 2) // 512) * 512
    assert plan["workspace"] == exact + slots * slot


def check_covers_backward(problem, plan):
    """The same for the pairs of the backward; and each accumulator belongs to one core."""
    unit, owners = 16, {}
    pairs = np.array(plan["pairs"], np.int64).reshape(-1, 8)
    group = problem.heads // problem.kv_heads
    for core, b, head, _, _, key0, keys, part in pairs.tolist():
        slices = range(key0 // 128, -(-(key0 + keys) // 128))
        for owner in [("dq", b, head, part)] + [("dk", b, head // group, piece) for piece in slices]:
            assert owners.setdefault(owner, core) == core, "two cores add to one accumulator"
    for b, (sq, sk) in enumerate(problem.lengths):
        begin, end = problem.bounds(b)
        blocks = -(-sk // unit)
        for head in {0, problem.heads - 1}:
            covered = np.zeros((sq, blocks), np.int64)
            for _, _, _, row0, rows, key0, keys, _ in pairs[(pairs[:, 1] == b) & (pairs[:, 2] == head)].tolist():
                assert key0 % unit == 0 and 0 < rows <= plan["block_q"] and 0 < keys <= plan["block_k"]
                covered[row0:row0 + rows, key0 // unit:-(-(key0 + keys) // unit)] += 1
                live = end[row0:row0 + rows] > begin[row0:row0 + rows]
                assert live.any() and end[row0:row0 + rows][live].max() >= key0 + keys, "keys that no row needs"
                assert begin[row0:row0 + rows][live].min() < key0 + unit, "keys that no row needs"
            assert covered.max(initial=0) <= 1, "computed twice"
            columns = np.arange(blocks) * unit
            needed = (columns[None, :] + unit > begin[:, None]) & (columns[None, :] < end[:, None])
            needed &= (end > begin)[:, None]
            assert (covered[needed] == 1).all(), "not computed"


def draw(rng, longest=3400):
    length = lambda: int(rng.integers(1, 40) if rng.random() < 0.3 else rng.integers(1, longest))
    kv_heads = int(rng.integers(1, 4))
    heads = kv_heads * int(rng.choice([1, 1, 2, 4, 8]))
    d = 16 * int(rng.integers(1, 17))
    options = {}
    if rng.random() < 0.5:
        options["right"] = 0 if rng.random() < 0.6 else int(rng.integers(0, 300))
    if rng.random() < 0.4:
        options["left"] = int(rng.integers(0, 600))
    if rng.random() < 0.4:
        options["align"] = "top_left"
    if rng.random() < 0.2:
        options["block_m"] = 16 * int(rng.integers(1, 9))
    if rng.random() < 0.2:
        options["block_n"] = int(2 ** rng.integers(6, 11))
    dv = d if rng.random() < 0.7 else 16 * int(rng.integers(1, 17))
    if rng.random() < 0.3:
        batch = int(rng.integers(1, 6))
        lengths = rng.integers(0, 1200, (2, batch)) * (rng.random((2, batch)) < 0.85)
        cu = [[0, *np.cumsum(row).tolist()] for row in lengths]
        return Problem(batch, heads, kv_heads, 0, 0, d, dv, cu=cu, **options)
    present = [name for name, chance in (("attn_mask", 0.2), ("bias", 0.2)) if rng.random() < chance]
    return Problem(int(rng.integers(1, 4)), heads, kv_heads, length(), length(), d, dv, present=present, **options)


@pytest.mark.parametrize("seed", range(10))
def test_every_needed_block_is_computed_once_and_no_other(seed):
    rng = np.random.default_rng(seed)
    for _ in range(500):
        problem = draw(rng)
        plan = problem.plan()
        check_covers(problem, plan)
        check_fits(problem, plan)


@pytest.mark.parametrize("seed", range(5))
def test_every_needed_pair_of_the_backward_is_computed_once_and_no_other(seed):
    rng = np.random.default_rng(100 + seed)
    for _ in range(60):
        problem = draw(rng, longest=1500)
        plan = problem.plan_backward()
        check_covers_backward(problem, plan)
        assert plan["ub"] <= UB and plan["l1"] <= L1


@pytest.mark.parametrize("seed", range(4))
def test_every_needed_pair_of_the_bias_gradient_is_computed_once_by_the_owner_of_the_bias(seed):
    rng = np.random.default_rng(200 + seed)
    for _ in range(60):
        drawn = draw(rng, longest=1500)
        sizes = (drawn.batch, drawn.heads, drawn.q_len, drawn.k_len)
        if drawn.cu is not None:    # a bias has equal lengths
            continue
        bias = tuple(n if rng.random() < 0.6 else 1 for n in sizes)
        problem = Problem(drawn.batch, drawn.heads, drawn.kv_heads, drawn.q_len, drawn.k_len, drawn.d, drawn.dv,
                          bias=bias, **drawn.options)
        plan = problem.plan_backward("bias_grad")
        # as one accumulator per pair: whose dq or dk it is does not matter here
        check_covers_backward(problem, {**plan, "pairs": [[0, *pair[1:7], 0] for pair in plan["pairs"]]})
        owners, tile = {}, 64
        own = lambda index, size: index if size > 1 else 0
        for core, b, head, row0, rows, key0, keys, _ in plan["pairs"]:
            for q in range(row0 // tile, -(-(row0 + rows) // tile)):
                for k in range(key0 // tile, -(-(key0 + keys) // tile)):
                    place = tuple(own(i, n) for i, n in zip((b, head, q, k), bias))
                    assert owners.setdefault(place, core) == core, "two cores add to one number"
        assert plan["ub"] <= UB and plan["l1"] <= L1


BENCHMARKS = [(batch, heads, s, d) for d in (64, 128, 256) for s, batch, heads in
              ((1024, 16, 16), (2048, 8, 16), (4096, 4, 16), (8192, 2, 16), (16384, 1, 16), (32768, 1, 16))]


@pytest.mark.parametrize("soc", ["910B1", "910B3"])
@pytest.mark.parametrize("options", [{}, {"right": 0}, {"left": 1024, "right": 0}], ids=["full", "causal", "window"])
def test_cores_share_the_work_of_the_benchmark_shapes(soc, options):
    with ascend.Settings(soc=soc, cores=0):
        for batch, heads, s, d in BENCHMARKS + [(1, 8, 4096, 128), (2, 8, 3333, 64)]:
            plan = Problem(batch, heads, heads, s, s, d, **options).plan()
            assert plan["imbalance"] <= 0.05, f"{batch, heads, s, d}: {plan['imbalance']:.1%}"
            back = Problem(batch, heads, heads, s, s, d, **options).plan_backward()
            assert back["imbalance"] <= 0.05, f"backward {batch, heads, s, d}: {back['imbalance']:.1%}"


def test_cores_share_sequences_of_many_lengths():
    rng = np.random.default_rng(5)
    lengths = rng.integers(100, 4000, 24)
    cu = [0, *np.cumsum(lengths).tolist()]
    for options in ({}, {"right": 0}):
        plan = Problem(24, 8, 8, 0, 0, 128, cu=(cu, cu), **options).plan()
        assert plan["imbalance"] <= 0.05


@pytest.mark.parametrize("q_len", [1, 4, 16])
def test_decoding_splits_the_keys_between_the_cores(q_len):
    plan = Problem(1, 8, 2, q_len, 32768, 128).plan()
    assert plan["pack"] == 4 and plan["imbalance"] <= 0.05
    units = len(plan["items"]) * plan["heads_per_item"]
    assert units >= plan["cores"]


def test_the_split_does_not_depend_on_the_number_of_cores():
    problem = Problem(1, 4, 4, 700, 5000, 128, right=0)
    plans = []
    for cores in (1, 2, 20, 24, 48):
        with ascend.Settings(cores=cores):
            plans.append(problem.plan())
    for plan in plans[1:]:
        assert plan["items"] == plans[0]["items"] and plan["merges"] == plans[0]["merges"]


def test_sizes_beyond_2_to_the_31_do_not_wrap():
    # 2^35 elements of query, 2^36 bytes of it; none is touched
    problem = Problem(64, 64, 64, 65536, 65536, 128, right=0)
    plan = problem.plan()
    check_covers(problem, {**plan, "items": [i for i in plan["items"] if i[0] == 63] +
                           [[b, r, n, k, e, s] for b, r, n, k, e, s in plan["items"] if b != 63]})
    with ascend.Settings(stack_n=1024, depth=7, cores=48):
        large = Problem(1, 1, 1, 1 << 20, 1 << 20, 256).plan()
    assert large["workspace"] > 0 and max(item[4] for item in large["items"]) == 1 << 20


def test_environment_and_call_choose_the_blocks(monkeypatch):
    assert Problem(1, 4, 4, 2048, 2048, 128, block_m=64, block_n=256).plan()["block_m"] == 64
    monkeypatch.setenv("MS_FLASH_BLOCK_M", "48")
    monkeypatch.setenv("MS_FLASH_BLOCK_N", "1024")
    monkeypatch.setenv("MS_FLASH_DEPTH", "1")
    plan = Problem(1, 4, 4, 2048, 2048, 128, block_m=64).plan()
    assert (plan["block_m"], plan["stack_n"], plan["depth"]) == (48, 1024, 1)
    monkeypatch.setenv("MS_FLASH_BLOCK_M", "many")
    with pytest.raises(ValueError, match=r"MS_FLASH_BLOCK_M must be a number >= 0, but got 'many'"):
        Problem(1, 4, 4, 2048, 2048, 128).plan()


@pytest.mark.parametrize("d", [8, 40, 272])
def test_head_dims_that_the_kernels_do_not_take(d):
    with pytest.raises(ValueError, match=f"multiple of 16 from 16 to 256, but got {d}"):
        Problem(1, 1, 1, 128, 128, d).plan()


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="'query' must be float16 or bfloat16"):
        Problem(1, 1, 1, 128, 128, 64, dtype="float32").plan()
