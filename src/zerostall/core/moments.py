"""When a save is said to have been made, by a clock that may be set forward and back."""

from __future__ import annotations

import math


def moment(clock: float, latest: float, passed: float) -> float:
    """What counts as now: the clock, where it is later than the `latest` save; else that save's moment and what passed.

    Which of two saves came later is told by this, so it always rises. After a save that was made while the clock was
    far ahead, time goes on from there at its own pace: what `Keep(within=)` counts from one save to the next stays
    right, and the clock is believed again once it is past that.

    Args:
        passed: seconds since the latest save, by a clock that nobody sets.
    """
    now = clock if clock > latest else latest + max(passed, 0.0)
    return now if now > latest else math.nextafter(latest, math.inf)
