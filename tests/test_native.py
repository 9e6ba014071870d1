"""The native library by itself: threads, forks, instruction sets, memory, errors."""
from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import flash_rule
import native
import numpy as np
import pytest

TESTS = Path(__file__).resolve().parent


def call(seed=0, batch=2, heads=6, kv_heads=2, q_len=113, k_len=203, d=40, dtype=np.float32, **options):
    """A forward and a backward of random inputs: all results, by name."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(dtype)
    inputs = {"query": draw(batch, heads, q_len, d), "key": draw(batch, kv_heads, k_len, d),
              "value": draw(batch, kv_heads, k_len, d), "bias": draw(heads, q_len, k_len),
              "sinks": draw(heads)}
    saved = native.forward(inputs, **options)
    dlse = rng.standard_normal((batch, heads, q_len)).astype(np.float32)
    grads = native.backward(inputs, saved, draw(batch, heads, q_len, d), dlse, **options)
    return {**saved, **grads}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture
def threads():
    """Sets the number of threads and puts it back."""
    library = native.library()
    before = library.msflash_cpu_get_num_threads()
    yield library.msflash_cpu_set_num_threads
    library.msflash_cpu_set_num_threads(before)


@pytest.fixture(params=native.library().msflash_cpu_isa_list().decode().split(","))
def isa(request):
    """Every instruction set that this machine has."""
    library = native.library()
    before = library.msflash_cpu_isa()
    assert library.msflash_cpu_force_isa(request.param.encode()) == 0
    yield request.param
    library.msflash_cpu_force_isa(before)


@pytest.mark.parametrize("options", [{"right": 0}, {"dropout": 0.17, "seed": 5}, {"left": 30, "right": 7}])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_bit_equal_for_any_number_of_threads_and_run_to_run(threads, options, dtype):
    results = []
    for count in (1, 2, 3, 8, 1):
        threads(count)
        results.append(call(dtype=dtype, **options))
    for other in results[1:]:
        assert_same(results[0], other)


def test_keys_split_between_tasks_are_merged_in_a_fixed_order(threads):
    # one head and one query block: only the keys can be shared out, in the forward and in the backward
    shape = {"batch": 1, "heads": 1, "kv_heads": 1, "q_len": 3, "k_len": 3333}
    threads(1)
    alone = call(**shape)
    threads(4)
    assert_same(alone, call(**shape))


def test_concurrent_callers_get_what_they_would_get_alone(threads):
    threads(2)
    expected = [call(seed) for seed in range(4)]
    failures = []

    def work(seed):
        try:
            for _ in range(5):
                assert_same(expected[seed], call(seed))
        except AssertionError as error:
            failures.append(f"{seed}: {error}")

    callers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


def test_a_forked_child_works_after_the_parent_used_threads(threads):
    threads(2)
    expected = call()
    child = os.fork()
    if child == 0:      # the parent's worker threads do not exist here
        try:
            assert_same(expected, call())
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert_same(expected, call())


@pytest.mark.parametrize("dtype", list(native.DTYPES))
def test_every_instruction_set_obeys_the_rule(isa, dtype):
    rng = np.random.default_rng(7)
    draw = lambda *shape: rng.standard_normal(shape).astype(native.DTYPES[dtype])
    q, k, v, dout = draw(1, 4, 97, 72), draw(1, 2, 161, 72), draw(1, 2, 161, 24), draw(1, 4, 97, 24)
    mask = rng.random((1, 1, 97, 161)) < 0.3
    inputs = {"query": q, "key": k, "value": v, "attn_mask": mask}
    options = {"softcap": 4.0, "left": 90, "right": 20}
    dlse = rng.standard_normal((1, 4, 97)).astype(np.float32)
    saved = native.forward(inputs, dropout=0.2, seed=3, **options)
    grads = native.backward(inputs, saved, dout, dlse, dropout=0.2, seed=3, **options)
    got = {"out": saved["out"], "lse": saved["lse"], **{name: grads[name] for name in ("dq", "dk", "dv")}}
    request = {"q": q, "k": k, "v": v, "attn_mask": mask, "dropout_p": 0.2, "seed": 3, **options}
    exact = flash_rule.evaluate(request, dout, dlse)
    naive = flash_rule.evaluate(request, dout, dlse, rounding=native.DTYPES[dtype])
    flash_rule.check(got, exact, {name: naive[name] for name in exact})


def test_high_precision_is_exact_to_float32(isa):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, 65, 33)).astype(np.float32) for _ in range(3))
    saved = native.forward({"query": q, "key": k, "value": v}, precision="high", right=0)
    exact = flash_rule.reference.forward(q, k, v, right=0)
    assert np.abs(saved["out"] - exact[0]).max() <= 2 ** -24 * np.abs(exact[0]).max()
    assert np.abs(saved["lse"] - exact[1]).max() <= 2 ** -24 * np.abs(exact[1]).max()


def test_wrong_calls_are_refused_with_a_reason_and_the_next_call_works():
    q = np.zeros((1, 2, 3, 4), np.float32)
    wrong = [
        ({"query": q, "key": q[..., :3], "value": q}, {}, "'head_dim' of 'key' must be equal"),
        ({"query": q, "key": q[:, :, :2], "value": q}, {}, "same heads and length"),
        ({"query": q, "key": q, "value": q, "attn_mask": np.zeros((2, 5), bool)}, {}, "must broadcast to"),
        ({"query": q, "key": q, "value": q, "sinks": np.zeros(3, np.float32)}, {}, "shape of 'sinks'"),
        ({"query": q[0], "key": q[0], "value": q[0], "cu_q": np.array([0, 5]), "cu_k": np.array([0, 2])},
         {"layout": "TND"}, "last value of 'cu_seqlens_q'"),
        ({"query": q[0], "key": q[0], "value": q[0], "cu_q": np.array([0, 2, 1]), "cu_k": np.array([0, 1, 2])},
         {"layout": "TND"}, "must not decrease"),
        ({"query": q[0], "key": q[0], "value": q[0], "cu_q": np.array([1, 2]), "cu_k": np.array([0, 2])},
         {"layout": "TND"}, "must start with 0"),
    ]
    for inputs, options, reason in wrong:
        with pytest.raises(RuntimeError, match=reason):
            native.forward(inputs, **options)
        assert np.isfinite(native.forward({"query": q, "key": q, "value": q})["out"]).all()


def in_a_fresh_process(code, **environment):
    """Standard output of Python code that may import the helpers of the tests."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(TESTS), **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


