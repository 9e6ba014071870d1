"""PagedKVCache: keys and values of many sequences in blocks of one size, which sequences take, share and give back.

Which block belongs to whom is plain Python between the steps of a model; the blocks themselves are Parameters, which
flash_attention_with_kvcache reads and writes in place.
"""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.common import dtype as mstype
from mindspore.common.initializer import initializer

from .spec import type_error, type_name, value_error

_NAME = "PagedKVCache"
_DTYPES = (mstype.float32, mstype.float16, mstype.bfloat16)
_LAYOUTS = ("BSND", "BNSD")


class CacheFullError(RuntimeError):
    """
    A cache has fewer free blocks than a call needs. The call changed nothing.

    Args:
        func (str): What was called.
        needed (int): Blocks that it needs.
        free (int): Blocks that are free.
        total (int): Blocks of the cache.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> import ms_flash
        >>> cache = ms_flash.nn.PagedKVCache(1, 4, 16, 2, 64, ms.float32)
        >>> try:
        ...     cache.allocate("a", 100)
        ... except ms_flash.nn.CacheFullError as error:
        ...     print(error.needed, error.free, cache.used_blocks)
        7 4 0
    """

    def __init__(self, func, needed, free, total):
        hint = ("free a sequence and try again" if needed <= total
                else "the whole cache is too small for this")
        super().__init__(f"For '{func}', the number of free blocks must be at least {needed}, but got {free} of "
                         f"{total}. Hint: {hint}.")
        self.needed = needed
        self.free = free


