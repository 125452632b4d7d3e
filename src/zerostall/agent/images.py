"""Images that this node can give to others, from wherever it has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.agent.loop_call import Post, on_loop
from zerostall.agent.notes import attempt_at, attempt_stored
from zerostall.agent.peers import Given
from zerostall.errors import CorruptError, SnapshotNotFoundError
from zerostall.telemetry import log
from zerostall.tiers.host import stride_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerostall.agent.doubt import Doubt
    from zerostall.agent.guest_disk import GuestDisk
    from zerostall.agent.guests import Guests
    from zerostall.agent.runs import Runs
    from zerostall.core.manifest import Record
    from zerostall.core.placement import ImageId
    from zerostall.tiers.contract import Stored
    from zerostall.tiers.disk import DiskTier
    from zerostall.tiers.host import HostTier
    from zerostall.tiers.lone_images import LoneImages, Replica


Get = Callable[[int, "Sequence[int] | None"], object]
"""Brings an image, or these chunks of it, to an address."""

Opener = Callable[[], "tuple[Stored, str, Get]"]
"""Finds out on disk what an image is: that, its attempt, and what brings its bytes."""


class Images:
    """See `peers.Source`. Any thread."""

    def __init__(
        self, runs: Runs, guests: Guests, doubt: Doubt, post: Post, guest_disk: GuestDisk | None = None
    ) -> None:
        self._runs = runs
        self._guests = guests
        self._guest_disk = guest_disk
        self._doubt = doubt
        self._post = post

    @contextlib.contextmanager
    def given(self, image: ImageId, step: int, created: float, chunks: Sequence[int] | None = None) -> Iterator[Given]:
        """The image, held for as long as the block lasts: from memory, else from disk, and then only these chunks.

        Raises:
            SnapshotNotFoundError: it is not here.
        """
        found = on_loop(self._post, lambda: self._hold(image, step, created))
        if isinstance(found, tuple):
            given, release = found
            try:
                yield given
            finally:
                self._post(release)
            return
        stored, attempt, get = found()
        segment = native.Segment(f"zerostall-give-{image.rank}", stride_of(stored.layout), populate=False)
        try:
            if chunks is None or chunks:
                get(segment.address, chunks)
            yield Given(stored.layout, stored.record, attempt, segment.view)
        finally:
            segment.close()

    def damaged(self, image: ImageId, record: Record, chunk: int) -> None:
        """A copy given here is not what its record says."""
        self._doubt(image, record.step, f"chunk {chunk} was given to another node and came damaged")

    def _hold(self, image: ImageId, step: int, created: float) -> tuple[Given, Callable[[], None]] | Opener:
        """On the loop: hold the image in memory; where it is not there, what opens it on disk."""
        disk: DiskTier | None = None
        for run in self._runs:
            if run.folder.facts.run != image.run:
                continue
            disk = run.folder.disk
            berth = run.berths.get(image.rank)
            tier = berth.tier_with(step) if berth else None
            if berth is not None and tier is not None and created in (0.0, tier.record_of(step).created):
                if tier.damage(step):
                    return self._in_run(disk, image, step, created)
                return self._held(tier, step, attempt_at(berth, step))
        tier = self._guests.tier_with(image, step)
        if tier is not None and created in (0.0, tier.record_of(step).created):
            if damage := tier.damage(step):
                raise SnapshotNotFoundError(f"its copy is damaged: {damage}")
            return self._held(tier, step, self._guests.attempt(image, step))
        if self._guest_disk is not None and (found := self._guest_disk.find(image, step, created)) is not None:
            return self._alone(self._guest_disk, *found)
        if disk is None:
            raise SnapshotNotFoundError(f"no step {step} of rank {image.rank} here")
        return self._in_run(disk, image, step, created)

    @staticmethod
    def _held(tier: HostTier, step: int, attempt: str) -> tuple[Given, Callable[[], None]]:
        held = tier.hold(step)
        given = Given(
            held.image.layout,
            held.image.record,
            attempt,
            lambda offset, nbytes: tier.segment.view(held.offset + offset, nbytes),
        )
        return given, lambda: tier.release(held)

    def _in_run(self, disk: DiskTier, image: ImageId, step: int, created: float) -> Opener:
        """An image in the folder of its run."""

        def opened() -> tuple[Stored, str, Get]:
            stored = disk.open(step, image.rank)
            if created not in (0.0, stored.record.created):
                raise SnapshotNotFoundError(f"step {step} of rank {image.rank} on disk here is another one")
            return stored, attempt_stored(disk.manifest(step)), get

        def get(address: int, chunks: Sequence[int] | None) -> None:
            try:
                disk.get(step, image.rank, address, chunks=chunks)
            except CorruptError as error:
                self._doubt(image, step, f"it was to be given to another node: {error.args[0]}", disk=True)
                raise

        return opened

    def _alone(self, guest_disk: GuestDisk, images: LoneImages, replica: Replica) -> Opener:
        """An image that is here for another node. One that is damaged goes; what is in memory is written anew."""
        attempt = guest_disk.attempt(replica)

        def opened() -> tuple[Stored, str, Get]:
            with dropped():
                stored = images.open(replica)

            def get(address: int, chunks: Sequence[int] | None) -> None:
                with dropped():
                    images.get(replica, stored, address, chunks=chunks)

            return stored, attempt, get

        @contextlib.contextmanager
        def dropped() -> Iterator[None]:
            try:
                yield
            except CorruptError as error:
                log.warning("%s; it goes", error.args[0])
                self._post(lambda: guest_disk.drop(replica))
                raise

        return opened
