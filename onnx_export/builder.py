"""Writes ONNX nodes, one call each, with dtypes and shapes kept along."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .mindir import TensorType, numpy_dtype


@dataclass(eq=False)
class Tensor:
    """A value of the graph. `array`, or a function that gives it, is there when its content is fixed.

    A fixed value gets its name, and its place in the file, when a node first uses it.
    """

    dtype: str
    shape: tuple[int, ...]          # -1: not known
    name: str | None = None
    array: Any = None
    origin: tuple | None = None     # (Tensor, axis) for a length

    @property
    def rank(self):
        return len(self.shape)

    @property
    def fixed(self):
        """The content of a small fixed value, or None."""
        return self.array if isinstance(self.array, np.ndarray) else None


class Scalar(Tensor):
    """A number that the graph computes, such as a length: an ONNX tensor of shape (1,)."""


NUMBERS = (bool, int, float)


@dataclass(frozen=True)
class Reference:
    """Value of an attribute inside a function: the attribute of that name of the node that calls it."""

    name: str
    kind: type      # int or float


class Unsupported(Exception):
    """Why a rule cannot convert a node. Collected, so that all of them reach the user in one error."""


@dataclass
class Emitted:
    """A node that is not yet a protocol buffer."""

    op: str
    domain: str
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, Any]
    name: str
    overload: str = ""


@dataclass
class Block:
    """A list of nodes with results: the body of a graph, of a branch or of a function."""

    nodes: list[Emitted] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    lengths: dict[tuple, Scalar] = field(default_factory=dict)     # read in this block, by (name, axis)


class Builder:
    """Grows one graph.

    Args:
        opset (int): Version of ai.onnx that rules write for.
        constants_inside (bool): Constants become nodes, as a function needs it, instead of initializers.
    """

    def __init__(self, opset, constants_inside=False):
        self.opset = opset
        self.constants_inside = constants_inside
        self.block = Block()
        self.initializers: dict[str, Any] = {}      # name -> (dtype, shape, array or function)
        self.scope = ""
        self.types: dict[str, Tensor] = {}
        self._names: dict[str, int] = {}
        self._constants: dict[tuple, Tensor] = {}

    # ---- names -------------------------------------------------------------------------------------------------
    def unique(self, name):
        """`name`, with a number from its second use on. Names depend on the net alone."""
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return name if count == 0 else self.unique(f"{name}_{count}")

    def _scoped(self, name):
        return f"{self.scope}/{name}" if self.scope else name

    # ---- values ------------------------------------------------------------------------------------------------
    def constant(self, value, dtype=None, shape=None) -> Tensor:
        """A fixed value; equal small ones are one."""
        array = np.asarray(value, None if dtype is None else numpy_dtype(dtype))
        if dtype is None:
            dtype = str(array.dtype)
        if shape is not None:
            array = array.reshape(shape)
        if array.size > 64:
            return Tensor(dtype, array.shape, array=array)
        key = (dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = Tensor(dtype, array.shape, array=array)
        return self._constants[key]

    def tensor(self, value, dtype=None) -> Tensor:
        """`value` as a Tensor: a number becomes a constant of rank 0, a Scalar loses its axis."""
        if isinstance(value, Scalar):
            value = self.op("Squeeze", value, self.constant([0], "int64"), dtype=value.dtype, shape=())
        if isinstance(value, Tensor):
            return value if dtype is None else self.cast(value, dtype)
        if isinstance(value, (tuple, list)) and any(isinstance(x, Tensor) for x in value):
            return self.cast(self.vector(value), dtype or "int64")
        if dtype is None and isinstance(value, NUMBERS):
            dtype = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float32"
        return self.constant(value, dtype)

    def vector(self, values) -> Tensor:
        """Whole numbers, fixed or not, as a Tensor int64 of rank 1."""
        if not isinstance(values, (tuple, list)):
            if isinstance(values, Tensor) and not isinstance(values, Scalar):
                return self.cast(values, "int64")
            values = (values,)
        if all(isinstance(x, NUMBERS) for x in values):
            return self.constant([int(x) for x in values], "int64", (len(values),))
        parts, run = [], []
        for x in values:
            if isinstance(x, NUMBERS):
                run.append(int(x))
                continue
            if run:
                parts.append(self.constant(run, "int64"))
                run = []
            x = self.cast(x, "int64")
            parts.append(x if isinstance(x, Scalar) else self.op("Reshape", x, self.constant([1], "int64"), shape=(1,)))
        if run:
            parts.append(self.constant(run, "int64"))
        if len(parts) == 1:
            return Tensor("int64", (len(values),), self.name(parts[0]))
        return self.op("Concat", *parts, axis=0, dtype="int64", shape=(len(values),))

    def length(self, x, axis):
        """Length of `axis` of `x`: a number where it is known."""
        size = x.shape[axis]
        if size >= 0:
            return size
        axis %= x.rank
        name = self.name(x)
        known = self.block.lengths
        if (name, axis) not in known:
            found = self.op("Shape", x, start=axis, end=axis + 1, dtype="int64", shape=(1,))
            known[name, axis] = Scalar("int64", (1,), found.name, origin=(x, axis))
        return known[name, axis]

    def cast(self, x, dtype):
        """`x` in `dtype`; the same when it has it."""
        if x.dtype == dtype:
            return x
        if x.fixed is not None and x.name is None:
            with np.errstate(all="ignore"):
                return self.constant(x.fixed.astype(numpy_dtype(dtype)), dtype)
        out = self.op("Cast", x, to=_onnx_dtype(dtype), dtype=dtype, shape=x.shape)
        return Scalar(dtype, (1,), out.name) if isinstance(x, Scalar) else out

    # ---- nodes -------------------------------------------------------------------------------------------------
    def op(self, op_type, *inputs, dtype=None, shape=None, outputs=1, domain="", name=None, overload="", **attrs):
        """Adds a node and returns its result, or a tuple of them with `outputs` (a number, or one type each).

        `dtype` and `shape` are those of the result; by default those of the first input.
        """
        names = ["" if x is None else self.name(x) for x in inputs]
        while names and not names[-1]:
            names.pop()
        first = next((x for x in inputs if x is not None), None)
        if isinstance(outputs, int):
            kind = TensorType(dtype or first.dtype, tuple(first.shape if shape is None else shape))
            outputs = (kind,) * outputs
            single = len(outputs) == 1
        else:
            single = False
        node_name = self.unique(self._scoped(name or op_type))
        results = []
        for index, kind in enumerate(outputs):
            if kind is None:
                results.append(None)
                continue
            suffix = "" if len(outputs) == 1 else f":{index}"
            results.append(Tensor(kind.dtype, tuple(kind.shape), node_name + suffix))
        written = ["" if r is None else r.name for r in results]
        self.types.update((r.name, r) for r in results if r is not None)
        attrs = {key: value for key, value in attrs.items() if value is not None}
        self.block.nodes.append(Emitted(op_type, domain, names, written, attrs, node_name, overload))
        return results[0] if single else tuple(results)

    def name(self, x) -> str:
        """Name of a value; a fixed one is put into the graph here."""
        if x.array is None:
            return x.name
        if x.name is None:
            x.name = self.unique(self._constant_name(x))
        if x.name not in self.initializers:
            if self.constants_inside:
                self.block.nodes.append(Emitted("Constant", "", [], [x.name], {"value": x}, x.name))
            self.initializers[x.name] = x
        return x.name

    def _constant_name(self, x):
        if isinstance(x.array, np.ndarray) and x.array.size == 1 and x.dtype != "bfloat16":
            value = x.array.reshape(()).item()
            if not isinstance(value, float) or math.isfinite(value):
                return f"const_{value}" if x.dtype != "float16" else f"const_{value}_f16"
        return "const"

    def branch(self, scope=None):
        """Context: nodes go into a new Block, for a branch of If."""
        return _Branch(self)


class _Branch:
    def __init__(self, builder):
        self.builder = builder

    def __enter__(self):
        self.outer, self.builder.block = self.builder.block, Block()
        return self.builder.block

    def __exit__(self, *_):
        self.builder.block = self.outer


def _onnx_dtype(name):
    from .mindir import DTYPES

    return next(number for number, known in DTYPES.items() if known == name)
