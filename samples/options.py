"""Types of options, for argparse: what is wrong is told in one line, before the work."""
from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number, `least` or more."""
    def whole(text):
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, but got {text!r}")
        return value

    return whole


def output_file(text: str) -> Path:
    """The type of an option that names a file to write: one that cannot be is told before the work. Its folder is made;
    a file that is there is replaced."""
    path = Path(text)
    if not path.name or path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file, but got the folder {text!r}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot be written: {error}") from None
    return path


def some_text(text: str) -> str:
    """The type of an option that must say something, in characters that there are."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    if any("\ud800" <= sign <= "\udfff" for sign in text):      # how Python hands on bytes that are no UTF-8
        raise argparse.ArgumentTypeError(f"must be UTF-8, but got {text!r}")
    return text
