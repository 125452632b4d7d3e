"""Copies brought back for trainers: what is there, and the bytes of one image in memory that a trainer can map."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.candidates import Past, left_behind
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
    from zerostall.flow.governor import Governor
    from zerostall.tiers.contract import RunTier
    from zerostall.tiers.disk import DiskTier
    from zerostall.tiers.remote import RemoteTier

Post = Callable[[Callable[[], None]], None]


class Fetches:
    """Driven by the agent's loop; files are read on a thread of its own, which comes back through `post`."""

    def __init__(self, disk: DiskTier, post: Post, governor: Governor) -> None:
        self.remote: RemoteTier | None = None
        self._governor = governor
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
                near = host + tuple(copy for copy in disk if copy is not None)
                near += self.elsewhere.copies(rank) if self.elsewhere else ()
                copies = near + tuple(self._look_afar(near))
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
            self._from(self._disk, client, berth.rank, request)
        elif request.tier == "replica" and self.elsewhere is not None:
            self._from_elsewhere(client, berth.rank, request, self.elsewhere)
        elif request.tier == "remote" and self.remote is not None:
            self._from(self.remote, client, berth.rank, request)
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

    def _from(self, run: RunTier, client: Client, rank: int, request: m.Fetch) -> None:
        self._steps.append(request.step)

        def read() -> None:
            try:
                with self._governor.restoring():
                    answer, segment = self._read(run, request, rank)
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                refused = m.Refused.of(request.id, _ours(error, run.where))
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

    def _read(self, run: RunTier, request: m.Fetch, rank: int) -> tuple[m.Fetched, native.Segment]:
        stored = run.open(request.step, rank)
        segment = native.Segment(f"zerostall-fetch-{rank}", stride_of(stored.layout), populate=False)
        try:
            run.get(request.step, rank, segment.address)
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

    def _look_afar(self, near: tuple[m.CopyFacts, ...]) -> Iterator[m.CopyFacts]:
        """What there is in the remote tier.

        Raises:
            StorageError: nobody can say, and there is nothing near: training must not begin anew for that.
        """
        if self.remote is None:
            return
        try:
            found = self.remote.look(self.remote.steps())
        except StorageError as error:
            if not near:
                raise
            log.warning("%s: what is there is left out: %s", self.remote.where, error)
            return
        known = [Past(copy.step, copy.created) for copy in near]
        for step, manifest, why in found:
            created, world = (manifest.created, manifest.world) if manifest else (0.0, 0)
            reason = m.plain(why or left_behind(Past(step, created), known))
            yield m.CopyFacts(step=step, tier="remote", clean=not reason, created=created, reason=reason, world=world)


def _ours(error: Exception, where: Path | str) -> ZerostallError:
    if isinstance(error, ZerostallError):
        return error
    if isinstance(error, OSError):
        return StorageError(f"cannot read from {where}: {error.strerror or error}", errno=error.errno)
    log.exception("%s: could not be read", where)
    return AgentError(f"the agent could not read from {where}: {error!r}", hint="the agent's log says more")
