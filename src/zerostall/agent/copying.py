"""Which step of a run goes to other nodes: what was chosen, as every agent of the run knows it, and who chooses.

The agent that decides which saves are clean (`chair`) chooses, by `core.copying`; the others hear it from there
(`wire.nodes.Copy`), behind what is clean, so that no agent has let go of the images by then. Neither the manager nor a
trainer is asked.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from zerostall.core.candidates import Past
from zerostall.core.copying import Copy, Course, Seen, decide, seen
from zerostall.telemetry import log
from zerostall.wire import nodes as n

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from zerostall.agent.berth import Berth
    from zerostall.core.roll import Save

LOOK_SECONDS = 0.5


class Copying:
    """What was chosen, and the images of it that this node's ranks have. On the agent's loop."""

    def __init__(self, berths: Mapping[int, Berth]) -> None:
        self.current: Save | None = None
        self.safe: Save | None = None
        self._berths = berths
        self._current: dict[int, Past] = {}
        self._safe: dict[int, Past] = {}

    def follow(self, current: Save | None, safe: Save | None) -> None:
        """That is on its way now, and that is safe. Who has chosen nothing yet, as after a restart, leaves what is."""
        if safe is not None and safe != self.safe:
            known = self._current if safe == self.current else {}
            self.safe, self._safe = safe, known
        if current != self.current:
            self.current, self._current = current, {}
        self._look()

    def _look(self) -> None:
        """Remember which images these are. An agent that comes after another hears what was chosen before trainers
        have handed it their images; and what is gone from here is still to be kept elsewhere.
        """
        for save, known in ((self.safe, self._safe), (self.current, self._current)):
            if save is None:
                continue
            for rank, berth in self._berths.items():
                if rank not in known and (created := berth.created_of(save)) is not None:
                    known[rank] = Past(save.step, created)

    def wanted(self, rank: int) -> tuple[Past, ...]:
        """The rank's images that its partners should have, the first that they should fetch in front."""
        self._look()
        here = self._berths[rank].sealed()
        both = dict.fromkeys(past for past in (self._safe.get(rank), self._current.get(rank)) if past in here)
        return tuple(past for past in both if past is not None)

    def kept(self, rank: int) -> tuple[Past, ...]:
        """What partners should keep until another one is safe."""
        self._look()
        past = self._safe.get(rank)
        return () if past is None else (past,)

    def spared(self, rank: int, *, several: bool) -> frozenset[int]:
        """Steps that stay in this node's memory while there is other room.

        What is safe matters here where others may have to go back to it: where ranks are on `several` nodes.
        """
        self._look()
        pasts = (self._current.get(rank), self._safe.get(rank) if several else None)
        return frozenset(past.step for past in pasts if past is not None)

    def said(self, rank: int, had: Iterable[frozenset[Past]], given: int) -> n.RankCopies:
        """How it stands with the copies of what is on its way; `had`: what each partner has of the rank."""
        self._look()
        past, partners = self._current.get(rank), list(had)
        if not partners:
            copy = Copy.nobody
        elif past is not None and all(past in one for one in partners):
            copy = Copy.has
        else:
            copy = Copy.lacks if past is not None and past in self._berths[rank].sealed() else Copy.gone
        return n.RankCopies(rank, copy, given)


class Choosing:
    """Chooses for a run of `world` ranks. On the agent's loop.

    Args:
        tell: every agent of the run.
    """

    def __init__(self, world: int, tell: Callable[[n.Copy], None]) -> None:
        self.course = Course()
        self._world = world
        self._tell = tell
        self._newest: Save | None = None
        self._seen: dict[int, Seen] = {}
        self._without: frozenset[int] = frozenset()
        self._heard = False
        self._looked = float("-inf")

    def clean(self, save: Save) -> None:
        """Every rank has sealed the save."""
        self._newest = save
        self.look()

    def revoked(self, save: Save) -> None:
        """The save is dirty after all."""
        if save == self._newest:
            self._newest = None
        if save == self.course.current:
            self._turn(Course(safe=self.course.safe, reason=f"step {save.step} is dirty after all"))

    def without(self, ranks: Iterable[int]) -> None:
        """The agents of these ranks have nobody keep copies."""
        self._without = frozenset(ranks)

    def hear(self, said: n.Copied) -> None:
        """What a node says of its ranks."""
        self._heard = True
        now = time.monotonic()
        if said.save == self.course.current:
            for one in said.ranks:
                self._seen[one.rank] = seen(self._seen.get(one.rank), one.copy, one.given, now)
            self.look(again=LOOK_SECONDS / 2)
        elif self.course.current is None:
            self.look()

    def look(self, again: float = 0.0) -> None:
        """Decide anew, unless that was done less than `again` seconds ago."""
        now = time.monotonic()
        if not self._heard or now - self._looked < again:
            return
        self._looked = now
        nobody = Seen(Copy.nobody, 0, now, now)
        known = {**self._seen, **dict.fromkeys(self._without, nobody)}
        course = decide(self.course, self._newest, known, self._world, now)
        if course != self.course:
            self._turn(course)

    def look_in(self) -> float | None:
        """Seconds until `look` should be called; None when it need not."""
        return LOOK_SECONDS if self._heard and self.course.current is not None else None

    def news(self) -> n.Copy:
        """For an agent that comes."""
        return n.Copy(self.course.current, self.course.safe)

    def _turn(self, course: Course) -> None:
        told = self.news()
        if course.current != self.course.current:
            self._seen.clear()
            log.debug("copies: %s", course.reason)
        self.course = course
        if self.news() != told:
            self._tell(self.news())
