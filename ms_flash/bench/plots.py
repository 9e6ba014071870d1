"""Charts of the suite cpu, PNG: times faster than each peer, time and memory by length, percent of the limit."""

from __future__ import annotations

import csv
from pathlib import Path


def draw(table: Path, dtype: str, folder: Path) -> list[Path]:
    """Draws the rows of `dtype` of a CSV file into `folder`.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    with open(table, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["dtype"] == dtype and row["ours_ms"]]
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for direction in dict.fromkeys(row["direction"] for row in rows):
        mine = [row for row in rows if row["direction"] == direction]
        for name, chart in (("ratio", _ratios), ("length", _by_length), ("limit", _limits)):
            path = folder / f"{table.stem}-{name}-{direction}.png"
            if chart(mine, f"{direction}, {dtype}", path):
                paths.append(path)
    return paths


def _problem(row):
    """What one group of bars stands for."""
    return f"{row['shape']}{' causal' if row['causal'] == '1' else ''}, {row['threads']}T"


def _figure(groups, title, path, draw):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(4 + 0.45 * groups, 5), layout="constrained")
    draw(axes)
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


def _ratios(rows, title, path):
    """A group of bars per problem, a bar per peer, with the quartiles."""
    rows = [row for row in rows if row["ratio"]]
    problems, peers = (list(dict.fromkeys(map(key, rows))) for key in (_problem, lambda row: row["peer"]))
    width = 0.8 / max(len(peers), 1)

    def bars(axes):
        for index, peer in enumerate(peers):
            mine = {_problem(row): [float(row[c]) for c in ("ratio", "ratio_low", "ratio_high")]
                    for row in rows if row["peer"] == peer}
            places = [problems.index(name) + (index - (len(peers) - 1) / 2) * width for name in mine]
            middle, low, high = zip(*mine.values())
            spread = [[m - a for m, a in zip(middle, low)], [b - m for m, b in zip(middle, high)]]
            axes.bar(places, middle, width, yerr=spread, label=peer, error_kw={"linewidth": 0.8})
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_ylabel("times faster than the peer")
        axes.set_xticks(range(len(problems)), problems, rotation=60, ha="right")

    return bool(rows) and _figure(len(problems), title, path, bars)


def _by_length(rows, title, path):
    """Time, and where it was measured memory, against the length, of problems that differ in nothing else."""
    alike = lambda row: (row["batch"], row["heads"], row["kv_heads"], row["head_dim"])
    rows = [row for row in rows if row["q_len"] == row["kv_len"] and row["shape"][1:] == row["q_len"]
            and row["shape"][0] == "s" and row["threads"] == max((r["threads"] for r in rows), key=int)]
    if len({alike(row) for row in rows}) != 1 or len({row["q_len"] for row in rows}) < 2:
        return False

    def lines(axes):
        axes.set(xscale="log", yscale="log", xlabel="length", ylabel="ms (solid), MiB (dotted)")
        for causal in ("0", "1"):
            for peer in dict.fromkeys(row["peer"] for row in rows):
                mine = [row for row in rows if row["peer"] == peer and row["causal"] == causal]
                whose = [(peer, "peer")] + [("ms_flash", "ours")] * (peer == rows[0]["peer"])
                for label, column in whose:
                    for unit, style in (("ms", "-o"), ("mib", ":o")):
                        measured = [row for row in mine if row[f"{column}_{unit}"]]
                        points = [(int(row["q_len"]), float(row[f"{column}_{unit}"])) for row in measured]
                        if points:
                            axes.plot(*zip(*points), style, label=f"{label}{' causal' if causal == '1' else ''} {unit}")

    return _figure(10, title, path, lines)


def _limits(rows, title, path):
    """Ours in percent of what the machine can do at most, a bar per problem."""
    best = {_problem(row): float(row["of_limit"]) for row in rows if row["of_limit"]}

    def bars(axes):
        axes.bar(range(len(best)), list(best.values()), label="ms_flash")
        axes.axhline(100, color="black", linewidth=0.8)
        axes.set_ylabel("percent of the limit")
        axes.set_xticks(range(len(best)), list(best), rotation=60, ha="right")

    return bool(best) and _figure(len(best), title, path, bars)
