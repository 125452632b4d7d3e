"""When a snapshot in which no change was found is clean for good, so that what changes later is no tear."""

from __future__ import annotations

from dataclasses import dataclass

GRACE = 1.0
"""Seconds after which an operation of another thread, or one of many instructions (compiled code that writes to its
inputs), has ended and has been counted."""

Place = tuple[tuple[int, int], ...]
"""What a thread is executing: code object and instruction of each of its frames. It stays the same throughout one
operation of torch's."""

UNKNOWN: Place = ()
"""It executes something, and nobody can say what."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A time, by a clock that is never set, and where the thread that saves was then; None: it had ended."""

    at: float
    place: Place | None


@dataclass(frozen=True, slots=True)
class Ruling:
    """Whether a look at `now` is the last one that is needed, and why."""

    final: bool
    reason: str


def settled(read: Moment, now: Moment, grace: float = GRACE) -> Ruling:
    """Has everything ended, and so been counted, that was under way when the last byte had been read?

    Args:
        read: a moment after which nothing was read any more.
        now: a later one, before versions are compared.
    """
    if now.at - read.at < grace:
        return Ruling(False, "an operation of some other thread may not have ended")
    if UNKNOWN in (read.place, now.place):
        return Ruling(False, "what the thread that saves was executing is not known")
    if now.place is not None and now.place == read.place:
        return Ruling(False, "the thread that saves may still be in the same operation")
    return Ruling(True, "what was under way has ended")
