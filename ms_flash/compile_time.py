"""Python that runs on what is known of its arguments: when called in PyNative, while it is compiled in a graph."""

from __future__ import annotations

from mindspore import Tensor
from mindspore.ops import PrimitiveWithInfer

from .spec import Arg, Unknown


class CompileTime(PrimitiveWithInfer):
    """A call whose result is a constant of the graph.

    The function receives Tensors as Arg (shape, dtype), constants as themselves, and values that a graph does not know
    as Unknown. Whatever it raises reaches the user as it is.

    Args:
        name (str): Name of the node.
        function (function): Takes the arguments as described; its result must be a constant MindSpore can hold.
    """

    def __init__(self, name, function):
        super().__init__(name)
        self._function = function
        self.set_const_prim(True)
        self.add_prim_attr("constexpr_prim", True)
        self.add_prim_attr("forbid_reuse_result", True)

    def __infer__(self, *items):
        return {"shape": None, "dtype": None, "value": self._function(*[_known(item) for item in items])}

    def __call__(self, *args):
        return self._function(*[_described(x) if isinstance(x, Tensor) else x for x in args])


def _described(x):
    return Arg(x.shape, _dtype_name(x.dtype))


def _known(item):
    dtype, value = item["dtype"], item["value"]
    if hasattr(dtype, "element_type"):
        shape = tuple(item["shape"])
        return Arg(None if -2 in shape else shape, _dtype_name(dtype.element_type()))
    if dtype is not None and value is None:
        return Unknown(f"a variable of the graph ({dtype})")
    return value


def _dtype_name(dtype):
    """MindSpore writes Float32, Bool, BFloat16."""
    return str(dtype).lower()
