"""explain, verify and their commands: what they report, that verify catches a wrong fusion, that nets stay as is."""

from __future__ import annotations

import json
import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from ms_flash.fusion_passes import plan
from small_net import Loss, batch, build, fresh

import ms_flash
from ms_flash.cli import main


@pytest.fixture
def rng(request):
    return fresh(request)


class Gate(nn.Cell):
    """A softmax over features that is no attention."""

    def construct(self, x):
        return (ops.softmax(x, -1) * x).sum()


def test_explain_names_places_and_reasons_and_runs_nothing(rng, capsys):
    net, inputs = build(), batch(rng)
    step = nn.TrainOneStepCell(net, nn.SGD(net.trainable_params(), 1.0))
    before = [(p.name, p.asnumpy().copy()) for p in net.trainable_params()]
    report = ms_flash.explain(step, *inputs)
    site, = report.fused
    assert site["kind"] == "forward and backward" and site["place"] == "attention" and "small_net.py:" in site["line"]
    out = capsys.readouterr().out
    assert "1 of 1 attention sites fused in 1 graph" in out and "causal" in out
    assert ms_flash.explain(net, *inputs, train=False).fused[0]["kind"] == "forward"
    assert [name for name, _ in before] == [p.name for p in net.trainable_params()]
    assert all(np.array_equal(value, p.asnumpy()) for (_, value), p in zip(before, net.trainable_params()))
    assert not net.training and ms.get_context("mode") == ms.PYNATIVE_MODE

    left, = ms_flash.explain(Gate(), inputs[0]).left
    assert left["reason"] and left["reason"] in capsys.readouterr().out


def test_verify_passes_and_leaves_the_net_alone(rng, capsys):
    net, inputs = build(), batch(rng)
    net.set_train()
    before = [(p.name, p.asnumpy().copy()) for p in net.get_parameters()]
    certificate = ms_flash.verify(net, *inputs)
    assert certificate.passed and certificate.reference == ""
    assert [row.name for row in certificate.rows] == ["loss", "input 0", "input 1"] + [name for name, _ in before]
    assert all(row.error <= row.allowed for row in certificate.rows)
    assert max(row.difference / row.largest for row in certificate.rows if "key.bias" not in row.name) < 1e-5
    assert "PASSED: the loss and 10 gradients agree" in capsys.readouterr().out
    assert all(p.name == name and np.array_equal(p.asnumpy(), value)
               for p, (name, value) in zip(net.get_parameters(), before))
    assert net.training and ms.get_context("mode") == ms.PYNATIVE_MODE
    values = json.loads(certificate.to_json())
    assert values["passed"] and len(values["values"]) == 11 and values["report"]["fused"] == 1


def test_verify_catches_query_and_key_exchanged(rng, monkeypatch, capsys):
    plan_graph = plan.plan_graph

    def damaged(graph, options):
        made, sites = plan_graph(graph, options)
        for node in made["new"]:
            if "prim" in node:
                node["inputs"][:2] = node["inputs"][1::-1]
        return made, sites

    monkeypatch.setattr(plan, "plan_graph", damaged)
    certificate = ms_flash.verify(build(), *batch(rng))
    assert len(certificate.report.fused) == 1 and not certificate.passed
    assert not certificate.rows[0].passed
    assert "TOO LARGE" in capsys.readouterr().out


def test_verify_fails_where_nothing_is_fused(rng, capsys):
    assert not ms_flash.verify(Gate(), batch(rng)[0]).passed
    assert "FAILED: nothing was fused" in capsys.readouterr().out


def test_verify_in_float16_and_with_dropout(rng, capsys):
    net, inputs = build(dropout=0.3), batch(rng)
    net = Loss(amp.auto_mixed_precision(net.attention, "O3"))
    certificate = ms_flash.verify(net, *inputs)
    assert certificate.passed, str(certificate)
    assert certificate.report.fused[0]["dtype"] == "float16" and certificate.reference == ""
    out = capsys.readouterr().out
    assert "Compared with dropout off, because Dropout draws anew" in out
    kept = re.search(r"Dropout 0.3: ms_flash draws by its own generator; it keeps ([\d.]+) of .*, 0.7000 expected", out)
    assert abs(float(kept[1]) - 0.7) < 0.003 and "WRONG" not in out


class Classes(nn.Cell):
    """The cross entropy of what the attention makes of x; a negative label does not count."""

    def __init__(self, attention):
        super().__init__()
        self.attention, self.loss = attention, nn.CrossEntropyLoss(ignore_index=-7)

    def construct(self, x, labels):
        out = self.attention(x)
        return self.loss(out.reshape(-1, out.shape[-1]), labels.reshape(-1))


