"""How one run stands on this node: its folder, its ranks and their memory, what is on its way, and who decides."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from zerostall.agent.away import Away
from zerostall.agent.chair import Caller, Chair
from zerostall.agent.copying import Copying
from zerostall.agent.fetches import Fetches
from zerostall.agent.folder import RunFolder
from zerostall.agent.tally import Tally
from zerostall.agent.trickle import Trickle
from zerostall.agent.undrained import Undrained
from zerostall.agent.verdicts import Verdicts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from zerostall import native
    from zerostall.agent.berth import Berth
    from zerostall.agent.carrier import Carrier
    from zerostall.agent.loop_call import Post
    from zerostall.core.candidates import Past
    from zerostall.core.manifest import Manifest, RankFacts
    from zerostall.flow.governor import Governor
    from zerostall.wire import cluster as w
    from zerostall.wire import messages as m


_REVOKED_KEPT = 8


class Standing:
    """What `run.Run` changes, and all that deals with a run looks at. On the agent's loop.

    Attributes:
        where: the folder that it is known by.
        url: where its steps are, if it has no disk.
        part: the ranks of this node, where there are others; None where all are here.
        heir: the run that the folder goes on with, if it is empty.
        member: this node belongs to a cluster.
        berths: one for each rank that this node has had and whose memory it has not given back.
        caller: who decides which saves are clean.
        copying: which of them other nodes are to have.
        carrier: takes steps to the remote tier, where there is one.
        revoked: images that turned out dirty when they had been sealed, by rank.
    """

    def __init__(
        self,
        where: Path,
        world: int,
        url: str,
        pool: native.Pool,
        post: Post,
        governor: Governor,
        *,
        advance: Callable[[], None],
        grant: Callable[[], None],
        clean: Callable[[int], None],
    ) -> None:
        self.where = where
        self.url = url
        self.world = world
        self.part: frozenset[int] | None = None
        self.heir: w.Inherited | None = None
        self.member = False
        self.berths: dict[int, Berth] = {}
        self.revoked: dict[int, deque[Past]] = {}
        self.folder = RunFolder(where, pool)
        self.fetches = Fetches(self.folder.disk, post, governor)
        self.tally = Tally()
        self.trickle = Trickle(
            self.berths,
            self.folder,
            self.fetches,
            post,
            advance,
            self.tally,
            governor,
            lambda: self.part or frozenset(),
        )
        self.trickle.off = bool(url)
        self.carrier: Carrier | None = None
        self.verdicts = Verdicts(self.berths, grant, clean)
        self.copying = Copying(self.berths)
        self.caller: Caller = Chair(where, world, self.verdicts, self.copying)
        self.undrained = Undrained(self.berths, lambda rank, reason: self.caller.lost(rank, reason))
        self.away = Away(self.berths, self.undrained.ended)

    @property
    def epoch(self) -> int:
        """The newest that this node knows of."""
        return self.verdicts.epoch

    @property
    def here(self) -> frozenset[int]:
        """The ranks of the present attempt that are on this node."""
        return frozenset(range(self.world)) if self.part is None else self.part

    def attached(self) -> bool:
        return any(berth.client for berth in self.berths.values())

    def steps(self) -> tuple[int, ...]:
        """Every step that this node can bring back, rising."""
        remote = self.carrier.steps if self.carrier else ()
        clean = (berth.clean_steps() for berth in self.berths.values())
        return tuple(sorted(set(self.folder.disk.steps()).union(remote, *clean)))

    def holds_some(self) -> bool:
        """Is there a step in memory or on disk, whatever the remote tier has?"""
        return bool(self.folder.disk.steps()) or any(berth.clean_steps() for berth in self.berths.values())

    def has_own_step(self) -> bool:
        """Has the world of now a step of its own on disk?"""
        first = self.berths.get(min(self.here))
        steps = self.trickle.clean_steps()
        manifest = max((first.manifest(step) for step in steps), key=_step, default=None) if first else None
        return manifest is not None and manifest.world == self.world and manifest.step in self.folder.on_disk

    def kept(self) -> frozenset[int]:
        """Steps that stay in memory: the newest that is clean on every rank, and what may become so."""
        return frozenset([*self.trickle.clean_steps()[-1:], *(save.step for save in self.caller.pending())])

    def copies_for(self, berth: Berth) -> tuple[m.CopyFacts, ...]:
        """What this rank can get that is clean in memory: its own images, and steps of worlds that it was not in."""
        own = berth.clean_copies()
        others = {
            (copy.step, copy.created): copy
            for other in self.berths.values()
            for copy in other.clean_copies()
            if copy.clean and copy.world <= berth.rank
        }
        for copy in own:
            others.pop((copy.step, copy.created), None)
        return (*own, *others.values())

    def busy(self) -> bool:
        """Is a step on its way to disk, being read, about to go, or retention at work?"""
        carrying = self.carrier is not None and self.carrier.busy()
        return self.fetches.busy() or self.trickle.busy() or carrying or self.undrained.any()

    def retry_in(self) -> float | None:
        """Seconds until there is something to do that no message announces; None when there is not."""
        carrier = self.carrier.retry_in() if self.carrier else None
        waits = [self.trickle.retry_in(), carrier, self.caller.look_in(), self.away.look_in()]
        return min((wait for wait in waits if wait is not None), default=None)

    def remember_revoked(self, rank: int, past: Past) -> None:
        """For those who keep copies of it."""
        known = self.revoked.setdefault(rank, deque(maxlen=_REVOKED_KEPT))
        if past not in known:
            known.append(past)

    def evict(self, rank: int, past: Past, facts: RankFacts | None = None) -> None:
        """A rank's image is dirty after all: its step goes from where it was taken to. `facts`: see `Trickle.evict`."""
        if not self.url:
            self.trickle.evict(rank, past, facts)
        elif self.carrier is not None:
            self.carrier.evict(past, rank)

    def tell(self, rank: int, message: m.Reached | m.Failed) -> None:
        """A trainer, be it on this node or on another."""
        if (berth := self.berths.get(rank)) is not None:
            berth.send(message)
        elif self.trickle.fellows is not None:
            self.trickle.fellows.tell_rank(rank, message)


def _step(manifest: Manifest | None) -> int:
    return manifest.step if manifest else -1
