"""What a restore can have from other nodes: which copies there are, and the bytes of one in memory."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.agent.afar import Afar
from zerostall.agent.brought import TIER, Brought, source_of, whole
from zerostall.agent.loop_call import Post, on_loop
from zerostall.agent.pulling import TRIES
from zerostall.agent.scattered import HEARD_SECONDS
from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core.candidates import Past
from zerostall.core.placement import ImageId
from zerostall.core.prefetch import MEMORY
from zerostall.errors import FormatError, ManagerError, SnapshotNotFoundError, ZerostallError
from zerostall.telemetry import log
from zerostall.tiers.host import stride_of
from zerostall.wire import cluster as w
from zerostall.wire import messages as m
from zerostall.wire import peers as p

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from zerostall.agent.neighbourhood import Neighbourhood
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record
    from zerostall.wire.cluster import LocatedCopy

HEIR_SECONDS = 30.0
"""So long a node that has a run and was not heard lately is waited for, until it is heard or lost."""
_ASK_AGAIN_SECONDS = 0.25


class Elsewhere:
    """For the threads that look for copies and read them; what is let go is let go on the loop."""

    def __init__(self, neighbourhood: Neighbourhood, post: Post) -> None:
        self._neighbourhood = neighbourhood
        self._replication = neighbourhood.replication
        self._whereabouts = neighbourhood.whereabouts
        self._post = post
        self._sources: dict[tuple[ImageId, int], list[LocatedCopy]] = {}
        self._runs: dict[tuple[str, int], OfRun] = {}
        self._expected: dict[ImageId, int] = {}

    def of_run(self, run: str, world: int) -> OfRun:
        """On the loop."""
        known = self._runs.get((run, world))
        if known is None:
            known = self._runs[run, world] = OfRun(self, run, world, Afar(self._neighbourhood, run))
        return known

    def expect(self, image: ImageId, step: int) -> None:
        """Another rank's folder has that step: the next look waits for nodes that have not said yet what they have."""
        self._expected[image] = step

    def heir(self, where: str, name: str, then: Callable[[w.Inherited], None]) -> None:
        """Find out which run an empty folder goes on with, and call with that on the loop. On the loop."""

        def ask() -> None:
            began = time.monotonic()
            found = w.Inherited("", name, "")
            while True:
                asked = time.monotonic() - began
                try:
                    found = self._whereabouts.heir(where, name, asked)
                except ZerostallError as error:
                    found = w.Inherited("", name, f"nobody can say whether it goes on with a run: {error.args[0]}")
                    break
                if not found.wait or asked > HEIR_SECONDS:
                    break
                time.sleep(_ASK_AGAIN_SECONDS)
            self._post(lambda: then(found))

        threading.Thread(target=ask, name="heir", daemon=True).start()

    def copies(self, run: str, rank: int, world: int, near: Collection[Past]) -> tuple[m.CopyFacts, ...]:
        """The steps of which another node, or this one as a guest, has the rank's image; one entry a step.

        What is on this node's disk is `near`: another's disk is not told of then, only what is in memory.
        """
        image = ImageId(run, rank)
        here = {past.step: past.created for past in on_loop(self._post, lambda: self._replication.guests.images(image))}
        try:
            located = self._located(run, rank, near)
            unknown = "its manager does not know whether every rank has it"
        except ManagerError as error:
            log.warning("%s: copies on other nodes are not found", error.args[0])
            located, unknown = (), "nobody says whether every rank has it, since the manager cannot be reached"
        self._sources = {key: value for key, value in self._sources.items() if key[0] != image}
        found: dict[int, m.CopyFacts] = {}
        for copy in located:
            self._sources.setdefault((image, copy.step), []).append(copy)
            if copy.tier not in MEMORY and Past(copy.step, copy.began) in near:
                continue
            known = found.get(copy.step)
            if known is None or (copy.clean and not known.clean):
                reason = m.plain(copy.reason)
                found[copy.step] = m.CopyFacts(copy.step, TIER, copy.clean, copy.began, reason, copy.world)
        for step, created in here.items():
            # Of a run with one rank, an image that is whole here is all there is to know.
            if step not in found or world == 1:
                alone = world == 1
                began = created if alone else 0.0
                found[step] = m.CopyFacts(step, TIER, alone, began, "" if alone else unknown, world)
        return tuple(found[step] for step in sorted(found))

    def _located(self, run: str, rank: int, near: Collection[Past]) -> tuple[LocatedCopy, ...]:
        """Where the manager knows copies, once nodes that come up just now had time to say what their disks have."""
        deadline = time.monotonic() + HEARD_SECONDS
        expected = self._expected.pop(ImageId(run, rank), -1)
        while True:
            located = self._whereabouts.whereis(run, rank)
            steps = [past.step for past in near] + [copy.step for copy in located if copy.clean]
            newest = max(steps, default=-1)
            awaited = expected > newest or any(copy.awaited and copy.step > newest for copy in located)
            if not awaited or time.monotonic() > deadline:
                return located
            time.sleep(_ASK_AGAIN_SECONDS)

    def bring(self, request: m.Fetch, run: str, rank: int) -> Brought:
        """The image in memory: this node's own, else from the nearest node that has it.

        Raises:
            SnapshotNotFoundError, FormatError, StorageError, AgentError: no copy could be had; the last reason.
        """
        image = ImageId(run, rank)
        own = on_loop(self._post, lambda: self.own(request, image))
        if own is not None:
            return own
        problem: ZerostallError = SnapshotNotFoundError(f"no node has step {request.step} of rank {rank} any more")
        sources = self._sources.get((image, request.step), ())
        node = self._neighbourhood.node
        sources = [copy for copy in sources if copy.clean and (copy.peer.node != node or copy.tier == "partner")]
        # A node that is gone may be among them: each is tried once before any is tried again.
        for tries in (1, TRIES):
            for copy in sources:
                try:
                    return self._pulled(copy, request, image, tries)
                except (ZerostallError, OSError) as error:
                    log.warning("step %d of rank %d from node %s: %s", request.step, rank, copy.peer.node, error)
                    problem = error if isinstance(error, ZerostallError) else FormatError(str(error))
        raise problem

    def own(self, request: m.Fetch, image: ImageId, told: Record | None = None) -> Brought | None:
        """On the loop: this node keeps it as a guest; `told`: that very image."""
        tier = self._replication.guests.tier_with(image, request.step)
        if tier is None or (told is not None and tier.record_of(request.step) != told):
            return None
        held = tier.hold(request.step)
        answer = m.Fetched(
            id=request.id,
            memory=m.Lent(0, tier.segment.nbytes),
            offset=held.offset,
            passing=True,
            layout=layouts.encode(tier.layout),
            record=manifests.encode_record(held.image.record),
            verified=False,
        )
        return Brought(answer, tier.segment.fileno(), lambda: tier.release(held), slow=False)

    def _pulled(self, copy: LocatedCopy, request: m.Fetch, image: ImageId, tries: int) -> Brought:
        segments: list[native.Segment] = []

        def room(layout: Layout, record: Record) -> Callable[[int, int], memoryview]:
            segments.append(native.Segment(f"zerostall-fetch-{image.rank}", stride_of(layout), populate=False))
            return segments[0].view

        try:
            wanted = p.Pull(image.run, image.rank, request.step, copy.created)
            came = self._replication.pull(copy.peer.address, wanted, room, tries)
        except BaseException:
            for segment in segments:
                segment.close()
            raise
        segment = segments[0]
        answer = whole(request, segment, came.layout, came.record, source_of(copy.tier))
        return Brought(answer, segment.fileno(), segment.close, slow=True)


@dataclass(frozen=True, slots=True)
class OfRun:
    """See `brought.OtherNodes`."""

    elsewhere: Elsewhere
    run: str
    world: int
    afar: Afar

    def copies(self, rank: int, near: Collection[Past]) -> tuple[m.CopyFacts, ...]:
        return self.elsewhere.copies(self.run, rank, self.world, near)

    def source(self, step: int, rank: int) -> str:
        return source_of(self.afar.gave.get((step, rank), "replica"))

    def lend(self, request: m.Fetch, rank: int) -> Brought | None:
        """On the loop: the image that the step was found to have, where this node keeps it as a guest."""
        told = self.afar.told(request.step, rank)
        return self.elsewhere.own(request, ImageId(self.run, rank), told) if told is not None else None

    def bring(self, request: m.Fetch, rank: int) -> Brought:
        return self.elsewhere.bring(request, self.run, rank)
