"""The inputs of a net: their names, which of their lengths are free, and other values of them for the verification."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import numpy as np

from .mindir import array_of, numpy_dtype

_FUNC = "export_onnx"


@dataclass
class Input:
    """One Tensor that the user passed; `axes` maps the axes of free length to their names."""

    name: str
    dtype: str
    example: np.ndarray | None
    axes: dict[int, str]
    position: tuple[int, ...]       # in the arguments of the net: (index,), or (index, index in the tuple)
    shape: tuple[int, ...] = ()

    @property
    def dims(self):
        """Shape with names where lengths are free."""
        return tuple(self.axes.get(i, n) for i, n in enumerate(self.shape))


def describe(net, args, names, dynamic_axes):
    """Reads the arguments of the net.

    Returns:
        tuple (list of Input, dict of free lengths of outputs by output name).

    Raises:
        TypeError: If an argument is of a type that cannot become an input.
        ValueError: If names or axes do not fit.
    """
    found = []
    for index, (default, value) in enumerate(zip(_parameter_names(net, len(args)), args)):
        for position, name, tensor in _tensors((index,), default, value):
            shape = tuple(tensor.shape)
            axes = {i: f"{name}_{i}" for i, n in enumerate(shape) if n is None or n < 0}
            example = None if axes else array_of(tensor)
            found.append(Input(name, str(tensor.dtype).lower(), example, axes, position,
                               tuple(-1 if n is None else n for n in shape)))
    if not found:
        raise ValueError(f"For '{_FUNC}', at least one of 'inputs' must be a Tensor.")
    if names is not None:
        names = _strings("input_names", names)
        if len(names) != len(found):
            raise ValueError(f"For '{_FUNC}', 'input_names' must hold one name per Tensor among the inputs: "
                             f"{len(found)} ({', '.join(i.name for i in found)}), but got {len(names)}: {names}.")
        for entry, name in zip(found, names):
            entry.name = name
    by_name = {entry.name: entry for entry in found}
    if len(by_name) != len(found):
        raise ValueError(f"For '{_FUNC}', the names of the inputs must differ, but got {[i.name for i in found]}.")
    others = {}
    for name, axes in (dynamic_axes or {}).items():
        if name not in by_name:
            others[name] = axes
            continue
        entry = by_name[name]
        for axis, label in _axes(name, axes, len(entry.shape)).items():
            entry.axes[axis] = label
    return found, others


def _parameter_names(net, count):
    names = []
    if hasattr(net, "construct"):
        for p in inspect.signature(net.construct).parameters.values():
            if p.kind is not p.VAR_POSITIONAL:
                names.append(p.name)
    return (names + [f"input_{i}" for i in range(len(names), count)])[:count]


def _tensors(position, name, value):
    from mindspore import Tensor

    if isinstance(value, Tensor):
        yield position, name, value
    elif isinstance(value, (tuple, list)):
        for i, x in enumerate(value):
            yield from _tensors((*position, i), f"{name}_{i}", x)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise TypeError(f"For '{_FUNC}', the inputs must be Tensors, numbers, strings, None, or tuples of these, but "
                        f"'{name}' is {type(value).__name__}.")


def _strings(what, names):
    if isinstance(names, str) or not isinstance(names, (tuple, list)) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"For '{_FUNC}', '{what}' must be a list of str, but got {names!r}.")
    if not all(names):
        raise ValueError(f"For '{_FUNC}', '{what}' must not hold empty names, but got {names!r}.")
    return list(names)


def _axes(name, axes, rank):
    """{axis: label} from what the user wrote: a dict, or a list of axes."""
    if isinstance(axes, (tuple, list)):
        axes = {axis: f"{name}_{axis}" for axis in axes}
    if not isinstance(axes, dict):
        raise TypeError(f"For '{_FUNC}', 'dynamic_axes[{name!r}]' must be a dict from axis to name, or a list of axes, "
                        f"but got {axes!r}.")
    result = {}
    for axis, label in axes.items():
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise TypeError(f"For '{_FUNC}', the axes in 'dynamic_axes[{name!r}]' must be int, but got {axis!r}.")
        if not -rank <= axis < rank:
            raise ValueError(f"For '{_FUNC}', the axes in 'dynamic_axes[{name!r}]' must be in the range "
                             f"[{-rank}, {rank - 1}], but got {axis}.")
        result[axis % rank] = str(label)
    return result


def check_arguments(net, args, found):
    """The arguments for compilation: Tensors of free lengths in the place of the examples."""
    import mindspore as ms

    free = {entry.position: entry for entry in found if entry.axes}
    inside = {entry.position[:n] for entry in found for n in range(1, len(entry.position))}

    def replaced(position, value):
        if isinstance(value, (tuple, list)):
            changed = type(value)(replaced((*position, i), x) for i, x in enumerate(value))
            # MindSpore takes the Tensors of a tuple for constants unless it is mutable
            return ms.mutable(changed) if position in inside and len(position) == 1 else changed
        entry = free.get(position)
        if entry is None:
            return value
        shape = [None if i in entry.axes else n for i, n in enumerate(entry.shape)]
        return ms.Tensor(shape=shape, dtype=value.dtype)

    return [replaced((i,), value) for i, value in enumerate(args)]


def substituted(args, found, arrays):
    """The arguments with other Tensors in them: `arrays` by input name."""
    by_position = {entry.position: arrays[entry.name] for entry in found}

    def replaced(position, value):
        if position in by_position:
            return to_tensor(by_position[position])
        if isinstance(value, (tuple, list)):
            return type(value)(replaced((*position, i), x) for i, x in enumerate(value))
        return value

    return [replaced((i,), value) for i, value in enumerate(args)]


def to_tensor(array):
    """A MindSpore Tensor of an array, bfloat16 included."""
    import mindspore as ms

    if str(array.dtype) == "bfloat16":
        return ms.Tensor(np.asarray(array, np.float32)).astype(ms.bfloat16)
    return ms.Tensor(np.ascontiguousarray(array))


def redrawn(found, lengths, rng):
    """Other values for the inputs, of the kind of the examples: resampled from them, in other shapes.

    Args:
        found (list[Input]): The inputs, with their examples.
        lengths (dict): A length for every name of a free axis.
        rng (numpy.random.Generator): Where values come from.
    """
    arrays = {}
    for entry in found:
        shape = tuple(lengths[entry.axes[i]] if i in entry.axes else n for i, n in enumerate(entry.shape))
        pool = np.zeros(0) if entry.example is None else np.asarray(entry.example).reshape(-1)
        if "float" in entry.dtype and (pool.size == 0 or np.unique(pool.astype(np.float64)).size == 1):
            values = rng.standard_normal(shape)
        elif pool.size == 0:
            values = np.zeros(shape)
        else:
            values = pool[rng.integers(0, pool.size, shape)]
        arrays[entry.name] = np.asarray(values).astype(numpy_dtype(entry.dtype))
    return arrays


def lengths_of(found):
    """{name of a free axis: its length in the examples}."""
    return {label: entry.shape[axis] for entry in found for axis, label in entry.axes.items()}
