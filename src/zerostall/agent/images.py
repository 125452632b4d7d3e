"""Images that this node can give to others, from wherever it has them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.agent.holdings import attempt_at, attempt_stored
from zerostall.agent.loop_call import Post, on_loop
from zerostall.errors import CorruptError, SnapshotNotFoundError
from zerostall.tiers.host import stride_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zerostall.agent.guests import Guests
    from zerostall.agent.mending import Doubt
    from zerostall.agent.service import Service
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Record
    from zerostall.core.placement import ImageId
    from zerostall.tiers.disk import DiskTier
    from zerostall.tiers.host import HostTier


@dataclass(frozen=True, slots=True)
class Given:
    """An image that stays where it is while it is given."""

    layout: Layout
    record: Record
    attempt: str
    view: Callable[[int, int], memoryview]


class Images:
    """Any thread."""

    def __init__(self, service: Service, guests: Guests, doubt: Doubt, post: Post) -> None:
        self._service = service
        self._guests = guests
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
        with self._from_disk(found, image, step, created, chunks) as given:
            yield given

    def damaged(self, image: ImageId, record: Record, chunk: int) -> None:
        """A copy given here is not what its record says."""
        self._doubt(image, record.step, f"chunk {chunk} was given to another node and came damaged")

    def _hold(self, image: ImageId, step: int, created: float) -> tuple[Given, Callable[[], None]] | DiskTier:
        """On the loop: hold the image in memory; where it is not there, the run's folder."""
        disk: DiskTier | None = None
        for run in self._service.runs.values():
            if run.folder.facts.run != image.run:
                continue
            disk = run.folder.disk
            berth = run.berths.get(image.rank)
            tier = berth.tier_with(step) if berth else None
            if berth is not None and tier is not None and created in (0.0, tier.record_of(step).created):
                if tier.damage(step):
                    return disk
                return self._held(tier, step, attempt_at(berth, step))
        tier = self._guests.tier_with(image, step)
        if tier is not None and created in (0.0, tier.record_of(step).created):
            if damage := tier.damage(step):
                raise SnapshotNotFoundError(f"its copy is damaged: {damage}")
            return self._held(tier, step, self._guests.attempt(image, step))
        if disk is None:
            raise SnapshotNotFoundError(f"no step {step} of rank {image.rank} here")
        return disk

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

    @contextlib.contextmanager
    def _from_disk(
        self, disk: DiskTier, image: ImageId, step: int, created: float, chunks: Sequence[int] | None
    ) -> Iterator[Given]:
        stored = disk.open(step, image.rank)
        if created not in (0.0, stored.record.created):
            raise SnapshotNotFoundError(f"step {step} of rank {image.rank} on disk here is another one")
        segment = native.Segment(f"zerostall-give-{image.rank}", stride_of(stored.layout), populate=False)
        try:
            if chunks is None or chunks:
                try:
                    disk.get(step, image.rank, segment.address, chunks=chunks)
                except CorruptError as error:
                    self._doubt(image, step, f"it was to be given to another node: {error.args[0]}", disk=True)
                    raise
            yield Given(stored.layout, stored.record, attempt_stored(disk.manifest(step)), segment.view)
        finally:
            segment.close()
