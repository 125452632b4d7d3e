"""Where an image can be had once more: its run's folder, other nodes, the remote tier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zerostall.errors import ManagerError, SnapshotNotFoundError, ZerostallError
from zerostall.telemetry import log
from zerostall.tiers.contract import Stored
from zerostall.wire import peers as p

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerostall import native
    from zerostall.agent.neighbourhood import Neighbourhood
    from zerostall.agent.run import Run
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record
    from zerostall.core.placement import ImageId
    from zerostall.tiers.contract import RunTier

_TRIES = 2


@dataclass(frozen=True, slots=True)
class Target:
    """Memory for an image, of which it begins at `offset`; only the chunk that is brought is written."""

    segment: native.Segment
    offset: int = 0

    @property
    def address(self) -> int:
        return self.segment.address + self.offset

    def view(self, start: int, nbytes: int) -> memoryview:
        return self.segment.view(self.offset + start, nbytes)


class Wanted(Protocol):
    """An image that is to be had once more.

    Attributes:
        tier: where it is damaged.
        run: the rank's, where it trains here.
    """

    @property
    def image(self) -> ImageId: ...
    @property
    def record(self) -> Record: ...
    @property
    def tier(self) -> str: ...
    @property
    def run(self) -> Run | None: ...


@dataclass(frozen=True, slots=True)
class GoodCopy:
    """Somewhere else, the same image, as far as is known.

    Attributes:
        name: what messages call it.
        bring: called with a place and a chunk: brings that chunk to where it belongs in the image. Raises
            ZerostallError or OSError where it cannot be had.
    """

    name: str
    bring: Callable[[Target, int], None]


def good_copies(wanted: Wanted, neighbourhood: Neighbourhood | None) -> Iterator[GoodCopy]:
    """Nearest first; any thread. Where the manager cannot be asked, those that this node knows by itself."""
    run = wanted.run
    if run is not None and not run.url and wanted.tier != "disk":
        yield _of_tier(wanted, run.folder.disk)
    if neighbourhood is not None:
        yield from _of_nodes(wanted, neighbourhood)
    if run is not None and run.fetches.remote is not None:
        yield _of_tier(wanted, run.fetches.remote)


def _of_tier(wanted: Wanted, tier: RunTier) -> GoodCopy:
    def bring(target: Target, chunk: int) -> None:
        step, rank = wanted.record.step, wanted.image.rank
        _same(tier.open(step, rank).record, wanted)
        tier.get(step, rank, target.address, chunks=[chunk])

    return GoodCopy(f"the tier {tier.name}", bring)


def descriptions(
    run: Run, image: ImageId, step: int, neighbourhood: Neighbourhood | None
) -> Iterator[tuple[str, Stored]]:
    """What the image is, as other nodes and the remote tier say, each with what messages call it; any thread."""
    if neighbourhood is not None:
        request = p.Pull(image.run, image.rank, step)
        for name, address in _nodes_with(image, step, neighbourhood):
            try:
                for came in neighbourhood.replication.peek(address, [request], {}):
                    yield name, Stored(came.layout, came.record)
            except (ZerostallError, OSError) as error:
                log.info("step %d of rank %d, %s: %s", step, image.rank, name, error)
    if (remote := run.fetches.remote) is not None:
        try:
            yield f"the tier {remote.name}", remote.open(step, image.rank)
        except (ZerostallError, OSError) as error:
            log.info("step %d of rank %d in the remote tier: %s", step, image.rank, error)


def _of_nodes(wanted: Wanted, neighbourhood: Neighbourhood) -> Iterator[GoodCopy]:
    for name, address in _nodes_with(wanted.image, wanted.record.step, neighbourhood):
        yield _of_node(wanted, name, address, neighbourhood)


def _nodes_with(image: ImageId, step: int, neighbourhood: Neighbourhood) -> Iterator[tuple[str, str]]:
    """Other nodes that may have the image: what messages call each, and its address."""
    seen: set[str] = set()
    try:
        located = neighbourhood.whereabouts.whereis(image.run, image.rank)
    except ManagerError as error:
        log.info("%s: only nodes are asked that are known without it", error.args[0])
        located = ()
    for other in located:
        mine = other.peer.node == neighbourhood.node
        if other.step == step and not mine and other.peer.address not in seen:
            seen.add(other.peer.address)
            yield f"node {other.peer.node}", other.peer.address
    for address in neighbourhood.replication.known(image):
        if address not in seen:
            yield f"the node at {address}", address


def _of_node(wanted: Wanted, name: str, address: str, neighbourhood: Neighbourhood) -> GoodCopy:
    def bring(target: Target, chunk: int) -> None:
        def room(layout: Layout, record: Record) -> Callable[[int, int], memoryview]:
            _same(record, wanted)
            return target.view

        image, record = wanted.image, wanted.record
        request = p.Pull(image.run, image.rank, record.step, record.created, chunks=(chunk,))
        neighbourhood.replication.pull(address, request, room, _TRIES)

    return GoodCopy(name, bring)


def _same(record: Record, wanted: Wanted) -> None:
    """Raises SnapshotNotFoundError where that is another image."""
    if (record.created, record.checksums) != (wanted.record.created, wanted.record.checksums):
        raise SnapshotNotFoundError(f"step {record.step} there is another one")
