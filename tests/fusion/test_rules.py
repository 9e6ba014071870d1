"""The rules on saved graphs: no compiler runs. The plan is applied to the graph in Python and looked at."""

from __future__ import annotations

import time

import numpy as np
import pytest
import save_graphs
from ms_flash.fusion_passes import ir
from ms_flash.fusion_passes.constants import Constants
from ms_flash.fusion_passes.masks import band
from ms_flash.fusion_passes.plan import plan_graph
from ms_flash.fusion_passes.views import Views, identity, merged, paired, refine, regroup
from negatives import NEGATIVES
from spellings import SPELLINGS

WANTED = {name: want for name, _, want in SPELLINGS}
REASONS = {name: codes for name, _, codes in NEGATIVES}
SAVED = sorted(file.name[:-len(".json.gz")] for file in save_graphs.FOLDER.glob("*.json.gz"))
POSITIVE = [name for name in SAVED if name.rsplit("_", 1)[0] in WANTED]
NEGATIVE = [name for name in SAVED if name.rsplit("_", 1)[0] in REASONS]
# Cells in which a copy is unavoidable: parts of a packed projection that the op cannot read, rotary positions
# computed head by head, repeated heads of another order, a query that all batch entries share.
COPIES = {"TntPackedQk", "Pvt", "Llama", "LlamaRepeatInterleave", "LlamaTile", "TileHeads", "SharedValue", "Swin",
          "TriangleBias", "Perceiver", "TwoLayers", "DiffusersMasked", "Glm", "GlmInterleaved"}


def planned(name, **options):
    """Graph, plan and sites of a saved graph."""
    described = save_graphs.load(*name.rsplit("_", 1))
    primitives = []

    def handle(primitive):
        primitives.append(primitive)
        return len(primitives) - 1

    plan, sites = plan_graph(described, {"level": "layout", "handle": handle, **options})
    return described, plan, sites


def live_ops(described, plan):
    """Names of the operations that are still needed once the plan is applied."""
    nodes = {node["id"]: node for node in described["nodes"]} | {node["id"]: node for node in plan["new"]}
    replaced, ordered = dict(map(tuple_of, plan["replace"])), dict(map(tuple_of, plan["order"]))
    todo, seen = [node["id"] for node in described["nodes"] if node["op"] == "Return"], set()
    while todo:
        at = todo.pop()
        if at in replaced and at not in seen:
            seen.add(at)
            todo += names_of(replaced[at])
            continue
        if at in seen:
            continue
        seen.add(at)
        for source in nodes[at].get("inputs", []):
            ordering = nodes[at].get("op") == "UpdateState" and source in ordered
            todo += names_of(ordered[source]) if ordering else names_of(source)
    return [nodes[at].get("op", "fused") for at in seen if at not in replaced]


def tuple_of(pair):
    return pair[0], pair[1]


def names_of(operand):
    """The nodes that an operand of a plan names."""
    if isinstance(operand, dict):
        return [operand["item"][0]] if "item" in operand else []
    return [] if operand is None else [operand]


@pytest.mark.parametrize("name", POSITIVE)
def test_spelling(name):
    described, plan, sites = planned(name)
    want = WANTED[name.rsplit("_", 1)[0]]
    assert [site["reason"] for site in sites if not site["fused"]] == []
    assert [site["mask"] for site in sites] == [want["mask"]] * want["sites"]
    kind = "forward and backward" if name.endswith("joint") else "forward"
    assert {site["kind"] for site in sites} == {kind}
    if name.rsplit("_", 1)[0] not in COPIES:
        assert sum(site["transposes"] for site in sites) == 0
    ops = live_ops(described, plan)
    assert not {"Softmax", "SoftmaxBackward", "Dropout", "DropoutGrad"} & set(ops)
    assert ops.count("fused") >= want["sites"] * (2 if kind == "forward and backward" else 1)


