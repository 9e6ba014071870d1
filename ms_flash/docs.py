"""``docs``: the generated parts of README and docs/, from ``op_impl/ops.yaml``, docstrings and the recorded benchmark.

A part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; NAME is one of `PARTS`.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import json
import re
from pathlib import Path

from . import op_table

ROOT = Path(__file__).resolve().parent.parent
FILES = ("README.md", "README_CN.md", "docs/support.md", "docs/api.md", "docs/benchmarks.md", "docs/fusion.md")
_RESULTS = ROOT / "benchmarks" / "results" / "cpu.csv"

_CHINESE = {
    "backend": "后端", "device": "设备", "status": "状态", "what runs": "执行内容", "dtypes": "数据类型",
    "layouts": "布局", "dynamic shapes in a graph": "图模式动态 shape", "yes": "是", "no": "否",
    "proven": "已验证", "planned": "尚未实现", "any": "任意",
    "shape": "形状", "mask": "掩码", "full": "无", "causal": "因果",
    "forward": "前向", "forward + backward": "前向 + 反向",
    "memory": "内存", "threads": "线程", "Not measured yet.": "尚未测量。",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a file is out of date")


def run(args: argparse.Namespace) -> int:
    """Rewrites the files, or tells which are out of date."""
    if not (ROOT / "README.md").exists():
        print("ms-flash docs works in a checkout of the project only.")
        return 2
    stale = 0
    for name in FILES:
        path = ROOT / name
        old = path.read_text(encoding="utf-8")
        new = filled(old)
        if new == old:
            continue
        stale += 1
        print(f"{name}: {'out of date, run: python -m ms_flash docs' if args.check else 'rewritten'}")
        if not args.check:
            path.write_text(new, encoding="utf-8")
    return int(args.check and stale > 0)


def filled(text: str) -> str:
    """`text` with every generated part made anew."""
    return re.sub(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)",
                  lambda m: f"{m[1]}{PARTS[m[2]]()}\n{m[3]}", text, flags=re.S)


def _table(header, rows, words=None):
    """A Markdown table, translated word by word."""
    words = words or {}
    cells = [[words.get(str(cell), str(cell)) for cell in row] for row in [header, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def _backends(words=None):
    header = ("backend", "device", "status", "what runs", "dtypes", "layouts", "head_dim", "precision_mode",
              "dynamic shapes in a graph")
    precisions = op_table.table()["attributes"]["precision"]["values"]
    return _table(header, [
        (name, b["target"], b["status"], b["summary"], ", ".join(b["dtypes"]) or "–", ", ".join(b["layouts"]) or "–",
         f"≤ {b['head_dim']}" if "head_dim" in b else "any" if b["ops"] else "–",
         ", ".join(b.get("precision", precisions)) if b["ops"] else "–", "yes" if b["dynamic_shape"] else "no")
        for name, b in op_table.table()["backends"].items()], words)


def _ops():
    names = list(op_table.table()["backends"])
    rows = [(f"`{op}`", entry["summary"], ", ".join(f"`{x}`" for x in entry["outputs"]),
             *("yes" if op in op_table.table()["backends"][name]["ops"] else "–" for name in names))
            for op, entry in op_table.table()["ops"].items()]
    return _table(("op", "what", "outputs", *names), rows)


def _inputs(group="inputs"):
    sets = op_table.table()["dtypes"]
    rows = [(f"`{x['name']}`", ", ".join("dtype of `query`" if d == "query" else d for d in sets[x["dtypes"]]),
             x.get("shape", "by layout"), "yes" if x.get("optional") else "no", x.get("note", ""))
            for x in op_table.table()[group]]
    return _table(("input", "dtypes", "shape", "may be `None`", "note"), rows)


def _layouts():
    rows = [(name, f"({', '.join(x['axes'])})", "`num_heads`" if x.get("heads") == "given" else "from the shape",
             "yes" if x.get("varlen") else "no") for name, x in op_table.table()["layouts"].items()]
    return _table(("layout", "axes", "heads", "sequences of different lengths"), rows)


def _api():
    """Signature and docstring of everything public."""
    import ms_flash

    public = [(f"ms_flash.{name}", getattr(ms_flash, name)) for name in ms_flash.__all__ if name != "__version__"]
    public = [(name, thing) for name, thing in public if callable(thing)]
    public += [(f"ms_flash.nn.{name}", getattr(ms_flash.nn, name)) for name in ms_flash.nn.__all__]
    parts = []
    for name, thing in public:
        text = inspect.getdoc(thing).strip()
        parts.append(f"## {name}\n\n```python\n{name}{inspect.signature(thing)}\n```\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def _bench(words=None, summary=False):
    """The recorded run of ``bench``; the summary is float32 on all cores, against other attention."""
    words = words or {}
    if not _RESULTS.exists():
        return words.get("Not measured yet.", "Not measured yet.")
    machine = json.loads(_RESULTS.with_suffix(".json").read_text(encoding="utf-8"))
    with open(_RESULTS, newline="", encoding="utf-8") as file:
        measured = list(csv.DictReader(file))
    if summary:
        measured = [row for row in measured if row["dtype"] == "float32" and row["threads"] == measured[-1]["threads"]
                    and not row["peer"].startswith("ms_flash") and row["peer"] != "mindspore-op"]
    peers = list(dict.fromkeys(row["peer"] for row in measured))
    lines = {}
    for row in measured:
        key = (row["shape"], row["dtype"], "causal" if row["causal"] == "1" else "full", row["threads"])
        cells = lines.setdefault(key, {})
        if row["ratio"]:
            cells[row["direction"], row["peer"]] = f"{row['ratio']}× ({row['ratio_low']}–{row['ratio_high']})"
        if row["memory_ratio"]:
            cells["memory", row["peer"]] = f"{row['memory_ratio']}×"
    titles = {"fwd": "forward", "fwd+bwd": "forward + backward", "memory": "memory"}
    columns = [(what, peer) for what in titles for peer in peers
               if any((what, peer) in cells for cells in lines.values())]
    header = ["shape", "dtypes", "mask", "threads",
              *(f"{words.get(titles[what], titles[what])}: {peer}" for what, peer in columns)]
    rows = [(*key, *(cells.get(column, "–") for column in columns)) for key, cells in lines.items()]
    return (f"{machine['cpu']}, {machine['cores']} cores, MindSpore {machine['packages']['mindspore']}, "
            f"ms_flash {machine['ms_flash']}.\n\n" + _table(header, rows, words))


def _refusals():
    """Every reason of the matcher, its details left open."""
    from .fusion_passes.reasons import REASONS

    return _table(("reason", "what to do"), [
        tuple(re.sub(r"({\w+})+", "…", text) for text in reason) for reason in REASONS.values()])


PARTS = {
    "refusals": _refusals,
    "backends": _backends,
    "backends-cn": lambda: _backends(_CHINESE),
    "ops": _ops,
    "inputs": _inputs,
    "kvcache-inputs": lambda: _inputs("kvcache_inputs"),
    "layouts": _layouts,
    "api": _api,
    "bench": _bench,
    "bench-summary": lambda: _bench(summary=True),
    "bench-summary-cn": lambda: _bench(_CHINESE, summary=True),
}
