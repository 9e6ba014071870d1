"""AttentionSpec: a request for attention, parsed and validated once; everything behind the public call receives it."""

from __future__ import annotations

import functools
import math
import numbers
from dataclasses import dataclass
from typing import NamedTuple

from . import op_table

ALIGNMENTS = tuple(op_table.table()["attributes"]["align"]["values"])
PRECISIONS = tuple(op_table.table()["attributes"]["precision"]["values"])
LAYOUTS = op_table.table()["layouts"]
SLOTS = op_table.input_names()
_FLOAT32_MAX = 3.4028234663852886e38


class Arg(NamedTuple):
    """What is known of a Tensor argument: shape (-1 = unknown length, ``None`` = unknown rank) and dtype name."""

    shape: tuple[int, ...] | None
    dtype: str

    def __str__(self):
        return "unknown" if self.shape is None else str(self.shape).replace("-1", "?")


def value_error(func: str, text: str) -> ValueError:
    """A wrong value or shape, in MindSpore's words."""
    return ValueError(f"For '{func}', {text}")


def type_error(func: str, text: str) -> TypeError:
    """A wrong type or dtype, in MindSpore's words."""
    return TypeError(f"For '{func}', {text}")


@dataclass(frozen=True)
class AttentionSpec:
    """One validated request. Lengths that a graph does not know while it is compiled are -1."""

    func: str
    layout: str
    packed: bool
    dtype: str
    batch: int
    num_heads: int
    num_kv_heads: int
    q_len: int              # T for TND
    k_len: int
    head_dim: int
    v_head_dim: int
    heads_in_spec: tuple[int, int]
    scale: float | None
    left: int
    right: int
    align: str
    softcap: float
    dropout_p: float        # 0 outside training
    seed: int
    seed_source: str        # "spec", "tensor" or "generator"
    mask_fill: float | None
    precision: str
    block_m: int
    block_n: int
    inputs: tuple[Arg | None, ...]   # by slot; the seed slot is filled when a seed Tensor is passed on

    @property
    def present(self) -> str:
        """0 or 1 per input slot."""
        return "".join("0" if arg is None else "1" for arg in self.inputs)

    def has(self, name: str) -> bool:
        """Whether the input of that name is given."""
        return self.inputs[SLOTS.index(name)] is not None

    @property
    def head_dims(self) -> tuple[tuple[str, int], ...]:
        """By the tensor that has it; -1 where a graph does not know it yet."""
        return (("query", self.head_dim), ("value", self.v_head_dim))

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output, in the layout of the query."""
        sizes = {"B": self.batch, "N": self.num_heads, "S": self.q_len, "T": self.q_len, "D": self.v_head_dim,
                 "H": self.num_heads * self.v_head_dim}
        return tuple(sizes[axis] for axis in LAYOUTS[self.layout]["axes"])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(B, N, Sq), or (N, T) for variable lengths."""
        rows = (self.num_heads, self.q_len)
        return rows if self.layout == "TND" else (self.batch,) + rows

    @functools.cached_property
    def static(self) -> bool:
        """Whether every shape is known."""
        return all(arg is None or (arg.shape is not None and -1 not in arg.shape) for arg in self.inputs)

    @functools.cached_property
    def empty_shapes(self) -> tuple | None:
        """Shapes of output and LSE if it is known that there is no query, or no key for any of them."""
        empty = 0 in (self.batch, self.q_len, self.k_len) and -1 not in self.out_shape + self.lse_shape
        return (self.out_shape, self.lse_shape) if empty else None

    @functools.cached_property
    def primitives(self) -> dict:
        """Where backends keep the primitives of this request, by (backend, op)."""
        return {}

    def render(self) -> str:
        """The string attribute that carries everything static to the kernels."""
        fields = [
            ("layout", self.layout), ("heads", self.heads_in_spec[0]), ("kv_heads", self.heads_in_spec[1]),
            ("packed", int(self.packed)), ("scale", "default" if self.scale is None else self.scale.hex()),
            ("left", self.left), ("right", self.right), ("align", self.align), ("softcap", self.softcap.hex()),
            ("dropout", self.dropout_p.hex()), ("seed", self.seed), ("offset", 0)]
        if self.mask_fill is not None:
            fields.append(("fill", self.mask_fill.hex()))
        fields += [("precision", self.precision), ("block_m", self.block_m), ("block_n", self.block_n),
                   ("present", self.present)]
        return ";".join(f"{key}={value}" for key, value in fields)

    @staticmethod
    def parse(func, inputs, window_size, options) -> AttentionSpec:
        """Checks a request and returns its spec, from a cache when the same one came before.

        Args:
            func (str): Name of the public function, for error texts.
            inputs (tuple): One Arg or ``None`` per slot; slot attn_mask may be a window, slot seed an int.
            window_size (tuple): As given by the user.
            options (tuple): Values of OPTIONS, in that order.

        Returns:
            AttentionSpec.

        Raises:
            ValueError: If a value or shape is wrong.
            TypeError: If a type or dtype is wrong.
        """
        mask = inputs[3]
        if mask is not None and not isinstance(mask, Arg):
            mask = _window(func, "attn_mask", mask)
        window = _window(func, "window_size", window_size)
        seed = inputs[7]
        inputs = inputs[:3] + (mask if isinstance(mask, Arg) else None,) + inputs[4:7] + (
            seed if isinstance(seed, Arg) else None,) + inputs[8:]
        arguments = (func, inputs, None if isinstance(mask, Arg) else mask, window,
                     None if isinstance(seed, Arg) else seed) + options
        try:
            return _parse_cached(*arguments)
        except TypeError:       # an option that cannot be hashed: _parse names it
            return _parse(*arguments)


