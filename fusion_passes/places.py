"""Where in the model a site is, in the model's own names."""

from __future__ import annotations


def name(graph: dict, site: dict) -> str:
    """The common part of the names of the nearest weights above the site, else its cells.

    MindSpore gives the nodes of a repeated layer the scope of its first copy; weights are never confused.
    """
    nodes = graph["nodes"]
    weights, seen, row = [], set(), [site["node"]] if "node" in site else []
    while row and len(weights) < 2:
        above = []
        for node in (nodes[i] for i in row):
            if node["op"] == "Parameter" and node["weight"]:
                weights.append(node["name"].split(".")[:-1])
            above += [i for i in node.get("inputs", ()) if i is not None and i not in seen]
            seen.update(above)
        row = above
    common = []
    for parts in zip(*weights) if len(weights) > 1 else ():
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) or cells(site.get("scope", ""))


def cells(scope: str) -> str:
    """A scope without its class names: "Default/net-Net/attn-Attention" is "net.attn"."""
    parts = [part.split("-")[0] for part in scope.split("/")]
    return ".".join(part for part in parts if part not in ("", "Default", "Gradients"))
