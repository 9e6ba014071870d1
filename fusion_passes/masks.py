"""What the masks and biases of a match become: a window where a constant is a band, else a mask, a fill and a bias."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from .reasons import Refusal
from .scores import Scores, Step, Term

# A constant mask of a finite number counts as "never" from here on: beside a score that is higher by 104 or more, its
# weight is exactly 0 in float32. The report says so where scores could in principle get there.
_NEVER = -1e4
_BEYOND_DOUBT = -6e4
_UNDERFLOW = 104.0


@dataclass
class Masking:
    """How the kernel is told."""

    left: int = -1
    right: int = -1
    align: str = "bottom_right"
    masks: list[Term] = field(default_factory=list)     # joined by "or"
    fill: float | None = None                           # None: -inf
    biases: list[Term] = field(default_factory=list)    # added up
    note: str = ""

    @property
    def kind(self) -> str:
        """A word for the report."""
        words = []
        if (self.left, self.right) != (-1, -1):
            words.append("causal" if (self.left, self.right) == (-1, 0) else f"window({self.left}, {self.right})")
        if self.masks:
            words.append("mask" if self.fill is None else f"mask (fill {self.fill:g})")
        if self.biases:
            words.append("bias")
        return " + ".join(words) or "none"


def settle(scores: Scores, zeroed: Step | None = None) -> Masking:
    """Decides on every mask and bias of `scores`; `zeroed` is a mask that is also put to 0 after the softmax."""
    queries, keys = scores.product.node.shape[-2:]
    found = Masking(masks=[t for t in scores.masks if not _never_masks(t)],
                    biases=[t for t in scores.biases if t.const is None or t.const.any()])
    for term in found.masks:
        if term.step is zeroed:     # then a row without keys is 0, as the kernel has it for -inf
            if term.value > _NEVER:
                raise Refusal("probs_modified", op="a mask")
            term.value = -math.inf
    for term in list(found.masks) + list(found.biases):
        masked, fill = _as_mask(term, term in found.masks)
        if masked is None or not _alone(term, fill, found):
            continue
        window = band(masked, queries, keys)
        if window is None or (fill != -math.inf and _empty_rows(masked, keys)):
            continue
        found.left, found.right, found.align = window
        if fill > _BEYOND_DOUBT:
            found.note = f"the constant {fill:g} masks: true unless scores of a row differ by {-fill - _UNDERFLOW:g}"
        for terms in (found.masks, found.biases):
            if term in terms:
                terms.remove(term)
        break
    fills = {term.value for term in found.masks}
    if len(fills) > 1:
        raise Refusal("mask_order", detail=f"scores are masked with different numbers, {sorted(fills)}")
    fill = fills.pop() if fills else -math.inf
    found.fill = None if fill == -math.inf else fill
    return found


def _never_masks(term):
    return term.const is not None and not _masked(term).any()


def _masked(term):
    return ~term.const.astype(bool) if term.keep else term.const.astype(bool)


def _as_mask(term, is_mask):
    """(what is masked out, its score) if `term` is a constant that says so for all heads alike, else (None, None)."""
    if term.const is None or term.const.shape[0] != 1:
        return None, None
    if is_mask:
        return (_masked(term)[0], term.value) if term.value <= _NEVER else (None, None)
    values = term.const[0].astype(np.float64) * term.value if term.value else term.const[0]
    low = values < 0
    if not low.any() or (values[~low] != 0).any() or values[low].max() > _NEVER:
        return None, None
    return low, float(values[low].max())


def _alone(term, fill, found):
    """Whether nothing else can bring a whole row down to the score of what the band masks out."""
    others = [t for t in found.masks if t is not term]
    if fill == -math.inf:
        # a later fill would put a finite score where the band says -inf
        return all(t.value == -math.inf for t in others) or term is found.masks[-1]
    biases = [t for t in found.biases if t is not term]
    return not others and all(t.const is not None and np.abs(t.const * t.value).max() < -fill / 10
                              for t in biases)


def _empty_rows(masked, keys):
    return np.broadcast_to(masked, (masked.shape[0], keys)).all(axis=1).any()


def band(masked, queries: int, keys: int) -> tuple[int, int, str] | None:
    """(left, right, alignment) of the window that leaves exactly what is not `masked`, or ``None``."""
    allowed = ~np.broadcast_to(masked, (queries, keys))
    rows = allowed.any(axis=1)
    if not rows.any():
        return None
    index = np.arange(queries)
    first, last = allowed.argmax(axis=1), keys - 1 - allowed[:, ::-1].argmax(axis=1)
    left, right = index - first, last - index           # of the diagonal that starts at the top left corner
    cut_left, cut_right = rows & (first > 0), rows & (last < keys - 1)
    left = int(left[cut_left][0]) if cut_left.any() else None
    right = int(right[cut_right][0]) if cut_right.any() else None
    column = np.arange(keys)
    expected = np.ones((queries, keys), bool)
    if left is not None:
        expected &= column >= index[:, None] - left
    if right is not None:
        expected &= column <= index[:, None] + right
    if not (expected == allowed).all():
        return None
    alignments = [("bottom_right", keys - queries), ("top_left", 0)]
    if right == 0 and keys != queries:
        alignments.reverse()
    for align, offset in alignments:
        window = (-1 if left is None else left + offset), (-1 if right is None else right - offset)
        if (left is None or window[0] >= 0) and (right is None or window[1] >= 0):
            return window + (align,)
    return None
