"""FlashAttention's own parameter grid: an all-pairs selection, forward and gradients under FlashAttention's rule."""
from __future__ import annotations

import itertools

import flash_rule
import native
import numpy as np
import pytest

GRID = {
    "lengths": [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024),
                (1024, 1023), (1, 239), (3, 799), (127, 512), (127, 513)],
    "head_dim": [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256],
    "kind": ["mha", "mqa", "gqa"],
    "dtype": ["float32", "float16", "bfloat16"],
    "causal": [False, True],
    "window": [False, True],
    "dropout_p": [0.0, 0.17],
    "softcap": [0.0, 50.0],
}
HEADS = {"mha": (2, 2), "mqa": (2, 1), "gqa": (4, 2)}


def all_pairs(grid):
    """Rows of the grid such that every two values of every two factors meet; greedy, always the same rows."""
    names = list(grid)
    rest = list(itertools.product(*(grid[name] for name in names[2:])))
    met, rows = set(), []

    def pairs(row):
        return {(i, j, row[i], row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    for first, second in itertools.product(grid[names[0]], grid[names[1]]):    # these two need the full product anyway
        # rotating `rest` keeps ties from always falling to the same values once every pair has been met
        start = 37 * len(rows) % len(rest)
        row = max(((first, second, *others) for others in rest[start:] + rest[:start]),
                  key=lambda row: len(pairs(row) - met))
        met |= pairs(row)
        rows.append(row)
    return [dict(zip(names, row)) for row in rows]


CASES = all_pairs(GRID)


def _name(case):
    (sq, sk), flags = case["lengths"], [name for name in ("causal", "window", "dropout_p", "softcap") if case[name]]
    return "-".join([f"{sq}x{sk}", f"d{case['head_dim']}", case["kind"], case["dtype"], *flags])


def test_every_pair_of_values_is_there():
    assert len(CASES) >= 150
    for a, b in itertools.combinations(GRID, 2):
        assert {(case[a], case[b]) for case in CASES} == set(itertools.product(GRID[a], GRID[b])), (a, b)


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_rule_holds(case, kernel_backend):
    from public_api import attention

    rng = np.random.default_rng(list(_name(case).encode()))
    dtype, (heads, kv_heads), (sq, sk) = native.DTYPES[case["dtype"]], HEADS[case["kind"]], case["lengths"]
    q, k, v, dout = (rng.standard_normal((1, n, s, case["head_dim"])).astype(dtype)
                     for n, s in ((heads, sq), (kv_heads, sk), (kv_heads, sk), (heads, sq)))
    call = {"q": q, "k": k, "v": v, "dropout_p": case["dropout_p"], "seed": 7, "softcap": case["softcap"]}
    if case["softcap"]:
        call["q"] = (q.astype(np.float64) * case["softcap"]).astype(dtype)     # or the cap would not be felt
    if case["window"]:
        call.update(left=int(rng.integers(0, sk)), right=int(rng.integers(0, sk)))
    if case["causal"]:
        call["right"] = 0
    exact = flash_rule.evaluate(call, dout)
    naive = flash_rule.evaluate(call, dout, rounding=dtype)
    flash_rule.check(attention(call, kernel_backend, dout), exact, naive)
