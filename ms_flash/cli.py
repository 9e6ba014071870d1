"""The command line: ``python -m ms_flash COMMAND`` or ``ms-flash COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Sequence

from .version import __version__

# name: (module with add_arguments(parser) and run(args) -> exit code, help). A module is imported when its command is
# asked for, so that one that needs MindSpore does not stand in the way of `doctor`.
COMMANDS = {
    "doctor": (".doctor", "what is installed, which backends run here, and whether they compute correctly"),
    "bench": (".bench", "time and memory against other implementations, as CSV"),
    "tune": (".tuning.tune", "measure block sizes on this machine and write the table that the CPU kernels use"),
    "export": (".onnx_export.command", "write a net as ONNX, checked and compared with the net in ONNX Runtime"),
    "explain": (".fusion_passes.explain", "what fusion makes of each attention site of your net, and why"),
    "verify": (".fusion_passes.verify", "run your net as written and fused, and compare the loss and every gradient"),
    "tiling": (".tiling", "what the Ascend kernels make of a shape: blocks, buffers, and which core does what"),
    "docs": (".docs", "rewrite (or --check) the generated tables of README and docs/ in a checkout"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="ms-flash", description="Exact attention for MindSpore.")
    parser.add_argument("--version", action="version", version=f"ms_flash {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name in argv[:1]:
            chosen = importlib.import_module(module, __package__)
            chosen.add_arguments(command)
            command.set_defaults(run=chosen.run)
    args = parser.parse_args(argv)
    return ended(lambda: args.run(args))


def ended(call: Callable[[], int]) -> int:
    """The status that `call` returns; 1, after one line, where it is interrupted, a package is missing, or a file
    cannot be read or written."""
    # Once it has compiled a graph, MindSpore 2.10 answers SIGINT by sending its own process SIGTERM.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return call()
    except KeyboardInterrupt:
        error = "Interrupted."
    except (ImportError, OSError) as problem:
        error = problem
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"\n{error}", file=sys.stderr)
    return 1
