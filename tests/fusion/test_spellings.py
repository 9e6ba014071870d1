"""Attention as public models write it: found, replaced, and the same numbers, in every route and dtype."""

from __future__ import annotations

import functools

import mindspore as ms
import numpy as np
import pytest
from routes import ROUTES, build, inputs, of_cell, worst
from spellings import SPELLINGS

NAMES = [name for name, _, _ in SPELLINGS]
CLASSES = [cls for _, cls, _ in SPELLINGS]
CASES = list(enumerate(SPELLINGS))


@functools.lru_cache(None)
def run(route, fused, precision="float32", level="auto"):
    """All spellings in one graph, once per route."""
    change = None if precision == "float32" else lambda cell: ms.amp.auto_mixed_precision(cell, precision)
    options = {"level": level} if fused else {}
    return ROUTES[route](build(CLASSES, change), inputs(), fused, **options)


def check_sites(number, want, sites):
    """As many fused sites as expected, with the expected kind of mask, and no softmax left."""
    assert [site["reason"] for site in sites if not site["fused"]] == []
    assert len(sites) == want["sites"]
    assert {site["mask"] for site in sites} == {want["mask"]}


@pytest.mark.parametrize(("number", "spelling"), CASES, ids=NAMES)
@pytest.mark.parametrize("route", ["jit_gradient", "jit_forward"])
def test_float32(route, number, spelling):
    plain, fused = run(route, False), run(route, True)
    check_sites(number, spelling[2], fused.sites.get(number, []))
    np.testing.assert_allclose(fused.losses[number], plain.losses[number], rtol=1e-5, atol=1e-4)
    gradients = of_cell(plain.grads, number)
    assert worst(of_cell(fused.grads, number), gradients) <= 1e-5


@pytest.mark.parametrize("route", ["jit_gradient", "jit_forward"])
def test_gradients_of_the_inputs(route):
    plain, fused = run(route, False), run(route, True)
    names = ("x", "context")
    assert worst({n: fused.grads[n] for n in names}, {n: plain.grads[n] for n in names}) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("number", "spelling"), CASES, ids=NAMES)
@pytest.mark.parametrize("route", ["train_step", "inference"])
def test_other_routes(route, number, spelling):
    plain, fused = run("jit_gradient", False), run(route, True)
    check_sites(number, spelling[2], fused.sites.get(number, []))
    np.testing.assert_allclose(fused.losses[number], plain.losses[number], rtol=1e-5, atol=1e-4)
    if fused.grads:
        assert worst(of_cell(fused.grads, number), of_cell(plain.grads, number)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("number", "spelling"), CASES, ids=NAMES)
@pytest.mark.parametrize("route", ["jit_gradient", "jit_forward"])
def test_core_level(route, number, spelling):
    plain, fused = run(route, False), run(route, True, level="core")
    check_sites(number, spelling[2], fused.sites.get(number, []))
    assert worst(of_cell(fused.grads, number), of_cell(plain.grads, number)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("number", "spelling"), CASES, ids=NAMES)
@pytest.mark.parametrize("precision", ["O3", "O2", "O1"])
@pytest.mark.parametrize("route", ["jit_gradient", "jit_forward"])
def test_mixed_precision(route, precision, number, spelling):
    """At most twice the error of the unfused run in the same precision, against the float32 run."""
    exact, plain = run("jit_gradient", False), run(route, False, precision)
    fused = run(route, True, precision)
    sites = fused.sites.get(number, [])
    assert [site["reason"] for site in sites if not site["fused"]] == []
    assert len(sites) == spelling[2]["sites"]
    gradients = of_cell(exact.grads, number)
    allowed = 2 * worst(of_cell(plain.grads, number), gradients) + 2e-3
    assert worst(of_cell(fused.grads, number), gradients) <= allowed
