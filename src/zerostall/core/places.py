"""What the places of a rank's locker in a vault are for: a pure table.

An image is captured into a place that was *granted*, drained from there to host memory, and stays for who restores,
until the place is wanted for another image. Only the newest few are there, as many as there are places.

    free ──reserve──▶ granted ──drain──▶ draining ──keep──▶ kept ──reserve──▶ granted (its old image is gone)
                         └──free──▶ free     └────free──▶ free    └──forget──▶ free
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerostall.core.candidates import Past

Runs = tuple[tuple[int, int], ...]
"""Offset in the image and size of what lies in a place, rising."""


def gaps(runs: Runs, begin: int, end: int) -> Runs:
    """What of that stretch of an image lies in none of the runs."""
    found: list[tuple[int, int]] = []
    for offset, size in (*runs, (end, 0)):
        if begin < min(offset, end):
            found.append((begin, min(offset, end) - begin))
        begin = max(begin, offset + size)
    return tuple(found)


class Phase(Enum):
    free = "free"
    granted = "granted"
    draining = "draining"
    kept = "kept"


@dataclass(slots=True)
class Place:
    """Room for one image.

    Attributes:
        past: the image that is kept.
        runs: what of it lies here.
        age: which of those kept came first.
        readers: how many restore from it.
    """

    index: int
    phase: Phase = Phase.free
    past: Past | None = None
    runs: Runs = ()
    age: int = 0
    readers: int = 0


class Places:
    """The table of one locker. Not thread-safe: one owner drives it."""

    def __init__(self, count: int) -> None:
        self._table = [Place(index) for index in range(count)]
        self._kept = 0

    def __len__(self) -> int:
        return len(self._table)

    def reserve(self) -> int | None:
        """Grant a place: a free one, else the one that was kept first; None where all are drained or read."""
        free = [place for place in self._table if place.phase is Phase.free]
        kept = [place for place in self._table if place.phase is Phase.kept and not place.readers]
        for place in [*free, *sorted(kept, key=lambda place: place.age)][:1]:
            place.phase, place.past, place.runs = Phase.granted, None, ()
            return place.index
        return None

    def claim(self, index: int) -> bool:
        """Grant this very place, of which somebody knows what is in it; whether that could be, for it is free."""
        if not 0 <= index < len(self._table) or self._table[index].phase is not Phase.free:
            return False
        self._table[index].phase = Phase.granted
        return True

    def drain(self, index: int) -> None:
        """What was captured into the granted place is whole."""
        self._in(index, Phase.granted).phase = Phase.draining

    def keep(self, index: int, past: Past, runs: Runs) -> None:
        """What was drained from there is sealed in host memory, and lies here, too."""
        place = self._in(index, Phase.draining)
        self._kept += 1
        place.phase, place.past, place.runs, place.age = Phase.kept, past, runs, self._kept

    def free(self, index: int) -> None:
        """Nothing was captured into the granted place, or what is there is worth nothing."""
        place = self._in(index, Phase.granted, Phase.draining)
        place.phase = Phase.free

    def forget(self, past: Past) -> None:
        """That image is worth nothing after all."""
        for place in self._table:
            if place.phase is Phase.kept and place.past == past:
                place.phase, place.past, place.runs = Phase.free, None, ()

    def hold(self, past: Past) -> Place | None:
        """Where that very image is kept, if it is, for somebody who starts to read it."""
        place = next((place for place in self._table if place.phase is Phase.kept and place.past == past), None)
        if place is not None:
            place.readers += 1
        return place

    def read(self, index: int) -> None:
        """Somebody copies what is being drained; it is kept at least until `release`."""
        self._in(index, Phase.draining).readers += 1

    def release(self, index: int) -> None:
        """A reader is through."""
        self._table[index].readers -= 1

    def kept(self) -> list[Past]:
        """The images that are kept, the one that came first in front."""
        found = sorted((place.age, place.past) for place in self._table if place.past is not None)
        return [past for _, past in found]

    def whole(self) -> int:
        """How many images lie here."""
        return sum(place.phase in (Phase.draining, Phase.kept) for place in self._table)

    def _in(self, index: int, *phases: Phase) -> Place:
        place = self._table[index]
        if place.phase not in phases:
            raise ValueError(f"place {index} is {place.phase.value}")
        return place