OPTIONS = ("dropout_p", "softmax_scale", "causal", "softcap", "layout", "causal_align", "training", "deterministic",
           "precision_mode", "block_m", "block_n", "num_heads", "num_kv_heads", "mask_fill")


def _parse(func, inputs, mask_window, window, seed, dropout_p, softmax_scale, causal, softcap, layout, causal_align,
           training, deterministic, precision_mode, block_m, block_n, num_heads, num_kv_heads, mask_fill):
    check = Check(func)
    for name, flag in (("causal", causal), ("training", training), ("deterministic", deterministic)):
        check.boolean(name, flag)
    varlen = func == "flash_attention_varlen" or inputs[9] is not None or inputs[10] is not None
    check.one_of("layout", layout, tuple(n for n in LAYOUTS if (n == "TND") == varlen), _layout_hint(layout))
    check.one_of("causal_align", causal_align, ALIGNMENTS)
    check.one_of("precision_mode", precision_mode, PRECISIONS)
    for name, size in (("block_m", block_m), ("block_n", block_n), ("num_heads", num_heads),
                       ("num_kv_heads", num_kv_heads)):
        if size is not None:
            check.integer(name, size, 1)
    scale = None if softmax_scale is None else check.number("softmax_scale", softmax_scale)
    softcap = check.number("softcap", softcap)
    if softcap < 0:
        raise check.value(f"'softcap' must be 0 (none) or greater, but got {softcap}.")
    fill = None if mask_fill is None else check.number("mask_fill", mask_fill)
    dropout = check.number("dropout_p", dropout_p)
    if not 0 <= dropout < 1:
        raise check.value(f"'dropout_p' must be in the range [0, 1), but got {dropout_p}.")
    left, right = _merge_windows(check, window, mask_window)
    if causal:
        right = 0
    seed_arg, drop_mask = inputs[7], inputs[8]
    if seed is not None:
        check.integer("seed", seed, -2**63, 2**63 - 1)
    if seed_arg is not None:
        check.dtype("seed", seed_arg, "a Tensor seed holds (seed, offset)")
        check.shape("seed", seed_arg, (2,), "(seed, offset)")

    shape = _Shapes(check, inputs, layout, num_heads, num_kv_heads)
    _check_dtypes(check, inputs)
    if varlen:
        _check_varlen(check, shape, inputs)
    for name in ("attn_mask", "bias", "drop_mask"):
        _check_plane(check, shape, name, inputs[SLOTS.index(name)], varlen)
    if inputs[5] is not None:
        _check_slopes(check, shape, inputs[5])
    if inputs[6] is not None:
        check.shape("sinks", inputs[6], (shape.num_heads,), "(num_heads,)")

    if not training or (drop_mask is None and dropout == 0):
        dropout, seed_arg, drop_mask, source = 0.0, None, None, "spec"
    elif drop_mask is not None:
        seed_arg, source = None, "spec"
    elif seed_arg is not None:
        source = "tensor"
    elif seed is None:
        seed_arg, source = Arg((2,), "int64"), "generator"
    else:
        source = "spec"
    return AttentionSpec(
        func=func, layout=layout, packed=shape.packed, dtype=inputs[0].dtype, batch=shape.batch,
        num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, q_len=shape.q_len, k_len=shape.k_len,
        head_dim=shape.head_dim, v_head_dim=shape.v_head_dim, heads_in_spec=shape.heads_in_spec, scale=scale,
        left=left, right=right, align=causal_align, softcap=softcap, dropout_p=dropout,
        seed=int(seed) if source == "spec" and dropout and seed is not None else 0, seed_source=source,
        mask_fill=fill, precision=precision_mode, block_m=int(block_m or 0), block_n=int(block_n or 0),
        inputs=inputs[:7] + (seed_arg, drop_mask) + inputs[9:])


