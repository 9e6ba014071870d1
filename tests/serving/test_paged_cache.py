"""PagedKVCache: any sequence of calls against a dict of lists, then sharing, copying, refusing, and the op over it."""

from __future__ import annotations

import copy

import mindspore as ms
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mindspore import nn

from ms_flash import flash_attention_with_kvcache, reference
from ms_flash.nn import CacheFullError, PagedKVCache

DTYPES = [ms.float32, ms.float16, ms.bfloat16]


def new(num_blocks=8, block_size=4, **options):
    return PagedKVCache(2, num_blocks, block_size, 1, 1, ms.float32, 2, **options)


def tables(cache):
    """The blocks of every sequence."""
    rows = cache.block_table(list(cache.sequences)).asnumpy().tolist()
    return {name: [block for block in row if block >= 0] for name, row in zip(cache.sequences, rows)}


def blocks_of(cache, sequence):
    return tables(cache)[sequence]


def lengths_of(cache):
    return dict(zip(cache.sequences, cache.seqlens(list(cache.sequences)).asnumpy().tolist()))


def state(cache):
    """Everything one can see of the books."""
    return (tables(cache), lengths_of(cache), [cache.references(block) for block in range(cache.num_blocks)],
            cache.free_blocks, cache.used_blocks)


def pages(cache):
    """The data: keys and values of layer 0, then of layer 1."""
    return [p.astype(ms.float32).asnumpy().copy() for layer in range(2) for p in (cache.k(layer), cache.v(layer))]


