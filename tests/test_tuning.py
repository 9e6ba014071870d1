"""Block sizes: which table decides, what a wrong one says, and that ``tune`` writes one that is used."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
import yaml

import ms_flash
from ms_flash import library, tuning

PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """No table of the machine that runs the tests, and afterwards the sizes of before."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("MS_FLASH_TUNING", "MS_FLASH_BLOCK_M", "MS_FLASH_BLOCK_N"):
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.undo()
    library.use_blocks()


def table(tmp_path, *rules):
    file = tmp_path / "ms_flash" / "cpu.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump(list(rules)))
    return file


def attention(dtype=ms.float32, queries=301, block_n=None, grad=False):
    """Results whose last bits tell how many keys a block has."""
    rng = np.random.default_rng(3)
    shapes = (1, 2, queries, 40), (1, 2, 1201, 40), (1, 2, 1201, 40)
    inputs = [ms.Tensor(rng.standard_normal(shape, np.float32)).astype(dtype) for shape in shapes]
    call = lambda *qkv: ms_flash.flash_attention(*qkv, block_n=block_n, backend="cpu")
    results = ms.grad(lambda *qkv: call(*qkv).astype(ms.float32).sum(), (0, 1, 2))(*inputs) if grad else [call(*inputs)]
    return [x.astype(ms.float32).asnumpy() for x in results]


def equal(a, b):
    return all((x == y).all() for x, y in zip(a, b))


def test_a_rule_holds_where_it_says(tmp_path):
    library.use_blocks()
    plain, wished = attention(), attention(block_n=32)
    assert not equal(plain, wished)
    table(tmp_path, {"dtype": "float32", "pass": "forward", "head_dim": [40, 40], "keys": [1201, 1201], "block_n": 32})
    library.use_blocks()
    assert equal(attention(), wished)
    assert equal(attention(block_n=128), plain)     # the call's own wish comes first


@pytest.mark.parametrize("rule", [{"isa": "other"}, {"dtype": "float16"}, {"pass": "backward"}, {"pass": "decode"},
                                  {"head_dim": [41, 64]}, {"head_dim": [1, 39]}, {"keys": [1202, 9999]}])
def test_a_rule_does_not_hold_elsewhere(tmp_path, rule):
    library.use_blocks()
    plain = attention()
    table(tmp_path, {**rule, "block_n": 32})
    library.use_blocks()
    assert equal(attention(), plain)


def test_backward_and_decode_have_rules_of_their_own(tmp_path):
    library.use_blocks()
    gradients, decoded, forward = attention(grad=True), attention(queries=1), attention()
    table(tmp_path, {"pass": "backward", "keys_per_part": 2000})    # of dQ as one part, not as four
    library.use_blocks()
    assert not equal(attention(grad=True), gradients) and equal(attention(queries=1), decoded)
    table(tmp_path, {"pass": "decode", "block_n": 16, "keys_per_part": 100})
    library.use_blocks()
    assert equal(attention(grad=True), gradients) and not equal(attention(queries=1), decoded)
    assert equal(attention(), forward)


def test_first_rule_and_environment_first(tmp_path, monkeypatch):
    library.use_blocks()
    wished = {n: attention(block_n=n) for n in (32, 64, 256)}
    table(tmp_path, {"pass": "forward", "block_n": 32}, {"block_n": 64})
    library.use_blocks()
    assert equal(attention(), wished[32])
    other = tmp_path / "other.yaml"
    other.write_text("- {block_n: 64}\n")
    monkeypatch.setenv("MS_FLASH_TUNING", str(other))
    library.use_blocks()
    assert equal(attention(), wished[64])
    monkeypatch.setenv("MS_FLASH_BLOCK_N", "256")
    library.use_blocks()
    assert equal(attention(), wished[256])
    monkeypatch.setenv("MS_FLASH_BLOCK_M", "48")     # the other size stays what it was
    assert tuning.in_use()[0] == {"block_n": 256, "block_m": 48}
    assert tuning.sources()[:3] == ["MS_FLASH_BLOCK_M", "MS_FLASH_BLOCK_N", str(other)]


