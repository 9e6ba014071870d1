"""From the graph of a net to ONNX nodes: walks it in order and applies the rule of each node."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from .builder import NUMBERS, Builder, Scalar, Tensor, Unsupported
from .mindir import Monad, Program, ScalarType, SubGraph, TensorType, place
from .rules import RULES


class Refusal(NamedTuple):
    """A node that could not be converted."""

    op: str
    scope: str
    reason: str


class ExportError(ValueError):
    """What stands in the way of an export, all of it. `refusals` holds one entry per node."""

    def __init__(self, text, refusals=()):
        super().__init__(text)
        self.refusals = tuple(refusals)


class _Failed(NamedTuple):
    """The value of a node that could not be converted."""


class Converter:
    """Converts one Program into the graph of one Builder.

    Args:
        program (Program): What to convert.
        builder (Builder): Where the nodes go.
        progress (function): Called with the number of nodes done and of all.
    """

    def __init__(self, program: Program, builder: Builder, progress=None):
        self.program, self.builder = program, builder
        self.refusals: list[Refusal] = []
        self.progress = progress
        self._fixed: dict[str, Any] = {}
        self._stack: list[str] = []
        builder.call = self.call

    def run(self, inputs):
        """Converts the main graph.

        Args:
            inputs (list): One value per input of the graph: Tensors, or tuples of them.

        Returns:
            The value of the net: a Tensor or a tuple.

        Raises:
            ExportError: If anything in the graph cannot be converted; it names all of that.
        """
        results = self.call(SubGraph(self.program.main.name), inputs)
        if self.refusals:
            raise ExportError(_explain(self.refusals), self.refusals)
        return results

    def call(self, graph, inputs):
        """Converts `graph` in place, where it is called."""
        name, inputs = graph.name, [*graph.bound, *inputs]
        if name in self._stack:
            raise Unsupported("a loop whose number of turns the graph does not know")
        graph = self.program.graphs[name]
        env = dict(zip((entry[0] for entry in graph.inputs), inputs))
        memory = Memory(env)
        self._stack.append(name)
        for done, node in enumerate(graph.nodes):
            env[node.name] = self._node(node, env)
            memory.after(node)
            if self.progress and len(self._stack) == 1:
                self.progress(done + 1, len(graph.nodes))
        self._stack.pop()
        results = tuple(self._value(output, env) for output in graph.outputs)
        return results[0] if len(results) == 1 else results

    def _node(self, node, env):
        inputs = [self._value(name, env) for name in node.inputs]
        if node.op == "call":
            inputs.insert(0, self._value(node.attrs["callee"], env))
        if any(_contains_failure(x) for x in inputs):
            return _Failed()
        rule = rule_of(node.op)
        scope = place(node.scope)
        if rule is None:
            self.refusals.append(Refusal(node.op, scope, ""))
            return _Failed()
        # the names of a file depend on the net alone
        named = scope.rpartition(".")[0] if scope in self.program.plain else scope
        outer, self.builder.scope = self.builder.scope, named
        depth = len(self._stack)
        try:
            if in_place(node):
                self._check_in_place(node)
                if node.op not in RULES:
                    node = dataclasses.replace(node, op=node.op[len("Inplace"):])
            result = rule(self.builder, node, *[x for x in inputs if not isinstance(x, Monad)])
            return _typed(result, node.type)
        except Unsupported as reason:
            self.refusals.append(Refusal(node.op, scope, str(reason)))
        except Exception as error:
            # a rule that met what it does not expect, such as an input that a newer MindSpore has added
            self.refusals.append(Refusal(node.op, scope, f"its rule failed: {type(error).__name__}: {error}"))
        finally:
            self.builder.scope = outer
            del self._stack[depth:]
        return _Failed()

    def _check_in_place(self, node):
        target = node.inputs[0]
        if target in self.program.parameters:
            raise Unsupported(f"it changes the parameter '{self.program.parameters[target].name}', but a model keeps "
                              "nothing from run to run: make it an input and an output")
        maker = self._makers.get(target)
        if maker is None or maker.op.endswith("View"):
            raise Unsupported("it changes a view, or a value from outside, in place")

    @functools.cached_property
    def _makers(self):
        return {node.name: node for graph in self.program.graphs.values() for node in graph.nodes}

    def _value(self, name, env):
        if name in env:
            return env[name]
        if name not in self._fixed:
            self._fixed[name] = self._look_up(name)
        return self._fixed[name]

    def _look_up(self, name):
        if name in self.program.parameters:
            parameter = self.program.parameters[name]
            return Tensor(parameter.type.dtype, parameter.type.shape, self.builder.unique(parameter.name),
                          parameter.load)
        if name in self.program.graphs:
            return SubGraph(name)
        return _wrapped(self.builder, self.program.constants[name])


_WRITERS = ("Assign", "AssignAdd", "AssignSub", "ScatterNdUpdate", "ScatterUpdate")


def in_place(node):
    """Whether the node writes into its first input."""
    return node.op.startswith("Inplace") or node.op in _WRITERS


def rule_of(op):
    """The rule for a primitive; that of an in-place one gives what it writes."""
    rule = RULES.get(op)
    if rule is None and op.startswith("Inplace"):
        rule = RULES.get(op[len("Inplace"):])
    return rule


class Memory:
    """Keeps values right that are changed in place: MindSpore reads such a value through a Load, in order.

    All names of one piece of memory get the new value.
    """

    def __init__(self, env):
        self.env = env
        self.shared: dict[str, list[str]] = {}

    def after(self, node):
        """To be called when the node has its value."""
        if not in_place(node):
            return
        names = self.shared.setdefault(node.inputs[0], [node.inputs[0]])
        names.append(node.name)
        self.shared[node.name] = names
        for name in names:
            self.env[name] = self.env[node.name]


def _wrapped(builder, value):
    """A constant as rules see it."""
    if isinstance(value, np.ndarray):
        return builder.constant(value)
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_wrapped(builder, x) for x in value)
    return value


def _contains_failure(value):
    if isinstance(value, SubGraph):
        return any(map(_contains_failure, value.bound))
    return isinstance(value, _Failed) or (type(value) is tuple and any(map(_contains_failure, value)))


def _typed(result, kind):
    """`result` with what MindSpore knows of its shape."""
    if isinstance(kind, tuple) and not isinstance(kind, (TensorType, ScalarType, Monad)):
        if isinstance(result, tuple) and len(result) == len(kind):
            return tuple(_typed(r, k) for r, k in zip(result, kind))
        return result
    if isinstance(kind, TensorType) and isinstance(result, Tensor) and not isinstance(result, Scalar):
        if result.dtype != kind.dtype:
            raise Unsupported(f"its rule gave {result.dtype} where MindSpore has {kind.dtype}")
        if result.array is None and -2 not in kind.shape:
            result.shape = kind.shape
    return result


def _explain(refusals):
    """One line per primitive and reason, with the places."""
    groups: dict[tuple, list[str]] = {}
    for op, scope, reason in refusals:
        groups.setdefault((op, reason), []).append(scope or "the net itself")
    lines = []
    for (op, reason), scopes in sorted(groups.items()):
        places = list(dict.fromkeys(scopes))
        shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more places" if len(places) > 3 else "")
        lines.append(f"  {op}: {reason or 'no rule for this primitive'} (in {shown})")
    missing = any(not reason for _, _, reason in refusals)
    hint = "\nHint: a rule for a primitive is added with ms_flash.onnx_export.rules.register, see docs/onnx.md." \
        if missing else ""
    return f"For 'export_onnx', {len(groups)} {'thing' if len(groups) == 1 else 'things'} in the net cannot be " \
           f"exported:\n" + "\n".join(lines) + hint


def flatten(value, name):
    """(name, Tensor) for every Tensor in the value of a net; None is left out."""
    if value is None:
        return []
    if isinstance(value, (Tensor, *NUMBERS)):
        return [(name, value)]
    if type(value) is tuple:
        return [pair for index, x in enumerate(value) for pair in flatten(x, f"{name}_{index}")]
    raise ExportError(f"For 'export_onnx', the net must return Tensors, but '{name}' is {type(value).__name__}.")