def write(cache, sequence, start, tokens):
    """What the op does with new keys and values: token t is t + layer in the keys, -t - layer in the values."""
    blocks = blocks_of(cache, sequence)
    for layer in range(2):
        for page, sign in ((cache.k(layer), 1), (cache.v(layer), -1)):
            data = page.astype(ms.float32).asnumpy().copy()
            for i, token in enumerate(tokens, start):
                data[blocks[i // cache.block_size], i % cache.block_size] = sign * (token + layer)
            page.set_data(ms.Tensor(data).astype(page.dtype))


def texts_of(cache, count=None):
    """The tokens of every sequence, all or the first `count`, which must be the same in all layers."""
    found, lengths, contents = {}, lengths_of(cache), pages(cache)
    for name, blocks in tables(cache).items():
        at = range(lengths[name] if count is None else count)
        rows = [[data[blocks[i // cache.block_size], i % cache.block_size] for i in at] for data in contents]
        first = [int(row.flat[0]) for row in rows[0]]
        for layer_rows, layer, sign in zip(rows, (0, 0, 1, 1), (1, -1, 1, -1)):
            assert all((row == sign * (token + layer)).all() for row, token in zip(layer_rows, first))
        found[name] = first
    return found


def read(cache, sequence, count=None):
    return texts_of(cache, count)[sequence]


class Books(RuleBasedStateMachine):
    """The cache beside `texts`, a list of tokens for each sequence."""

    @initialize(num_blocks=st.integers(1, 9), block_size=st.integers(1, 5))
    def start(self, num_blocks, block_size):
        self.cache = new(num_blocks, block_size)
        self.texts = {}
        self.token = self.name = 0

    def fresh(self, count):
        self.token += count
        return list(range(self.token - count + 1, self.token + 1))

    def blocks(self, length):
        return (length + self.cache.block_size - 1) // self.cache.block_size

    def attempt(self, needed, call):
        """True if the call went through, which it must exactly if there is room; otherwise nothing has changed."""
        before, contents, free = state(self.cache), pages(self.cache), self.cache.free_blocks
        try:
            call()
        except CacheFullError as error:
            assert (error.needed, error.free) == (needed, free) and needed > free
            assert state(self.cache) == before
            assert all((a == b).all() for a, b in zip(pages(self.cache), contents))
            return False
        assert needed <= free and self.cache.free_blocks == free - needed
        return True

    @rule(length=st.integers(0, 16))
    def allocate(self, length):
        self.name += 1
        if self.attempt(self.blocks(length), lambda: self.cache.allocate(self.name, length)):
            self.texts[self.name] = self.fresh(length)
            write(self.cache, self.name, 0, self.texts[self.name])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def append(self, data):
        names = data.draw(st.lists(st.sampled_from(sorted(self.texts)), unique=True))
        counts = data.draw(st.lists(st.integers(0, 7), min_size=len(names), max_size=len(names)))
        if counts and data.draw(st.booleans()):
            counts = [counts[0]] * len(counts)
        # of the sequences in one unfinished block the last may stay in it, if all that hold it go on
        going = {}
        for name, count in zip(names, counts):
            if count and len(self.texts[name]) % self.cache.block_size:
                going.setdefault(blocks_of(self.cache, name)[-1], []).append(name)
        copies = sum(min(len(those), self.cache.references(block) - 1) for block, those in going.items())
        needed = copies + sum(self.blocks(len(self.texts[name]) + count) - self.blocks(len(self.texts[name]))
                              for name, count in zip(names, counts))
        n = counts[0] if len(set(counts)) == 1 and data.draw(st.booleans()) else counts
        lengths = []
        if self.attempt(needed, lambda: lengths.append(self.cache.append(names, n))):
            assert lengths[0].asnumpy().tolist() == [len(self.texts[name]) for name in names]
            assert lengths[0].dtype == ms.int32
            for name, count in zip(names, counts):
                tokens = self.fresh(count)
                write(self.cache, name, len(self.texts[name]), tokens)
                self.texts[name] = self.texts[name] + tokens

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.texts)))
        self.name += 1
        assert self.attempt(0, lambda: self.cache.fork(parent, self.name))
        self.texts[self.name] = list(self.texts[parent])
        assert blocks_of(self.cache, self.name) == blocks_of(self.cache, parent)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data):
        name = data.draw(st.sampled_from(sorted(self.texts)))
        length = data.draw(st.integers(0, len(self.texts[name])))
        self.cache.truncate(name, length)
        self.texts[name] = self.texts[name][:length]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data):
        name = data.draw(st.sampled_from(sorted(self.texts)))
        self.cache.free(name)
        del self.texts[name]

    @invariant()
    def books_are_right(self):
        cache = self.cache
        assert cache.used_blocks + cache.free_blocks == cache.num_blocks
        assert cache.sequences == tuple(self.texts)
        blocks = tables(cache)
        held = [block for name in self.texts for block in blocks[name]]
        assert [cache.references(block) for block in range(cache.num_blocks)] == \
            [held.count(block) for block in range(cache.num_blocks)]
        assert cache.used_blocks == len(set(held))
        assert all(len(blocks[name]) == self.blocks(len(text)) for name, text in self.texts.items())
        assert texts_of(cache) == self.texts

    def teardown(self):
        for name in getattr(self, "texts", ()):
            self.cache.free(name)
        if hasattr(self, "cache"):
            assert self.cache.free_blocks == self.cache.num_blocks


Books.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None,
                                   suppress_health_check=list(HealthCheck))
test_any_calls_keep_the_books = Books.TestCase


def test_a_block_is_copied_only_when_shared_and_gone_on_in():
    cache = new()
    cache.allocate("a", 6)
    write(cache, "a", 0, range(1, 7))
    first, last = blocks_of(cache, "a")
    cache.append(["a"], 1)                                  # alone in it: no copy
    assert blocks_of(cache, "a") == [first, last]
    cache.truncate("a", 6)
    cache.fork("a", "b")
    cache.append(["b"], 0)                                  # goes on by nothing: no copy
    assert blocks_of(cache, "b") == [first, last] and cache.used_blocks == 2
    cache.append(["b"], 1)
    assert blocks_of(cache, "a") == [first, last]
    assert blocks_of(cache, "b")[0] == first and blocks_of(cache, "b")[1] != last
    assert read(cache, "b", 6) == [1, 2, 3, 4, 5, 6]
    cache.allocate("c", 4)
    cache.fork("c", "d")
    used = cache.used_blocks
    cache.append(["d"], 1)                                  # the shared block is full: nobody writes into it
    assert cache.used_blocks == used + 1 and blocks_of(cache, "d")[0] == blocks_of(cache, "c")[0]


