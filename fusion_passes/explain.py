"""``explain``: compiles a net with fusion and prints what became of every attention site."""

from __future__ import annotations

import argparse

from . import session, steps, target


def explain(net, *inputs, level="auto", dropout=True, memory="keep", train=True):
    """
    Compiles one step of a net with fusion, runs nothing, prints what became of every softmax, and why.

    Args:
        net (Cell): The net; its value is taken as the loss. A training cell such as ``nn.TrainOneStepCell`` is compiled
            as it is, with its optimizer.
        inputs (tuple): What the net is called with; shapes and dtypes count.

    Keyword Args:
        level (str, optional): As in `fuse`. Default: ``"auto"``.
        dropout (bool, optional): As in `fuse`. Default: ``True``.
        memory (str, optional): As in `fuse`. Default: ``"keep"``.
        train (bool, optional): Whether the step has a backward. Default: ``True``.

    Returns:
        Report.

    Raises:
        TypeError: If the type of an argument is wrong.
        ValueError: If a value is not one of those that `fuse` names.
        RuntimeError: If this version of MindSpore is not supported, or the bridge into it cannot be compiled.

    Supported Platforms:
        ``Ascend`` (sources, unproven) / ``CPU``

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> import ms_flash
        >>> from mindspore import nn
        >>> net = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = ms.Tensor(np.ones((1, 3, 8)), ms.float32)
        >>> report = ms_flash.explain(net, x, x, x, None, False)   # need_weights=False
        ms_flash fusion: 1 of 1 attention sites fused in 1 graph
          fused, layout  net (nn_func.py:3224)  B1 N2 S3 D4 float32  scale 0.5, forward and backward
    """
    steps.checked("explain", net, inputs)
    if not isinstance(train, bool):
        raise TypeError(f"For 'explain', the type of 'train' must be bool, but got {type(train).__name__}.")
    report = compiled(net, inputs, level=level, dropout=dropout, memory=memory, train=train)
    print(report)
    return report


def compiled(net, inputs, *, train, **options):
    """The report of compiling one step, without a print."""
    whole = train and steps.is_training_cell(net)
    with session.fusion(**options) as report, steps.graph_mode(), steps.training(net, train):
        step = net if whole else steps.make(net, inputs, train)[0]
        step.compile_cache.clear()  # or a cell that was compiled before would not be again
        step.compile(*inputs)
    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    target.add_arguments(parser)
    parser.add_argument("--inference", action="store_true", help="compile the forward alone")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 if nothing is fused."""
    net, inputs = target.load("explain", args.target)
    options = target.options(args)
    report = compiled(net, inputs, train=not args.inference, **options)
    print(report.to_json() if args.json else report)
    return 0 if report.fused else 1