@pytest.mark.parametrize("name", POSITIVE)
def test_replacements_have_the_type_of_what_they_replace(name):
    described, plan, _ = planned(name)
    old, new = ({node["id"]: node for node in nodes} for nodes in (described["nodes"], plan["new"]))
    assert len(new) == len(plan["new"])
    for replaced, operand in plan["replace"]:
        if isinstance(operand, dict):
            at, index = operand["item"]
            shape, dtype = new[at]["shape"][index], new[at]["dtype"][index]
        else:
            shape, dtype = (new.get(operand) or old[operand])["shape"], (new.get(operand) or old[operand])["dtype"]
        assert (shape, dtype) == (old[replaced]["shape"], old[replaced]["dtype"])
    known = set()
    for node in plan["new"]:
        for source in node["inputs"]:
            assert all(at in old or at in known for at in names_of(source))
        known.add(node["id"])


@pytest.mark.parametrize("name", NEGATIVE)
def test_negative(name):
    _, plan, sites = planned(name)
    assert [site["code"] for site in sites] == list(REASONS[name.rsplit("_", 1)[0]])
    assert all(site["reason"] and site["hint"] for site in sites)
    assert plan == {"new": [], "replace": [], "order": []}


def test_a_rule_that_fails_leaves_its_site_alone(monkeypatch):
    from ms_flash.fusion_passes import plan as module

    def broken(*_):
        raise IndexError("planted")

    monkeypatch.setattr(module, "settle", broken)
    _, plan, sites = planned("Bert_joint")
    assert plan["replace"] == [] and [site["code"] for site in sites] == ["error"]
    assert "planted" in sites[0]["reason"]


def test_a_backend_that_cannot_serve_is_named(monkeypatch):
    monkeypatch.setenv("MS_FLASH_BACKEND", "reference")
    assert [site["code"] for site in planned("Bert_joint")[2]] == ["backend"]


def test_24_layers_take_well_under_a_second():
    described = save_graphs.load("Bert", "joint")
    nodes, outputs, step = [], [], 1 + max(node["id"] for node in described["nodes"])
    for layer in range(24):
        for node in described["nodes"]:
            moved = [None if i is None else i + layer * step for i in node.get("inputs", [])]
            nodes.append({**node, "id": node["id"] + layer * step, **({"inputs": moved} if "inputs" in node else {})})
        outputs += [i + layer * step for i in described["outputs"]]
    start = time.process_time()
    _, sites = plan_graph({"nodes": nodes, "outputs": outputs}, {"handle": lambda primitive: 0})
    assert sum(site["fused"] for site in sites) == 24
    assert time.process_time() - start < 1.0


def test_the_backward_proof_sees_a_changed_factor():
    """One constant of the backward pass altered: the gradient is no longer that of the attention."""
    for op in ("Divs", "Muls"):
        described = save_graphs.load("Gpt2" if op == "Divs" else "Vit", "joint")
        by_id = {node["id"]: node for node in described["nodes"]}
        after_softmax = False
        for node in described["nodes"]:
            after_softmax = after_softmax or node["op"] == "SoftmaxBackward"
            if after_softmax and node["op"] == op:
                changed = {**by_id[node["inputs"][1]], "id": 10**6}
                changed["value"] *= 1.01
                node["inputs"] = [node["inputs"][0], 10**6]
                described["nodes"].insert(0, changed)
                break
        plan, sites = plan_graph(described, {"level": "core", "handle": lambda primitive: 0})
        if op == "Divs":
            assert [site["code"] for site in sites] == ["backward_differs"]
        else:       # a factor on the query lies outside the core match, and stays as it is
            assert any(node.get("op") == "Muls" for node in described["nodes"]) and sites[0]["fused"]
            assert {"Softmax"} & set(live_ops(described, plan)) == set()


# --- views, constants, windows ---


def graph_of(*nodes):
    """A graph of (op, inputs, shape, further keys) with float32 results."""
    described = [{"id": i, "op": op, "inputs": inputs, "shape": list(shape), "dtype": "float32", **more}
                 for i, (op, inputs, shape, more) in enumerate(nodes)]
    return ir.Graph({"nodes": described, "outputs": [len(nodes) - 1]})


def const(*value):
    return "Const", [], (), {"value": list(value), "type": "tuple", "dtype": ["int64"]}