def test_parent_that_goes_on_is_copied_and_the_child_keeps_the_block():
    cache = new()
    cache.allocate("a", 3)
    write(cache, "a", 0, [7, 8, 9])
    cache.fork("a", "b")
    block = blocks_of(cache, "a")
    cache.append(["a"], 1)
    write(cache, "a", 3, [10])
    assert blocks_of(cache, "b") == block and blocks_of(cache, "a") != block
    assert read(cache, "a") == [7, 8, 9, 10] and read(cache, "b") == [7, 8, 9]


def test_of_all_that_go_on_in_one_block_the_last_keeps_it():
    cache = new(num_blocks=3)
    cache.allocate(0, 2)
    write(cache, 0, 0, [5, 6])
    cache.fork(0, 1)
    cache.fork(1, 2)
    cache.append([2, 0, 1], 1)                              # three blocks in all, and there are three
    assert cache.free_blocks == 0
    assert sorted(blocks_of(cache, name)[0] for name in range(3)) == [0, 1, 2]
    assert texts_of(cache, 2) == {name: [5, 6] for name in range(3)}


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copy_is_exact_and_touches_one_block(dtype, layout):
    cache = PagedKVCache(2, 5, 4, 3, 6, dtype, 7, layout=layout)
    rng = np.random.default_rng()
    for layer in range(2):
        for page in (cache.k(layer), cache.v(layer)):
            page.set_data(ms.Tensor(rng.standard_normal(page.shape), ms.float32).astype(dtype))
    cache.k(0).view(ms.int16)[0, 0, 0, 0] = -1              # NaN, of no usual bits
    before = pages(cache)
    cache.allocate("a", 2)
    cache.fork("a", "b")
    cache.append(["b"], 1)
    (old,), (copied,) = blocks_of(cache, "a"), blocks_of(cache, "b")
    for a, b in zip(before, pages(cache)):
        a[copied] = a[old]
        np.testing.assert_array_equal(b, a)


def test_shapes_names_and_dtypes():
    cache = PagedKVCache(2, 5, 4, 3, 6, ms.float16, 7, name="mine")
    assert [cache.k(1).shape, cache.v(1).shape] == [(5, 4, 3, 6), (5, 4, 3, 7)]
    assert PagedKVCache(1, 5, 4, 3, 6, ms.float16, layout="BNSD").v(0).shape == (5, 3, 4, 6)
    assert [p.name for p in cache.get_parameters()] == ["mine.k.0", "mine.k.1", "mine.v.0", "mine.v.1"]
    assert all(p.dtype == ms.float16 and not p.requires_grad for p in cache.get_parameters())
    assert cache.trainable_params() == []


def test_table_is_padded():
    cache = new()
    cache.allocate("a", 9)
    cache.allocate("b")
    table = cache.block_table(["b", "a"])
    assert table.dtype == ms.int32
    np.testing.assert_array_equal(table.asnumpy(), [[-1] * 3, blocks_of(cache, "a")])
    assert cache.block_table(["b", "a"], 5).shape == (2, 5)
    assert cache.block_table(["b"]).shape == (1, 1)
    assert cache.block_table([]).shape == (0, 1) and cache.seqlens([]).shape == (0,)
    assert cache.append([], 1).shape == (0,)


def test_a_full_cache_says_what_is_missing_and_changes_nothing():
    cache = new(num_blocks=4, block_size=4)
    cache.allocate("a", 6)
    cache.fork("a", "b")
    cache.allocate("c", 4)
    before = state(cache)
    text = "For 'PagedKVCache.append', the number of free blocks must be at least 2, but got 1 of 4. Hint: free a seq"
    with pytest.raises(CacheFullError, match=text) as full:
        cache.append(["b", "c"], 1)                         # one copy and one new block
    assert (full.value.needed, full.value.free) == (2, 1) and state(cache) == before
    with pytest.raises(CacheFullError, match="Hint: the whole cache is too small"):
        cache.allocate("d", 17)
    assert state(cache) == before and "d" not in cache.sequences
    cache.free("a")
    cache.append(["b", "c"], 1)                             # nothing to copy any more
    assert cache.free_blocks == 0


