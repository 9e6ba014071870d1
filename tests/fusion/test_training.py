"""The ways of MindSpore to train, each with and without fusion: what is fused, and that losses and weights agree."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
import spellings
from mindspore import Tensor, amp, nn, ops
from routes import build as spelling_net
from routes import inputs as spelling_inputs
from small_net import LENGTH, WIDTH, Loss, batch, build, fresh
from spellings import BATCH, HIDDEN

import ms_flash

STEPS = 3
KNOWN = {name: cls for name, cls, _ in spellings.SPELLINGS}


@pytest.fixture
def rng(request):
    return fresh(request)


def optimizer(net):
    return nn.SGD(net.trainable_params(), 0.1)


def train_one_step(net, batches):
    step = nn.TrainOneStepCell(net, optimizer(net)).set_train()
    return [step(*inputs) for inputs in batches]


def gradient_in_the_graph(net, batches):
    gradient, update = ms.value_and_grad(net, None, net.trainable_params()), optimizer(net)

    @ms.jit
    def step(x, y):
        loss, grads = gradient(x, y)
        update(grads)
        return loss

    return [step(*inputs) for inputs in batches]


def forward_in_a_graph(net, batches):
    ms.set_context(mode=ms.PYNATIVE_MODE)

    @ms.jit
    def forward(x, y):
        return net(x, y)

    gradient, update = ms.value_and_grad(forward, None, net.trainable_params()), optimizer(net)
    losses = []
    for inputs in batches:
        loss, grads = gradient(*inputs)
        update(grads)
        losses.append(loss)
    return losses


def construct_in_a_graph(net, batches):
    net.construct = ms.jit(net.construct)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    gradient, update = ms.value_and_grad(net, None, net.trainable_params()), optimizer(net)
    losses = []
    for inputs in batches:
        loss, grads = gradient(*inputs)
        update(grads)
        losses.append(loss)
    return losses


def model_train(net, batches, sink=False):
    columns = [np.concatenate([inputs[i].asnumpy() for inputs in batches]) for i in range(2)]
    data = ms.dataset.NumpySlicesDataset(tuple(columns), ["x", "y"], shuffle=False).batch(batches[0][0].shape[0])
    losses = []

    class Collect(ms.Callback):
        def on_train_step_end(self, run_context):
            losses.append(run_context.original_args().net_outputs)

    model = ms.Model(net, loss_fn=None, optimizer=optimizer(net))
    model.train(1, data, callbacks=[Collect()], dataset_sink_mode=sink)
    return losses


def model_train_sink(net, batches):
    return model_train(net, batches, sink=True)


def loss_scaling(net, batches):
    scaler, update = amp.DynamicLossScaler(scale_value=2**10, scale_factor=2, scale_window=1000), optimizer(net)

    def scaled(x, y):
        return scaler.scale(net(x, y))

    gradient = ms.value_and_grad(scaled, None, net.trainable_params())

    @ms.jit
    def step(x, y):
        loss, grads = gradient(x, y)
        grads = scaler.unscale(grads)
        if scaler.adjust(amp.all_finite(grads)):
            update(grads)
        return scaler.unscale(loss)

    return [step(*inputs) for inputs in batches]


def accumulation(net, batches):
    """Two halves of a batch, their gradients added inside the graph."""
    gradient, update = ms.value_and_grad(net, None, net.trainable_params()), optimizer(net)
    add = ops.MultitypeFuncGraph("add")

    @add.register("Tensor", "Tensor")
    def _add(a, b):
        return (a + b) / 2

    half = batches[0][0].shape[0] // 2

    @ms.jit
    def step(x, y):
        first, grads = gradient(x[:half], y[:half])
        second, more = gradient(x[half:], y[half:])
        update(ops.HyperMap()(add, grads, more))
        return (first + second) / 2

    return [step(*inputs) for inputs in batches]


def recompute(net, batches):
    net.attention.recompute()
    return train_one_step(net, batches)


class Padded(nn.Cell):
    """A cell of `spellings`, on hidden states alone."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell
        _, self.context, self.pad = spelling_inputs()

    def construct(self, x):
        return self.cell(x, self.context, self.pad)


def model(name):
    """A Loss around the spelling of that name, the same at every call."""
    return Loss(Padded(spelling_net([KNOWN[name]]).members[0]))