def test_views_of_two_spellings_are_equal():
    parameter = ("Parameter", [], (6, 20), {"name": "x"})
    split = graph_of(parameter, const(2, 3, 4, 5), ("Reshape", [0, 1], (2, 3, 4, 5), {}), const(0, 2, 1, 3),
                     ("Transpose", [2, 3], (2, 4, 3, 5), {}), const(8, 3, 5), ("Reshape", [4, 5], (8, 3, 5), {}))
    view = Views(split).of(split.by_id[6])
    assert view.base is split.by_id[0]
    rng = np.random.default_rng()
    x = rng.normal(size=(6, 20))
    index = np.full((), view.offset)
    for dim in view.dims:
        for size, stride in dim:
            index = index[..., None] + np.arange(size) * stride
    expected = x.reshape(2, 3, 4, 5).transpose(0, 2, 1, 3).reshape(8, 3, 5)
    np.testing.assert_array_equal(x.ravel()[index].reshape(8, 3, 5), expected)


def test_regroup_refuses_what_would_cut_an_atom():
    assert regroup([(6, 1)], (4,)) is None
    assert regroup([(6, 1)], (2, 3)) == (((2, 3),), ((3, 1),))
    assert regroup([(4, 10), (5, 1)], (10, 2)) is None


def test_atoms():
    assert merged([(2, 12), (3, 4), (1, 7), (4, 1)]) == ((24, 1),)
    assert refine([(6, 1)], [(3, 2), (2, 1)]) == [((3, 2), (2, 1)), ((3, 2), (2, 1))]
    assert refine([(6, 1)], [(4, 1)]) is None
    assert paired([(6, 1)], [(2, 50), (3, 7)]) == [((2, 3), (2, 50)), ((3, 1), (3, 7))]
    assert identity(graph_of(("Parameter", [], (2, 3), {"name": "x"})).by_id[0]).key[2] == ((6, 1),)


def test_constants_are_evaluated():
    graph = graph_of(const(4, 4), ("Ones", [0], (4, 4), {}), ("Triu", [1], (4, 4), {"attrs": {"diagonal": 1}}),
                     ("Const", [], (), {"value": -10000.0, "type": "float32"}), ("Muls", [2, 3], (4, 4), {}))
    value = Constants(Views(graph)).value(graph.by_id[4])
    np.testing.assert_array_equal(value, np.triu(np.full((4, 4), -10000.0), 1))
    graph = graph_of(const(5, 0), ("TupleToTensor", [0], (2,), {"dtype": "int64"}),
                     ("BitwiseNot", [1], (2,), {"dtype": "int64"}))
    np.testing.assert_array_equal(Constants(Views(graph)).value(graph.by_id[2]), [-6, -1])


@pytest.mark.parametrize(("queries", "keys", "left", "right", "align"), [
    (5, 5, None, 0, "bottom_right"), (4, 7, None, 0, "bottom_right"), (4, 7, None, 0, "top_left"),
    (7, 4, None, 0, "top_left"), (6, 6, 2, 1, "bottom_right"), (6, 6, 0, 0, "bottom_right"),
    (5, 9, 3, 0, "bottom_right"), (9, 5, 1, None, "top_left")])
def test_bands(queries, keys, left, right, align):
    rows, columns = np.arange(queries)[:, None], np.arange(keys)[None]
    diagonal = rows + (keys - queries if align == "bottom_right" else 0)
    masked = np.zeros((queries, keys), bool)
    if left is not None:
        masked |= columns < diagonal - left
    if right is not None:
        masked |= columns > diagonal + right
    found = band(masked, queries, keys)
    offset = rows + (keys - queries if found[2] == "bottom_right" else 0)
    again = np.zeros((queries, keys), bool)
    if found[0] >= 0:
        again |= columns < offset - found[0]
    if found[1] >= 0:
        again |= columns > offset + found[1]
    np.testing.assert_array_equal(again, masked)


def test_what_is_no_band():
    masked = np.triu(np.ones((6, 6), bool), 1)
    masked[4, 1] = True
    assert band(masked, 6, 6) is None
    assert band(np.ones((3, 3), bool), 3, 3) is None
    assert band(np.triu(np.ones((6, 6), bool), 1).T, 6, 6) == (0, -1, "bottom_right")