class PagedKVCache(nn.Cell):
    r"""
    The keys and values of many sequences, in blocks that sequences take as they grow, share, and give back.

    It is what :func:`ms_flash.flash_attention_with_kvcache` takes as paged `k_cache` and `v_cache`. The methods keep
    the books: which blocks belong to which sequence, and how many sequences share a block. They run between the steps
    of a model, not inside a compiled graph. The data is written by the op; only a block that must be copied because a
    sequence goes on in it while others still read it is copied here.

    A step of a model with ``n`` new tokens per sequence:

    1. ``lengths = cache.append(ids, n)`` takes the blocks that are needed and returns the lengths before the step.
    2. ``table = cache.block_table(ids)`` tells where the blocks are.
    3. Each layer calls the op with ``cache.k(layer)``, ``cache.v(layer)``, its new keys and values,
       ``cache_seqlens=lengths`` and ``block_table=table``.

    At any time ``used_blocks + free_blocks == num_blocks``, and a call that fails changes nothing.

    Args:
        num_layers (int): Layers of the model. All of them share one block table.
        num_blocks (int): Blocks of each layer.
        block_size (int): Tokens in a block.
        num_kv_heads (int): Heads of key and value.
        head_dim (int): Channels of a head of the keys.
        dtype (:class:`mindspore.dtype`): float32, float16 or bfloat16.
        value_dim (int, optional): Channels of a head of the values. Default: ``None``, `head_dim`.

    Keyword Args:
        layout (str, optional): ``"BSND"`` for blocks of shape (block_size, num_kv_heads, head_dim), or ``"BNSD"`` for
            (num_kv_heads, block_size, head_dim). Default: ``"BSND"``.
        name (str, optional): Prefix of the names of the Parameters. Default: ``"kv_cache"``.

    Raises:
        TypeError: If the type of an argument is wrong.
        ValueError: If a size is less than 1, or `layout` is unknown.

    Supported Platforms:
        ``CPU``

    Examples:
        >>> import mindspore as ms
        >>> import ms_flash
        >>> cache = ms_flash.nn.PagedKVCache(2, 8, 16, 2, 64, ms.float32)
        >>> cache.allocate("a", 20)
        >>> cache.fork("a", "b")
        >>> print(cache.used_blocks, cache.free_blocks)
        2 6
        >>> print(cache.append(["b"], 1))        # into a block that "a" reads too: it is copied first
        [20]
        >>> print(cache.block_table(["a", "b"]))
        [[0 1]
         [0 2]]
        >>> print(cache.seqlens(["a", "b"]))
        [20 21]
        >>> cache.free("a")
        >>> print(cache.used_blocks, cache.free_blocks)
        2 6
    """

    def __init__(self, num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, value_dim=None, *,
                 layout="BSND", name="kv_cache"):
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        for what, size in (("num_layers", num_layers), ("num_blocks", num_blocks), ("block_size", block_size),
                           ("num_kv_heads", num_kv_heads), ("head_dim", head_dim), ("value_dim", value_dim)):
            _checked_count(_NAME, what, size, 1)
        if dtype not in _DTYPES:
            raise type_error(_NAME, f"the 'dtype' must be float32, float16 or bfloat16, but got {dtype}.")
        if layout not in _LAYOUTS:
            raise value_error(_NAME, f"the 'layout' must be one of {_LAYOUTS}, but got {layout!r}.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        # one Parameter per layer: a graph updates whole Parameters in place, and a view of a larger one would be a copy
        self._keys, self._values = (
            ParameterTuple([Parameter(initializer("zeros", _block_shape(layout, num_blocks, block_size, num_kv_heads,
                                                                        dim), dtype),
                                      name=f"{name}.{what}.{layer}", requires_grad=False)
                            for layer in range(num_layers)])
            for what, dim in (("k", head_dim), ("v", value_dim)))
        self._free = list(range(num_blocks))[::-1]      # a stack: the block given back last is the warmest in the cache
        self._shared = [0] * num_blocks                 # how many sequences hold each block
        self._blocks = {}                               # seq_id -> its blocks in order, exactly as many as it fills
        self._lengths = {}                              # seq_id -> tokens

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks that sequences hold; a block that several share counts once."""
        return self.num_blocks - len(self._free)

    @property
    def sequences(self) -> tuple:
        """The sequences, oldest first."""
        return tuple(self._lengths)

    def k(self, layer: int) -> Parameter:
        """The keys of a layer, (num_blocks, block_size, num_kv_heads, head_dim), or as `layout` says."""
        return self._keys[layer]

    def v(self, layer: int) -> Parameter:
        """The values of a layer, (num_blocks, block_size, num_kv_heads, value_dim), or as `layout` says."""
        return self._values[layer]

    def allocate(self, seq_id, tokens: int = 0) -> None:
        """
        Takes the blocks for a new sequence whose `tokens` tokens are about to be written, with cache_seqlens 0.

        Args:
            seq_id (Hashable): Name of the sequence.
            tokens (int, optional): Its length. Default: ``0``.

        Raises:
            CacheFullError: If there are not enough free blocks.
            TypeError: If `tokens` is not an int.
            ValueError: If there is a sequence of that name, or `tokens` is negative.
        """
        func = f"{_NAME}.allocate"
        self._check_new(func, "seq_id", seq_id)
        _checked_count(func, "tokens", tokens, 0)
        needed = self._blocks_of(tokens)
        self._check_room(func, needed)
        self._blocks[seq_id] = [self._take() for _ in range(needed)]
        self._lengths[seq_id] = tokens

    def append(self, seq_ids, n) -> Tensor:
        """
        Lengthens sequences by tokens that are about to be written; takes blocks for them, and copies a last block that
        others hold as well.

        Args:
            seq_ids (Union[list, tuple]): The sequences, each once.
            n (Union[int, list[int], tuple[int]]): New tokens, of each or one number per sequence. 0 is nothing.

        Returns:
            Tensor, int32, (len(seq_ids),): the lengths before, which is `cache_seqlens` of the op.

        Raises:
            CacheFullError: If there are not enough free blocks for all of them.
            TypeError: If the type of an argument is wrong.
            ValueError: If a sequence is unknown or named twice, or a number is negative.
        """
        func = f"{_NAME}.append"
        seq_ids = self._checked_ids(func, seq_ids)
        counts = [n] * len(seq_ids) if isinstance(n, int) else n
        if not isinstance(counts, (list, tuple)):
            raise type_error(func, f"the type of 'n' must be int or a list of int, but got {type_name(n)}.")
        if len(counts) != len(seq_ids):
            raise value_error(func, f"the length of 'n' must be that of 'seq_ids' {len(seq_ids)}, but got "
                                    f"{len(counts)}.")
        for count in counts:
            _checked_count(func, "n", count, 0)
        if len(set(seq_ids)) != len(seq_ids):
            raise value_error(func, f"the 'seq_ids' must differ, but got {seq_ids}.")
        before = [self._lengths[seq_id] for seq_id in seq_ids]
        needed, copies = 0, []
        holders = {}        # of each last block, when those before in the list have left it
        for seq_id, length, count in zip(seq_ids, before, counts):
            needed += self._blocks_of(length + count) - self._blocks_of(length)
            if count and length % self.block_size:
                block = self._blocks[seq_id][-1]
                holders.setdefault(block, self._shared[block])
                if holders[block] > 1:
                    holders[block] -= 1
                    copies.append(seq_id)
        self._check_room(func, needed + len(copies))
        shared = [self._blocks[seq_id][-1] for seq_id in copies]
        self._copy(shared, self._free[::-1][:len(copies)])      # the ones that are taken next
        for seq_id in copies:
            self._blocks[seq_id][-1] = self._take()
        self._give_back(shared)
        for seq_id, length, count in zip(seq_ids, before, counts):
            blocks = self._blocks[seq_id]
            blocks += [self._take() for _ in range(self._blocks_of(length + count) - len(blocks))]
            self._lengths[seq_id] = length + count
        return Tensor(np.array(before, np.int32))

    def fork(self, parent, child) -> None:
        """
        Makes a new sequence with the tokens of another. It takes no block: they share them until one goes on.

        Args:
            parent (Hashable): A sequence.
            child (Hashable): Name of the new one.

        Raises:
            ValueError: If `parent` is unknown, or `child` is not new.
        """
        func = f"{_NAME}.fork"
        self._check_known(func, "parent", parent)
        self._check_new(func, "child", child)
        self._blocks[child] = list(self._blocks[parent])
        self._lengths[child] = self._lengths[parent]
        for block in self._blocks[child]:
            self._shared[block] += 1

    def truncate(self, seq_id, tokens: int) -> None:
        """
        Drops the last tokens of a sequence, such as rejected drafts or padding, with the blocks they alone fill.

        Args:
            seq_id (Hashable): A sequence.
            tokens (int): Its new length, at most the one it has.

        Raises:
            TypeError: If `tokens` is not an int.
            ValueError: If the sequence is unknown, or shorter than `tokens`.
        """
        func = f"{_NAME}.truncate"
        self._check_known(func, "seq_id", seq_id)
        _checked_count(func, "tokens", tokens, 0)
        if tokens > self._lengths[seq_id]:
            raise value_error(func, f"the 'tokens' must be at most the length {self._lengths[seq_id]}, but got "
                                    f"{tokens}.")
        kept = self._blocks_of(tokens)
        self._give_back(self._blocks[seq_id][kept:])
        del self._blocks[seq_id][kept:]
        self._lengths[seq_id] = tokens

    def free(self, seq_id) -> None:
        """
        Forgets a sequence and gives back the blocks that nobody else holds.

        Args:
            seq_id (Hashable): A sequence.

        Raises:
            ValueError: If it is unknown.
        """
        self._check_known(f"{_NAME}.free", "seq_id", seq_id)
        self._give_back(self._blocks.pop(seq_id))
        del self._lengths[seq_id]

    def block_table(self, seq_ids, max_blocks: int | None = None) -> Tensor:
        """
        Where the blocks of sequences are.

        Args:
            seq_ids (Union[list, tuple]): The sequences.
            max_blocks (int, optional): Width of the table, fixed so that a graph keeps its shapes.
                Default: ``None``, as many as the longest of them has, and at least 1.

        Returns:
            Tensor, int32, (len(seq_ids), max_blocks), filled up with -1.

        Raises:
            TypeError: If the type of an argument is wrong.
            ValueError: If a sequence is unknown, or has more blocks than `max_blocks`.
        """
        func = f"{_NAME}.block_table"
        rows = [self._blocks[seq_id] for seq_id in self._checked_ids(func, seq_ids)]
        longest = max(map(len, rows), default=0)
        width = max(longest, 1)
        if max_blocks is not None:
            width = _checked_count(func, "max_blocks", max_blocks, 1)
        if longest > width:
            raise value_error(func, f"the 'max_blocks' must be at least the {longest} blocks of the longest sequence, "
                                    f"but got {width}.")
        table = np.full((len(rows), width), -1, np.int32)
        for row, blocks in zip(table, rows):
            row[:len(blocks)] = blocks
        return Tensor(table)

    def seqlens(self, seq_ids) -> Tensor:
        """
        How long sequences are, the tokens of the last :meth:`append` included.

        Args:
            seq_ids (Union[list, tuple]): The sequences.

        Returns:
            Tensor, int32, (len(seq_ids),).

        Raises:
            TypeError: If `seq_ids` is not a list or tuple.
            ValueError: If a sequence is unknown.
        """
        seq_ids = self._checked_ids(f"{_NAME}.seqlens", seq_ids)
        return Tensor(np.array([self._lengths[seq_id] for seq_id in seq_ids], np.int32))

    def references(self, block: int) -> int:
        """
        How many sequences hold a block.

        Args:
            block (int): Its number, as in :meth:`block_table`.

        Returns:
            int, 0 for a free one.

        Raises:
            TypeError: If `block` is not an int.
            ValueError: If there is no such block.
        """
        func = f"{_NAME}.references"
        if _checked_count(func, "block", block, 0) >= self.num_blocks:
            raise value_error(func, f"the 'block' must be less than {self.num_blocks}, but got {block}.")
        return self._shared[block]

    def _blocks_of(self, tokens):
        return -(-tokens // self.block_size)

    def _take(self):
        block = self._free.pop()
        self._shared[block] = 1
        return block

    def _give_back(self, blocks):
        for block in reversed(blocks):
            self._shared[block] -= 1
            if not self._shared[block]:
                self._free.append(block)

    def _copy(self, sources, targets):
        for parameter in (*self._keys, *self._values):
            blocks = parameter.view(mstype.int16)       # the same memory: bfloat16 cannot be assigned to on the CPU
            for source, target in zip(sources, targets):
                blocks[target] = blocks[source]

    def _check_room(self, func, needed):
        if needed > len(self._free):
            raise CacheFullError(func, needed, len(self._free), self.num_blocks)

    def _check_known(self, func, what, seq_id):
        if seq_id not in self._lengths:
            raise value_error(func, f"the '{what}' must be a sequence of this cache, but got {seq_id!r}.")

    def _check_new(self, func, what, seq_id):
        if seq_id in self._lengths:
            raise value_error(func, f"the '{what}' must be new, but got {seq_id!r}, which is there already.")

    def _checked_ids(self, func, seq_ids):
        if not isinstance(seq_ids, (list, tuple)):     # a str is a sequence of sequences as well, a set has no order
            raise type_error(func, f"the type of 'seq_ids' must be list or tuple, but got {type_name(seq_ids)}.")
        for seq_id in seq_ids:
            self._check_known(func, "seq_ids", seq_id)
        return seq_ids


def _block_shape(layout, num_blocks, block_size, heads, dim):
    return (num_blocks, block_size, heads, dim) if layout == "BSND" else (num_blocks, heads, block_size, dim)


def _checked_count(func, name, value, lowest):
    if isinstance(value, bool) or not isinstance(value, int):
        raise type_error(func, f"the type of '{name}' must be int, but got {type_name(value)}.")
    if value < lowest:
        raise value_error(func, f"the '{name}' must be at least {lowest}, but got {value}.")
    return value