# typed: 1, 1.0 and True are equal keys otherwise, and the wrong one of them would pass unchecked
_parse_cached = functools.lru_cache(4096, typed=True)(_parse)


class Check:
    """Checks of single values, with the name of the public function in every error text."""

    def __init__(self, func):
        self.func = func

    def value(self, text):
        return value_error(self.func, text)

    def type(self, text):
        return type_error(self.func, text)

    def boolean(self, name, x):
        if not isinstance(x, bool):
            raise self.type(f"the type of '{name}' must be bool, but got {type_name(x)}.")

    def integer(self, name, x, low, high=2**31 - 1):
        if isinstance(x, bool) or not isinstance(x, numbers.Integral):
            raise self.type(f"the type of '{name}' must be int, but got {type_name(x)}.")
        if not low <= x <= high:
            bound = f"in the range [{low}, {high}]" if x > high else f"{low} or greater"
            raise self.value(f"'{name}' must be {bound}, but got {x}.")

    def number(self, name, x):
        if isinstance(x, bool) or not isinstance(x, numbers.Real):
            raise self.type(f"the type of '{name}' must be float or int, but got {type_name(x)}.")
        try:
            number = float(x)
        except OverflowError:   # an int beyond float64
            number = math.inf
        if not math.isfinite(number):
            raise self.value(f"'{name}' must be finite, but got {number}.")
        if abs(number) > _FLOAT32_MAX:
            raise self.value(f"'{name}' must be finite in float32, the precision of the kernels, but got {number}.")
        return number

    def one_of(self, name, x, names, hint=""):
        if not isinstance(x, str) or isinstance(x, Unknown):
            raise self.type(f"the type of '{name}' must be str, but got {type_name(x)}.")
        if x not in names:
            raise self.value(f"'{name}' must be one of {', '.join(map(repr, names))}, but got {x!r}.{hint}")

    def dtype(self, name, arg, hint="", query=None):
        allowed = op_table.dtypes(name, query)
        if arg.dtype not in allowed:
            expected = allowed[0] if len(allowed) == 1 else "one of " + ", ".join(allowed)
            raise self.type(f"the dtype of '{name}' must be {expected}, but got {arg.dtype}."
                            + (f" Hint: {hint}." if hint else ""))

    def shape(self, name, arg, expected, meaning):
        if arg.shape is None:
            return
        if len(arg.shape) != len(expected) or any(differ(a, b) for a, b in zip(arg.shape, expected)):
            raise self.value(f"the shape of '{name}' must be {meaning} = {Arg(expected, '')}, but got {arg}.")


def type_name(x) -> str:
    """How error texts call the type of `x`."""
    if isinstance(x, Arg):
        return "Tensor"
    return x if isinstance(x, Unknown) else type(x).__name__


class Unknown(str):
    """Stands for a value that a graph does not know while it is compiled; the text is its type."""


def differ(a, b):
    return a != b and a >= 0 and b >= 0


