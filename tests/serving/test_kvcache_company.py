"""What surrounds a call over a cache and must not matter: the batch, threads, keys out of the cache, other owners."""

from __future__ import annotations

import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from public_api import tensor

import ms_flash
from ms_flash import flash_attention_with_kvcache, reference

pytestmark = pytest.mark.ops("MsFlashKvCache")
BLOCKS, SIZE, KV_HEADS, DIM = 400, 16, 2, 8


@pytest.fixture
def draw():
    rng = np.random.default_rng()
    return lambda *shape: rng.standard_normal(shape).astype(np.float32)


def attend(query, caches, key, value, lengths, table=None, **options):
    """The output and the caches afterwards; `caches` themselves are not written."""
    k_cache, v_cache = (tensor(x) for x in caches)
    out = flash_attention_with_kvcache(
        tensor(query), k_cache, v_cache, tensor(key), tensor(value), cache_seqlens=ms.Tensor(lengths, ms.int32),
        block_table=None if table is None else ms.Tensor(table, ms.int32), **options)
    return out.asnumpy(), k_cache.asnumpy(), v_cache.asnumpy()


def exact(query, caches, key, value, lengths, table=None):
    """The same of the reference, all (B, S, N, D)."""
    turned = [x.swapaxes(1, 2) for x in (query, *caches, key, value)]
    out, _, k_cache, v_cache = reference.kvcache_forward(*turned, lengths, block_table=table, right=0)
    return [x.swapaxes(1, 2) for x in (out, k_cache, v_cache)]


@pytest.mark.parametrize("splits, queries", [(1, 1), (7, 1), (4, 3)])
def test_with_fixed_splits_a_row_has_the_same_bits_in_any_batch(kernel_backend, draw, splits, queries):
    lengths = np.array([2000, 3, 900, 60])
    table = np.random.default_rng().permutation(BLOCKS)[:4 * 100].reshape(4, 100)
    lengths = np.minimum(lengths, 100 * SIZE - queries)
    caches = draw(BLOCKS, SIZE, KV_HEADS, DIM), draw(BLOCKS, SIZE, KV_HEADS, DIM)
    query, key, value = (draw(4, queries, heads, DIM) for heads in (4, KV_HEADS, KV_HEADS))
    run = lambda rows: attend(query[rows], caches, key[rows], value[rows], lengths[rows], table[rows],
                              num_splits=splits, backend=kernel_backend)[0]
    together = run(slice(None))
    np.testing.assert_allclose(together, exact(query, caches, key, value, lengths, table)[0], atol=1e-5)
    for row in range(4):
        np.testing.assert_array_equal(run(slice(row, row + 1))[0], together[row])
    np.testing.assert_array_equal(run(slice(None, None, -1)), together[::-1])


def test_the_number_of_threads_does_not_matter(draw):
    lengths, table = [1500, 3, 800], np.random.default_rng().permutation(BLOCKS)[:300].reshape(3, 100)
    caches = draw(BLOCKS, SIZE, KV_HEADS, DIM), draw(BLOCKS, SIZE, KV_HEADS, DIM)
    inputs = [draw(3, 2, heads, DIM) for heads in (8, KV_HEADS, KV_HEADS)]
    threads, outs = ms_flash.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            ms_flash.set_num_threads(count)
            outs.append(attend(inputs[0], caches, *inputs[1:], lengths, table, backend="cpu")[0])
    finally:
        ms_flash.set_num_threads(threads)
    assert (outs[0] == outs[1]).all() and (outs[0] == outs[2]).all()


def test_new_keys_that_are_rows_of_the_cache_are_read_before_they_are_overwritten(kernel_backend, draw):
    caches = draw(2, 16, KV_HEADS, DIM), draw(2, 16, KV_HEADS, DIM)
    k_cache, v_cache = (tensor(x) for x in caches)
    query = draw(2, 4, 4, DIM)
    out = flash_attention_with_kvcache(tensor(query), k_cache, v_cache, k_cache[:, 2:6], v_cache[:, 2:6],
                                       cache_seqlens=ms.Tensor([3, 4], ms.int32), backend=kernel_backend)
    expected = exact(query, caches, caches[0][:, 2:6], caches[1][:, 2:6], [3, 4])
    for got, right in zip((out, k_cache, v_cache), expected):
        np.testing.assert_allclose(got.asnumpy(), right, atol=1e-5)


def test_nan_of_one_sequence_or_before_the_window_stays_there(kernel_backend, draw):
    k_cache, v_cache = draw(2, 40, KV_HEADS, DIM), draw(2, 40, KV_HEADS, DIM)
    query, key, value = (draw(2, 1, heads, DIM) for heads in (4, KV_HEADS, KV_HEADS))
    right = attend(query[:1], (k_cache[:1], v_cache[:1]), key[:1], value[:1], [30], window_size=(20, 0),
                   backend=kernel_backend)[0]
    k_cache[1], key[1], value[1], v_cache[1] = np.nan, np.nan, np.inf, np.nan
    k_cache[0, :10], v_cache[0, :10] = np.nan, np.inf
    out = attend(query, (k_cache, v_cache), key, value, [30, 9], window_size=(20, 0), backend=kernel_backend)[0]
    np.testing.assert_allclose(out[:1], right, atol=1e-6)


class Step(nn.Cell):
    """A net that owns its cache."""

    def __init__(self, k_cache, v_cache):
        super().__init__()
        self.k_cache, self.v_cache = (ms.Parameter(tensor(x), name=name, requires_grad=False)
                                      for x, name in ((k_cache, "k_cache"), (v_cache, "v_cache")))

    def construct(self, query, key, value, lengths):
        return flash_attention_with_kvcache(query, self.k_cache, self.v_cache, key, value, cache_seqlens=lengths,
                                            backend="cpu")


def test_copies_and_checkpoints_of_a_net_have_what_was_written(mode, draw, tmp_path):
    caches = [draw(2, 16, KV_HEADS, DIM), draw(2, 16, KV_HEADS, DIM)]
    net = Step(*caches)

    def check(net, caches, at):
        inputs = [draw(2, 1, heads, DIM) for heads in (4, KV_HEADS, KV_HEADS)]
        out, *after = exact(inputs[0], caches, *inputs[1:], at)
        np.testing.assert_allclose(net(*map(tensor, inputs), ms.Tensor(at, ms.int32)).asnumpy(), out, atol=1e-5)
        np.testing.assert_array_equal(net.k_cache.asnumpy(), after[0].astype(np.float32))
        np.testing.assert_array_equal(net.v_cache.asnumpy(), after[1].astype(np.float32))
        return after

    caches = check(net, caches, [3, 8])
    other = copy.deepcopy(net)
    ms.save_checkpoint(net, str(tmp_path / "net.ckpt"))
    loaded = Step(draw(2, 16, KV_HEADS, DIM), draw(2, 16, KV_HEADS, DIM))
    ms.load_param_into_net(loaded, ms.load_checkpoint(str(tmp_path / "net.ckpt")))
    for each in (loaded, other, net):
        check(each, caches, [4, 9])
