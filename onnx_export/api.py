"""export_onnx: from a net to a checked ONNX file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ..version import __version__
from . import fuse as attention
from . import inputs as net_inputs
from . import mindir, model, profiles, schema
from .builder import Builder, Tensor
from .convert import Converter, ExportError, flatten
from .extras import need
from .mindir import TensorType

_FUNC = "export_onnx"


def export_onnx(net, *inputs, file_name, input_names=None, output_names=None, dynamic_axes=None, profile="portable",
                opset=None, fuse=True, verify=True, tolerance=None, external_data_threshold=model.EXTERNAL_BYTES,
                progress=None):
    r"""
    Writes a net as an ONNX model that runs in stock ONNX Runtime, checks it, and compares it with the net.

    The net is exported in evaluation mode and stays as it is. Attention, written with ms_flash or with
    ``mindspore.ops.flash_attention_score``, becomes one node; how it is written depends on `profile`. Everything that
    cannot be exported is named in one error.

    Args:
        net (Union[Cell, str, Path]): What to export: a Cell, or a ``.mindir`` file that holds its weights.
        inputs (Tensor): Example inputs of the net, as it would be called: Tensors, tuples of them, numbers or ``None``.
            Numbers and ``None`` are fixed in the model. For a ``.mindir`` file none.

    Keyword Args:
        file_name (Union[str, Path]): Where to write. ``.onnx`` is added where it is missing.
        input_names (list[str], optional): A name for each Tensor among the inputs. Default: ``None``, the names of the
            parameters of ``construct``.
        output_names (list[str], optional): A name for each Tensor that the net returns. Default: ``None``, ``output``
            or ``output_0``, ``output_1``, ...
        dynamic_axes (dict, optional): For each input with free lengths its axes: ``{"ids": {0: "batch", 1: "length"}}``
            or ``{"ids": [0, 1]}``. Axes of one name are equally long. Default: ``None``, all lengths are fixed.
        profile (str, optional): ``"portable"``: the node ``ai.msflash::FlashAttention`` with a function body, for ONNX
            Runtime with and without the operator library. ``"inlined"``: standard ops only. ``"standard"``: the node
            Attention of ai.onnx. ``"plugin"``: the node without a body, for TensorRT. ``"mslite"``: the operator of
            MindSpore Lite for Ascend. Default: ``"portable"``.
        opset (int, optional): Version of ai.onnx, from 18 on. Default: ``None``, 18, and 25 for ``"standard"``.
        fuse (bool, optional): Whether attention that the net writes out in small ops becomes the node as well.
            Default: ``True``.
        verify (Union[bool, list], optional): ``True`` runs the model in ONNX Runtime at two shapes and compares it with
            the net; a list of tuples of inputs is compared instead of drawn ones; ``False`` leaves it at ONNX's
            checker. Default: ``True``.
        tolerance (float, optional): Largest error of an output, relative to its largest value. Default: ``None``,
            1e-4 for float32, 5e-3 for float16, 4e-2 for bfloat16.
        external_data_threshold (int, optional): Bytes of weights from which on they are written to a file beside the
            model, ``NAME.onnx.data``. Default: ``2146435072``, what a model file can hold.
        progress (function, optional): Called with a text and a fraction in [0, 1] as the export goes on.
            Default: ``None``.

    Returns:
        Certificate, whose text tells what was checked and with which errors.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a wrong value, the net cannot be exported, or the model computes something else
            than the net.
        ImportError: If the packages onnx, or onnxruntime for `verify`, are not installed.

    Supported Platforms:
        ``Ascend`` (unproven) / ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> import ms_flash
        >>> net = ms_flash.nn.FlashAttention(causal=True)
        >>> x = ms.Tensor(np.random.randn(2, 4, 16, 32), ms.float32)
        >>> certificate = ms_flash.export_onnx(net, x, x, x, file_name="attention.onnx",
        ...                                    dynamic_axes={name: {0: "batch", 2: "length"}
        ...                                                  for name in ("query", "key", "value")})
        >>> certificate.passed
        True
    """
    need("onnx")
    if verify is not False:
        need("onnxruntime")
    report = progress or (lambda text, fraction: None)
    chosen = profiles.make(profile, opset)
    path = _path(file_name)
    from_file = isinstance(net, (str, os.PathLike))
    found, output_axes = ([], dynamic_axes or {}) if from_file else net_inputs.describe(
        net, inputs, input_names, dynamic_axes)

    report("compiling the net", 0.0)
    with _damage_explained(net) if from_file else contextlib.nullcontext():
        if from_file:
            if inputs:
                raise ValueError(f"For '{_FUNC}', a .mindir file takes no example inputs, but got {len(inputs)}.")
            program = mindir.from_file(net)
            found = _file_inputs(program, input_names)
        else:
            program = mindir.from_net(net, net_inputs.check_arguments(net, inputs, found))

        builder = Builder(chosen.opset)
        builder.profile = chosen
        given = [Tensor(entry.dtype, tuple(-1 if i in entry.axes else n for i, n in enumerate(entry.shape)),
                        builder.unique(entry.name)) for entry in found]
        results = Converter(program, builder, lambda done, of: report("converting", 0.1 + 0.4 * done / of)).run(
            _arranged(program.main.inputs, iter(given)))
        builder.types.update((t.name, t) for t in given)
        outputs = _named_outputs(builder, results, output_names, {t.name for t in given})
        sites = attention.fuse(builder) if fuse else []
        _check_leftover_axes(output_axes, [entry.name for entry in found], [t.name for t in outputs])

        report("writing", 0.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
            temporary = Path(folder) / path.name
            weights = model.Weights(temporary, external_data_threshold)
            proto = _assemble(builder, chosen, given, found, outputs, weights, output_axes)
            temporary.write_bytes(proto.SerializeToString(deterministic=True))

            from . import verify as verification

            certificate = verification.certify(temporary, proto, chosen, net=None if from_file else net, args=inputs,
                                               found=found, verify=verify, tolerance=tolerance, shown=path.name,
                                               progress=lambda text, f: report(text, 0.6 + 0.4 * f))
            certificate.sites = sites
            if not certificate.passed:
                raise ExportError(f"For '{_FUNC}', the model does not compute what the net computes; it was not "
                                  f"written.\n{certificate}")
            old = path.parent / weights.location
            if weights.external:
                os.replace(temporary.parent / weights.location, old)
            elif old.exists():
                old.unlink()
            os.replace(temporary, path)
    report("done", 1.0)
    certificate.path = path
    return certificate


@contextlib.contextmanager
def _damage_explained(path):
    """What a damaged file that can be read leads to later on, told as what it is."""
    try:
        yield
    except (ImportError, OSError):
        raise
    except Exception as error:
        if str(error).startswith(f"For '{_FUNC}'"):
            raise
        raise mindir.MindirError(f"For '{_FUNC}', the file '{path}' is damaged or of an unknown version of MINDIR: "
                                 f"{type(error).__name__}: {error}") from error


def _path(file_name):
    if not isinstance(file_name, (str, os.PathLike)):
        raise TypeError(f"For '{_FUNC}', the type of 'file_name' must be str or Path, but got "
                        f"{type(file_name).__name__}.")
    path = Path(file_name)
    if path.name and path.suffix != ".onnx":
        path = path.with_name(path.name + ".onnx")
    if not path.name or path.is_dir():
        raise ValueError(f"For '{_FUNC}', 'file_name' must be a file, but got the folder '{path}'.")
    return path


def _file_inputs(program, names):
    found = []
    for index, (name, kind) in enumerate(program.main.inputs):
        if not isinstance(kind, TensorType):
            raise ExportError(f"For '{_FUNC}', the input '{name}' of the file is not a Tensor.")
        label = name.split(":", 1)[-1]
        axes = {i: f"{label}_{i}" for i, n in enumerate(kind.shape) if n < 0}
        found.append(net_inputs.Input(label, kind.dtype, None, axes, (index,), kind.shape))
    if names is not None:
        if len(names) != len(found):
            raise ValueError(f"For '{_FUNC}', 'input_names' must hold {len(found)} names, but got {len(names)}.")
        for entry, name in zip(found, names):
            entry.name = name
    return found


def _arranged(kinds, tensors):
    """The Tensors in the structure that the graph expects."""
    def arranged(kind):
        if isinstance(kind, tuple) and not isinstance(kind, TensorType):
            return tuple(arranged(k) for k in kind)
        return next(tensors)

    return [arranged(kind) for _, kind in kinds]


def _named_outputs(builder, results, names, taken):
    """The results as Tensors that are made by a node and carry their final names."""
    pairs = flatten(results, "output")
    if not pairs:
        raise ExportError(f"For '{_FUNC}', the net returns no Tensor.")
    if names is not None:
        names = net_inputs._strings("output_names", names)
        if len(names) != len(pairs):
            raise ValueError(f"For '{_FUNC}', 'output_names' must hold {len(pairs)} names, as many as the net returns "
                             f"Tensors, but got {len(names)}: {names}.")
        if len(set(names)) != len(names) or taken & set(names):
            raise ValueError(f"For '{_FUNC}', 'output_names' must differ from each other and from the names of the "
                             f"inputs, but got {names}.")
    outputs = []
    for index, (default, value) in enumerate(pairs):
        tensor = builder.tensor(value)
        out = builder.op("Identity", tensor)
        out.name = builder.block.nodes[-1].outputs[0] = builder.unique(names[index] if names else default)
        if names and out.name != names[index]:
            out.name = builder.block.nodes[-1].outputs[0] = _freed(builder, names[index])
        outputs.append(out)
    builder.block.outputs = outputs
    return outputs


def _freed(builder, name):
    """Gives `name` to an output: a value inside that has it by chance is renamed."""
    other = builder.unique(name + "_inside")
    for node in builder.block.nodes:
        node.inputs = [other if n == name else n for n in node.inputs]
        node.outputs = [other if n == name else n for n in node.outputs]
    if name in builder.initializers:
        tensor = builder.initializers.pop(name)
        tensor.name = other
        builder.initializers[other] = tensor
    return name


def _check_leftover_axes(axes, inputs, outputs):
    for name in axes:
        if name not in outputs:
            raise ValueError(f"For '{_FUNC}', 'dynamic_axes' must hold names of inputs ({', '.join(inputs)}) or "
                             f"outputs ({', '.join(outputs)}), but got {name!r}.")


def _assemble(builder, profile, given, found, outputs, weights, output_axes):
    onnx = need("onnx")
    wanted = set()
    model.prune(builder.block, wanted)
    fixed = [(name, tensor) for name, tensor in builder.initializers.items() if name in wanted]
    inputs = [(tensor, entry.dims) for tensor, entry in zip(given, found)]
    functions = profile.functions()
    opsets = [onnx.helper.make_opsetid("", profile.opset)]
    domains = {node.domain for node in _all_nodes(builder.block)} - {""}
    opsets += [onnx.helper.make_opsetid(domain, schema.SINCE_VERSION) for domain in sorted(domains)]
    if schema.DOMAIN not in domains:
        functions = []      # every node was removed again
    ir_version = model.IR_VERSIONS[profile.opset]
    if any(f.overload for f in functions):
        ir_version = max(ir_version, 10)

    def build(initializers, extra=()):
        graph = model.graph_proto(builder.block, "ms_flash", [*inputs, *extra], initializers)
        return onnx.helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=ir_version,
                                      producer_name="ms_flash", producer_version=__version__)

    small = [(name, t) for name, t in fixed if model.size(t) <= 1024]
    large = [(t, None) for _, t in fixed if model.size(t) > 1024]
    skeleton = build([model.tensor_proto(t, name) for name, t in small], large)
    dims = _output_dims(skeleton, outputs, {d for _, entry in inputs for d in entry if isinstance(d, str)})
    proto = build(weights.protos(fixed))
    for info, known, tensor in zip(proto.graph.output, dims, outputs):
        for axis, (dim, name) in enumerate(zip(info.type.tensor_type.shape.dim, known)):
            if tensor.shape[axis] < 0 and name is not None:
                dim.dim_param = name
        labels = output_axes.get(info.name)
        if labels:
            for axis, label in net_inputs._axes(info.name, labels, tensor.rank).items():
                if tensor.shape[axis] < 0:
                    info.type.tensor_type.shape.dim[axis].dim_param = label
    return proto


def _all_nodes(block):
    for node in block.nodes:
        yield node
        for value in node.attrs.values():
            if hasattr(value, "nodes"):
                yield from _all_nodes(value)


def _output_dims(skeleton, outputs, symbols):
    """For each axis of each output the name of the free length that it has, where ONNX can tell."""
    onnx = need("onnx")
    try:
        inferred = onnx.shape_inference.infer_shapes(skeleton, data_prop=True)
    except Exception:       # the checker, which comes next, says what is wrong
        return [[None] * tensor.rank for tensor in outputs]
    return [[d.dim_param if d.dim_param in symbols else None for d in info.type.tensor_type.shape.dim]
            or [None] * tensor.rank for info, tensor in zip(inferred.graph.output, outputs)]
