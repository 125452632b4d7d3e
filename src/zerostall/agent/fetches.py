"""Copies brought back for trainers: what is there, and the bytes of images in memory that a trainer can map.

A trainer reads its own rank's image whole, or chunks of any rank's (`node_reads`).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from zerostall import native
from zerostall.agent.arrivals import Arrivals
from zerostall.agent.brought import whole
from zerostall.agent.node_reads import NodeReads
from zerostall.agent.refusing import ours
from zerostall.agent.scattered import Scattered
from zerostall.agent.step_images import StepImages
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.candidates import Past, left_behind, went_back
from zerostall.errors import (
    FormatError,
    ManagerError,
    SnapshotNotFoundError,
    StorageError,
    ZerostallError,
)
from zerostall.flow.worker import Worker
from zerostall.telemetry import log
from zerostall.tiers.contract import Stored
from zerostall.tiers.host import stride_of
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from zerostall.agent.berth import Berth
    from zerostall.agent.brought import OtherNodes
    from zerostall.agent.client import Claim, Client
    from zerostall.agent.loop_call import Post
    from zerostall.agent.stowage import Stowage
    from zerostall.core.manifest import Manifest
    from zerostall.flow.governor import Governor
    from zerostall.tiers.contract import Readable
    from zerostall.tiers.disk import DiskTier
    from zerostall.tiers.host import HostTier
    from zerostall.tiers.remote import RemoteTier


class Fetches:
    """Driven by the agent's loop; files are read on a thread of its own, which comes back through `post`.

    Attributes:
        damaged: called with rank, step and reason where what vouches for an image on disk is; makes it good if it can.
    """

    def __init__(self, disk: DiskTier, post: Post, governor: Governor) -> None:
        self.remote: RemoteTier | None = None
        self.damaged: Callable[[int, int, str], None] = lambda rank, step, why: None
        self._governor = governor
        self._disk = disk
        self._post = post
        self.elsewhere: OtherNodes | None = None  # what other nodes have, where this one belongs to a cluster
        self._steps: list[int] = []
        self._rest: dict[int, Readable] = {}  # where images are of a step that this node has only some of
        self._reader = Worker(f"fetch {disk.where.name}")
        self._node = NodeReads(disk, self._steps, post, governor, self._reader)
        self._arrivals = Arrivals(self._steps, post, governor, self._reader)

    def busy(self) -> bool:
        return bool(self._steps)

    def steps(self) -> frozenset[int]:
        """Steps that are being read: retention leaves them."""
        return frozenset(self._steps)

    def close(self) -> None:
        self._reader.close()
        self._node.close()

    def find(self, client: Client, request: m.Find, rank: int, host: tuple[m.CopyFacts, ...]) -> None:
        """Answer with the copies of every step, damaged ones with the reason."""

        def look() -> m.Message:
            disk = [self._look_at(step, rank) for step in self._disk.steps()]
            near = host + _of_the_present(tuple(copy for copy in disk if copy is not None), host)
            if self.elsewhere:
                clean = {Past(copy.step, copy.created) for copy in disk if copy is not None and copy.clean}
                near += _of_the_present(self.elsewhere.copies(rank, clean), near)
            return m.Found(id=request.id, copies=near + tuple(self._look_afar(near)))

        self._answer(client, request.id, look)

    def describe(self, client: Client, berths: Mapping[int, Berth], rank: int, request: m.Describe | m.Quote) -> None:
        """Answer with what all ranks' images at a step are, or with the records of some."""
        look = self._looking(berths, rank, request.tier, request.step)

        def tell() -> m.Message:
            with self._governor.restoring():
                found = look()
                return found.quoted(request) if isinstance(request, m.Quote) else found.described(request.id, rank)

        self._answer(client, request.id, tell)

    def fetch(self, client: Client, berths: Mapping[int, Berth], rank: int, request: m.Fetch) -> None:
        """Answer with an image of a step in memory; held until the client releases it or is gone."""
        wanted = rank if request.rank is None else request.rank
        berth, elsewhere = berths.get(wanted), self.elsewhere
        tier = berth.tier_with(request.step) if request.tier == "host" and berth is not None else None
        if berth is not None and tier is not None:
            self._from_host(client, tier, request, berth.stowage)
        elif request.as_file and request.tier == "remote" and self.remote is not None:
            again = msgspec.structs.replace(request, as_file=False)
            self._arrivals.open(client, wanted, self.remote, request, lambda: self.fetch(client, berths, rank, again))
        elif request.chunks is not None:
            mine = elsewhere if request.tier in ("host", "replica") else None
            if mine is not None and (own := mine.lend(request, wanted)) is not None:
                self._steps.append(request.step)
                self._hand(client.claim(), request.step, own.answer, own.fd, own.release)
                return
            run = self._run(request.tier, request.step)
            run = run.place_of(wanted) if isinstance(run, Scattered) else run
            if request.as_file and run is self._disk:
                self._node.open(client, wanted, request)
            else:
                afar = elsewhere is not None and run is elsewhere.afar
                self._node.lend(client, wanted, run, request, *([elsewhere.source] if elsewhere and afar else []))
        elif request.tier == "replica":
            self._from_elsewhere(client, wanted, request, self._cluster())
        elif request.tier == "host":
            raise SnapshotNotFoundError(f"step {request.step} is no longer in host memory")
        elif request.as_file and request.tier == "disk":
            self._file(client, wanted, request)
        else:
            self._from(self._run(request.tier, request.step), client, wanted, request)

    def take(self, client: Client, request: m.Take) -> None:
        """Answer with what has come of images that are on their way from a store; see `Arrivals.take`."""
        self._arrivals.take(client, request)

    def common(self, client: Client, request: m.Common) -> None:
        """Answer with those chunks of a file that the client has, and is not to read, for others want them, too."""
        run = self._run(request.tier, request.step)
        run = run.place_of(request.rank) if isinstance(run, Scattered) else run
        self._node.common(client, run, request)

    def _run(self, tier: str, step: int) -> Readable:
        """Where a step is read from; of one in this node's memory, what is not here: where it was found to be whole."""
        if tier == "remote" and self.remote is not None:
            return self.remote
        if tier == "replica":
            return self._cluster().afar
        if tier not in ("host", "disk"):
            raise FormatError(f"no tier {tier!r}")
        return self._rest.get(step, self._disk) if tier == "host" else self._on_disk(step)

    def _on_disk(self, step: int) -> Readable:
        """The run's folder; where that has some ranks' images of a step alone, other nodes beside it."""
        here = self._disk.here(step)
        afar = self.elsewhere.afar if self.elsewhere is not None else None
        return self._disk if here is None or afar is None else Scattered(self._disk, here, afar, step)

    def _cluster(self) -> OtherNodes:
        if self.elsewhere is None:
            raise SnapshotNotFoundError("this node belongs to no cluster: there are no copies on other nodes")
        return self.elsewhere

    # ---------------------------------------------------------------------------------------------- what is there

    def _in_memory(
        self, berths: Mapping[int, Berth], rank: int, step: int
    ) -> tuple[Manifest | None, dict[int, Stored]]:
        """The manifest of a step that is clean in memory, and what of it is in memory of this node."""
        sound = {other: berth for other, berth in berths.items() if not berth.damage(step)}
        tiers = {other: tier for other, berth in sound.items() if (tier := berth.tier_with(step)) is not None}
        if rank not in tiers:
            # This rank was not there, or its image is gone: any other's manifest is as good.
            rank = min(tiers, default=-1)
        if rank < 0:
            raise SnapshotNotFoundError(f"step {step} is no longer in host memory")
        manifest = tiers[rank].manifest(step)
        here: dict[int, Stored] = {}
        for facts in manifest.ranks:
            tier = tiers.get(facts.rank)
            if tier is None:
                continue
            record = tier.record_of(step)
            if manifests.facts(record, manifests.encode_record(record)) == facts:
                here[facts.rank] = Stored(tier.layout, record)
        return manifest, here

    def _looking(self, berths: Mapping[int, Berth], rank: int, tier: str, step: int) -> Callable[[], StepImages]:
        """What finds all ranks' images of a step, to be called on the thread that reads."""
        near, here = self._in_memory(berths, rank, step) if tier == "host" else (None, {})
        run = self._run(tier, step)

        def look() -> StepImages:
            if near is None:
                manifest = run.manifest(step)
                return StepImages(step, manifest.created, manifest.ranks, here, run)
            manifest, rest = self._of_all_ranks(near, here)
            return StepImages(step, manifest.created, manifest.ranks, here, rest)

        return look

    def _of_all_ranks(self, near: Manifest, here: Mapping[int, Stored]) -> tuple[Manifest, Readable]:
        """Of a step that is clean in memory: what all ranks' images are, and where those are that this node lacks.

        They are on disk, else in other nodes' memory, and must be the very same.
        """
        if len(here) == near.world:
            return near, self._disk
        why = ""
        places = [self._on_disk(near.step), *([self.elsewhere.afar] if self.elsewhere else [])]
        for place in places:
            try:
                whole = place.manifest(near.step)
            except (FormatError, FileNotFoundError, ManagerError) as error:
                why = f"; {error.args[0]}"
                continue
            if set(near.ranks) <= set(whole.ranks):
                self._rest[near.step] = place
                return whole, place
        raise SnapshotNotFoundError(f"step {near.step}: images of other nodes' ranks are not on disk{why}")

    def _look_at(self, step: int, rank: int) -> m.CopyFacts | None:
        """What there is of a step; None when it has just been evicted."""
        try:
            try:
                return self._clean_copy(step, rank)
            except FormatError as error:
                self.damaged(rank, step, f"found by who looked for copies: {error.args[0]}")
            return self._clean_copy(step, rank)
        except SnapshotNotFoundError:
            return None
        except (ZerostallError, OSError) as error:
            why = m.plain(str(error.args[0] if error.args else error))
        created, world = 0.0, 0
        with contextlib.suppress(ZerostallError, OSError):
            manifest = self._disk.manifest(step)
            created, world = manifest.created, manifest.world
        return m.CopyFacts(step=step, tier="disk", clean=False, created=created, reason=why, world=world)

    def _clean_copy(self, step: int, rank: int) -> m.CopyFacts:
        """Raises as `DiskTier.open`."""
        manifest = self._disk.manifest(step)
        if rank < manifest.world:
            self._disk.open_of(manifest, rank)
        return m.CopyFacts(step=step, tier="disk", clean=True, created=manifest.created, world=manifest.world)

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

    def _answer(self, client: Client, request: int, look: Callable[[], m.Message]) -> None:
        def run() -> None:
            try:
                answer = look()
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                answer = m.Refused.of(request, ours(error, self._disk.where))
            self._post(lambda: client.send(answer))

        self._reader.submit(run)

    # ------------------------------------------------------------------------------------------------ whole images

    def _from_host(self, client: Client, tier: HostTier, request: m.Fetch, stowage: Stowage | None) -> None:
        held = tier.hold(request.step)
        client.fetched.append(lambda: tier.release(held))
        record = held.image.record
        kept: tuple[m.Kept, ...] = ()
        if stowage is not None:
            kept, release = stowage.lend(Past(record.step, record.created))
            client.fetched.append(release)
        known = request.chunks is not None
        answer = m.Fetched(
            id=request.id,
            memory=m.Lent(tier.key, tier.segment.nbytes),
            offset=held.offset,
            passing=False,
            layout=b"" if known else layouts.encode(tier.layout),
            record=b"" if known else manifests.encode_record(record),
            verified=False,
            kept=kept,
        )
        client.send(answer, tier.segment.fileno())

    def _from(self, run: Readable, client: Client, rank: int, request: m.Fetch) -> None:
        claim = self._claim(client, request)

        def read() -> None:
            try:
                with self._governor.restoring():
                    answer, segment = self._read(run, request, rank)
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                refused = m.Refused.of(request.id, ours(error, run.where))
                self._post(lambda: self._give_up(client, request.step, refused))
            else:
                self._post(lambda: self._give(claim, request.step, answer, segment))

        self._reader.submit(read)

    def _file(self, client: Client, rank: int, request: m.Fetch) -> None:
        claim = self._claim(client, request)

        def look() -> None:
            try:
                stored = self._disk.open(request.step, rank)
                image = self._disk.bytes_of(request.step, rank, stored)
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                refused = m.Refused.of(request.id, ours(error, self._disk.where))
                self._post(lambda: self._give_up(client, request.step, refused))
                return
            held = contextlib.ExitStack()
            held.callback(image.close)
            held.enter_context(self._governor.restoring())
            answer = m.Opened(
                id=request.id,
                path=os.fsencode(image.path),
                layout=layouts.encode(stored.layout),
                record=manifests.encode_record(stored.record),
            )
            self._post(lambda: self._hand(claim, request.step, answer, image.fileno(), held.close))

        self._reader.submit(look)

    def _from_elsewhere(self, client: Client, rank: int, request: m.Fetch, elsewhere: OtherNodes) -> None:
        claim = self._claim(client, request)

        def bring() -> None:
            try:
                brought = elsewhere.bring(request, rank)
            except Exception as error:  # noqa: BLE001 - a trainer waits for the answer
                refused = m.Refused.of(request.id, ours(error, self._disk.where))
                self._post(lambda: self._give_up(client, request.step, refused))
            else:
                release = (lambda: self._reader.submit(brought.release)) if brought.slow else brought.release
                self._post(lambda: self._hand(claim, request.step, brought.answer, brought.fd, release))

        self._reader.submit(bring)

    def _read(self, run: Readable, request: m.Fetch, rank: int) -> tuple[m.Fetched, native.Segment]:
        stored = run.open(request.step, rank)
        segment = native.Segment(f"zerostall-fetch-{rank}", stride_of(stored.layout), populate=False)
        try:
            run.get(request.step, rank, segment.address)
        except BaseException:
            segment.close()
            raise
        return whole(request, segment, stored.layout, stored.record), segment

    def _claim(self, client: Client, request: m.Fetch) -> Claim:
        """The step stays until `_hand` or `_give_up`."""
        self._steps.append(request.step)
        return client.claim()

    def _give(self, claim: Claim, step: int, answer: m.Fetched, segment: native.Segment) -> None:
        # Giving gigabytes back takes a while.
        self._hand(claim, step, answer, segment.fileno(), lambda: self._reader.submit(segment.close))

    def _hand(self, claim: Claim, step: int, answer: m.Message, fd: int, release: Callable[[], None]) -> None:
        def done() -> None:
            self._steps.remove(step)
            release()

        claim.settle(answer, fd, done)

    def _give_up(self, client: Client, step: int, refused: m.Refused) -> None:
        self._steps.remove(step)
        client.send(refused)


def _of_the_present(copies: tuple[m.CopyFacts, ...], nearer: tuple[m.CopyFacts, ...]) -> tuple[m.CopyFacts, ...]:
    """Of a past that the run has left there is no copy: on disk one stays until a step that was saved since gets there,
    and with a node that was away meanwhile.
    """
    known = [Past(copy.step, copy.created) for copy in nearer]
    judged = ((copy, went_back(Past(copy.step, copy.created), known)) for copy in copies)
    replace = msgspec.structs.replace
    return tuple(replace(one, clean=False, reason=why) if one.clean and why else one for one, why in judged)