# route: (function, sites in its graphs)
ROUTES = {"TrainOneStepCell": (train_one_step, 1), "jit of value_and_grad": (gradient_in_the_graph, 1),
          "value_and_grad of jit": (forward_in_a_graph, 1), "jit of construct": (construct_in_a_graph, 1),
          "Model.train": (model_train, 1), "Model.train, sink": (model_train_sink, 1),
          "loss scaling": (loss_scaling, 1), "accumulation": (accumulation, 2), "recompute": (recompute, 2)}


def run(route, batches, make=build):
    ms.set_context(mode=ms.GRAPH_MODE)
    net = make()
    losses = [float(loss.asnumpy()) for loss in route(net, batches)]
    return losses, [p.asnumpy().astype(np.float64) for p in net.trainable_params()]


def agree(route, rng, sites, bound, make=build, shape=(2, LENGTH, WIDTH)):
    batches = [tuple(Tensor(rng.normal(size=shape).astype(np.float32)) for _ in range(2)) for _ in range(STEPS)]
    losses, weights = run(route, batches, make)
    with ms_flash.fusion() as report:
        fused_losses, fused_weights = run(route, batches, make)
    assert len(report.fused) == len(report.sites) == sites, str(report)
    assert len(losses) == STEPS and losses[0] != losses[-1]
    assert fused_losses == pytest.approx(losses, rel=bound)
    for weight, fused in zip(weights, fused_weights):
        assert np.abs(fused - weight).max() <= bound * max(1.0, np.abs(weight).max())


@pytest.mark.parametrize("route", ROUTES)
def test_routes(route, rng):
    function, sites = ROUTES[route]
    agree(function, rng, sites, 1e-5)


def test_a_sequence_of_one(rng):
    """The weights are their own transpose there, and the gradient of the values looks like the output."""
    agree(train_one_step, rng, 1, 1e-5, lambda: model("Vit"), (BATCH, 1, HIDDEN))


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_amp(level, rng):
    agree(train_one_step, rng, 1, 1e-2, lambda: Loss(amp.auto_mixed_precision(build().attention, level)))


# A padding mask by addition, a packed projection with a constant causal mask, length first with a mask filled in, and
# grouped heads in float32 softmax.
MODELS = ("Bert", "Gpt2", "Detr", "LlamaTile")
WAYS = ("Model.train", "loss scaling", "accumulation", "recompute", "value_and_grad of jit")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("route", WAYS)
def test_routes_with_models(route, name, rng):
    function, sites = ROUTES[route]
    agree(function, rng, sites, 2e-5, lambda: model(name), (BATCH * 2 if route == "accumulation" else BATCH,
                                                           spellings.LENGTH, HIDDEN))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("route", ["TrainOneStepCell", "loss scaling", "accumulation"])
def test_amp_with_models(route, level, name, rng):
    function, sites = ROUTES[route]
    agree(function, rng, sites, 2e-2, lambda: Loss(amp.auto_mixed_precision(model(name).attention, level)),
          (BATCH * 2 if route == "accumulation" else BATCH, spellings.LENGTH, HIDDEN))


def test_dropout_in_training_and_none_in_evaluation(rng):
    ms.set_context(mode=ms.GRAPH_MODE)
    net, inputs = build(dropout=0.4), batch(rng)
    expected = net.set_train(False)(*inputs).asnumpy()
    with ms_flash.fusion() as report:
        assert float(net(*inputs).asnumpy()) == pytest.approx(float(expected), rel=1e-6)
        net.set_train()
        draws = {float(net(*inputs).asnumpy()) for _ in range(4)}
        assert len(draws) == 4      # each step draws anew
        assert float(net.set_train(False)(*inputs).asnumpy()) == pytest.approx(float(expected), rel=1e-6)
    assert [site["dropout"] for site in report.fused] == [0.0, pytest.approx(0.4)]
    with ms_flash.fusion(dropout=False) as report:
        net.set_train()(*inputs)
    assert not report.fused and "dropout" in report.left[0]["reason"]


def test_lengths_that_the_graph_does_not_know(rng):
    """Fused or left: the numbers are those of the net as written at every size."""
    ms.set_context(mode=ms.GRAPH_MODE)
    net = build()
    net.set_inputs(*(Tensor(shape=[None, LENGTH, WIDTH], dtype=ms.float32) for _ in range(2)))
    data = [batch(rng, size) for size in (1, 3, 2)]
    expected = [net(*inputs).asnumpy() for inputs in data]
    with ms_flash.fusion() as report:
        got = [net(*inputs).asnumpy() for inputs in data]
    assert report.compiled == 1 and len(report.sites) == 1
    assert report.fused or report.left[0]["reason"]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
