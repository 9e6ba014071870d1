"""Block sizes of the CPU kernels: the tables that ``tune`` writes, and what of them is in use.

A table is a YAML list of rules. A rule says for which calls it holds and with which sizes they run::

    - {isa: avx512, dtype: float32, pass: backward, head_dim: [33, 64], keys: [512, 2047], block_m: 96, block_n: 144}

What a rule leaves out it does not restrict, or does not say. The first rule that holds for a call decides, in this
order: the environment variables MS_FLASH_BLOCK_M and MS_FLASH_BLOCK_N, the table of this machine (MS_FLASH_TUNING, or
the file that ``tune`` writes), the table of the package. `block_m` and `block_n` of the call itself come before all.
"""

from __future__ import annotations

import os
from pathlib import Path

import yaml

DTYPES = ("float32", "float16", "bfloat16")
PASSES = ("forward", "decode", "backward")  # decode: a forward with one query per sequence
_UNLIMITED = 2**62
_WORDS = {"isa": None, "dtype": DTYPES, "pass": PASSES}
_RANGES = ("head_dim", "keys")
_SIZES = ("block_m", "block_n", "keys_per_part")
_VARIABLES = {"MS_FLASH_BLOCK_M": "block_m", "MS_FLASH_BLOCK_N": "block_n"}


def shipped() -> Path:
    """The table of the package."""
    return Path(__file__).resolve().parent / "cpu.yaml"


def own() -> Path:
    """The table of this machine: the file that MS_FLASH_TUNING names, or the one that ``tune`` writes."""
    named = os.environ.get("MS_FLASH_TUNING")
    if named:
        return Path(named)
    config = os.environ.get("XDG_CONFIG_HOME")
    return Path(config or os.path.expanduser("~/.config")) / "ms_flash" / "cpu.yaml"


def _files():
    """Those that are there. os.path, because a home that may not be read is not there."""
    return [file for file in (own(), shipped()) if os.path.exists(file)]


def sources() -> list[str]:
    """What is in use, the first that decides first: names of variables and files."""
    return [name for name in _VARIABLES if os.environ.get(name)] + [str(file) for file in _files()]


def in_use() -> list[dict]:
    """The rules in use, the first that decides first.

    Raises:
        ValueError: If a variable or a file says what cannot be.
    """
    override = {}
    for variable, size in _VARIABLES.items():
        text = os.environ.get(variable)
        if text:
            if not text.isdecimal() or not 0 < int(text) < 2**31:
                raise ValueError(f"The environment variable {variable} must be a positive integer, but got {text!r}.")
            override[size] = int(text)
    if os.environ.get("MS_FLASH_TUNING") and not os.path.exists(own()):
        raise ValueError(f"The environment variable MS_FLASH_TUNING must name a file, but got {str(own())!r}.")
    rules = [rule for file in _files() for rule in read(file)]
    # A variable goes into every rule: where only one of the two is set, the other size is still that of the tables.
    return [{**rule, **override} for rule in rules] + ([override] if override else [])


def read(file: Path) -> list[dict]:
    """The rules of a table.

    Raises:
        ValueError: If it cannot be read, or a rule of it says what cannot be.
    """
    try:
        rules = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"The block table {file} cannot be read: {' '.join(str(error).split())}.") from error
    rules = [] if rules is None else rules
    if not isinstance(rules, list):
        raise ValueError(f"The block table {file} must be a list of rules, but got {type(rules).__name__}.")
    for number, rule in enumerate(rules, 1):
        wrong = _wrong(rule)
        if wrong:
            raise ValueError(f"The block table {file}, rule {number}: {wrong}.")
    return rules


def _wrong(rule):
    """What is wrong with a rule, if anything."""
    whole = lambda x: isinstance(x, int) and not isinstance(x, bool)
    if not isinstance(rule, dict):
        return f"must be a mapping, but got {rule!r}"
    for name, value in rule.items():
        if name in _WORDS:
            known = _WORDS[name]
            if not isinstance(value, str) or value.split() != [value] or (known and value not in known):
                return f"'{name}' must be {'one of ' + ', '.join(known) if known else 'a word'}, but got {value!r}"
        elif name in _RANGES:
            if not (isinstance(value, list) and len(value) == 2 and all(whole(x) for x in value)
                    and 0 <= value[0] <= value[1] < _UNLIMITED):
                return f"'{name}' must be [least, most], but got {value!r}"
        elif name in _SIZES:
            if not whole(value) or not 0 < value < 2**31:
                return f"'{name}' must be a positive integer, but got {value!r}"
        else:
            return f"there is no field {name!r}; the fields are {', '.join((*_WORDS, *_RANGES, *_SIZES))}"
    return None


def as_text(rules: list[dict]) -> str:
    """The rules as the native library takes them: see op_impl/cpu/blocks.h."""
    lines = []
    for rule in rules:
        words = [rule.get(name, "*") for name in _WORDS]
        ranges = [bound for name in _RANGES for bound in rule.get(name, [0, _UNLIMITED])]
        lines.append(" ".join(str(field) for field in [*words, *ranges, *(rule.get(name, 0) for name in _SIZES)]))
    return "\n".join(lines)