def _window(func, name, window):
    """(left, right) as ints."""
    if not isinstance(window, (tuple, list)):
        hint = "" if name == "window_size" else " (or a Tensor)"
        raise type_error(func, f"the type of '{name}' must be a tuple (left, right){hint}, "
                               f"but got {type_name(window)}.")
    if len(window) != 2:
        raise value_error(func, f"'{name}' must hold two numbers (left, right), but got {len(window)}: {window}.")
    for x in window:
        if isinstance(x, bool) or not isinstance(x, numbers.Integral):
            raise type_error(func, f"'{name}' must hold ints, but got {type_name(x)} in {window}.")
        if x < -1:
            raise value_error(func, f"'{name}' must hold numbers of keys, or -1 for no limit, but got {tuple(window)}.")
    # more than any length is no limit; the kernels count in 32 bits here
    return tuple(-1 if x >= 2**31 - 1 else int(x) for x in window)


def _merge_windows(check, window, mask_window):
    if mask_window is None:
        return window
    if window != (-1, -1):
        raise check.value(f"a window is given twice: 'attn_mask' {mask_window} and 'window_size' {window}.")
    return mask_window


def _layout_hint(layout):
    if layout == "TND":
        return " Hint: for sequences end to end use 'flash_attention_varlen'."
    if isinstance(layout, str) and layout.upper() in LAYOUTS:
        return f" Hint: did you mean {layout.upper()!r}?"
    return ""