@pytest.mark.parametrize("call, error, text", [
    (lambda c: c.allocate("a", 1), ValueError, "'seq_id' must be new, but got 'a'"),
    (lambda c: c.allocate("z", -1), ValueError, "'tokens' must be at least 0, but got -1"),
    (lambda c: c.allocate("z", 1.0), TypeError, "type of 'tokens' must be int, but got float"),
    (lambda c: c.allocate("z", True), TypeError, "type of 'tokens' must be int, but got bool"),
    (lambda c: c.append("a", 1), TypeError, "type of 'seq_ids' must be list or tuple, but got str"),
    (lambda c: c.append(["a", "z"], 1), ValueError, "'seq_ids' must be a sequence of this cache, but got 'z'"),
    (lambda c: c.append(["a", "a"], 1), ValueError, r"'seq_ids' must differ, but got \['a', 'a'\]"),
    (lambda c: c.append(["a", "b"], [1]), ValueError, "length of 'n' must be that of 'seq_ids' 2, but got 1"),
    (lambda c: c.append(["a", "b"], [1, -1]), ValueError, "'n' must be at least 0, but got -1"),
    (lambda c: c.append(["a"], True), TypeError, "type of 'n' must be int, but got bool"),
    (lambda c: c.append(["a"], 1.5), TypeError, "type of 'n' must be int or a list of int, but got float"),
    (lambda c: c.append(["a"], [1.5]), TypeError, "type of 'n' must be int, but got float"),
    (lambda c: c.fork("z", "y"), ValueError, "'parent' must be a sequence of this cache, but got 'z'"),
    (lambda c: c.fork("a", "b"), ValueError, "'child' must be new, but got 'b'"),
    (lambda c: c.truncate("a", 6), ValueError, "'tokens' must be at most the length 5, but got 6"),
    (lambda c: c.truncate("z", 0), ValueError, "'seq_id' must be a sequence of this cache, but got 'z'"),
    (lambda c: c.free("z"), ValueError, "'seq_id' must be a sequence of this cache, but got 'z'"),
    (lambda c: c.block_table(["a"], 1), ValueError, "'max_blocks' must be at least the 2 blocks .* but got 1"),
    (lambda c: c.block_table(["a"], 0), ValueError, "'max_blocks' must be at least 1, but got 0"),
    (lambda c: c.block_table({"a"}), TypeError, "type of 'seq_ids' must be list or tuple, but got set"),
    (lambda c: c.seqlens(["z"]), ValueError, "'seq_ids' must be a sequence of this cache, but got 'z'"),
    (lambda c: c.references(8), ValueError, "'block' must be less than 8, but got 8"),
    (lambda c: c.references("0"), TypeError, "type of 'block' must be int, but got str"),
])
def test_wrong_calls_say_so_and_change_nothing(call, error, text):
    cache = new()
    cache.allocate("a", 5)
    cache.fork("a", "b")
    before = state(cache)
    with pytest.raises(error, match=rf"For 'PagedKVCache\.\w+', the .*{text}"):
        call(cache)
    assert state(cache) == before


@pytest.mark.parametrize("args, options, error, text", [
    ((0, 8, 4, 1, 8, ms.float32), {}, ValueError, "'num_layers' must be at least 1, but got 0"),
    ((1, 0, 4, 1, 8, ms.float32), {}, ValueError, "'num_blocks' must be at least 1, but got 0"),
    ((1, 8, 2.0, 1, 8, ms.float32), {}, TypeError, "type of 'block_size' must be int, but got float"),
    ((1, 8, 4, -1, 8, ms.float32), {}, ValueError, "'num_kv_heads' must be at least 1, but got -1"),
    ((1, 8, 4, 1, 0, ms.float32), {}, ValueError, "'head_dim' must be at least 1, but got 0"),
    ((1, 8, 4, 1, 8, ms.float32, 0), {}, ValueError, "'value_dim' must be at least 1, but got 0"),
    ((1, 8, 4, 1, 8, ms.int32), {}, TypeError, "'dtype' must be float32, float16 or bfloat16, but got Int32"),
    ((1, 8, 4, 1, 8, ms.float32), {"layout": "BSH"}, ValueError, "'layout' must be one of .* but got 'BSH'"),
])
def test_wrong_caches(args, options, error, text):
    with pytest.raises(error, match=f"For 'PagedKVCache', the .*{text}"):
        PagedKVCache(*args, **options)


