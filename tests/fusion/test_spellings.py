"""Attention as public models write it: found, replaced, and the same numbers, in every route and dtype."""

from __future__ import annotations

import functools

import mindspore as ms
import numpy as np
import pytest
from routes import ROUTES, build, inputs, of_cell, worst
from spellings import SPELLINGS

NAMES = tuple(name for name, _, _ in SPELLINGS)
# One of each kind: plain, views with side effects, a trained bias written in place, packed, grouped heads.
SOME = ("Bert", "Mint", "T5", "Vit", "LlamaTile", "Conformer")
EVERY = pytest.mark.parametrize("name", NAMES)


@functools.lru_cache(None)
def run(route, fused, precision="float32", level="auto", names=NAMES):
    """These spellings in one graph, once."""
    classes = [cls for name, cls, _ in SPELLINGS if name in names]
    change = None if precision == "float32" else lambda cell: ms.amp.auto_mixed_precision(cell, precision)
    return ROUTES[route](build(classes, change), inputs(), fused, **({"level": level} if fused else {}))


def wanted(name):
    """What the report has to say of a spelling."""
    return next(want for other, _, want in SPELLINGS if other == name)


def check_sites(name, sites, masks=True):
    """As many fused sites as expected, with the expected kind of mask, and no softmax left."""
    assert [site["reason"] for site in sites if not site["fused"]] == []
    assert len(sites) == wanted(name)["sites"]
    if masks:
        assert {site["mask"] for site in sites} == {wanted(name)["mask"]}


def check(name, fused, plain, names=NAMES):
    """Sites, loss and every gradient of one spelling, against the unfused run."""
    number = names.index(name)
    check_sites(name, fused.sites.get(number, []))
    np.testing.assert_allclose(fused.losses[number], plain.losses[number], rtol=1e-5, atol=1e-4)
    if fused.grads:
        gradients = of_cell(plain.grads, number)
        assert worst(of_cell(fused.grads, number), gradients) <= 1e-5


@EVERY
def test_joint_graph(name):
    check(name, run("jit_gradient", True), run("jit_gradient", False))


def test_gradients_of_the_inputs():
    plain, fused = run("jit_gradient", False), run("jit_gradient", True)
    assert worst({n: fused.grads[n] for n in ("x", "context")}, {n: plain.grads[n] for n in ("x", "context")}) <= 1e-5


@pytest.mark.parametrize("name", SOME)
def test_forward_graph(name):
    names = tuple(n for n in NAMES if n in SOME)
    check(name, run("jit_forward", True, names=names), run("jit_forward", False, names=names), names)


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("route", ["jit_forward", "train_step", "inference"])
def test_other_routes(route, name):
    check(name, run(route, True), run("jit_gradient", False))


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("route", ["jit_gradient", "jit_forward"])
def test_core_level(route, name):
    check(name, run(route, True, level="core"), run("jit_gradient", False))


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("precision", ["O3", "O2"])     # O1 rewrites source, which module constants prevent
@pytest.mark.parametrize("route", ROUTES)
def test_mixed_precision(route, precision, name):
    """At most twice the error of the unfused run in the same precision, against the float32 run."""
    number = NAMES.index(name)
    exact, plain = run("jit_gradient", False), run(route, False, precision)
    fused = run(route, True, precision)
    check_sites(name, fused.sites.get(number, []), masks=False)
    loss = exact.losses[number]
    assert abs(fused.losses[number] - loss) <= 2 * abs(plain.losses[number] - loss) + 2e-3 * max(abs(loss), 10.0)
    if not fused.grads:
        return
    gradients = of_cell(exact.grads, number)
    allowed = 2 * worst(of_cell(plain.grads, number), gradients) + 2e-3
    assert worst(of_cell(fused.grads, number), gradients) <= allowed
