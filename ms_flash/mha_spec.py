"""MhaSpec: a request for the block op, which is attention with the projections around it, checked once."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from . import op_table
from .spec import Arg, AttentionSpec, type_error, value_error

MHA_SLOTS = op_table.input_names("mha_inputs")
GRADIENTS = MHA_SLOTS[:11] + ("sinks",)  # inputs whose gradients the backward gives, in its order
_OPTIONS = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "softcap": 0.0, "layout": "BSH",
            "causal_align": "bottom_right", "training": True, "deterministic": True, "precision_mode": "default",
            "block_m": None, "block_n": None, "num_heads": None, "num_kv_heads": None, "mask_fill": None}


@dataclass(frozen=True)
class MhaSpec:
    """One validated request. Lengths that a graph does not know while it is compiled are -1."""

    func: str
    attention: AttentionSpec    # of the projected queries, keys and values
    transposed: tuple[bool, ...]
    interleaved: bool
    recompute: bool
    grads: tuple[str, ...]
    out_shape: tuple[int, ...]
    inputs: tuple[Arg | None, ...]   # by slot

    @property
    def dtype(self) -> str:
        """That of x, the weights and the output."""
        return self.attention.dtype

    @property
    def saved(self) -> tuple[int, ...]:
        """Which results of the forward the backward takes, in its order; row_max for q, k, v that it computes anew."""
        qkv = (5, 5, 5) if self.recompute else (1, 2, 3)
        return (*qkv, 4 if self.has("w_o") else 0, 5, 6)

    @property
    def work_shape(self) -> tuple[int, ...]:
        """Shape of the working memory, the last result of the backward: see op_impl/cpu/mha.cpp."""
        spec, padded = self.attention, lambda n: (n + 31) // 32 * 32
        shapes = [arg.shape for arg in spec.inputs[:3]]
        if any(shape is None or -1 in shape for shape in shapes):
            return (-1,)
        attn = padded(math.prod(spec.out_shape)) if self.has("w_o") else 0
        return (attn + sum(padded(math.prod(shape)) for shape in shapes),)

    def has(self, name: str) -> bool:
        """Whether the input of that name is given."""
        return self.inputs[MHA_SLOTS.index(name)] is not None

    def dtype_of(self, name: str) -> str:
        """The dtype of an input that is given."""
        return self.inputs[MHA_SLOTS.index(name)].dtype

    @functools.cached_property
    def primitives(self) -> dict:
        """Where backends keep the primitives of this request, by (backend, op)."""
        return {}

    def render(self) -> str:
        """The string attribute that carries everything static to the kernels."""
        digits = lambda flags: "".join("1" if flag else "0" for flag in flags)
        fields = [("inputs", digits(arg is not None for arg in self.inputs)), ("recompute", int(self.recompute)),
                  ("interleaved", int(self.interleaved)), ("transposed", digits(self.transposed)),
                  ("grads", digits(name in self.grads for name in GRADIENTS))]
        return ";".join(f"{key}={value}" for key, value in fields) + "|" + self.attention.render()

    @staticmethod
    def parse(func, inputs, *, num_heads, num_kv_heads=None, layout="BSH", transposed=(False,) * 4, interleaved=False,
              recompute=False, grads=None, window_size=(-1, -1), **options) -> MhaSpec:
        """Checks a request.

        Args:
            func (str): Name of the public function, for error texts.
            inputs (tuple): One Arg or ``None`` per slot of MHA_SLOTS; slot attn_mask may be a window, slot seed an int.
                Without w_v, w_k holds keys and values; without w_k, w_q holds all three, and so do the biases.
            num_heads (int): Heads of the queries.
            num_kv_heads (int): Heads of keys and values; ``None`` is `num_heads`. Default: ``None``.
            layout (str): "BSH" for hidden states (B, S, E), "SBH" for (S, B, E). Default: ``"BSH"``.
            transposed (tuple): For w_q, w_k, w_v, w_o: ``True`` when stored (in, out), not (out, in).
            interleaved (bool): Packed weights are ordered (head, part, channel). Default: ``False``.
            recompute (bool): Compute queries, keys and values again in the backward. Default: ``False``.
            grads (tuple): Names, of GRADIENTS, of the inputs whose gradients are wanted; ``None`` is all of them.
            window_size (tuple): As for flash_attention.
            options: Those of flash_attention, without layout and heads.

        Returns:
            MhaSpec.

        Raises:
            ValueError: If a value or shape is wrong.
            TypeError: If a type or dtype is wrong.
        """
        if layout not in ("BSH", "SBH"):
            raise value_error(func, f"'layout' must be one of 'BSH', 'SBH', but got {layout!r}.")
        for name in set(grads or ()) - set(GRADIENTS):
            raise value_error(func, f"'grads' must hold names of {', '.join(GRADIENTS)}, but got {name!r}.")
        for name in set(options) - set(_OPTIONS):
            raise value_error(func, f"there is no option {name!r}.")
        given = dict(zip(MHA_SLOTS, inputs))
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        shapes = _Projections(func, given, num_heads, num_kv_heads, layout, transposed, interleaved)
        values = {**_OPTIONS, **options, "layout": layout, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        attention = AttentionSpec.parse(
            func, (*shapes.qkv, *(given[name] for name in MHA_SLOTS[11:]), None, None), window_size,
            tuple(values.values()))
        return MhaSpec(func=func, attention=attention, transposed=tuple(bool(t) for t in transposed),
                       interleaved=bool(interleaved), recompute=bool(recompute),
                       grads=GRADIENTS if grads is None else tuple(grads), out_shape=shapes.out,
                       inputs=tuple(inputs[:11]) + attention.inputs[3:9])


class _Projections:
    """Shapes of the projected queries, keys and values and of the output, after checking what they come from."""

    def __init__(self, func, given, heads, kv_heads, layout, transposed, interleaved):
        self.func, self.given, self.transposed = func, given, dict(zip(("w_q", "w_k", "w_v", "w_o"), transposed))
        for name in ("x", "w_q"):
            if given[name] is None:
                raise type_error(func, f"the type of '{name}' must be Tensor, but got NoneType.")
        if given["w_v"] is not None and given["w_k"] is None:
            raise value_error(func, "'w_v' must be None where 'w_k' is: then 'w_q' holds query, key and value.")
        for bias, weight in (("b_k", "w_k"), ("b_v", "w_v"), ("b_o", "w_o")):
            if given[bias] is not None and given[weight] is None:
                raise value_error(func, f"'{bias}' must be None where '{weight}' is, but got {given[bias]}.")
        for name, n in (("num_heads", heads), ("num_kv_heads", kv_heads)):
            if isinstance(n, bool) or not isinstance(n, int):
                raise type_error(func, f"the type of '{name}' must be int, but got {type(n).__name__}.")
            if n < 1:
                raise value_error(func, f"'{name}' must be 1 or greater, but got {n}.")
        if interleaved and given["w_k"] is None and heads != kv_heads:
            raise value_error(func, f"'num_kv_heads' must be equal to 'num_heads' {heads} where packed weights are "
                                    f"interleaved, but got {kv_heads}.")
        self._check_dtypes()
        self._check_ranks()
        source_k = "x" if given["context"] is None else "context"
        source_v = source_k if given["context_v"] is None else "context_v"
        channels = self._channels(heads, kv_heads, ("x", source_k, source_v))
        self.qkv = tuple(self._with_channels(source, n) for source, n in zip(("x", source_k, source_v), channels))
        out = channels[2] // kv_heads * heads if channels[2] >= 0 else -1
        if given["w_o"] is not None:
            merged = out
            out, inner = self._weight("w_o")
            self._equal("the input channels of 'w_o'", inner, merged)
            self._bias("b_o", out)
        self.out = self._with_channels("x", out).shape

    def _check_dtypes(self):
        x = self.given["x"]
        for name in MHA_SLOTS[:11]:
            arg = self.given[name]
            allowed = op_table.dtypes(name, x.dtype)
            if arg is not None and arg.dtype not in allowed:
                expected = allowed[0] if len(allowed) == 1 else "one of " + ", ".join(allowed)
                raise type_error(self.func, f"the dtype of '{name}' must be {expected}, but got {arg.dtype}.")

    def _check_ranks(self):
        ranks = dict.fromkeys(("x", "context", "context_v"), 3)
        ranks.update(dict.fromkeys(("w_q", "w_k", "w_v", "w_o"), 2))
        ranks.update(dict.fromkeys(("b_q", "b_k", "b_v", "b_o"), 1))
        for name, rank in ranks.items():
            arg = self.given[name]
            if arg is not None and arg.shape is not None and len(arg.shape) != rank:
                raise value_error(self.func, f"the rank of '{name}' must be {rank}, but got {len(arg.shape)}, shape "
                                             f"{arg}.")

    def _weight(self, name):
        """(out, in) of a weight."""
        shape = self.given[name].shape or (-1, -1)
        return shape[::-1] if self.transposed[name] else shape

    def _equal(self, what, got, expected):
        if got >= 0 and expected >= 0 and got != expected:
            raise value_error(self.func, f"{what} must be {expected}, but got {got}.")

    def _bias(self, name, channels):
        arg = self.given[name]
        if arg is not None and arg.shape is not None:
            self._equal(f"the length of '{name}'", arg.shape[0], channels)

    def _channels(self, heads, kv_heads, sources):
        """Output channels of the three projections."""
        given, counts = self.given, (heads, kv_heads, kv_heads)
        slots = ["w_q", "w_q" if given["w_k"] is None else "w_k"]
        slots.append(slots[1] if given["w_v"] is None else "w_v")
        channels = []
        for slot, count, source in zip(slots, counts, sources):
            out, inner = self._weight(slot)
            arg = given[source]
            if arg.shape is not None:
                self._equal(f"the input channels of '{slot}'", inner, arg.shape[2])
            self._bias("b" + slot[1:], out)
            total = sum(n for s, n in zip(slots, counts) if s == slot)
            if out >= 0 and out % total:
                raise value_error(self.func, f"the output channels of '{slot}' must be a multiple of the {total} heads "
                                             f"it makes, but got {out}.")
            channels.append(-1 if out < 0 else out // total * count)
        return channels

    def _with_channels(self, source, channels):
        shape = self.given[source].shape
        return Arg((-1, -1, channels) if shape is None else (*shape[:2], channels), self.given["x"].dtype)
