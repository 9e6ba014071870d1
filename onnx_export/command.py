"""``python -m ms_flash export``: a net from a module or a file, written as ONNX."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path

from . import profiles
from .api import export_onnx

_BAR = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("net", metavar="MODULE:FACTORY",
                        help="a module or a .py file, and in it a function without arguments that returns "
                             "(net, inputs) or (net, inputs, options of export_onnx); or a .mindir file")
    parser.add_argument("file", metavar="OUT.onnx", help="where to write")
    parser.add_argument("--profile", default=None, choices=list(profiles.PROFILES), help="; ".join(
        f"{name}: {profile.summary}" for name, profile in profiles.PROFILES.items()) + ". Default: portable")
    parser.add_argument("--opset", type=int, help="version of ai.onnx; default: that of the profile")
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True,
                        help="compare with the net in ONNX Runtime at two shapes (the default)")
    parser.add_argument("--tolerance", type=float, help="largest relative error that passes")


def run(args: argparse.Namespace) -> int:
    """Exports and prints the certificate."""
    try:
        net, inputs, options = _built(args.net)
        options = {**options, "verify": args.verify and options.get("verify", True)}
        for name in ("profile", "opset", "tolerance"):
            if getattr(args, name) is not None:
                options[name] = getattr(args, name)
        show = _Progress(sys.stderr)
        certificate = export_onnx(net, *inputs, file_name=args.file, progress=show, **options)
        show.close()
    except (ImportError, TypeError, ValueError, RuntimeError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    print(certificate)
    return 0


def _built(reference):
    """(net, inputs, options) of what the user named."""
    if reference.endswith(".mindir"):
        return reference, (), {}
    source, _, factory = reference.rpartition(":")
    if not source or not factory:
        raise ValueError(f"For 'export', the net must be given as MODULE:FACTORY or as a .mindir file, but got "
                         f"{reference!r}.")
    module = _module(source)
    if not hasattr(module, factory):
        raise ValueError(f"For 'export', there is no '{factory}' in '{source}'.")
    made = getattr(module, factory)()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(f"For 'export', '{factory}' must return (net, inputs) or (net, inputs, options), but got "
                         f"{type(made).__name__}.")
    net, inputs, *options = made
    inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    return net, inputs, dict(options[0]) if options else {}


def _module(source):
    if not source.endswith(".py"):
        sys.path.insert(0, "")
        return importlib.import_module(source)
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"For 'export', the file '{source}' does not exist.")
    sys.path.insert(0, str(path.resolve().parent))      # what the file imports lies beside it
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class _Progress:
    """A bar on a terminal, nothing elsewhere."""

    def __init__(self, stream):
        self.stream = stream
        self.shown = ""

    def __call__(self, text, fraction):
        if not self.stream.isatty():
            return
        done = round(_BAR * fraction)
        line = f"\r[{'#' * done}{'.' * (_BAR - done)}] {text:<40}"
        if line != self.shown:
            self.stream.write(line)
            self.stream.flush()
            self.shown = line

    def close(self):
        """Ends the line of the bar."""
        if self.shown:
            self.stream.write("\r" + " " * (_BAR + 44) + "\r")
