"""Reads ``op_impl/ops.yaml``, the one table of ops, and turns it into MindSpore registrations."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import yaml


def path() -> Path:
    """Where ops.yaml is: in the installed ``ms_flash.op_impl``, or beside the package in a checkout."""
    found = importlib.util.find_spec("ms_flash.op_impl")
    folder = Path(found.origin).parent if found else Path(__file__).resolve().parent.parent / "op_impl"
    return folder / "ops.yaml"


@functools.lru_cache(None)
def table() -> dict:
    """The whole table, as written."""
    return yaml.safe_load(path().read_text(encoding="utf-8"))


@functools.lru_cache(None)
def input_names(group: str = "inputs") -> tuple[str, ...]:
    """The inputs every attention op starts with (`group`: another kind of op), in slot order."""
    return tuple(entry["name"] for entry in table()[group])


@functools.lru_cache(None)
def dtypes(name: str, query: str | None = None) -> tuple[str, ...]:
    """Dtypes that input `name` may have; `query` is the dtype of the query (or x), where the set depends on it."""
    groups = ("inputs", "mha_inputs", "kvcache_inputs", "merge_inputs")
    entry = next(e for group in groups for e in table()[group] if e["name"] == name)
    names = [query if d == "query" else d for d in table()["dtypes"][entry["dtypes"]]]
    return tuple(dict.fromkeys(d for d in names if d))


def slots(op: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the inputs and outputs of `op`."""
    entry = table()["ops"][op]
    inputs = tuple(slot["name"] for group in entry["inputs"] for slot in table()[group])
    return inputs, tuple(entry["outputs"])


def registration(op: str, target: str) -> dict:
    """CustomRegOp information for `op`: any dtype and ``None`` pass here, because spec.py has checked them."""
    from mindspore.ops import CustomRegOp, DataType

    inputs, outputs = slots(op)
    info = CustomRegOp(op)
    for index, name in enumerate(inputs):
        info.input(index, name, "optional")
    # "dynamic" makes a tuple of a single output, and with it one form of shape inference in C++ for all ops
    kind = "required" if len(outputs) > 1 else "dynamic"
    for index, name in enumerate(outputs):
        info.output(index, name, kind)
    return info.dtype_format(*[DataType.None_None] * (len(inputs) + len(outputs))).target(target).get_op_info()
