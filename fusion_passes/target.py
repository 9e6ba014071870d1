"""What the commands ``explain`` and ``verify`` work on: MODULE:FACTORY or FILE.py:FACTORY on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path

from mindspore import nn

from . import steps
from .session import LEVELS, MEMORY


def add_arguments(parser) -> None:
    """The options that both commands share."""
    parser.add_argument("target", metavar="MODULE:FACTORY",
                        help="a module or a Python file, and the function in it that returns (net, inputs): the cell "
                        "whose value is the loss, and the tuple it is called with")
    parser.add_argument("--level", choices=LEVELS, default="auto", help="what to fuse (default %(default)s)")
    parser.add_argument("--memory", choices=MEMORY, default="keep", help="of level block (default %(default)s)")
    parser.add_argument("--no-dropout", action="store_true", help="leave attention with dropout alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def options(args) -> dict:
    """The arguments of `fuse`."""
    return {"level": args.level, "dropout": not args.no_dropout, "memory": args.memory}


def load(func: str, text: str):
    """The net and its inputs, for the command `func`.

    Raises:
        SystemExit: With what is wrong, for the command line.
    """
    name, colon, factory = text.rpartition(":")
    if not colon or not name or not factory:
        raise SystemExit(f"ms-flash: the target must be MODULE:FACTORY or FILE.py:FACTORY, but got {text!r}")
    module = _tried(lambda: _module(name), f"{name} cannot be imported")
    function = getattr(module, factory, None)
    if not callable(function) or isinstance(function, nn.Cell):
        raise SystemExit(f"ms-flash: there is no function {factory!r} in {name}")
    made = _tried(function, f"{text}, called without arguments, failed")
    if not isinstance(made, tuple) or len(made) != 2:
        kind = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise SystemExit(f"ms-flash: {text} must return (net, inputs), but got {kind}")
    net, inputs = made
    inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    try:
        steps.checked(func, net, inputs)
    except TypeError as error:
        raise SystemExit(f"ms-flash: {text} returns a wrong value. {error}") from error
    return net, inputs


def _tried(call, failed):
    """What `call` returns; where the user's code raises, its message and where that was."""
    try:
        return call()
    except Exception as error:
        text, places = str(error), [frame[:2] for frame in traceback.extract_tb(error.__traceback__)
                                    if frame[0] not in (__file__, importlib.__file__) and frame[0][0] != "<"]
        if isinstance(error, SyntaxError):
            text, places = error.msg, [(error.filename, error.lineno)]
        place = f" ({Path(places[-1][0]).name}:{places[-1][1]})" if places else ""
        raise SystemExit(f"ms-flash: {failed}: {type(error).__name__}: {text.strip()}{place}") from error


def _module(name):
    if not name.endswith(".py"):
        sys.path.insert(0, "")
        return importlib.import_module(name)
    file = Path(name).resolve()
    if not file.exists():
        raise SystemExit(f"ms-flash: there is no file {name}")
    sys.path.insert(0, str(file.parent))    # as Python does for a script
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module     # MindSpore looks up the source of a cell through its module
    spec.loader.exec_module(module)
    return module
