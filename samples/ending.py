"""How a sample refuses its options, and how it ends: what is wrong is one line, and so is Ctrl-C."""
from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def run(main: Callable[[], int]) -> None:
    """Leaves Python with the status that `main` returns; with 1, after one line, where it is interrupted, a package is
    missing, or a file cannot be read or written."""
    try:
        status = main()
    except KeyboardInterrupt:
        status = "\nInterrupted."
    except (ImportError, OSError) as error:
        status = f"\n{error}"
    sys.exit(status)    # a text goes to stderr, and the status is 1


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
