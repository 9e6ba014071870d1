"""KvCacheSpec and MergeSpec: requests for attention over a cache, and for a merge of attentions, checked once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from . import op_table
from .spec import Arg, AttentionSpec, Check, differ, type_name, value_error

KVCACHE_SLOTS = op_table.input_names("kvcache_inputs")
MERGE_SLOTS = op_table.input_names("merge_inputs")
LAYOUTS = ("BSND", "BNSD")
_TENSORS = ("query", "k_cache", "v_cache", "k", "v")


@dataclass(frozen=True)
class KvCacheSpec:
    """One validated request. Lengths that a graph does not know while it is compiled are -1."""

    func: str
    attention: AttentionSpec    # of the queries over all that the cache can hold
    new_len: int                # tokens to append
    block_size: int             # 0: each sequence has a cache of its own
    num_blocks: int
    capacity: int               # tokens that a sequence can have
    positions: int              # of the rotary embedding; 0: none
    interleaved: bool
    num_splits: int
    inputs: tuple[Arg | None, ...]   # by slot

    @property
    def dtype(self) -> str:
        """That of query, cache and output."""
        return self.attention.dtype

    @property
    def layout(self) -> str:
        """That of query, cache and output."""
        return self.attention.layout

    @property
    def appends(self) -> bool:
        """Whether the call writes into the cache."""
        return self.has("k")

    def has(self, name: str) -> bool:
        """Whether the input of that name is given."""
        return self.inputs[KVCACHE_SLOTS.index(name)] is not None

    @functools.cached_property
    def static(self) -> bool:
        """Whether every shape is known."""
        return all(arg is None or (arg.shape is not None and -1 not in arg.shape) for arg in self.inputs)

    @property
    def empty(self) -> bool:
        """Whether it is known that there is no query, or no sequence at all."""
        return 0 in (self.attention.batch, self.attention.q_len)

    @functools.cached_property
    def primitives(self) -> dict:
        """Where backends keep the primitives of this request, by (backend, op)."""
        return {}

    def render(self) -> str:
        """The string attribute that carries everything static to the kernels."""
        inputs = "".join("0" if arg is None else "1" for arg in self.inputs)
        own = f"inputs={inputs};interleaved={int(self.interleaved)};splits={self.num_splits}"
        return f"{own}|{self.attention.render()}"

    def check_values(self, lengths: np.ndarray, table: np.ndarray | None) -> None:
        """Checks what cache_seqlens and block_table hold, before anything is written.

        Raises:
            ValueError: If a sequence does not fit its cache or the rotary table, a block does not exist, or a block
                that a sequence appends to is used twice.
        """
        if not lengths.size:
            return
        lengths = lengths.astype(np.int64)
        if lengths.min() < 0:
            at = int(np.argmax(lengths < 0))
            raise value_error(self.func, f"'cache_seqlens' must be 0 or greater, but got {lengths[at]} for sequence "
                                         f"{at}.")
        at = int(np.argmax(lengths))
        if lengths[at] > self.capacity - self.new_len:
            more = f" and {self.new_len} more to append" if self.new_len else ""
            raise value_error(self.func, f"the cache of sequence {at} has room for {self.capacity} tokens, but got "
                                         f"'cache_seqlens' {lengths[at]}{more}.")
        total = lengths + self.new_len
        if self.positions:
            if total[at] > self.positions:
                raise value_error(self.func, f"'rotary_cos' has {self.positions} positions, but sequence {at} has "
                                             f"{total[at]} tokens.")
            at = int(np.argmin(total))
            if total[at] < self.attention.q_len:
                raise value_error(self.func, "with 'rotary_cos' a sequence must have as many tokens as queries "
                                             f"{self.attention.q_len}, but sequence {at} has {total[at]}.")
        if table is not None:
            self._check_table(lengths, total, table)

    def _check_table(self, lengths, total, table):
        index = np.arange(table.shape[1])
        used = index < -(-total // self.block_size)[:, None]
        wrong = used & ((table < 0) | (table >= self.num_blocks))
        if wrong.any():
            b, i = (int(x[0]) for x in np.nonzero(wrong))
            raise value_error(self.func, f"'block_table' must hold blocks in the range [0, {self.num_blocks}), but got "
                                         f"{table[b, i]} for sequence {b}, block {i}.")
        if not self.new_len:
            return
        written = table[used & (index >= (lengths // self.block_size)[:, None])]
        uses = np.bincount(table[used].astype(np.int64), minlength=self.num_blocks)[written]
        if uses.max(initial=1) > 1:
            raise value_error(self.func, "a block that a sequence appends to must be used once in 'block_table', but "
                                         f"got block {written[np.argmax(uses > 1)]} twice. Hint: copy a shared block "
                                         "before appending to it.")

    @staticmethod
    def parse(func, inputs, options) -> KvCacheSpec:
        """Checks a request and returns its spec, from a cache when the same one came before.

        Args:
            func (str): Name of the public function, for error texts.
            inputs (tuple): One Arg or ``None`` per slot of KVCACHE_SLOTS.
            options (tuple): rotary_interleaved, softmax_scale, causal, window_size, softcap, layout, num_splits,
                precision_mode.

        Returns:
            KvCacheSpec.

        Raises:
            ValueError: If a value or shape is wrong.
            TypeError: If a type or dtype is wrong.
        """
        try:
            return _parse_cached(func, inputs, *options)
        except TypeError:       # an option that cannot be hashed, or a wrong type: _parse names it
            return _parse(func, inputs, *options)


def _parse(func, inputs, rotary_interleaved, softmax_scale, causal, window_size, softcap, layout, num_splits,
           precision_mode):
    check = Check(func)
    check.boolean("rotary_interleaved", rotary_interleaved)
    check.one_of("layout", layout, LAYOUTS)
    check.integer("num_splits", num_splits, 0, 1024)
    given = dict(zip(KVCACHE_SLOTS, inputs))
    _check_given(check, given, rotary_interleaved)
    _check_dtypes(check, given)
    sizes = _Sizes(check, given, layout)
    capacity = sizes.capacity
    options = {"dropout_p": 0.0, "softmax_scale": softmax_scale, "causal": causal, "softcap": softcap, "layout": layout,
               "causal_align": "bottom_right", "training": False, "deterministic": True,
               "precision_mode": precision_mode, "block_m": None, "block_n": None, "num_heads": None,
               "num_kv_heads": None, "mask_fill": None}
    keys = [Arg(tuple({"B": sizes.batch, "S": capacity, "N": sizes.kv_heads, "D": channels}[axis] for axis in layout),
                given["query"].dtype) for channels in (sizes.head_dim, sizes.v_head_dim)]
    attention = AttentionSpec.parse(
        func, (given["query"], *keys, None, None, given["alibi_slopes"], given["sinks"], None, None, None, None),
        window_size, tuple(options.values()))
    paged = given["block_table"] is not None
    return KvCacheSpec(func=func, attention=attention, new_len=sizes.new_len,
                       block_size=sizes.cache_len if paged else 0, num_blocks=sizes.cache_batch if paged else 0,
                       capacity=capacity, positions=sizes.positions, interleaved=rotary_interleaved,
                       num_splits=int(num_splits), inputs=inputs)


# typed: 1, 1.0 and True are equal keys otherwise, and the wrong one of them would pass unchecked
_parse_cached = functools.lru_cache(4096, typed=True)(_parse)


def _check_given(check, given, interleaved):
    for name, x in given.items():
        if x is None and name in ("query", "k_cache", "v_cache", "cache_seqlens"):
            raise check.type(f"the type of '{name}' must be Tensor, but got NoneType.")
        if x is not None and not isinstance(x, Arg):
            raise check.type(f"the type of '{name}' must be Tensor, but got {type_name(x)}.")
    for a, b in (("k", "v"), ("rotary_cos", "rotary_sin")):
        if (given[a] is None) != (given[b] is None):
            missing = a if given[a] is None else b
            raise check.value(f"'{a}' and '{b}' must be given both, or neither, but '{missing}' is None.")
    if interleaved and given["rotary_cos"] is None:
        raise check.value("'rotary_interleaved' must be False without 'rotary_cos', but got True.")


def _check_dtypes(check, given):
    query = given["query"]
    check.dtype("query", query)
    for name in _TENSORS[1:]:
        if given[name] is not None and given[name].dtype != query.dtype:
            raise check.type(f"the dtype of '{name}' must be equal to that of 'query' {query.dtype}, but got "
                             f"{given[name].dtype}. Hint: nothing is cast silently; cast one of them.")
    for name in KVCACHE_SLOTS[5:]:
        if given[name] is not None:
            check.dtype(name, given[name], "", query.dtype)


class _Sizes:
    """Sizes read from the tensors, after checking that they agree."""

    def __init__(self, check, given, layout):
        self.check = check
        for name in _TENSORS:
            self._rank(name, given[name], layout)
        q, k_cache, v_cache, k, v = (self._axes(given[name], layout) for name in _TENSORS)
        self.batch, self.head_dim = q["B"], q["D"]
        if k_cache["D"] == 0 or v_cache["D"] == 0:
            raise check.value("'head_dim' of the caches must be 1 or greater, but got 0.")
        self.kv_heads = self._same("number of heads", "v_cache", v_cache["N"], "k_cache", k_cache["N"])
        self.cache_len = self._same("length", "v_cache", v_cache["S"], "k_cache", k_cache["S"])
        self.cache_batch = self._same("first axis", "v_cache", v_cache["B"], "k_cache", k_cache["B"])
        self.head_dim = self._same("'head_dim'", "k_cache", k_cache["D"], "query", q["D"])
        self.v_head_dim = v_cache["D"]
        if q["N"] > 0 and self.kv_heads > 0 and q["N"] % self.kv_heads:
            raise check.value(f"the number of heads of 'query' must be a multiple of that of 'k_cache' {self.kv_heads},"
                              f" but got {q['N']}: query {given['query']}, k_cache {given['k_cache']}.")
        self.new_len = 0
        if given["k"] is not None:
            self._new(k, v)
        for what, size in (("number of blocks of 'k_cache'", -1 if given["block_table"] is None else self.cache_batch),
                           ("length of 'k_cache'", self.cache_len)):
            if size == 0:
                raise check.value(f"the {what} must be 1 or greater, but got 0.")
        check.shape("cache_seqlens", given["cache_seqlens"], (self.batch,), "(batch,)")
        self._capacity(given["block_table"])
        self._rotary(given["rotary_cos"], given["rotary_sin"])

    def _rank(self, name, arg, layout):
        if arg is not None and arg.shape is not None and len(arg.shape) != 4:
            raise self.check.value(f"the rank of '{name}' must be 4 ({', '.join(layout)}) for layout '{layout}', but "
                                   f"got {len(arg.shape)}, shape {arg}.")

    def _axes(self, arg, layout):
        return dict(zip(layout, (-1,) * 4 if arg is None or arg.shape is None else arg.shape))

    def _same(self, what, name, got, other, expected):
        """The size, from whichever of the two is known."""
        if differ(got, expected):
            raise self.check.value(f"the {what} of '{name}' must be equal to that of '{other}' {expected}, but got "
                                   f"{got}.")
        return max(got, expected)

    def _new(self, k, v):
        for name, x in (("k", k), ("v", v)):
            self.batch = self._same("batch size", name, x["B"], "query", self.batch)
            self.kv_heads = self._same("number of heads", name, x["N"], "k_cache", self.kv_heads)
        self.head_dim = self._same("'head_dim'", "k", k["D"], "k_cache", self.head_dim)
        self.v_head_dim = self._same("'head_dim'", "v", v["D"], "v_cache", self.v_head_dim)
        self.new_len = self._same("length", "v", v["S"], "k", k["S"])
        if self.new_len == 0:
            raise self.check.value("the length of 'k' must be 1 or greater, but got 0. Hint: without new tokens, 'k' "
                                   "and 'v' are None.")

    def _capacity(self, table):
        if table is None:
            self._same("batch size", "k_cache", self.cache_batch, "query", self.batch)
            self.capacity = self.cache_len
            return
        if table.shape is not None and (len(table.shape) != 2 or differ(table.shape[0], self.batch)):
            raise self.check.value(f"the shape of 'block_table' must be (batch, blocks) = ({self.batch}, ?), but got "
                                   f"{table}.")
        blocks = -1 if table.shape is None else table.shape[1]
        if blocks == 0:
            raise self.check.value("'block_table' must have 1 or more blocks for a sequence, but got 0.")
        self.capacity = blocks * self.cache_len if min(blocks, self.cache_len) >= 0 else -1

    def _rotary(self, cos, sin):
        self.positions = 0
        if cos is None:
            return
        if cos.shape is not None:
            if len(cos.shape) != 2 or 0 in cos.shape or (self.head_dim >= 0 and 2 * cos.shape[1] > self.head_dim):
                raise self.check.value(f"the shape of 'rotary_cos' must be (positions, at most head_dim / 2 = "
                                       f"{self.head_dim // 2}), but got {cos}.")
            self.check.shape("rotary_sin", sin, cos.shape, "that of 'rotary_cos'")
        self.positions = -1 if cos.shape is None else cos.shape[0]


@dataclass(frozen=True)
class MergeSpec:
    """One validated merge of stacked outputs and log-sum-exps."""

    func: str
    layout: str
    inputs: tuple[Arg, ...]     # by slot

    precision = "default"       # float32 sums; there is no other

    @property
    def dtype(self) -> str:
        """That of the outputs."""
        return self.inputs[0].dtype

    @property
    def head_dims(self) -> tuple[tuple[str, int], ...]:
        """By the tensor that has it; -1 where a graph does not know it yet."""
        shape = self.inputs[0].shape
        return (("outs", -1 if shape is None else shape[-1]),)

    @functools.cached_property
    def static(self) -> bool:
        """Whether every shape is known."""
        return all(arg.shape is not None and -1 not in arg.shape for arg in self.inputs)

    @functools.cached_property
    def primitives(self) -> dict:
        """Where backends keep the primitives of this request, by (backend, op)."""
        return {}

    def render(self) -> str:
        """The string attribute that carries everything static to the kernels."""
        return f"layout={self.layout}"

    @staticmethod
    def parse(func, inputs, layout) -> MergeSpec:
        """Checks a request: `inputs` are the stacked outs and lses.

        Raises:
            ValueError: If a value or shape is wrong.
            TypeError: If a type or dtype is wrong.
        """
        check = Check(func)
        for name, x in zip(MERGE_SLOTS, inputs):
            if not isinstance(x, Arg):
                raise check.type(f"the type of '{name}' must be Tensor, or a list or tuple of Tensors, but got "
                                 f"{type_name(x)}.")
            check.dtype(name, x)
        check.one_of("layout", layout, LAYOUTS)
        outs, lses = inputs
        if outs.shape is not None:
            if len(outs.shape) != 5:
                raise check.value(f"the rank of 'outs' must be 5 (parts, {', '.join(layout)}), or 4 for each of a list,"
                                  f" but got the shape {outs} of all parts.")
            if 0 in outs.shape:
                raise check.value(f"every axis of 'outs' must be 1 or greater, but got {outs} for all parts.")
            size = dict(zip("K" + layout, outs.shape))
            check.shape("lses", lses, tuple(size[axis] for axis in "KBNS"), "(parts, B, N, S)")
        return MergeSpec(func, layout, inputs)


def checked_parts(func, name, parts) -> str:
    """The dtype of a list of Tensors, which must be alike.

    Raises:
        ValueError: If there is none, or the shapes differ.
        TypeError: If one is no Tensor, or the dtypes differ.
    """
    check = Check(func)
    if not parts:
        raise check.value(f"'{name}' must hold one part or more, but got none.")
    for i, x in enumerate(parts):
        if not isinstance(x, Arg):
            raise check.type(f"'{name}' must hold Tensors, but got {type_name(x)}.")
        if x.dtype != parts[0].dtype:
            raise check.type(f"the parts of '{name}' must have one dtype, but got {parts[0].dtype} and {x.dtype}.")
        shapes = parts[0].shape, x.shape
        if None not in shapes and (len(shapes[0]) != len(shapes[1]) or any(map(differ, *shapes))):
            raise check.value(f"the parts of '{name}' must have one shape, but got {parts[0]} and, of part {i}, {x}.")
    return parts[0].dtype
