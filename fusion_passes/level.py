"""Which level a site gets when the user leaves it to us."""

from __future__ import annotations


def takes_projections(options: dict) -> bool:
    """Whether to try level block for a site that level layout fuses.

    Measured on the models of `bench --suite fusion`, one thread, CPU time of interleaved steps: block takes 1.0 times
    what layout takes for each of the three (median over rounds 0.91 GPT-2, 1.03 BERT, 0.98 ViT-S, minimum 1.01, 0.99),
    inside the spread of the rounds. So block is for its other virtue, not keeping query, key and value: it is taken
    where that is asked for.
    """
    return options["level"] == "block" or (options["level"] == "auto" and options.get("memory") == "recompute")
