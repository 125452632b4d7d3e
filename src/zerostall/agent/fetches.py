"""Copies brought back for trainers: what is there, and the bytes of one image in memory that a trainer can map."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.errors import AgentError, FormatError, SnapshotNotFoundError, StorageError, ZerostallError
from zerostall.flow.worker import Worker
from zerostall.telemetry import log
from zerostall.tiers.host import stride_of
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.agent.berth import Berth
    from zerostall.agent.client import Client
    from zerostall.agent.elsewhere import OfRun
    from zerostall.tiers.disk import DiskTier

Post = Callable[[Callable[[], None]], None]


class Fetches:
    """Driven by the agent's loop; files are read on a thread of its own, which comes back through `post`."""

    def __init__(self, disk: DiskTier, post: Post) -> None:
        self._disk = disk
        self._post = post
        self.elsewhere: OfRun | None = None  # what other nodes have, where this one belongs to a cluster
        self._steps: list[int] = []
        self._reader = Worker(f"fetch {disk.where.name}")

    def busy(self) -> bool:
        return bool(self._steps)

    def steps(self) -> frozenset[int]:
        """Steps that are being read: retention leaves them."""
        return frozenset(self._steps)

    def close(self) -> None:
        self._reader.close()

    def find(self, client: Client, request: m.Find, rank: int, host: tuple[m.CopyFacts, ...]) -> None:
        """Answer with the copies of every step, damaged ones with the reason."""

        def look() -> None:
            try:
                disk = (self._look_at(step, rank) for step in self._disk.steps())
                copies = host + tuple(copy for copy in disk if copy is not None)
                copies += self.elsewhere.copies(rank) if self.elsewhere else ()
                answer: m.Message = m.Found(id=request.id, copies=copies)
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                answer = m.Refused.of(request.id, _ours(error, self._disk.where))
            self._post(lambda: client.send(answer))

        self._reader.submit(look)

    def fetch(self, client: Client, berth: Berth, request: m.Fetch) -> None:
        """Answer with the image of a step in memory; held until the client releases it or is gone."""
        if request.tier == "host":
            self._from_host(client, berth, request)
        elif request.tier == "disk":
            self._from_disk(client, berth.rank, request)
        elif request.tier == "replica" and self.elsewhere is not None:
            self._from_elsewhere(client, berth.rank, request, self.elsewhere)
        else:
            raise FormatError(f"no tier {request.tier!r}")

    def _from_host(self, client: Client, berth: Berth, request: m.Fetch) -> None:
        tier = berth.tier_with(request.step)
        if tier is None:
            raise SnapshotNotFoundError(f"step {request.step} is no longer in host memory")
        held = tier.hold(request.step)
        client.fetched.append(lambda: tier.release(held))
        answer = m.Fetched(
            id=request.id,
            memory=m.Lent(tier.key, tier.segment.nbytes),
            offset=held.offset,
            passing=False,
            layout=layouts.encode(tier.layout),
            record=manifests.encode_record(held.image.record),
            verified=False,
        )
        client.send(answer, tier.segment.fileno())

    def _from_disk(self, client: Client, rank: int, request: m.Fetch) -> None:
        self._steps.append(request.step)

        def read() -> None:
            try:
                answer, segment = self._read(request, rank)
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                refused = m.Refused.of(request.id, _ours(error, self._disk.where))
                self._post(lambda: self._give_up(client, request.step, refused))
            else:
                self._post(lambda: self._give(client, request.step, answer, segment))

        self._reader.submit(read)

    def _from_elsewhere(self, client: Client, rank: int, request: m.Fetch, elsewhere: OfRun) -> None:
        self._steps.append(request.step)

        def bring() -> None:
            try:
                brought = elsewhere.bring(request, rank)
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                refused = m.Refused.of(request.id, _ours(error, self._disk.where))
                self._post(lambda: self._give_up(client, request.step, refused))
            else:
                release = (lambda: self._reader.submit(brought.release)) if brought.slow else brought.release
                self._post(lambda: self._hand(client, request.step, brought.answer, brought.fd, release))

        self._reader.submit(bring)

    def _read(self, request: m.Fetch, rank: int) -> tuple[m.Fetched, native.Segment]:
        stored = self._disk.open(request.step, rank)
        segment = native.Segment(f"zerostall-fetch-{rank}", stride_of(stored.layout), populate=False)
        try:
            self._disk.get(request.step, rank, segment.address)
        except BaseException:
            segment.close()
            raise
        answer = m.Fetched(
            id=request.id,
            memory=m.Lent(0, segment.nbytes),
            offset=0,
            passing=True,
            layout=layouts.encode(stored.layout),
            record=manifests.encode_record(stored.record),
            verified=True,
        )
        return answer, segment

    def _give(self, client: Client, step: int, answer: m.Fetched, segment: native.Segment) -> None:
        # Giving gigabytes back takes a while.
        self._hand(client, step, answer, segment.fileno(), lambda: self._reader.submit(segment.close))

    def _hand(self, client: Client, step: int, answer: m.Fetched, fd: int, release: Callable[[], None]) -> None:
        def done() -> None:
            self._steps.remove(step)
            release()

        if client.broken:
            done()
            return
        client.fetched.append(done)
        client.send(answer, fd)

    def _give_up(self, client: Client, step: int, refused: m.Refused) -> None:
        self._steps.remove(step)
        client.send(refused)

    def _look_at(self, step: int, rank: int) -> m.CopyFacts | None:
        """What there is of a step; None when it has just been evicted."""
        created, world = 0.0, 0
        try:
            manifest = self._disk.manifest(step)
            created, world = manifest.created, manifest.world
            if rank < world:
                self._disk.open(step, rank)
        except SnapshotNotFoundError:
            return None
        except (ZerostallError, OSError) as error:
            why = m.plain(str(error.args[0] if error.args else error))
            return m.CopyFacts(step=step, tier="disk", clean=False, created=created, reason=why, world=world)
        return m.CopyFacts(step=step, tier="disk", clean=True, created=created, world=world)


def _ours(error: Exception, where: Path) -> ZerostallError:
    if isinstance(error, ZerostallError):
        return error
    if isinstance(error, OSError):
        return StorageError(f"cannot read from {where}: {error.strerror or error}", errno=error.errno)
    log.exception("%s: could not be read", where)
    return AgentError(f"the agent could not read from {where}: {error!r}", hint="the agent's log says more")
