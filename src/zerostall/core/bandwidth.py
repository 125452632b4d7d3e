"""Who may use a node's bus, disk and network now, and how fast: pure decisions.

Restores come first, for training waits for them; then captures, for the optimizer may wait for them, and every one is
over soon; then what a vault gives to host memory, for the next capture may wait for its place; then writes to disk
that somebody waits for; then other writes; then uploads. (Checks of what lies in memory come last: `core.scrubbing`.
What goes to other nodes yields to training's own traffic on the link: `core.yielding`.)
"""

from __future__ import annotations

import msgspec

MOST_YIELD_SECONDS = 10.0
"""An upload yields that long for each of its parts and no longer: a run whose every save is promised to the disk must
get to its remote tier, too."""

MOST_WRITE_YIELD_SECONDS = 1.0
"""As long does a write to disk that nobody waits for yield, for each image, and for as long again as it was at it: it
takes at most that much longer than twice the time that it needs."""

LOOK_SECONDS = 0.5
LOOK_AGAIN_SECONDS = 0.02
"""A capture is over in a fraction of a second."""

LEAST_BURST = 16 << 20

_CAPTURES = "a snapshot is being captured"


class Traffic(msgspec.Struct, frozen=True):
    """What is going on at a node: restores, captures, drains of vaults, and writes to disk that somebody waits for."""

    restores: int = 0
    promised: int = 0
    drains: int = 0
    captures: int = 0


class Turn(msgspec.Struct, frozen=True):
    """Whether the next part may go, and why not; then when to look again, in seconds."""

    go: bool
    reason: str = ""
    again: float = LOOK_SECONDS


def write_turn(traffic: Traffic, waited: float, at_it: float = 0.0) -> Turn:
    """May an image be written to disk, or written on, for which nobody waits?

    It has waited that many seconds, and for others it was being written.
    """
    most = MOST_WRITE_YIELD_SECONDS + at_it
    if traffic.captures:
        return Turn(waited >= most, _CAPTURES, LOOK_AGAIN_SECONDS)
    if traffic.restores:
        return Turn(waited >= most, "a restore is under way", LOOK_AGAIN_SECONDS)
    return Turn(True)


def turn(traffic: Traffic, waited: float) -> Turn:
    """May the next part of an upload go, which has waited that many seconds?"""
    if traffic.restores:
        reason = "a restore is under way"
    elif traffic.captures:
        return Turn(waited >= MOST_YIELD_SECONDS, _CAPTURES, LOOK_AGAIN_SECONDS)
    elif traffic.drains:
        reason = "a vault is being drained"
    elif traffic.promised:
        reason = "a write to disk is waited for"
    else:
        return Turn(True)
    return Turn(waited >= MOST_YIELD_SECONDS, reason)


class Bucket(msgspec.Struct, frozen=True):
    """Bytes that may go at once: it fills at `rate` a second, up to a burst; below zero it has been lent."""

    rate: float
    level: float
    at: float

    @classmethod
    def full(cls, rate: float, now: float) -> Bucket:
        return cls(rate, max(rate, LEAST_BURST), now)


def take(bucket: Bucket, nbytes: int, now: float) -> tuple[Bucket, float]:
    """Take bytes out; the bucket after that, and how many seconds to wait before they may go."""
    burst = max(bucket.rate, LEAST_BURST)
    level = min(burst, bucket.level + max(0.0, now - bucket.at) * bucket.rate) - nbytes
    return Bucket(bucket.rate, level, now), max(0.0, -level / bucket.rate)
