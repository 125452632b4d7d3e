"""Which image is checked next although nobody asks for it, and when: pure decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from zerostall.core.bandwidth import Traffic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SHORTEST_PAUSE = 0.05
"""Seconds after a chunk, however small it is."""
FRESH = 2.0
"""Seconds for which an image is not looked at: it was checked while it was copied, and is replaced soon."""


BETWEEN = 5.0
"""Seconds from one look at an image in memory to the next: few and small ones would be looked at without end."""


class Resident(msgspec.Struct, frozen=True, order=True):
    """An image: `name` tells it from all others, `created` is when it was saved.

    Attributes:
        rest: seconds that it is left alone after a check. Memory that is in use changes while one looks away; a file
            that nobody writes does so over months.
        met: when it was first seen here, by the clock that tells when others were looked at.
    """

    created: float
    name: str
    rest: float = BETWEEN
    met: float = float("-inf")


class Pause(msgspec.Struct, frozen=True):
    """How many seconds until the next chunk may be looked at, and why; 0.0 for now."""

    seconds: float
    reason: str


def longest_unseen(residents: Sequence[Resident], seen: Mapping[str, float], now: float) -> Resident | None:
    """The image whose last check is the longest ago; of those never checked, the oldest: None where none is due.

    Where training saves every other moment, its newest image is never old enough, and no core is taken from it.
    """
    due = [
        one
        for one in residents
        if now - one.met >= FRESH and (one.name not in seen or now - seen[one.name] >= one.rest)
    ]
    return min(due, key=lambda one: (seen.get(one.name, 0.0), one), default=None)


def pause(traffic: Traffic, rate: int) -> Pause:
    """May the next chunk be looked at now, at most at `rate` bytes a second on the whole?"""
    if not rate:
        return Pause(1.0, "the rate is 0")
    if traffic.restores:
        return Pause(1.0, "a restore is under way")
    if traffic != Traffic():
        return Pause(1.0, "the node is busy draining or writing")
    return Pause(0.0, "nothing else is going on")


def after(nbytes: int, rate: int) -> float:
    """Seconds to rest after that many bytes."""
    return max(SHORTEST_PAUSE, nbytes / rate)
