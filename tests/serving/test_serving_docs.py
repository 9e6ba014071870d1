"""docs/serving.md: its Python runs from top to bottom, and prints what stands below it; the same for docstrings."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest

from ms_flash import nn

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def test_every_example_prints_what_the_page_says():
    blocks = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", TEXT, flags=re.S)
    assert len(blocks) >= 4
    names = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == expected, code


def test_every_file_it_names_is_there():
    for name in re.findall(r"\b((?:samples|tests)/[\w/]+\.(?:py|md))", TEXT):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(([\w./]+\.md)\)", TEXT):
        assert (ROOT / "docs" / name).exists(), name


@pytest.mark.parametrize("name", ["PagedKVCache", "CacheFullError"])
def test_docstring_examples(name):
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(nn, name), name, globs={})
    assert len(example.examples) > 2
    assert doctest.DocTestRunner().run(example).failed == 0
