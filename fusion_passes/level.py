"""Which level a site gets when the user leaves it to us."""

from __future__ import annotations


def takes_projections(level: str, spec) -> bool:
    """Whether to try level block for a site that level layout fuses with this AttentionSpec."""
    del spec
    return level == "block"