@pytest.mark.parametrize("rule, message", [
    ("- {block_m: 0}", "'block_m' must be a positive integer, but got 0"),
    ("- {block_n: true}", "'block_n' must be a positive integer, but got True"),
    ("- {keys_per_part: x}", "'keys_per_part' must be a positive integer, but got 'x'"),
    ("- {keys: [5, 4]}", r"'keys' must be \[least, most\], but got \[5, 4\]"),
    ("- {keys: 5}", r"'keys' must be \[least, most\], but got 5"),
    ("- {head_dim: [-1, 4]}", r"'head_dim' must be \[least, most\]"),
    ("- {dtype: float64}", "'dtype' must be one of float32, float16, bfloat16, but got 'float64'"),
    ("- {pass: both}", "'pass' must be one of forward, decode, backward, but got 'both'"),
    ("- {isa: 'a b'}", "'isa' must be a word, but got 'a b'"),
    ("- {block: 3}", "there is no field 'block'; the fields are"),
    ("- 7", "must be a mapping, but got 7"),
    ("a: 1", "must be a list of rules, but got dict"),
    ("- [", "cannot be read: while parsing"),
    ("\x00", "cannot be read"),
])
def test_a_wrong_table_is_named(tmp_path, monkeypatch, rule, message):
    file = tmp_path / "wrong.yaml"
    file.write_text(f"- {{block_m: 96}}\n{rule}" if rule.startswith("- {") else rule)
    monkeypatch.setenv("MS_FLASH_TUNING", str(file))
    with pytest.raises(ValueError, match=f"The block table {re.escape(str(file))}.*{message}"):
        library.use_blocks()


@pytest.mark.parametrize("name, value, message", [
    ("MS_FLASH_BLOCK_M", "12.5", "MS_FLASH_BLOCK_M must be a positive integer, but got '12.5'"),
    ("MS_FLASH_BLOCK_N", "0", "MS_FLASH_BLOCK_N must be a positive integer, but got '0'"),
    ("MS_FLASH_TUNING", "/no/such.yaml", "MS_FLASH_TUNING must name a file, but got '/no/such.yaml'"),
])
def test_a_wrong_variable_is_named(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        library.use_blocks()


def run(*arguments, **environment):
    return subprocess.run([sys.executable, "-m", "ms_flash", *arguments], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": PACKAGE_PARENT, **environment})


def test_doctor_tells_a_wrong_table(tmp_path):
    done = run("doctor", MS_FLASH_BLOCK_M="many")
    assert done.returncode == 1
    assert "BROKEN: The environment variable MS_FLASH_BLOCK_M must be a positive integer, but got 'many'" in done.stdout


def test_the_native_library_refuses_what_it_cannot_read():
    native = library.load()
    for text in (b"avx2 float32", b"* * * 0 9 0 9 1 2 3 4", b"* * * 0 9 0 9 1 2 -3", b"* * * 0 9 0 9 1 2 x"):
        assert native.msflash_cpu_set_block_rules(text) == 1
        assert b"cannot be read" in native.msflash_cpu_last_error() or b"negative" in native.msflash_cpu_last_error()


def test_tune_writes_a_table_that_is_used(tmp_path):
    file = table(tmp_path, {"pass": "decode", "dtype": "float32", "isa": "elsewhere", "block_n": 64})
    done = run("tune", "--quick", "--passes", "decode", "--seconds", "0.3", "--out", str(file))
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    wins, sites = map(int, re.match(r"better than the kernels' own sizes: (\d+) of (\d+) problems", last).groups())
    assert sites == 4 and len(re.findall(r"times as fast as the kernels' own \(", done.stdout)) == 4
    rules = tuning.read(file)
    assert len(rules) == wins + 1 and rules[-1]["isa"] == "elsewhere"
    assert str(file) in tuning.sources()
    assert run("tune", "--passes", "sideways").returncode == 2