class _Shapes:
    """Sizes read from query, key and value, after checking that they agree."""

    def __init__(self, check, inputs, layout, num_heads, num_kv_heads):
        self.check, self.layout = check, layout
        self.axes = LAYOUTS[layout]["axes"]
        query, key, value = inputs[:3]
        if query is None:
            raise check.type("the type of 'query' must be Tensor, but got NoneType.")
        if (key is None) != (value is None):
            missing = "key" if key is None else "value"
            raise check.value("'key' and 'value' must be given both, or neither for packed QKV in 'query', "
                              f"but '{missing}' is None.")
        self.packed = key is None
        if self.packed and layout == "TND":
            raise check.type("the type of 'key' must be Tensor, but got NoneType.")
        self.given = (num_heads, num_kv_heads)
        five = layout == "BSND" and query.shape is not None and len(query.shape) == 5 and self.packed
        for name, arg in (("query", query), ("key", key), ("value", value)):
            if arg is not None and not (five and name == "query"):
                self._rank(name, arg)
        q, k, v = (self._sizes(arg) for arg in (query, key, value))
        self.batch, self.q_len = q.get("B", -1), q.get("S", q.get("T", -1))
        if five:
            self._packed_five(query.shape)
        elif self.packed:
            self._packed(query, q)
        else:
            self._separate(query, key, value, q, k, v)
        self._positive()

    def _rank(self, name, arg):
        if arg.shape is None or len(arg.shape) == len(self.axes):
            return
        hint = ""
        if len(arg.shape) == 3 and len(self.axes) == 4:
            hint = " Hint: for a (batch, length, hidden) tensor use layout='BSH' and 'num_heads'."
        elif len(arg.shape) == 4 and len(self.axes) == 3 and self.layout != "TND":
            hint = " Hint: for a 4-D tensor use layout='BNSD' or 'BSND'."
        elif len(arg.shape) == 4 and self.layout == "TND":
            hint = " Hint: for sequences of one length use 'flash_attention'."
        axes = ", ".join(self.axes)
        raise self.check.value(f"the rank of '{name}' must be {len(self.axes)} ({axes}) for layout '{self.layout}', "
                               f"but got {len(arg.shape)}, shape {arg}.{hint}")

    def _sizes(self, arg):
        if arg is None or arg.shape is None or len(arg.shape) != len(self.axes):
            return {}
        return dict(zip(self.axes, arg.shape))

    def _head_count(self, name, from_shape):
        """The number of heads of query ('num_heads') or key ('num_kv_heads'), from the shape unless that is unknown."""
        given = self.given[name == "num_kv_heads"]
        if given is not None and differ(given, from_shape):
            tensor = "query" if name == "num_heads" else "key"
            raise self.check.value(f"'{name}' must be equal to the number of heads of '{tensor}' {from_shape} "
                                   f"(layout '{self.layout}'), but got {given}.")
        return from_shape if from_shape >= 0 or given is None else given

    def _need_heads(self):
        heads, kv_heads = self.given
        if heads is None:
            why = "packed QKV" if self.packed else f"layout '{self.layout}'"
            raise self.check.value(f"'num_heads' must be given for {why}, but got None.")
        return heads, heads if kv_heads is None else kv_heads

    def _divide(self, name, hidden, heads, length, what="num_heads"):
        if hidden < 0:
            return -1
        if heads and hidden % heads:
            hint = ""
            if heads == length:
                hint = f" Hint: {heads} is the sequence length; '{what}' is the number of attention heads."
            raise self.check.value(f"the hidden size of '{name}' must be divisible by '{what}' {heads}, "
                                   f"but got {hidden}.{hint}")
        return hidden // heads

    def _packed(self, query, q):
        heads, kv_heads = self._need_heads()
        self.num_heads, self.num_kv_heads, self.k_len = heads, kv_heads, self.q_len
        total = heads + 2 * kv_heads
        if "H" in self.axes:
            hidden = q.get("H", -1)
            if hidden >= 0 and hidden % total:
                raise self.check.value(
                    "the hidden size of packed 'query' must be divisible by num_heads + 2 * num_kv_heads = "
                    f"{total}, but got {hidden}.")
            self.head_dim = hidden // total if hidden >= 0 else -1
        else:
            if differ(q.get("N", -1), total):
                raise self.check.value("the heads of packed 'query' must be num_heads + 2 * num_kv_heads = "
                                       f"{total}, but got {q['N']}, shape {query}. Hint: without 'key' and 'value', "
                                       "'query' holds all three along the head axis.")
            self.head_dim = q.get("D", -1)
        self.v_head_dim, self.heads_in_spec = self.head_dim, (heads, kv_heads)

    def _packed_five(self, shape):
        self.batch, self.q_len, three, heads, self.head_dim = shape
        if differ(three, 3):
            raise self.check.value("the third axis of a 5-D packed 'query' (B, S, 3, N, D) must be 3, but got "
                                   f"{three}, shape {Arg(shape, '')}.")
        self.num_heads = self._head_count("num_heads", heads)
        kv_heads = self.given[1]
        if kv_heads is not None and differ(kv_heads, self.num_heads):
            raise self.check.value("'num_kv_heads' must be equal to 'num_heads' for a 5-D packed 'query' "
                                   f"{self.num_heads}, but got {kv_heads}.")
        self.num_kv_heads, self.k_len, self.v_head_dim = self.num_heads, self.q_len, self.head_dim
        self.heads_in_spec = (max(self.num_heads, 0),) * 2

    def _separate(self, query, key, value, q, k, v):
        check = self.check
        self.k_len = k.get("S", k.get("T", -1))
        for name, arg, sizes in (("key", key, k), ("value", value, v)):
            if differ(q.get("B", -1), sizes.get("B", -1)):
                raise check.value(f"the batch size of '{name}' must be equal to that of 'query' {q['B']}, "
                                  f"but got {sizes['B']}: query {query}, {name} {arg}.{self._swap_hint(query, arg)}")
        v_len = v.get("S", v.get("T", -1))
        if differ(self.k_len, v_len):
            raise check.value(f"the length of 'value' must be equal to that of 'key' {self.k_len}, but got {v_len}: "
                              f"key {key}, value {value}.")
        self.k_len = max(self.k_len, v_len)
        if "H" in self.axes:
            self._separate_hidden(key, q, k, v)
            return
        self.num_heads = self._head_count("num_heads", q.get("N", -1))
        self.num_kv_heads = self._head_count("num_kv_heads", max(k.get("N", -1), v.get("N", -1)))
        if differ(q.get("D", -1), k.get("D", -1)):
            raise check.value(f"the 'head_dim' of 'key' must be equal to that of 'query' {q['D']}, but got {k['D']}: "
                              f"query {query}, key {key}.")
        if differ(k.get("N", -1), v.get("N", -1)):
            raise check.value(f"the number of heads of 'value' must be equal to that of 'key' {k['N']}, but got "
                              f"{v['N']}: key {key}, value {value}.")
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads and self.num_heads > 0:
            raise check.value(f"the number of heads of 'query' must be a multiple of that of 'key' "
                              f"{self.num_kv_heads}, but got {self.num_heads}: query {query}, key {key}."
                              f"{self._swap_hint(query, key)}")
        self.head_dim, self.v_head_dim = max(q.get("D", -1), k.get("D", -1)), v.get("D", -1)
        self.heads_in_spec = (0, 0)

    def _separate_hidden(self, key, q, k, v):
        check = self.check
        heads, kv_heads = self._need_heads()
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self.head_dim = self._divide("query", q.get("H", -1), heads, self.q_len)
        hidden = k.get("H", -1)
        if hidden >= 0 and self.head_dim >= 0 and hidden != kv_heads * self.head_dim:
            hint = ""
            if self.head_dim and hidden % self.head_dim == 0 and self.given[1] is None:
                hint = f" Hint: for grouped-query attention give num_kv_heads={hidden // self.head_dim}."
            raise check.value(f"the hidden size of 'key' must be num_kv_heads * head_dim = {kv_heads} * "
                              f"{self.head_dim} = {kv_heads * self.head_dim}, but got {hidden}.{hint}")
        if self.head_dim < 0:
            self.head_dim = self._divide("key", hidden, kv_heads, self.k_len, "num_kv_heads")
        if heads % kv_heads:
            raise check.value(f"'num_heads' must be a multiple of 'num_kv_heads' {kv_heads}, but got {heads}.")
        self.v_head_dim = self._divide("value", v.get("H", -1), kv_heads, self.k_len, "num_kv_heads")
        self.heads_in_spec = (heads, kv_heads)

    def _positive(self):
        heads, kv_heads = self.num_heads, self.num_kv_heads
        for name, tensor, size in (("num_heads", "query", heads), ("num_kv_heads", "key", kv_heads),
                                   ("head_dim", "query", self.head_dim), ("head_dim", "value", self.v_head_dim)):
            if size == 0:
                raise self.check.value(f"'{name}' of '{tensor}' must be 1 or greater, but got 0.")
        if heads > 0 and kv_heads > 0 and heads % kv_heads:
            raise self.check.value(f"'num_heads' must be a multiple of 'num_kv_heads' {kv_heads}, but got {heads}.")

    def _swap_hint(self, query, other):
        """For tensors whose heads and length look exchanged, as in a BSND tensor passed as BNSD."""
        a, b = query.shape, other.shape
        if a is None or b is None:
            return ""
        if len(a) == 4 and len(b) == 4 and a[0] == b[0] and a[2] == b[2] and a[1] != b[1]:
            instead = "BSND" if self.layout == "BNSD" else "BNSD"
            return f" Hint: if heads and length are swapped, pass layout='{instead}'."
        if len(a) == 4 and len(b) == 4 and a[0] == b[0] and a[1] == b[1] and a[2] != b[2] and self.layout == "BSND":
            return " Hint: if heads and length are swapped, pass layout='BNSD'."
        if len(a) == 3 and len(b) == 3 and a[1] == b[1] and a[0] != b[0] and self.layout in ("BSH", "SBH"):
            instead = "SBH" if self.layout == "BSH" else "BSH"
            return f" Hint: if batch and length are swapped, pass layout='{instead}'."
        return ""


