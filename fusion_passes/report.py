"""What fusion did: one entry per attention site of every compiled graph, as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass
class GraphReport:
    """One compiled graph. `sites` are dicts: fused, scope, line, kind, level, dtype, shape, mask, ..., reason."""

    name: str
    nodes: int
    seconds: float
    sites: list[dict] = field(default_factory=list)
    random: list[str] = field(default_factory=list)     # its operators that draw random numbers


class Report:
    """
    The sites seen since fusion was switched on, in the order of compilation.

    Attributes:
        graphs (list): One GraphReport per compiled graph that holds a softmax.
        compiled (int): How many graphs were compiled, those without a softmax included.
        failed (list): For each graph on which fusion itself failed, and which runs as written, the error.
    """

    def __init__(self):
        self.graphs: list[GraphReport] = []
        self.compiled = 0
        self.failed: list[str] = []

    @property
    def sites(self) -> list[dict]:
        """The sites of all graphs."""
        return [site for graph in self.graphs for site in graph.sites]

    @property
    def fused(self) -> list[dict]:
        """The sites that run on ms_flash."""
        return [site for site in self.sites if site["fused"]]

    @property
    def left(self) -> list[dict]:
        """The sites that were left as they are; each says why in ``reason``."""
        return [site for site in self.sites if not site["fused"]]

    def to_json(self, indent: int | None = 2) -> str:
        """All of it, for programs."""
        graphs = [{"graph": g.name, "nodes": g.nodes, "seconds": round(g.seconds, 4), "sites": g.sites}
                  for g in self.graphs]
        return json.dumps({"compiled": self.compiled, "fused": len(self.fused), "sites": len(self.sites),
                           "failed": self.failed, "graphs": graphs}, indent=indent)

    def _summary(self):
        if not self.compiled:
            return "no graph was compiled"
        graphs = "1 graph" if self.compiled == 1 else f"{self.compiled} graphs"
        failed = f"; fusion failed: {'; '.join(self.failed)}" if self.failed else ""
        if not self.sites:
            return ("nothing fused" if failed else "no softmax") + f" in {graphs}{failed}"
        return f"{len(self.fused)} of {len(self.sites)} attention sites fused in {graphs}{failed}"

    def __repr__(self):
        return f"<Report: {self._summary()}>"

    def __str__(self):
        lines = [f"ms_flash fusion: {self._summary()}"]
        for graph in self.graphs:
            if len(self.graphs) > 1:
                lines.append(f"{graph.name}, {graph.nodes} nodes, matched in {1e3 * graph.seconds:.0f} ms")
            rows = list(_alike(graph.sites))
            widths = [max(len(row[i]) for row in rows) for i in range(3)]
            for row in rows:
                lines.append("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)) + "  " + row[3])
        return "\n".join(lines)


def _row(site):
    status = f"fused, {site.get('level', '')}" if site["fused"] else "left"
    shape = " ".join(filter(None, (site.get("shape"), site.get("dtype"))))
    line = site.get("line", "").rsplit("/", 1)[-1]
    return status, line and f"({line})", shape, ", ".join(_details(site)) if site["fused"] else _reason(site)


def _alike(sites):
    """The rows of the table. Sites that differ in their place only, as those of repeated layers do, become one."""
    groups = {}
    for site in sites:
        groups.setdefault(_row(site), []).append(site.get("place") or "")
    for (status, line, *rest), places in groups.items():
        if len(places) > 2:
            places = [f"{places[0]} to {places[-1]}, {len(places)} sites"]
        for place in places:
            yield [status, f"{place} {line}".strip(), *rest]


def _reason(site):
    hint = site.get("hint")
    return site.get("reason", "") + (f" Hint: {hint}" if hint else "")


def _details(site):
    for name in ("scale", "mask", "bias", "softcap", "dropout", "projections", "transposes", "kind", "note"):
        value = site.get(name)
        if value in (None, "", "none", False) or (value == 0 and name != "scale"):
            continue
        if name in ("mask", "kind", "note"):
            yield str(value)
        else:
            yield f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
