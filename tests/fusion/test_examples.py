"""The examples in the docstrings of the public functions run and print what they say."""

from __future__ import annotations

import doctest

import pytest

import ms_flash


@pytest.mark.parametrize("name", ["fuse", "unfuse", "fusion", "explain", "verify"])
def test_docstring(name):
    function = getattr(ms_flash, name)
    examples = doctest.DocTestFinder(recurse=False).find(function, name, globs={})[0]
    assert examples.examples
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed, _ = runner.run(examples, out=said.append)
    assert not failed, "".join(said)
