"""How two ways of doing the same compare, where the speed of what both use swings: neighbours in time, one by one."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE = 0.95


class Share(msgspec.Struct, frozen=True):
    """The median of ratios, and between what the true one lies with 95 % confidence.

    Attributes:
        low, high: of fewer than six ratios the least and the greatest, which say less.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.median:.0f} % ({100 * self.low:.0f} to {100 * self.high:.0f})"


def share(floor: Sequence[float], ours: Sequence[float]) -> Share:
    """Return what share of the floor's speed ours reaches: seconds of both, measured next to each other, pair by pair.

    The median of the pairs' ratios, not the ratio of the medians: what makes the disk slower for a second makes it
    slower for both of a pair. Whose turn is first must alternate. The interval is the sign test's: it supposes nothing
    of how ratios are distributed.
    """
    ratios = sorted(a / b for a, b in zip(floor, ours, strict=True))
    aside = _aside(len(ratios))
    return Share(statistics.median(ratios), ratios[aside], ratios[-1 - aside])


def _aside(count: int) -> int:
    """How many of so many values, in order, lie outside of the interval of their median at each end."""
    aside, below = 0, 0.0
    for k in range(count // 2):
        below += math.comb(count, k) / 2**count
        if below > (1 - CONFIDENCE) / 2:
            break
        aside = k
    return aside
