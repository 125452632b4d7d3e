"""Who may use disk and network now, and how fast: pure decisions.

Restores come first, for training waits for them; then what a vault gives to host memory, for the next capture may wait
for its place; then writes to disk that somebody waits for; then uploads.
"""

from __future__ import annotations

import msgspec

MOST_YIELD_SECONDS = 10.0
"""An upload yields that long for each of its parts and no longer: a run whose every save is promised to the disk must
get to its remote tier, too."""

LEAST_BURST = 16 << 20


class Traffic(msgspec.Struct, frozen=True):
    """What is going on at a node: restores, drains of vaults, and writes to disk that somebody waits for."""

    restores: int = 0
    promised: int = 0
    drains: int = 0


class Turn(msgspec.Struct, frozen=True):
    """Whether an upload's next part may go, and why not."""

    go: bool
    reason: str = ""


def turn(traffic: Traffic, waited: float) -> Turn:
    """May the next part of an upload go, which has waited that many seconds?"""
    if traffic.restores:
        reason = "a restore is under way"
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
