"""A model in ONNX Runtime on the CPU, arrays in and out, bfloat16 included."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

from .extras import need

_BFLOAT16, _FLOAT = 16, 1


class Runtime:
    """A session. `names` are those of the outputs.

    Args:
        model (Union[Path, bytes]): The model.
        register (function, optional): Adds to the session's options, such as ``ms_flash.onnx_export.register``.
    """

    def __init__(self, model, register=None):
        onnxruntime = need("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        if register is not None:
            register(options)
        self.widened: set[str] = set()
        self.session = onnxruntime.InferenceSession(self._readable(model), options, providers=["CPUExecutionProvider"])
        self.names = [output.name for output in self.session.get_outputs()]
        self.inputs = {entry.name for entry in self.session.get_inputs()}

    def _readable(self, model):
        """The model, with float32 in the place of outputs of bfloat16, which ONNX Runtime does not give to NumPy."""
        onnx = need("onnx")
        proto = onnx.load_model_from_string(model) if isinstance(model, bytes) else onnx.load(
            str(model), load_external_data=False)
        for output in proto.graph.output:
            if output.type.tensor_type.elem_type == _BFLOAT16:
                self.widened.add(output.name)
        if not self.widened:
            return model if isinstance(model, bytes) else str(model)
        for node in proto.graph.node:
            for i, name in enumerate(node.output):
                if name in self.widened:
                    node.output[i] = name + "/bfloat16"
            for i, name in enumerate(node.input):
                if name in self.widened:
                    node.input[i] = name + "/bfloat16"
        for name in sorted(self.widened):
            proto.graph.node.append(onnx.helper.make_node("Cast", [name + "/bfloat16"], [name], to=_FLOAT))
        for output in proto.graph.output:
            if output.name in self.widened:
                output.type.tensor_type.elem_type = _FLOAT
        if isinstance(model, bytes):
            return proto.SerializeToString()
        copy = Path(model).with_suffix(".widened.onnx")     # beside it: weights outside are found by their folder
        copy.write_bytes(proto.SerializeToString())
        return str(copy)

    def run(self, arrays):
        """Arrays of all outputs for arrays by input name."""
        onnxruntime = need("onnxruntime")
        arrays = {name: x for name, x in arrays.items() if name in self.inputs}
        if not any(str(x.dtype) == "bfloat16" for x in arrays.values()):
            results = self.session.run(self.names, arrays)
        else:
            feeds = {}
            for name, x in arrays.items():
                x = np.ascontiguousarray(x)
                feeds[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
                    x.view(np.uint16), _BFLOAT16) if str(x.dtype) == "bfloat16" \
                    else onnxruntime.OrtValue.ortvalue_from_numpy(x)
            results = [value.numpy() for value in self.session.run_with_ort_values(self.names, feeds)]
        return [x.astype(ml_dtypes.bfloat16) if name in self.widened else x for name, x in zip(self.names, results)]
