"""What must not be fused: left as it is, bit by bit, with the expected reason."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from negatives import NEGATIVES
from routes import ROUTES, build, inputs, of_cell

NAMES = [name for name, _, _ in NEGATIVES]
CASES = list(enumerate(NEGATIVES))
# Their dropout draws other numbers in every run.
RANDOM = ("DropoutOnScores",)


@functools.lru_cache(None)
def run(route, fused):
    """All cells in one graph, once per route."""
    return ROUTES[route](build([cls for _, cls, _ in NEGATIVES]), inputs(1), fused)


def check(route, number, negative):
    """No site is fused, and every number is what it was."""
    name, _, codes = negative
    plain, fused = run(route, False), run(route, True)
    sites = fused.sites.get(number, [])
    assert [site["code"] for site in sites] == list(codes)
    assert not any(site["fused"] for site in sites)
    assert all(site["reason"] and site["hint"] for site in sites)
    if name in RANDOM:
        return
    assert fused.losses[number] == plain.losses[number]
    for parameter, gradient in of_cell(plain.grads, number).items():
        np.testing.assert_array_equal(fused.grads[parameter], gradient)


@pytest.mark.parametrize(("number", "negative"), CASES, ids=NAMES)
def test_joint_graph(number, negative):
    check("jit_gradient", number, negative)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "negative"), CASES, ids=NAMES)
def test_forward_graph(number, negative):
    check("jit_forward", number, negative)
