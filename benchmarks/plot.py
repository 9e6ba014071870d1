"""Plots a CSV of ``python -m ms_flash bench``: times faster than each peer, one chart per direction.

python benchmarks/plot.py build/bench/cpu.csv [--dtype float32] [--out build/bench]
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main() -> None:
    """Writes NAME-DIRECTION.png for each direction in the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="folder of the charts (default: that of the CSV)")
    args = parser.parse_args()
    with open(args.csv, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["dtype"] == args.dtype and row["ratio"]]
    folder = args.out or args.csv.parent
    folder.mkdir(parents=True, exist_ok=True)
    for direction in dict.fromkeys(row["direction"] for row in rows):
        path = folder / f"{args.csv.stem}-{direction}.png"
        chart([row for row in rows if row["direction"] == direction], f"{direction}, {args.dtype}", path)
        print(path)


def chart(rows: list[dict], title: str, path: Path) -> None:
    """A group of bars per problem, a bar per peer, with the quartiles."""
    problems = list(dict.fromkeys(map(problem, rows)))
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    figure, axes = plt.subplots(figsize=(4 + 0.45 * len(problems), 5), layout="constrained")
    width = 0.8 / len(peers)
    for index, peer in enumerate(peers):
        mine = {problem(row): [float(row[c]) for c in ("ratio", "ratio_low", "ratio_high")]
                for row in rows if row["peer"] == peer}
        places = [problems.index(name) + (index - (len(peers) - 1) / 2) * width for name in mine]
        middle, low, high = zip(*mine.values())
        spread = [[m - a for m, a in zip(middle, low)], [b - m for m, b in zip(middle, high)]]
        axes.bar(places, middle, width, yerr=spread, label=peer, error_kw={"linewidth": 0.8})
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylabel("times faster than the peer")
    axes.set_xticks(range(len(problems)), problems, rotation=60, ha="right")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def problem(row: dict) -> str:
    """What one group of bars stands for."""
    return f"{row['shape']}{' causal' if row['causal'] == '1' else ''}, {row['threads']}T"


if __name__ == "__main__":
    main()
