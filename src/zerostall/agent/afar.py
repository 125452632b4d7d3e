"""A step in other nodes' memory, read as from a tier: what every rank's image is, and of each the chunks one needs.

Where a restore wants images of ranks that are not on this node (state that all ranks share out, another number of
ranks, ranks that were numbered anew), it finds them here. Each comes from the nearest node that has it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall.agent.pulling import TRIES
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.errors import FormatError, SnapshotNotFoundError, ZerostallError
from zerostall.telemetry import log
from zerostall.tiers.contract import Stored
from zerostall.wire import peers as p

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerostall.agent.neighbourhood import Neighbourhood
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, RankFacts, Record
    from zerostall.wire.cluster import LocatedCopy


@dataclass(slots=True)
class Spread:
    """A step whose images are spread over nodes.

    Attributes:
        sources: of each rank, the copies of its image, the nearest first.
        stored: what each rank's image is.
    """

    sources: dict[int, list[LocatedCopy]]
    stored: dict[int, Stored] = field(default_factory=dict)

    def manifest(self) -> Manifest:
        return manifests.of_records([self.stored[rank].record for rank in range(len(self.sources))])


class Afar:
    """The steps of one run; see `tiers.contract.Readable`. For the thread that reads.

    Attributes:
        gave: the tier that gave a step's image of a rank last.
    """

    name = "replica"
    where = "other nodes' memory"

    def __init__(self, neighbourhood: Neighbourhood, run: str) -> None:
        self._replication = neighbourhood.replication
        self._whereabouts = neighbourhood.whereabouts
        self._run = run
        self._layouts: dict[str, Layout] = {}
        self._steps: dict[int, Spread] = {}
        self.gave: dict[tuple[int, int], str] = {}

    def manifest(self, step: int) -> Manifest:
        """Look anew where the step's images are, and what they are.

        Raises:
            SnapshotNotFoundError: the manager does not know it to be clean, or no node gives some rank's image.
            ManagerError: the manager cannot be reached.
        """
        spread = Spread(_sources(step, self._whereabouts.whereis_all(self._run, step)))
        self._describe(step, spread)
        self._steps[step] = spread
        return spread.manifest()

    def told(self, step: int, rank: int) -> Record | None:
        """What the image was when the step was looked for. Any thread."""
        spread = self._steps.get(step)
        stored = spread.stored.get(rank) if spread else None
        return stored.record if stored else None

    def layout(self, facts: RankFacts) -> Layout:
        return layouts.moved(self._layouts[facts.layout], facts.begins, source=self.where)

    def open(self, step: int, rank: int) -> Stored:
        if step not in self._steps:
            self.manifest(step)
        stored = self._steps[step].stored.get(rank)
        if stored is None:
            raise SnapshotNotFoundError(f"step {step} has no rank {rank}")
        return stored

    def get(self, step: int, rank: int, address: int, *, chunks: Sequence[int] | None = None) -> Stored:
        """Bring the image's bytes to `address`, or these chunks of it, each checked.

        Raises:
            SnapshotNotFoundError, CorruptError, PeerError: no node gives it; the last reason.
        """
        stored = self.open(step, rank)
        wanted = None if chunks is None else tuple(chunks)
        request = p.Pull(self._run, rank, step, stored.record.created, chunks=wanted)

        def room(layout: Layout, record: Record) -> Callable[[int, int], memoryview]:
            if record != stored.record:
                raise SnapshotNotFoundError(f"step {step} of rank {rank} is another one there")
            return lambda offset, nbytes: _memory(address + offset, nbytes)

        problem: ZerostallError = SnapshotNotFoundError(f"no node has step {step} of rank {rank}")
        for tries in (1, TRIES):  # a node that is gone may be among them: each is tried once before any is again
            for copy in self._steps[step].sources[rank]:
                try:
                    self._replication.pull(copy.peer.address, request, room, tries, known=self._layouts)
                except (ZerostallError, OSError) as error:
                    log.warning("step %d of rank %d from node %s: %s", step, rank, copy.peer.node, error)
                    problem = error if isinstance(error, ZerostallError) else FormatError(str(error))
                else:
                    self.gave[step, rank] = copy.tier
                    log.debug("step %d of rank %d: %s of node %s", step, rank, copy.tier, copy.peer.node)
                    return stored
        raise problem

    def _describe(self, step: int, spread: Spread) -> None:
        """Ask each node once for what it has; for what one does not give, the next nearest."""
        for turn in range(max(len(copies) for copies in spread.sources.values())):
            nodes: dict[str, list[LocatedCopy]] = {}
            for rank, copies in spread.sources.items():
                if rank not in spread.stored and turn < len(copies):
                    nodes.setdefault(copies[turn].peer.address, []).append(copies[turn])
            for address, copies in nodes.items():
                requests = [p.Pull(self._run, copy.rank, step, copy.created) for copy in copies]
                try:
                    for came in self._replication.peek(address, requests, self._layouts):
                        spread.stored[came.record.rank] = Stored(came.layout, came.record)
                except (ZerostallError, OSError) as error:
                    log.warning("step %d from node %s: %s", step, copies[0].peer.node, error)
        missing = [rank for rank in spread.sources if rank not in spread.stored]
        if missing:
            raise SnapshotNotFoundError(f"step {step}: no node gives the image of rank {missing[0]}")


def _sources(step: int, located: Sequence[LocatedCopy]) -> dict[int, list[LocatedCopy]]:
    """The copies of each rank's image, all of one attempt: of two that are clean the one that began later."""
    clean = [copy for copy in located if copy.clean]
    if not clean:
        why = located[0].reason if located else "no node has any of it"
        raise SnapshotNotFoundError(f"step {step} is not clean on other nodes: {why}")
    newest = max(clean, key=lambda copy: (copy.began, copy.attempt))
    sources: dict[int, list[LocatedCopy]] = {rank: [] for rank in range(newest.world)}
    for copy in clean:
        if copy.attempt == newest.attempt and copy.rank in sources:
            sources[copy.rank].append(copy)
    for rank, copies in sources.items():
        if not copies:
            raise SnapshotNotFoundError(f"step {step}: no node that can be reached has the image of rank {rank}")
    return sources


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
