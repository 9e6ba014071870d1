"""Saves the graphs of spellings and negatives as the fusion pass sees them, for tests that need no compiler.

python tests/fusion/save_graphs.py [names]
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "graphs"
ROUTES_OF = {"joint": "jit_gradient", "forward": "jit_forward"}


def path(name, kind):
    """Where the graph of a cell lies; `kind` is joint (forward and backward) or forward."""
    return FOLDER / f"{name}_{kind}.json.gz"


def load(name, kind):
    """A saved graph."""
    with gzip.open(path(name, kind), "rt") as file:
        return json.load(file)


def save(name, cls, kind):
    """Compiles one cell and writes what the pass sees."""
    import routes  # MindSpore is needed here alone
    from ms_flash.fusion_passes import plan

    graphs, planner = [], plan.plan_graph

    def keep(described, options):
        if any(node["op"] == "Softmax" for node in described["nodes"]):
            graphs.append(json.dumps(described, default=lambda data: base64.b64encode(bytes(data)).decode()))
        return planner(described, options)

    plan.plan_graph = keep
    try:
        routes.ROUTES[ROUTES_OF[kind]](routes.build([cls]), routes.inputs(), True)
    finally:
        plan.plan_graph = planner
    graph = json.loads(graphs[0])
    for node in graph["nodes"]:
        node["line"] = Path(node.get("line", "")).name
    FOLDER.mkdir(exist_ok=True)
    with open(path(name, kind), "wb") as file, gzip.GzipFile("", "wb", mtime=0, fileobj=file) as packed:
        packed.write(json.dumps(graph, separators=(",", ":")).encode())


if __name__ == "__main__":
    from negatives import NEGATIVES
    from spellings import SPELLINGS

    wanted = sys.argv[1:]
    for name, cls, _ in SPELLINGS + NEGATIVES:
        for kind in ROUTES_OF:
            if name in wanted or f"{name}_{kind}" in wanted or (not wanted and path(name, kind).exists()):
                save(name, cls, kind)
                print(path(name, kind).name, path(name, kind).stat().st_size, flush=True)
