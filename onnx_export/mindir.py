"""A net, or a ``.mindir`` file, as a small graph: what the converter reads. Lengths that are not known are -1."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

DTYPES = {1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool",
          10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16"}
_SUBGRAPH, _MONADS = "FuncGraph", ("UMONAD", "IOMONAD")


def numpy_dtype(name: str):
    """The NumPy dtype of that name, bfloat16 included."""
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


class TensorType(NamedTuple):
    """Type of a Tensor."""

    dtype: str
    shape: tuple[int, ...]


class ScalarType(NamedTuple):
    """Type of a number that the graph computes, such as a length."""

    dtype: str


class Monad(NamedTuple):
    """Orders side effects; carries no value."""


class DType(NamedTuple):
    """A dtype as a value."""

    name: str


class SubGraph(NamedTuple):
    """A graph as a value, for Switch and calls, with what is bound to its first inputs."""

    name: str
    bound: tuple = ()


@dataclass
class Node:
    """One operation. `inputs` are names of nodes, inputs, parameters or constants; `type` is that of its result."""

    op: str
    name: str
    inputs: list[str]
    attrs: dict[str, Any]
    type: Any
    scope: str = ""


@dataclass
class Graph:
    """Nodes in topological order; `outputs` are the names of its results."""

    name: str
    inputs: list[tuple[str, Any]] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


@dataclass
class Program:
    """All graphs of a net. `parameters` holds its weights by name, `constants` what is fixed, across the graphs.

    `plain` are the places of Cells like nn.ReLU, without weights and without Cells inside. MindSpore writes such a
    Cell into the scope of its nodes or leaves it out, after what the process compiled before.
    """

    main: Graph
    graphs: dict[str, Graph]
    parameters: dict[str, Parameter]
    constants: dict[str, Any]
    plain: set[str] = field(default_factory=set)


class Parameter(NamedTuple):
    """A weight: its name as users know it, its type, and its values (an array, or a function that gives one)."""

    name: str
    type: TensorType
    load: Any


class MindirError(ValueError):
    """A net that MindSpore cannot turn into a graph, or a file that is none."""


def from_net(net, inputs, func="export_onnx") -> Program:
    """Compiles a Cell for `inputs` and reads its graph. The Cell comes back as it was."""
    from mindspore import nn
    from mindspore.graph.api import _cell_graph_executor

    if not isinstance(net, nn.Cell):
        raise TypeError(f"For '{func}', the type of 'net' must be Cell, but got {type(net).__name__}.")
    with evaluating(net):
        graph_id, _ = _cell_graph_executor.compile(net, *inputs, phase="export.mindir", do_convert=False)
        try:
            stream = _cell_graph_executor._get_func_graph_proto(net, graph_id, "mind_ir", incremental=False)
        except RuntimeError as error:
            if "PyExecute" not in str(error):
                raise
            raise MindirError(f"For '{func}', the net holds Python that MindSpore runs as it is instead of compiling "
                              "it (PyExecute), such as NumPy, or an index of Tensors of free lengths.") from error
    weights = net.parameters_dict()
    program = _Reader(_parse(stream, "the graph of the net", func), func).program(
        lambda name: weights[name].data if name in weights else None)
    program.plain = {name for name, cell in net.cells_and_names() if not cell._cells and not cell._params}
    return program


def place(scope):
    """``Default/blocks-CellList/0-Block/attention-NaiveAttention/Softmax-op0`` -> ``blocks.0.attention``."""
    parts = scope.split("/")[:-1]
    parts = parts[1:] if parts[:1] == ["Default"] or parts[:1] == ["Gradients"] else parts
    return ".".join(part.rsplit("-", 1)[0] for part in parts if "-" in part)


@contextlib.contextmanager
def evaluating(net):
    """The Cell and all inside it in evaluation mode, and back in what each was."""
    modes = [(cell, cell.training) for _, cell in net.cells_and_names()]
    net.set_train(False)
    try:
        yield
    finally:
        for cell, training in modes:
            cell.training = training


def from_file(path, func="export_onnx") -> Program:
    """Reads a ``.mindir`` file that holds its weights."""
    path = Path(path)
    try:
        stream = path.read_bytes()
    except OSError as error:
        raise MindirError(f"For '{func}', the file '{path}' cannot be read: {error.strerror}.") from error
    return _Reader(_parse(stream, f"the file '{path}'", func), func).program(None)


def _parse(stream, what, func):
    from google.protobuf.message import DecodeError
    from mindspore.train.mind_ir_pb2 import ModelProto

    model = ModelProto()
    try:
        model.ParseFromString(stream)
    except (DecodeError, ValueError) as error:      # ValueError: a name that is no text
        raise MindirError(f"For '{func}', {what} is not in MINDIR format, or is damaged: {error}.") from error
    if model.producer_name != "MindSpore" or not model.graph.name:
        raise MindirError(f"For '{func}', {what} is not in MINDIR format: it was not written by MindSpore.")
    return model


class _Reader:
    """From the protocol buffer to a Program."""

    def __init__(self, model, func):
        self.model, self.func = model, func
        self.primitives = {p.name: p for p in model.primitives}
        self.graphs, self.constants = {}, {}

    def program(self, weight) -> Program:
        try:
            protos = [self.model.graph, *self.model.functions]
            self.names = {proto.name for proto in protos}
            for proto in protos:
                self._constants(proto)
            for proto in protos:
                self.graphs[proto.name] = self._graph(proto)
            parameters = {p.name: self._parameter(p, weight) for p in self.model.graph.parameter}
        except MindirError:
            raise
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise MindirError(f"For '{self.func}', the graph is damaged or of an unknown version of MINDIR "
                              f"({self.model.mind_ir_version}): {type(error).__name__}: {error}.") from error
        return Program(self.graphs[self.model.graph.name], self.graphs, parameters, self.constants)

    def _parameter(self, proto, weight):
        name = proto.name.split(":", 1)[-1]
        tensor_type = TensorType(DTYPES[proto.data_type], tuple(proto.dims))
        data = weight(name) if weight else None
        if data is not None:
            return Parameter(name, tensor_type, lambda: array_of(data))
        if not proto.raw_data and 0 not in proto.dims:
            return Parameter(name, tensor_type, functools.partial(_no_value, name, self.func))
        return Parameter(name, tensor_type, functools.partial(_array, proto))

    def _constants(self, proto):
        for node in proto.node:
            if node.op_type == "Constant":
                self.constants[node.output[0]] = self._value(node.attribute[0])

    def _graph(self, proto):
        graph = Graph(proto.name)
        for entry in proto.input:
            kind = self._type(entry.attr_info) if entry.HasField("attr_info") else self._tensor_type(entry.tensor)
            graph.inputs.append((entry.name, kind))
        for node in proto.node:
            if node.op_type != "Constant":
                graph.nodes.append(self._node(node))
        graph.outputs = [entry.name for entry in proto.output]
        return graph

    def _node(self, proto):
        reference = proto.op_type
        attrs, kind = {}, None
        if reference.startswith("REF::"):
            primitive = self.primitives.get(reference[5:])
            if primitive is None:       # a call: the node it refers to gives the graph
                op, attrs = "call", {"callee": reference[5:]}
            else:
                op = primitive.op_type
                attrs = {a.name: self._value(a) for a in primitive.attribute}
        else:
            op = reference
        for attribute in proto.attribute:
            if attribute.name == "shape":
                kind = self._type(attribute)
            else:
                attrs[attribute.name] = self._value(attribute)
        return Node(op, proto.output[0], list(proto.input), attrs, kind, proto.domain)

    def _tensor_type(self, tensors):
        tensor = tensors[0]
        return TensorType(DTYPES[tensor.data_type], tuple(tensor.dims))

    def _type(self, attribute):
        """The type that an attribute describes."""
        kind = self._kind(attribute)
        if kind == "TENSORS":
            return self._tensor_type(attribute.tensors)
        if kind == "SCALAR":
            return ScalarType(DTYPES[attribute.tensors[0].data_type])
        if kind in ("TUPLE", "LIST"):
            if attribute.seq_info.is_dyn_len:
                raise MindirError(f"For '{self.func}', a tuple whose length the graph does not know cannot be "
                                  "exported.")
            return tuple(self._type(value) for value in attribute.values)
        if kind in _MONADS:
            return Monad()
        return None

    def _value(self, attribute):
        """The constant that an attribute holds."""
        kind = self._kind(attribute)
        if kind in ("TUPLE", "LIST"):
            return tuple(self._element(value) for value in attribute.values)
        if kind in ("TENSORS", "TENSOR"):
            tensors = attribute.tensors or [attribute.t]
            arrays = [_array(t) if t.raw_data or 0 in t.dims else DType(DTYPES[t.data_type]) for t in tensors]
            return arrays[0] if len(arrays) == 1 else tuple(arrays)
        if kind in _MONADS:
            return Monad()
        return self._scalar(kind, attribute)

    def _element(self, attribute):
        kind = self._kind(attribute)
        for values in (attribute.ints, attribute.floats, attribute.doubles):
            if len(values):
                return bool(values[0]) if kind == "BOOL" else values[0]
        if len(attribute.strings):
            return _text(attribute.strings[0])
        return self._value(attribute)

    def _scalar(self, kind, attribute):
        if kind == "FLOAT":
            return attribute.f
        if kind == "DOUBLE":
            return attribute.d
        if kind == "BOOL":
            return bool(attribute.i)
        if kind.startswith(("INT", "UINT")):
            return attribute.i
        if kind == "STRING":
            return _text(attribute.s)
        if kind == "TYPE_NULL":
            return None
        if kind in ("NONE", "UNDEFINED"):
            return None
        return _Opaque(kind)

    @staticmethod
    def _kind(attribute):
        return type(attribute).AttributeType.Name(attribute.type)


class _Opaque(NamedTuple):
    """A constant of a kind the converter has no use for."""

    kind: str


def _no_value(name, func):
    """Stands for a value that is missing; an error only where the model needs it."""
    raise MindirError(f"For '{func}', the parameter '{name}' has no value: it belongs to no Cell of the net, or the "
                      "weights are kept in another file.")


def _text(data):
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else data


def _array(proto):
    dtype = numpy_dtype(DTYPES[proto.data_type])
    return np.frombuffer(proto.raw_data, dtype).reshape(tuple(proto.dims))


def array_of(tensor):
    """A MindSpore Tensor as an array; bfloat16 as ml_dtypes has it."""
    import mindspore as ms

    if tensor.dtype == ms.bfloat16:
        return np.frombuffer(tensor.get_bytes(), ml_dtypes.bfloat16).reshape(tensor.shape)
    return tensor.asnumpy()
