"""What uploads cost training, measured in its own steps, and how fast they may therefore be: a pure decision.

Priorities and rates only guess at what two streams of bytes do to each other. The agent knows from save to save how
long a step takes. So steps that were trained beside an upload are compared with those that were not.
"""

from __future__ import annotations

from statistics import median

import msgspec

COSTLY = 0.02
"""More than that share of a step, and more than the steps differ by anyway, is too much."""

HARMLESS = 0.005
LEAST_SPEED = 1 / 16
REMEMBERED = 8
_ENOUGH = 3
_BUSY, _QUIET = 0.5, 0.1
_LONGEST_REST = 10.0


class Stretch(msgspec.Struct, frozen=True):
    """From one save to the next: seconds a step, and for which share of it an upload was under way."""

    seconds: float
    share: float


class Effect(msgspec.Struct, frozen=True):
    """What has been seen, and what follows.

    Attributes:
        speed: how fast uploads may be, as a share of what they would reach.
        reason: why, in words.
        quiet, busy: seconds a step of the last stretches without and with an upload; those at this speed.
    """

    speed: float = 1.0
    reason: str = "uploads have not been compared with training's steps yet"
    quiet: tuple[float, ...] = ()
    busy: tuple[float, ...] = ()


def heed(effect: Effect, stretch: Stretch) -> Effect:
    """What is known once another stretch has been seen."""
    quiet, busy = effect.quiet, effect.busy
    if stretch.share <= _QUIET:
        quiet = (*quiet, stretch.seconds)[-REMEMBERED:]
    elif stretch.share >= _BUSY:
        busy = (*busy, stretch.seconds)[-REMEMBERED:]
    seen = msgspec.structs.replace(effect, quiet=quiet, busy=busy)
    if min(len(quiet), len(busy)) < _ENOUGH:
        return seen
    usual = median(quiet)
    cost = median(busy) / usual - 1
    spread = median(abs(one - usual) for one in quiet) / usual
    words = f"training's steps take {max(cost, 0.0):.1%} longer while a step is uploaded"
    if cost > max(COSTLY, 2 * spread):
        speed = max(LEAST_SPEED, effect.speed / 2)
    elif cost < HARMLESS and effect.speed < 1:
        speed = min(1.0, effect.speed * 2)
    else:
        return msgspec.structs.replace(seen, reason=words)
    slower = "" if speed == 1 else f": uploads go at {speed:.0%} of their speed"
    return Effect(speed, words + slower, quiet, () if speed != effect.speed else busy)


def rest(seconds: float, speed: float) -> float:
    """How long to rest after a part that took so many seconds."""
    return min(_LONGEST_REST, seconds * (1 / speed - 1))
