"""The serving sample: in a running batch requests get what they get alone and without a cache; nothing stays behind."""

from __future__ import annotations

import argparse
import copy
import gc
import os
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

SAMPLES = Path(__file__).resolve().parent.parent.parent / "samples"
SHARED, LONGEST, MOST = 21, 24, 20      # 21: the last block of the common text is unfinished, so forks copy it


@pytest.fixture(scope="module")
def sample():
    """samples/serve.py and what it imports."""
    sys.path.insert(0, str(SAMPLES))
    import batcher
    import serve
    yield argparse.Namespace(serve=serve, Batcher=batcher.Batcher, Request=batcher.Request,
                             random_requests=batcher.random_requests, Text=serve.Text, make_net=serve.make_net)
    sys.path.remove(str(SAMPLES))


@pytest.fixture(scope="module")
def world(sample):
    """A random net, a text, and its first characters as the common text."""
    text = sample.Text()
    options = argparse.Namespace(train=0, seed=3, context=SHARED + LONGEST + MOST, dim=64, layers=2)
    net = sample.make_net(text, options).set_train(False)
    return argparse.Namespace(net=net, logits=ms.jit(net), context=options.context, ids=text.ids,
                              shared=text.ids[:SHARED].tolist())


def run(batcher, requests):
    """All of them; the books are right after every step."""
    for request in requests:
        batcher.submit(request)
    cache, done = batcher.cache, []
    while batcher.waiting or batcher.running:
        done += batcher.step()
        assert cache.used_blocks + cache.free_blocks == cache.num_blocks
        assert set(cache.sequences) == {"shared", *batcher.running}
    assert {id(request) for request in done} == {id(request) for request in requests}
    assert all(len(request.written) == request.count for request in requests)
    batcher.close()
    assert cache.free_blocks == cache.num_blocks and not cache.sequences
    return [request.written for request in requests]


def without_cache(world, request):
    """The whole text run anew for every character."""
    text = (world.shared if request.shared else []) + request.prompt
    for _ in range(request.count):
        # of one length, so one graph: what stands behind the last character is unseen
        ids = ms.Tensor([text + [0] * (world.context - len(text))], ms.int32)
        text.append(int(world.logits(ids).asnumpy()[0, len(text) - 1].argmax()))
    return text[len(text) - request.count:]


def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("slots, blocks, block_size", [(8, 60, 8), (6, 80, 1), (3, 5, 64)])
def test_every_result_is_that_of_one_at_a_time(sample, world, slots, blocks, block_size):
    requests = sample.random_requests(np.random.default_rng(blocks), world.ids, 16, LONGEST, MOST)
    alone = copy.deepcopy(requests)
    batcher = sample.Batcher(world.net, slots, blocks, block_size, world.shared)
    together = run(batcher, requests)
    assert together == run(sample.Batcher(world.net, 1, blocks, block_size, world.shared), alone)
    assert together[:4] == [without_cache(world, request) for request in requests[:4]]
    assert batcher.moved > 1.5 * batcher.steps, "requests ran together"


def test_requests_are_set_back_when_the_cache_is_full_and_lose_nothing(sample, world):
    requests = sample.random_requests(np.random.default_rng(5), world.ids, 12, 4, MOST)
    batcher = sample.Batcher(world.net, 8, 16, 4, world.shared)
    together = run(batcher, requests)
    assert batcher.set_back > 1
    assert together == [without_cache(world, request) for request in requests]


def test_a_request_joins_while_another_runs(sample, world):
    batcher = sample.Batcher(world.net, 2, 20, 8, world.shared)
    first, second = (sample.Request(world.ids[at:at + 9].tolist(), 12) for at in (100, 200))
    batcher.submit(first)
    for _ in range(4):
        batcher.step()
    batcher.submit(second)
    assert batcher.step() == [] and batcher.running == [first, second] and len(second.written) == 2
    while batcher.running:
        batcher.step()
    assert [first.written, second.written] == [without_cache(world, request) for request in (first, second)]


def test_forks_share_the_blocks_of_the_common_text(sample, world):
    batcher = sample.Batcher(world.net, 4, 40, 4, world.shared)
    assert batcher.cache.used_blocks == 6                   # 21 characters
    for _ in range(4):
        batcher.submit(sample.Request(world.ids[50:51].tolist(), 2, True))
    batcher.step()
    assert batcher.cache.used_blocks == 6                   # done and gone: the common text is whole again
    for _ in range(4):
        batcher.submit(sample.Request(world.ids[50:51].tolist(), 3, True))
    batcher.step()
    assert batcher.cache.used_blocks == 6 + 4               # each has a copy of the sixth block, and the first five


@pytest.mark.parametrize("prompt, count", [(0, 3), (3, 0), (30, 30)])
def test_a_request_that_can_never_run_is_refused(sample, world, prompt, count):
    batcher = sample.Batcher(world.net, 2, 10, 8, world.shared)
    with pytest.raises(ValueError, match=f"but got {prompt} \\+ {count} characters"):
        batcher.submit(sample.Request([1] * prompt, count))


@pytest.mark.slow
def test_a_thousand_requests(sample, world):
    """Random lengths, a cache too small for all slots: equal results, no block left, memory flat."""
    requests = sample.random_requests(np.random.default_rng(7), world.ids, 1000, LONGEST, MOST)
    alone = copy.deepcopy(requests)
    batcher = sample.Batcher(world.net, 8, 28, 8, world.shared)
    for request in requests:
        batcher.submit(request)
    held, done = [], 0
    while batcher.waiting or batcher.running:
        before = done // 100
        done += len(batcher.step())
        assert batcher.cache.used_blocks + batcher.cache.free_blocks == 28
        if done // 100 > before:
            held.append(resident())
    assert len(held) == 10 and batcher.set_back > 0
    # keys and values of the other 800 requests are 17 MiB, 22 KiB each; seen: 0.1 MiB
    assert max(held[2:]) - held[1] < 2 * 2**20, held
    batcher.close()
    assert batcher.cache.free_blocks == 28
    assert [r.written for r in requests] == run(sample.Batcher(world.net, 1, 28, 8, world.shared), alone)


def test_command_line(tmp_path):
    done = subprocess.run([sys.executable, str(SAMPLES / "serve.py"), "--train", "2", "--requests", "12", "--dim", "64",
                           "--layers", "1", "--blocks", "20", "--most", "20"], capture_output=True, text=True,
                          cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "12 of 12 results equal those of one at a time" in done.stdout and ", 0 left behind" in done.stdout
    assert "together" in done.stderr and "blocks" in done.stderr    # the bars