MEMORY = """
    import resource, sys
    import numpy as np, native
    native.library().msflash_cpu_set_num_threads(2)
    b, n, s, d = {shape}
    draw = lambda: np.random.default_rng(0).standard_normal((b, n, s, d), np.float32)
    slot = lambda **named: [named.get(name) for name in native.SLOTS]
    query, key, value, dout = draw(), draw(), draw(), draw()
    tensors = dict(query=query, key=key, value=value)
    spec = native.spec_text(tensors)
    rows = [np.zeros((b, n, s), np.float32) for _ in range(4)]
    out, dq, dk, dv = (np.zeros((b, n, s, d), np.float32) for _ in range(4))
    for x in (*rows, out, dq, dk, dv): x.fill(1)
    raw_call = native.raw_call
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    raw_call("fwd", spec, slot(**tensors) + [out, *rows[:3]])
    raw_call("bwd", spec, slot(**tensors) + [out, rows[1], rows[2], dout, rows[3], dq, dk, dv, np.zeros(1, np.float32)])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(grown, 8 * out.nbytes)
"""


@pytest.mark.parametrize("length", [2048, 8192])
def test_working_memory_is_a_fraction_of_the_tensors(length):
    # 8 tensors: query, key, value, out and the gradients. The scores alone would be length / 16 times as large as one.
    grown, tensors = map(int, in_a_fresh_process(MEMORY.format(shape=(1, 8, length, 64))).split())
    assert grown < 0.5 * tensors, f"{grown / 2**20:.1f} MiB beside {tensors / 2**20:.1f} MiB of tensors"


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31_elements():
    # float16 (1, 1, 2^25 + 77, 65): 2,181,043,325 elements of query, one key, so that time and memory stay small
    length, d = 2 ** 25 + 77, 65
    pattern = np.random.default_rng(0).standard_normal((1024, d)).astype(np.float16)
    query = np.empty((1, 1, length, d), np.float16)
    for at in range(0, length, 1024):
        query[0, 0, at:at + 1024] = pattern[:min(1024, length - at)]
    key, value = pattern[None, None, :1], np.ones((1, 1, 1, 1), np.float16)
    out = np.zeros((1, 1, length, 1), np.float16)
    rows = [np.full((1, 1, length), np.nan, np.float32) for _ in range(3)]
    tensors = {"query": query, "key": key, "value": value}
    native.raw_call("fwd", native.spec_text(tensors), [tensors.get(slot) for slot in native.SLOTS] + [out, *rows])
    assert (out == 1).all()
    scores = pattern.astype(np.float64) @ pattern[0].astype(np.float64) / np.sqrt(d)
    for start in (0, 2 ** 25 - 1024, length // 1024 * 1024):
        got = rows[0][0, 0, start:start + 1024]
        np.testing.assert_allclose(got, scores[:len(got)], rtol=1e-5, atol=1e-5)


def test_no_function_is_shared_between_the_builds_for_different_instruction_sets():
    # A header's function that two builds both export would be taken from one of them, perhaps the one for AVX-512.
    # libstdc++'s own may be shared: the link order takes them from the baseline.
    symbols = subprocess.run(["nm", "-C", "--defined-only", str(native.library_path())], capture_output=True, text=True,
                             check=True).stdout.splitlines()
    weak = [line.split(maxsplit=2)[2] for line in symbols if line.split(maxsplit=2)[1] in "WVu"]
    ours = [name for name in weak if "msf::" in name and "std::" not in name]
    assert not ours, ours
