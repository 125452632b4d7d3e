"""What a guard does with chunks that are not read yet when an optimizer comes: chosen from what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["overlap", "freeze", "flip"]

MARGIN = 1.1
"""A drain counts as this much longer than it was: one that only just fitted will not fit the next time."""
LEAST = 16 << 20
"""Memory for less than one chunk is of no use."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known when a snapshot begins. Seconds are those of the newest one; None: not measured yet.

    Attributes:
        nbytes: size of an image.
        drain_seconds: from a save until everything had been read.
        free_seconds: from a save until the optimizer came.
        spare_bytes: memory that may be taken, where the state is.
        flips: whether an optimizer of the state can flip at no cost: in host memory it copies as a guard that freezes.
    """

    nbytes: int
    drain_seconds: float | None
    free_seconds: float | None
    spare_bytes: int
    flips: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy, why, and how much memory it may take."""

    policy: Policy
    reason: str
    nbytes: int = 0


def choose(facts: Facts) -> Choice:
    """The policy that holds training up least, judged by the snapshot before."""
    if facts.drain_seconds is None or facts.free_seconds is None:
        return Choice("overlap", "nothing has been measured yet")
    drain, free = facts.drain_seconds * MARGIN, facts.free_seconds
    if drain <= free:
        return Choice(
            "overlap",
            f"reading takes {facts.drain_seconds:.3g} s and the optimizer comes after {free:.3g} s: nothing is left",
        )
    late = int(facts.nbytes * (1 - free / drain))
    left = f"about {_size(late)} of {_size(facts.nbytes)} are not read yet when the optimizer comes"
    if facts.spare_bytes < LEAST:
        return Choice("overlap", f"{left}, and there is no memory to put them aside")
    if facts.flips:
        return Choice("flip", f"{left}; moments stay where they are", facts.spare_bytes)
    if facts.spare_bytes < late:
        return Choice("freeze", f"{left}; {_size(facts.spare_bytes)} of them can be put aside", facts.spare_bytes)
    return Choice(
        "freeze", f"{left}; there is memory to put them aside, and no optimizer that flips", facts.spare_bytes
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.3g} MB"
