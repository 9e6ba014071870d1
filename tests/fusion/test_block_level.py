"""Level block: the projections are taken in, forward and backward, or the site stays at level layout and says why."""
from __future__ import annotations

import functools

import numpy as np
import pytest
from mindspore import nn, ops
from routes import ROUTES, build, inputs, of_cell, worst
from spellings import DIM, HIDDEN, SPELLINGS, Projections

KNOWN = {name: cls for name, cls, _ in SPELLINGS}


class SharedProjection(Projections):
    """Key and value are one projection."""

    def construct(self, x, context, pad):
        both = self.split(self.k(x))
        scores = ops.matmul(self.split(self.q(x)), both.swapaxes(-1, -2)) * DIM**-0.5
        return self.o(self.merge(ops.matmul(ops.softmax(scores, -1), both)))


class ProjectionUsedTwice(Projections):
    """The projected value is also added to the result."""

    def construct(self, x, context, pad):
        value = self.v(x)
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) * DIM**-0.5
        return self.o(self.merge(ops.matmul(ops.softmax(scores, -1), self.split(value)))) + value


class OutputUsedTwice(Projections):
    """The attention output goes around its projection too."""

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) * DIM**-0.5
        mixed = self.merge(ops.matmul(ops.softmax(scores, -1), self.split(self.v(x))))
        return self.o(mixed) + mixed


class ActivatedQuery(Projections):
    """The query goes through an activation after its projection."""

    def construct(self, x, context, pad):
        query = self.split(ops.relu(self.q(x)))
        scores = ops.matmul(query, self.split(self.k(x)).swapaxes(-1, -2)) * DIM**-0.5
        return self.o(self.merge(ops.matmul(ops.softmax(scores, -1), self.split(self.v(x)))))


class FrozenKey(Projections):
    """No gradient of the key's projection is asked for."""

    def __init__(self):
        super().__init__()
        self.k.weight.requires_grad = self.k.bias.requires_grad = False

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(x)).swapaxes(-1, -2)) * DIM**-0.5
        return self.o(self.merge(ops.matmul(ops.softmax(scores, -1), self.split(self.v(x)))))


class NoOutputProjection(Projections):
    """What the attention gives is the result."""

    def __init__(self):
        super().__init__(bias=False)
        del self.o

    def construct(self, x, context, pad):
        scores = ops.matmul(self.split(self.q(x)), self.split(self.k(context)).swapaxes(-1, -2)) * DIM**-0.5
        return self.merge(ops.matmul(ops.softmax(scores, -1), self.split(self.v(context))))


class Decoder(nn.Cell):
    """Two layers of cross attention to one context: its gradient is one sum of four."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = Projections(), Projections(), nn.LayerNorm((HIDDEN,))

    @staticmethod
    def attend(layer, x, context):
        scores = ops.matmul(layer.split(layer.q(x)), layer.split(layer.k(context)).swapaxes(-1, -2)) * DIM**-0.5
        return layer.o(layer.merge(ops.matmul(ops.softmax(scores, -1), layer.split(layer.v(context)))))

    def construct(self, x, context, pad):
        x = self.norm(x + self.attend(self.first, x, context))
        return self.attend(self.second, x, context)


# cell: levels of its sites
BLOCKS = {KNOWN[name]: ["block"] for name in (
    "Bert", "Gpt2", "Vit", "PanGu", "Whisper", "MultiQuery", "T5", "LearnedBias", "WideValue", "Pvt", "Glm", "Detr",
    "BigCode", "PackedGroups")}
BLOCKS.update({KNOWN["TwoLayers"]: ["block"] * 2, FrozenKey: ["block"], NoOutputProjection: ["block"],
               Decoder: ["block"] * 2})
# cell: what the note says of a site that stays at level layout
NARROW = {SharedProjection: "share a projection", KNOWN["TntPackedQk"]: "transpose",
          ProjectionUsedTwice: "used by", OutputUsedTwice: "output projection",
          ActivatedQuery: "straight from projections", KNOWN["Llama"]: "transpose"}
CELLS = [*BLOCKS, *NARROW]


@functools.lru_cache(None)
def run(route, fused, memory="keep"):
    """All cells in one graph."""
    return ROUTES[route](build(CELLS), inputs(), fused, **({"level": "block", "memory": memory} if fused else {}))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.__name__)
@pytest.mark.parametrize(("route", "memory"), [("jit_gradient", "recompute"), ("jit_forward", "keep")])
def test_level_and_gradients(route, memory, cell):
    number = CELLS.index(cell)
    plain, fused = run("jit_gradient", False), run(route, True, memory)
    sites = fused.sites[number]
    assert all(site["fused"] for site in sites)
    np.testing.assert_allclose(fused.losses[number], plain.losses[number], rtol=1e-5, atol=1e-4)
    assert worst(of_cell(fused.grads, number), of_cell(plain.grads, number)) <= 1e-5
    if cell in BLOCKS:
        assert [site["level"] for site in sites] == BLOCKS[cell], [site["note"] for site in sites]
    elif route == "jit_gradient":
        assert [site["level"] for site in sites] == ["layout"] and NARROW[cell] in sites[0]["note"]


@pytest.mark.parametrize(("route", "memory"), [("jit_gradient", "recompute"), ("jit_forward", "keep")])
def test_gradients_of_what_many_blocks_read(route, memory):
    plain, fused = run("jit_gradient", False), run(route, True, memory)
    names = ("x", "context")
    assert worst({n: fused.grads[n] for n in names}, {n: plain.grads[n] for n in names}) <= 1e-5


def test_keeping_and_recomputing_give_the_same_bits():
    keep, again = (run("jit_gradient", True, memory) for memory in ("keep", "recompute"))
    for name, grad in keep.grads.items():
        assert grad.tobytes() == again.grads[name].tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("route", ["train_step", "inference"])
@pytest.mark.parametrize("cell", BLOCKS, ids=lambda cell: cell.__name__)
def test_other_routes(route, cell):
    number = CELLS.index(cell)
    plain, fused = run("jit_gradient", False), run(route, True)
    assert [site["level"] for site in fused.sites[number]] == BLOCKS[cell]
    np.testing.assert_allclose(fused.losses[number], plain.losses[number], rtol=1e-5, atol=1e-4)
    if fused.grads:
        assert worst(of_cell(fused.grads, number), of_cell(plain.grads, number)) <= 1e-5