def test_a_copied_cache_is_another_one():
    cache = new()
    cache.allocate("a", 3)
    write(cache, "a", 0, [1, 2, 3])
    other = copy.deepcopy(cache)
    other.append(["a"], 1)
    write(other, "a", 0, [4, 5, 6, 7])
    assert read(cache, "a") == [1, 2, 3] and read(other, "a") == [4, 5, 6, 7]


class OverCache(nn.Cell):
    """One layer of a model."""

    def __init__(self, cache, layout, backend):
        super().__init__()
        self.cache, self.layout, self.backend = cache, layout, backend

    def construct(self, query, key, value, lengths, table):
        return flash_attention_with_kvcache(query, self.cache.k(0), self.cache.v(0), key, value, cache_seqlens=lengths,
                                            block_table=table, layout=self.layout, backend=self.backend)


@pytest.mark.ops("MsFlashKvCache")
@pytest.mark.parametrize("dtype, bound, layout", [
    ("float32", 1e-5, "BSND"), ("float16", 4e-3, "BNSD"), ("bfloat16", 3e-2, "BSND")])
def test_the_op_over_forked_and_growing_sequences(kernel_backend, mode, dtype, bound, layout):
    """A common text, forks that go on by different numbers of tokens, one that is freed: each against its own text."""
    rng = np.random.default_rng()
    heads, kv_heads, dim, value_dim = 4, 2, 8, 5
    dtype = getattr(ms, dtype)
    cache = PagedKVCache(1, 20, 16, kv_heads, dim, dtype, value_dim, layout=layout)
    for page in (cache.k(0), cache.v(0)):
        page.set_data(ms.Tensor(np.full(page.shape, np.nan), ms.float32).astype(dtype))
    net = OverCache(cache, layout, kernel_backend)
    as_layout = lambda x: x if layout == "BSND" else x.swapaxes(1, 2)
    texts = {}

    def go_on(names, n):
        draws = [ms.Tensor(rng.standard_normal((len(names), n, h, d)), ms.float32).astype(dtype)
                 for h, d in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))]
        query, key, value = (x.astype(ms.float32).asnumpy().astype(np.float64) for x in draws)
        for i, name in enumerate(names):
            texts[name] = [np.concatenate((a, b[i])) for a, b in zip(texts[name], (key, value))]
        lengths = cache.append(names, n)
        out = net(*map(as_layout, draws), lengths, cache.block_table(names, 4))
        out = as_layout(out).astype(ms.float32).asnumpy()
        for i, name in enumerate(names):
            exact, _, _ = reference.forward(*(x.swapaxes(0, 1)[None] for x in (query[i], *texts[name])), right=0)
            np.testing.assert_allclose(out[i], exact[0].swapaxes(0, 1), atol=bound, rtol=bound)

    texts["common"] = [np.empty((0, kv_heads, d)) for d in (dim, value_dim)]
    cache.allocate("common")
    go_on(["common"], 21)
    for name in range(4):
        cache.fork("common", name)
        texts[name] = list(texts["common"])
    go_on([0, 2], 1)
    go_on([3, 1], 1)
    go_on([3, 2, 1, 0], 12)
    cache.fork(2, 4)
    texts[4] = list(texts[2])
    cache.free(2)
    go_on([4, "common"], 1)
    cache.truncate(0, 20)
    texts[0] = [x[:20] for x in texts[0]]
    go_on(["common", 0, 1, 4], 12)
    assert cache.used_blocks + cache.free_blocks == cache.num_blocks
