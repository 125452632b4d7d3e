"""Who decides which saves of a run are clean: this agent, from what all ranks say, be they here or on other nodes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from zerostall.agent.copying import Choosing
from zerostall.agent.verdicts import NAMED
from zerostall.core.manifest import Manifest
from zerostall.core.roll import News, Roll, Save
from zerostall.telemetry import log
from zerostall.wire import nodes as n

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.agent.berth import Berth
    from zerostall.agent.copying import Copying
    from zerostall.agent.fellows import Fellows
    from zerostall.agent.verdicts import Verdicts
    from zerostall.agent.wish import Wish
    from zerostall.core.candidates import Past
    from zerostall.core.manifest import RankFacts, Record
    from zerostall.wire import messages as m

_LOOK_SECONDS = 1.0
_AWAITED_SECONDS = 30.0
_LATE_SECONDS = 1.0


class Caller(Protocol):
    """To whom the ranks of this node say what they do; what follows comes by `Verdicts`. On the agent's loop.

    `chair.Chair` decides by itself, `outpost.Outpost` passes it on to the agent that does.
    """

    def found(self, rank: int) -> None:
        """A rank's trainer is there."""

    def lost(self, rank: int, reason: str) -> None:
        """A rank's trainer is gone."""

    def sealed(self, berth: Berth, record: Record, wish: Wish, *, adopted: bool = False) -> None:
        """A rank's image is whole; `adopted`: it was so under the agent before this one."""

    def passed(self, rank: int, save: Save, reason: str, *, skipped: bool = False) -> None:
        """A rank goes on without that save."""

    def revoked(self, rank: int, save: Save | None, past: Past, reason: str) -> None:
        """A rank's image is dirty after all; `save` is None where it is in memory no longer."""

    def began(self, rank: int, epoch: int) -> None:
        """A rank has agreed with all others where to go on from."""

    def plan(self, plan: m.Plan) -> None:
        """A rank proposes what all are to do."""

    def promise(self, rank: int, past: Past, save: Save | None, tier: str) -> bool:
        """A rank waits for its image in `tier`; True where another node's agent was asked to see to that."""
        ...

    def pending(self) -> list[Save]:
        """Saves that this node's ranks have sealed and that may yet become clean."""
        ...

    def copied(self, said: n.Copied) -> None:
        """How far the copies of this node's ranks are."""

    def look(self, patience: float) -> None:
        """Say whom saves wait for, and give up what has waited for `patience` seconds."""

    def look_in(self) -> float | None:
        """Seconds until `look` should be called; None when it need not."""
        ...


class Chair:
    """See `Caller`. `fellows` hear what is decided; what they say comes through their seat.

    Attributes:
        choosing: what goes to nodes that keep copies.
    """

    def __init__(
        self, where: Path, world: int, verdicts: Verdicts, copying: Copying, fellows: Fellows | None = None
    ) -> None:
        self.world = world
        self.fellows = fellows
        self.choosing = Choosing(world, self._chosen)
        self._copying = copying
        self._where = where
        self._verdicts = verdicts
        self._roll = Roll(world)
        self._leaving = -1

    def begin(self, world: int) -> None:
        """From now on the run has so many ranks."""
        self.world, self._roll, self.choosing = world, Roll(world), Choosing(world, self._chosen)

    # ----------------------------------------------------------------------------- what is said on this node

    def found(self, rank: int) -> None:
        self._roll.found(rank)

    def lost(self, rank: int, reason: str) -> None:
        if rank < self.world:
            self._heed(self._roll.lost(rank, reason))

    def sealed(self, berth: Berth, record: Record, wish: Wish, *, adopted: bool = False) -> None:
        self._heed(self._roll.sealed(berth.rank, wish.save, time.monotonic()), adopted=adopted)

    def sealed_afar(self, rank: int, save: Save) -> None:
        """A rank of another node has; the seat knows its image."""
        self._heed(self._roll.sealed(rank, save, time.monotonic()))

    def passed(self, rank: int, save: Save, reason: str, *, skipped: bool = False) -> None:
        self._heed(self._roll.passed(rank, save, reason, skipped=skipped))

    def revoked(self, rank: int, save: Save | None, past: Past, reason: str) -> None:
        if save is not None:
            self.choosing.revoked(save)
            self._heed(self._roll.revoked(rank, save, reason))

    def began(self, rank: int, epoch: int) -> None:
        self._heed(self._roll.began(rank, epoch))

    def plan(self, plan: m.Plan) -> None:
        """That all leave is said once: the first who says it decides when."""
        if plan.leave:
            if self._leaving == plan.epoch:
                return
            self._leaving = plan.epoch
        self._verdicts.plan(plan)
        if self.fellows:
            self.fellows.tell(plan)

    def promise(self, rank: int, past: Past, save: Save | None, tier: str) -> bool:
        return False

    def copied(self, said: n.Copied) -> None:
        self.choosing.hear(said)

    # -------------------------------------------------------------------------------------- what follows

    def pending(self) -> list[Save]:
        return self._roll.pending()

    def look(self, patience: float) -> None:
        now = time.monotonic()
        for save, ranks in self._roll.late(now, _LATE_SECONDS, NAMED):
            self._awaiting(save, ranks, quiet=True)
        for save, ranks in self._roll.awaited(now, min(_AWAITED_SECONDS, patience / 2)):
            log.warning("%s: step %d waits for ranks %s", self._where, save.step, ranks[:NAMED])
            self._awaiting(save, ranks[:NAMED])
        self._heed(self._roll.overdue(now, patience))
        self.choosing.look(again=_LOOK_SECONDS / 4)

    def _awaiting(self, save: Save, ranks: tuple[int, ...], *, quiet: bool = False) -> None:
        self._verdicts.awaiting(save, ranks, quiet=quiet)
        if self.fellows:
            self.fellows.tell(n.Awaiting(save, ranks, quiet))

    def look_in(self) -> float | None:
        copies = self.choosing.look_in()
        return copies if copies is not None else _LOOK_SECONDS if self._roll.pending() else None

    def _chosen(self, copy: n.Copy) -> None:
        self._copying.follow(copy.current, copy.safe)
        if self.fellows:
            self.fellows.tell(copy)

    def _heed(self, news: News, *, adopted: bool = False) -> None:
        """Act on what has become known."""
        for spoiled in news.spoiled:
            self._verdicts.spoiled(spoiled)
        if self.fellows and (news.spoiled or news.hold):
            self.fellows.tell(n.Verdict(news.spoiled, news.hold))
        for save in news.clean:
            self._commit(save, adopted=adopted)
        if news.hold:
            self._verdicts.hold(news.hold)

    def _commit(self, save: Save, *, adopted: bool) -> None:
        """Every rank's image of the save is there, unless one was set aside meanwhile where it has gone on from."""
        facts: dict[int, RankFacts] = self._verdicts.facts(save)
        if self.fellows:
            facts |= self.fellows.facts(save)
        if set(facts) != set(range(self.world)):
            return
        _, first = self._verdicts.images(save)[0]
        manifest = Manifest(
            run=first.run,
            step=save.step,
            world=self.world,
            ranks=tuple(facts[rank] for rank in range(self.world)),
            metric=first.metric,
            created=first.created,
        )
        self._verdicts.committed(save, manifest, adopted=adopted)
        if self.fellows:
            self.fellows.tell(n.Clean(save, first.created, first.metric))
        self.choosing.clean(save)
