"""What zerostall says and counts: one logger, sentences said once, and the counters of one process."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field

log = logging.getLogger("zerostall")


@dataclass(slots=True)
class Fallback:
    """Something that goes a slower or poorer way here.

    Attributes:
        text: what and why, as it was logged.
        count: how often.
    """

    text: str
    count: int = 0


_said: dict[str, Fallback] = {}
_MOST_TOLD = 32
_MOST_KEPT = 10_000


def say_once(key: str, message: str, *values: object, level: int = logging.WARNING) -> bool:
    """Log `message` the first time `key` comes up in this process; True when it was said.

    Every fallback goes through here, so that none is silent and none floods the log. All are counted, for
    `zerostall doctor`.
    """
    known = _said.setdefault(key, Fallback(""))  # atomic: two threads may say it at once
    known.count += 1
    if known.count > 1:
        return False
    known.text = message % values if values else message
    log.log(level, "%s", known.text)
    return True


def fallbacks() -> list[Fallback]:
    """What `say_once` was told in this process, the first ones."""
    return list(_said.values())[:_MOST_TOLD]


@dataclass(slots=True)
class Stats:
    """How one checkpointer fares, from its beginning; `ckpt.stats`, to be read at any time.

    >>> print(ckpt.stats)                                          # the counters
    >>> print(sorted(ckpt.stats.call_seconds)[-1])                 # the longest that a save has held training

    What cost training time is in `call_seconds` and `guard_seconds`, in seconds of the training thread. The lists hold
    at least the last 10 000, newest last.

    Attributes:
        saves: saves accepted.
        skipped: saves skipped since no slot was free, here or on another rank; they are not among `saves`.
        spoiled: accepted saves that came to nothing since another rank skipped them or failed.
        dirty: snapshots thrown away since a tensor changed behind the guard.
        chunks_compared: chunks that a CUDA device has looked at itself, to compare with what arrived.
        failed: what else went wrong with accepted saves: a capture, or a tier that refused; a retry counts anew.
        bytes_captured: image bytes captured.
        stowed: images captured into another GPU's memory first.
        call_seconds: duration of each `save` call.
        guard_seconds: how long each guard held training, mostly at the begin of an optimizer's step.
        free_seconds: from each save until its guard: the time in which reading costs training nothing.
        drain_seconds: from each save until its last chunk had been read (had left the CUDA device, where there is one).
        policy: what guards do now with what is not read yet.
        policy_reason: why.
        agent_restarts: how often a new agent had to be found.
        restored_from: tier of the last restore ("peer", "host", "replica", "disk", "remote", or "partner", which is the
            disk of another node), "" when there was nothing.
    """

    saves: int = 0
    skipped: int = 0
    spoiled: int = 0
    dirty: int = 0
    chunks_compared: int = 0
    failed: int = 0
    bytes_captured: int = 0
    stowed: int = 0
    agent_restarts: int = 0
    restored_from: str = ""
    policy: str = ""
    policy_reason: str = ""
    call_seconds: list[float] = field(default_factory=list, repr=False)
    guard_seconds: list[float] = field(default_factory=list, repr=False)
    free_seconds: list[float] = field(default_factory=list, repr=False)
    drain_seconds: list[float] = field(default_factory=list, repr=False)

    _untold: deque[float] = field(default_factory=lambda: deque(maxlen=1000), repr=False)

    def record_call(self, seconds: float) -> None:
        samples = self.call_seconds  # within a save, where each function of Python's takes a microsecond
        samples.append(seconds)
        if len(samples) > 2 * _MOST_KEPT:
            _keep_last(samples)
        self._untold.append(seconds)

    def record_guard(self, seconds: float, free: float) -> None:
        """A guard took so long; it came `free` seconds after the save began."""
        guards = self.guard_seconds
        guards.append(seconds)
        self.free_seconds.append(free)
        if len(guards) > 2 * _MOST_KEPT:
            _keep_last(guards)
            _keep_last(self.free_seconds)
        self._untold.append(seconds)

    def take_stalls(self) -> tuple[float, ...]:
        """Each time training was held since this was asked last, by a call or a guard. Any one thread."""
        return tuple(self._untold.popleft() for _ in range(len(self._untold)))

    def record_drain(self, seconds: float) -> None:
        self.drain_seconds.append(seconds)
        _keep_last(self.drain_seconds)


def _keep_last(samples: list[float]) -> None:
    if len(samples) > 2 * _MOST_KEPT:
        del samples[:-_MOST_KEPT]


def moment(seconds: float) -> str:
    """A time since 1970 as local date and time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "–"
    except (OverflowError, ValueError, OSError):  # a file may say anything
        return "–"
