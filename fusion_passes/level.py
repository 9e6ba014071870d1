"""Which level a site gets when the user leaves it to us."""

from __future__ import annotations


def takes_projections(options: dict) -> bool:
    """Whether to try level block for a site that level layout fuses.

    Measured (`bench --suite fusion`, ViT-S, one thread, CPU time of a step): layout 0.66 s, block 0.65 s, equal within
    their spread, against 0.76 s unfused. So block is for its other virtue, not keeping query, key and value: it is
    taken where that is asked for.
    """
    return options["level"] == "block" or (options["level"] == "auto" and options.get("memory") == "recompute")