class Named(nn.Cell):
    """A net that returns a dict: the loss, and what the attention gives."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def construct(self, x):
        out = self.attention(x)
        return {"loss": (out * out).mean(), "out": out}


def test_values_in_a_dict_are_compared(rng):
    certificate = ms_flash.verify(Named(build().attention), batch(rng)[0])
    assert certificate.passed and certificate.reference == ""
    assert [row.name for row in certificate.rows[:3]] == ["loss", "output 1", "input 0"]


def test_verify_says_that_the_net_itself_gives_nan(rng):
    net, (x, y) = build(), batch(rng)
    certificate = ms_flash.verify(net, x, y / 0.0)
    assert not certificate.passed and "As written, the net gives inf or NaN" in str(certificate)


def test_cross_entropy_has_a_float64_reference_too(rng):
    net, (x, _) = Classes(build().attention), batch(rng)
    labels = rng.integers(0, x.shape[-1], x.shape[:2])
    labels[0, :3] = -7
    certificate = ms_flash.verify(net, x, Tensor(labels, ms.int32))
    assert certificate.passed and certificate.reference == ""
    assert certificate.rows[0].error_unfused < 1e-6 * certificate.rows[0].largest


def test_bad_arguments(rng):
    x, y = batch(rng)
    with pytest.raises(TypeError, match="For 'explain', the type of 'net' must be Cell, but got Tensor"):
        ms_flash.explain(x)
    with pytest.raises(TypeError, match="'verify', the type of input 1 must be Tensor or a number, but got ndarray"):
        ms_flash.verify(build(), x, y.asnumpy())
    with pytest.raises(ValueError, match="the 'level' must be one of"):
        ms_flash.verify(build(), x, y, level="most")


FACTORY = """
import numpy as np
from small_net import batch, build


def attention():
    return build(), batch(np.random.default_rng(5))


def nothing():
    return build()


def three():
    return build(), 1, 2


def needs(size):
    return build(), size


def raises():
    raise KeyError("weights")


def arrays():
    return build(), [x.asnumpy() for x in batch(np.random.default_rng(5))]


def number():
    return 5, ()


net = build()
"""


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "user_model.py").write_text(FACTORY)
    return str(tmp_path / "user_model.py")


def test_commands(factory, capsys):
    assert main(["explain", f"{factory}:attention", "--level", "core", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["graphs"][0]["sites"][0]["level"] == "core"
    assert main(["verify", f"{factory}:attention"]) == 0
    assert "PASSED" in capsys.readouterr().out


@pytest.mark.parametrize(("target", "text"), [
    ("user_model.py", "must be MODULE:FACTORY or FILE.py:FACTORY"), ("no_such.py:f", "there is no file no_such.py"),
    ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
    ("{factory}:missing", "there is no function 'missing'"),
    ("{factory}:nothing", "must return (net, inputs), but got Loss"), ("{factory}:net", "there is no function 'net'"),
    ("{factory}:three", "must return (net, inputs), but got 3 values"),
    ("{factory}:needs", ":needs, called without arguments, failed: TypeError: needs() missing 1 required positional"),
    ("{factory}:raises", "failed: KeyError: 'weights' (user_model.py:23)"),
    ("{factory}:arrays", "For '{command}', the type of input 0 must be Tensor or a number, but got ndarray"),
    ("{factory}:number", "For '{command}', the type of 'net' must be Cell, but got int"),
    ("{folder}/broken.py:f", "broken.py cannot be imported: SyntaxError: invalid syntax (broken.py:2)"),
    ("{folder}/lacks.py:f", "ModuleNotFoundError: No module named 'no_such_module' (lacks.py:1)")])
@pytest.mark.parametrize("command", ["explain", "verify"])
def test_commands_say_what_is_wrong_with_the_target(command, target, text, factory, tmp_path):
    (tmp_path / "broken.py").write_text("def g():\n    return +\n")
    (tmp_path / "lacks.py").write_text("import no_such_module\n")
    with pytest.raises(SystemExit) as stopped:
        main([command, target.format(factory=factory, folder=tmp_path)])
    assert text.format(command=command) in str(stopped.value)
    assert "\n" not in str(stopped.value)


def test_the_report_of_many_graphs(rng):
    with ms_flash.fusion() as report:
        for _ in range(2):
            ms.jit(build())(*batch(rng))
        ms.jit(Gate())(Tensor(np.ones((2, 3), np.float32)))
    lines = str(report).splitlines()
    assert lines[0] == "ms_flash fusion: 2 of 3 attention sites fused in 3 graphs"
    assert len(lines) == 1 + 3 * 2 and repr(report) == "<Report: 2 of 3 attention sites fused in 3 graphs>"