def _check_dtypes(check, inputs):
    query, key, value, mask, bias, slopes, sinks, _, drop_mask, cu_q, cu_k = inputs
    check.dtype("query", query)
    for name, arg in (("key", key), ("value", value)):
        if arg is not None and arg.dtype != query.dtype:
            raise check.type(f"the dtype of '{name}' must be equal to that of 'query' {query.dtype}, but got "
                             f"{arg.dtype}. Hint: nothing is cast silently; cast one of them.")
    if mask is not None:
        hint = "cast to bool, True = masked out; a mask in which 1 means keep is inverted by attn_mask == 0"
        if "float" in mask.dtype:
            hint = "a float mask is added to the scores: pass it as 'bias'; in 'attn_mask' True means masked out"
        check.dtype("attn_mask", mask, hint)
    if bias is not None:
        hint = "a bool mask is 'attn_mask', True = masked out" if bias.dtype in op_table.dtypes("attn_mask") else ""
        check.dtype("bias", bias, hint, query.dtype)
    if slopes is not None:
        check.dtype("alibi_slopes", slopes)
    if sinks is not None:
        check.dtype("sinks", sinks, "", query.dtype)
    if drop_mask is not None:
        check.dtype("drop_mask", drop_mask)
    for name, arg in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if arg is not None:
            check.dtype(name, arg)


