"""Where an image of this node's memory can be had once more: its run's folder, other nodes, the remote tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.errors import ManagerError, SnapshotNotFoundError
from zerostall.telemetry import log
from zerostall.wire import peers as p

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerostall.agent.copies import Copy
    from zerostall.agent.replication import Replication
    from zerostall.agent.reporter import Reporter
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record
    from zerostall.tiers.contract import RunTier

_TRIES = 2


@dataclass(frozen=True, slots=True)
class GoodCopy:
    """Somewhere else, the same image, as far as is known.

    Attributes:
        name: what messages call it.
        bring: called with an image, its address and a chunk: brings that chunk to its place. Raises ZerostallError or
            OSError where it cannot be had.
    """

    name: str
    bring: Callable[[Copy, int, int], None]


@dataclass(slots=True)
class Neighbourhood:
    """What knows of other nodes.

    Attributes:
        node: this one.
    """

    node: str
    replication: Replication
    reporter: Reporter


def good_copies(copy: Copy, neighbourhood: Neighbourhood | None) -> Iterator[GoodCopy]:
    """Nearest first; any thread. Where the manager cannot be asked, those that this node knows by itself."""
    run = copy.run
    if run is not None and not run.url:
        yield _of_tier(run.folder.disk)
    if neighbourhood is not None:
        yield from _of_nodes(copy, neighbourhood)
    if run is not None and run.fetches.remote is not None:
        yield _of_tier(run.fetches.remote)


def _of_tier(tier: RunTier) -> GoodCopy:
    def bring(copy: Copy, address: int, chunk: int) -> None:
        _same(tier.open(copy.step, copy.image.rank).record, copy)
        tier.get(copy.step, copy.image.rank, address, chunks=[chunk])

    return GoodCopy(f"the tier {tier.name}", bring)


def _of_nodes(copy: Copy, neighbourhood: Neighbourhood) -> Iterator[GoodCopy]:
    seen: set[str] = set()
    try:
        located = neighbourhood.reporter.whereis(copy.image.run, copy.image.rank)
    except ManagerError as error:
        log.info("%s: only nodes are asked that are known without it", error.args[0])
        located = ()
    for other in located:
        mine = other.peer.node == neighbourhood.node
        if other.step == copy.step and not mine and other.peer.address not in seen:
            seen.add(other.peer.address)
            yield _of_node(f"node {other.peer.node}", other.peer.address, neighbourhood)
    for address in neighbourhood.replication.known(copy.image):
        if address not in seen:
            yield _of_node(f"the node at {address}", address, neighbourhood)


def _of_node(name: str, address: str, neighbourhood: Neighbourhood) -> GoodCopy:
    def bring(copy: Copy, target: int, chunk: int) -> None:
        offset = target - copy.memory.segment.address

        def room(layout: Layout, record: Record) -> Callable[[int, int], memoryview]:
            _same(record, copy)
            return lambda start, nbytes: copy.memory.segment.view(offset + start, nbytes)

        image = copy.image
        request = p.Pull(image.run, image.rank, copy.step, copy.record.created, chunks=(chunk,))
        neighbourhood.replication.pull(address, request, room, _TRIES)

    return GoodCopy(name, bring)


def _same(record: Record, copy: Copy) -> None:
    """Raises SnapshotNotFoundError where that is another image."""
    if (record.created, record.checksums) != (copy.record.created, copy.record.checksums):
        raise SnapshotNotFoundError(f"step {record.step} there is another one")
