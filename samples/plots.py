"""The two figures of the demo: loss curves, and memory against length."""
from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from gpt import ATTENTIONS
from matplotlib.ticker import FuncFormatter, NullLocator
from memory import ATTENTION_HEADS, expected

COLOURS = {"naive": "#c44e52", "fused": "#dd8452", "flash": "#2a6fb0"}
WIDTHS = {"naive": 7, "fused": 3.4, "flash": 1.2}    # the curves lie on one another
STYLE = {"font.size": 11, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True, "axes.spines.top": False,
         "axes.spines.right": False, "legend.frameon": False, "savefig.dpi": 150}


def plot_losses(losses: dict[str, list[float]], bound: float | None, subtitle: str, path: Path) -> None:
    """`losses`: attention -> loss of each step; how far they are from naive goes below, with its bound."""
    with plt.rc_context(STYLE):
        others = [attention for attention in losses if attention != "naive"]
        both = len(losses) > len(others) > 0
        figure, axes = plt.subplots(2 if both else 1, 1, figsize=(8, 6.2 if both else 4.5), sharex=True, squeeze=False,
                                    layout="constrained", height_ratios=[2.4, 1] if both else None)
        top = axes[0, 0]
        for attention, values in losses.items():
            top.plot(range(1, len(values) + 1), values, color=COLOURS[attention], label=ATTENTIONS[attention],
                     linewidth=WIDTHS[attention] if both else 1.4, alpha=0.45 if both and attention == "naive" else 1.0)
        figure.suptitle("Training loss of a small GPT, same weights and same batches", fontweight="bold")
        top.set_title(subtitle, fontsize=10, color="#555555")
        top.set_ylabel("loss (nats per character)")
        top.legend()
        if both:
            bottom = axes[1, 0]
            for other in others:
                gaps = [max(abs(a - b), 1e-8) for a, b in zip(losses["naive"], losses[other])]
                bottom.semilogy(range(1, len(gaps) + 1), gaps, color=COLOURS[other],
                                linewidth=WIDTHS[other],
                                label=f"{ATTENTIONS[other]} (0 drawn as 1e-8)")
            bottom.axhline(bound, color="#888888", linestyle="--", linewidth=1, label=f"bound {bound:g}")
            bottom.set_ylabel("|difference to naive|")
            bottom.set_ylim(5e-9, 5 * bound)
            bottom.legend(fontsize=9, loc=(0.01, 0.42))
        axes[-1, 0].set_xlabel("step")
        figure.savefig(path)
        plt.close(figure)


def plot_memory(grown: dict[str, dict[int, float]], lengths: list[int], budget: float, dtype: str, path: Path) -> None:
    """`grown`: attention -> length -> MiB; where naive attention was stopped, a dotted line says so."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 5.2), layout="constrained")
        for attention, points in grown.items():
            axes.plot(list(points), list(points.values()), "o-", color=COLOURS[attention], label=ATTENTIONS[attention])
            last = max(points)
            rest = [length for length in lengths if length > last]
            axes.annotate(_mib(points[last]), (last, points[last]), textcoords="offset points", xytext=(-4, 9),
                          ha="right", color=COLOURS[attention])
            if rest:
                foreseen = [expected(points, length) for length in rest]
                axes.plot([last, *rest], [points[last], *foreseen], ":", color=COLOURS[attention],
                          label="not run: over the budget (drawn as length²)")
                axes.annotate(f"would need {_mib(foreseen[-1])}", (rest[-1], foreseen[-1]), ha="right", va="bottom",
                              textcoords="offset points", xytext=(-10, -4), color=COLOURS[attention])
                axes.axhline(budget, color="#888888", linestyle="--", linewidth=1, label=f"budget {_mib(budget)}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _mib(value)))
        axes.set_xlabel("sequence length (tokens)")
        axes.set_ylabel("peak memory growth of the step")
        figure.suptitle("Memory of one causal attention step, forward and backward", fontweight="bold")
        axes.set_title(f"batch 1, {ATTENTION_HEADS} heads, head_dim 64, {dtype}; each point a fresh process",
                       fontsize=10, color="#555555")
        axes.legend(loc="upper left", fontsize=9.5)
        figure.savefig(path)
        plt.close(figure)


def _mib(value: float) -> str:
    return f"{value / 1024:.3g} GiB" if value >= 1024 else f"{value:.3g} MiB"