def _check_varlen(check, shape, inputs):
    bias, cu_q, cu_k = inputs[4], inputs[9], inputs[10]
    if bias is not None:
        raise check.value("'bias' must be None, because a bias is not supported for variable lengths, "
                          f"but got a Tensor of shape {bias}.")
    for name, arg in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if arg is None:
            raise check.type(f"the type of '{name}' must be Tensor, but got NoneType.")
    sizes = []
    for name, arg in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if arg.shape is not None:
            if len(arg.shape) != 1:
                raise check.value(f"the shape of '{name}' must be (batch + 1,), but got {arg}.")
            if arg.shape[0] == 0:
                raise check.value(f"the shape of '{name}' must be (batch + 1,), its first entry being 0, but got (0,).")
            sizes.append(arg.shape[0])
    if len(sizes) == 2 and differ(*sizes):
        raise check.value(f"the shape of 'cu_seqlens_k' must be equal to that of 'cu_seqlens_q' ({sizes[0]},), "
                          f"but got ({sizes[1]},).")
    known = [s for s in sizes if s >= 0]
    shape.batch = known[0] - 1 if known else -1


def _check_plane(check, shape, name, arg, varlen):
    """attn_mask, bias and drop_mask: right-aligned with (B, N, Sq, Sk), every axis 1 or full."""
    if arg is None or arg.shape is None:
        return
    if varlen and name == "attn_mask":
        if len(arg.shape) != 2:
            raise check.value(f"the rank of 'attn_mask' must be 2, (largest query length, largest key length), "
                              f"for variable lengths, but got {len(arg.shape)}, shape {arg}.")
        return
    full = (shape.batch, shape.num_heads, shape.q_len, shape.k_len)
    if varlen:
        full = (shape.batch, shape.num_heads, -1, -1)
    rank = len(arg.shape)
    if rank == 0 or rank > 4:
        raise check.value(f"the rank of '{name}' must be in the range [1, 4], but got {rank}, shape {arg}.")
    if all(a == 1 or not differ(a, b) for a, b in zip(arg.shape[::-1], full[::-1])):
        return
    batch, heads, q_len, k_len = full
    hint = ""
    if rank == 2 and arg.shape == (batch, k_len):
        hint = " Hint: a key padding mask (B, Sk) has to be reshaped to (B, 1, 1, Sk)."
    elif rank == 3 and arg.shape[0] == batch and all(a == 1 or a == b for a, b in zip(arg.shape[1:], full[2:])):
        hint = f" Hint: a mask per batch entry has to be reshaped to (B, 1, {arg.shape[1]}, {arg.shape[2]})."
    elif rank >= 2 and arg.shape[-2:] == (k_len, q_len):
        hint = " Hint: the last two axes look swapped; they are (query length, key length)."
    elif rank == 4 and (arg.shape[0], arg.shape[2]) == (batch, heads):
        hint = " Hint: the axes are (batch, heads, query length, key length) whatever the layout."
    raise check.value(f"the shape of '{name}' must be broadcastable to (B, N, Sq, Sk) = {Arg(full, '')}, but got "
                      f"{arg}.{hint}")


def _check_slopes(check, shape, arg):
    if arg.shape is None:
        return
    full = (shape.batch, shape.num_heads)
    if len(arg.shape) not in (1, 2) or any(differ(a, b) for a, b in zip(arg.shape[::-1], full[::-1])):
        raise check.value(f"the shape of 'alibi_slopes' must be (num_heads,) = ({full[1]},) or (batch, num_heads) = "
                          f"{Arg(full, '')}, but got {arg}.")
