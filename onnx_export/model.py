"""From a Builder to an ONNX model: pruning, protocol buffers, weights in a file of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .builder import Block, Reference, Tensor
from .extras import need
from .mindir import numpy_dtype

IR_VERSIONS = {18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 13}
EXTERNAL_BYTES = 2**31 - 2**20      # a protocol buffer holds 2 GB; 1 MiB is for the nodes
_SMALL = 1024                       # bytes that stay in the model whatever the threshold: shapes are read from there


def prune(block: Block, wanted: set[str]):
    """Removes the nodes that no result needs, and from nodes of other domains the optional outputs that nobody reads.

    `wanted` grows by what the block reads from outside.
    """
    kept = []
    wanted.update(t.name for t in block.outputs)
    for node in reversed(block.nodes):
        if not wanted.intersection(filter(None, node.outputs)):
            continue
        kept.append(node)
        if node.domain:         # ONNX's own may have outputs that have to be there, such as those of Split
            node.outputs = [name if name in wanted else "" for name in node.outputs]
        wanted.update(filter(None, node.inputs))
        for value in node.attrs.values():
            if isinstance(value, Block):
                prune(value, wanted)
    block.nodes[:] = kept[::-1]


def graph_proto(block: Block, name, inputs=(), initializers=()):
    """The GraphProto of a block. `inputs` and outputs are (Tensor, dims) or Tensors."""
    onnx = need("onnx")
    graph = onnx.GraphProto(name=name)
    graph.node.extend(node_proto(node, name) for node in block.nodes)
    graph.input.extend(value_info(tensor, dims) for tensor, dims in inputs)
    graph.output.extend(value_info(tensor, None) for tensor in block.outputs)
    graph.initializer.extend(initializers)
    return graph


def node_proto(node, graph_name=""):
    """The NodeProto of one emitted node."""
    onnx = need("onnx")
    proto = onnx.NodeProto(op_type=node.op, domain=node.domain, name=node.name, input=node.inputs, output=node.outputs,
                          overload=node.overload)
    for key in sorted(node.attrs):
        value = node.attrs[key]
        if isinstance(value, Reference):
            kind = onnx.AttributeProto.INT if value.kind is int else onnx.AttributeProto.FLOAT
            proto.attribute.add(name=key, ref_attr_name=value.name, type=kind)
            continue
        if isinstance(value, Block):
            value = graph_proto(value, f"{node.name}/{key}")
        elif isinstance(value, Tensor):
            value = tensor_proto(value)
        elif isinstance(value, (list, tuple)) and not value:
            proto.attribute.add(name=key, type=onnx.AttributeProto.INTS)
            continue
        proto.attribute.append(onnx.helper.make_attribute(key, value))
    return proto


def value_info(tensor, dims):
    """Name, dtype and shape of an input or output; `dims` may hold names for lengths that are not fixed."""
    onnx = need("onnx")
    dims = tensor.shape if dims is None else dims
    shape = [None if isinstance(d, int) and d < 0 else d for d in dims]
    return onnx.helper.make_tensor_value_info(tensor.name, element_type(tensor.dtype), shape)


def element_type(dtype):
    """ONNX's number for a dtype name."""
    onnx = need("onnx")
    return onnx.helper.np_dtype_to_tensor_dtype(numpy_dtype(dtype))


def tensor_proto(tensor, name=""):
    """The TensorProto of a fixed Tensor."""
    onnx = need("onnx")
    array = content(tensor)
    proto = onnx.TensorProto(name=name, data_type=element_type(tensor.dtype), dims=array.shape)
    proto.raw_data = array.tobytes()
    return proto


def content(tensor) -> np.ndarray:
    """The array of a fixed Tensor, in the byte order of the file."""
    array = tensor.array if isinstance(tensor.array, np.ndarray) else tensor.array()
    array = np.ascontiguousarray(array, numpy_dtype(tensor.dtype)).reshape(tensor.shape)
    return array if array.dtype.byteorder != ">" else array.astype(array.dtype.newbyteorder("<"))


def size(tensor):
    """Bytes of a fixed Tensor, without loading it."""
    return int(np.prod(tensor.shape, dtype=np.int64)) * numpy_dtype(tensor.dtype).itemsize


class Weights:
    """Turns fixed Tensors into initializers: inside the model, or in a file beside it when they are too large.

    Args:
        path (Path): Of the model; the weights' file is named after it, ``model.onnx.data``.
        threshold (int): Bytes of all weights from which on they go outside.
    """

    def __init__(self, path, threshold=EXTERNAL_BYTES):
        self.path, self.threshold = Path(path), threshold
        self.location = self.path.name + ".data"
        self.external = False

    def protos(self, tensors, progress=None):
        """One TensorProto per (name, Tensor)."""
        onnx = need("onnx")
        self.external = sum(size(tensor) for _, tensor in tensors) > self.threshold
        target = self.path.parent / self.location
        if not self.external:
            target.unlink(missing_ok=True)      # of an earlier export: it would be taken for part of this one
            return [tensor_proto(tensor, name) for name, tensor in tensors]
        protos, offset = [], 0
        with open(target, "wb") as file:
            for name, tensor in tensors:
                if size(tensor) <= _SMALL:
                    protos.append(tensor_proto(tensor, name))
                    continue
                array = content(tensor)
                proto = onnx.TensorProto(name=name, data_type=element_type(tensor.dtype), dims=array.shape,
                                         data_location=onnx.TensorProto.EXTERNAL)
                padding = -offset % 64          # aligned: runtimes map the file instead of reading it
                file.write(b"\0" * padding)
                offset += padding
                for key, value in (("location", self.location), ("offset", offset), ("length", array.nbytes)):
                    proto.external_data.add(key=key, value=str(value))
                file.write(array.data.cast("B") if array.size and array.dtype.kind in "fiub" else array.tobytes())
                offset += array.nbytes
                protos.append(proto)
        return protos
