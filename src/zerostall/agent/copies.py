"""Images in this node's memory, its own ranks' and its guests', each of which may be doubted, marked and made again."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.agent.good_copies import Target
from zerostall.agent.loop_call import Post, on_loop
from zerostall.core.placement import ImageId
from zerostall.errors import SnapshotNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerostall.agent.berth import Berth
    from zerostall.agent.guests import Guests
    from zerostall.agent.run import Run
    from zerostall.agent.runs import Runs
    from zerostall.core.manifest import Record
    from zerostall.tiers.host import HostTier


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One image in memory, as it was found; it may be gone since.

    Attributes:
        tier: "host" where the rank trains here, else "replica".
        newest: of its rank here.
        damaged: it was marked so.
        run: the rank's, where it trains here.
        copies: where it was found.
    """

    image: ImageId
    tier: str
    record: Record
    memory: HostTier
    copies: Copies
    newest: bool
    damaged: bool
    run: Run | None = None

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def chunks(self) -> int:
        return len(self.record.checksums)

    def __str__(self) -> str:
        return f"step {self.step} of rank {self.image.rank} in memory"

    # See `mending.Mendable`.

    def there(self) -> bool:
        return self.copies.there(self)

    def sound(self, chunk: int) -> bool:
        return self.copies.sound(self, chunk)

    @contextlib.contextmanager
    def target(self, chunk: int) -> Iterator[Target]:
        with self.copies.held(self) as address:
            yield Target(self.memory.segment, address - self.memory.segment.address)

    def damage(self) -> str:
        return self.memory.damage(self.step)

    def mark(self, reason: str) -> bool:
        return self.copies.mark(self, reason)


class Copies:
    """Any thread.

    Attributes:
        guests: images of other nodes, where this one belongs to a cluster.
    """

    def __init__(self, runs: Runs, post: Post) -> None:
        self.guests: Guests | None = None
        self._runs = runs
        self._post = post

    def of(self, image: ImageId, step: int) -> list[Copy]:
        """Those of one image."""
        return [copy for copy in self.all() if (copy.image, copy.step) == (image, step)]

    def all(self) -> list[Copy]:
        """Every sealed image."""
        return on_loop(self._post, lambda: [copy for berth in self._berths() for copy in berth])

    def damaged(self) -> list[Copy]:
        """Those that are marked."""
        return [copy for copy in self.all() if copy.damaged]

    @contextlib.contextmanager
    def held(self, copy: Copy) -> Iterator[int]:
        """Its address; it stays as it is for as long as the block lasts, so that should be short.

        Raises:
            SnapshotNotFoundError: it is not there any more.
        """
        memory = copy.memory

        def hold() -> tuple[int, int]:
            if not self._there(copy):
                raise SnapshotNotFoundError(f"{copy} made room meanwhile")
            held = memory.hold(copy.step)
            return held.slot, held.image.address

        slot, address = on_loop(self._post, hold)
        try:
            yield address
        finally:
            self._post(lambda: memory.slots.release(slot))

    def there(self, copy: Copy) -> bool:
        """Is it still in memory?"""
        return on_loop(self._post, lambda: self._there(copy))

    def sound(self, copy: Copy, chunk: int) -> bool:
        """Is a chunk what the record says?

        Raises:
            SnapshotNotFoundError: the image is not there any more.
        """
        start, nbytes = copy.record.extent(chunk)
        with self.held(copy) as address:
            return native.crc32c_memory(address + start, nbytes) == copy.record.checksums[chunk]

    def mark(self, copy: Copy, reason: str) -> bool:
        """Nobody may count on it until the mark is taken off with ""; whether it is there."""

        def mark() -> bool:
            there = self._there(copy)
            if there:
                copy.memory.mark(copy.step, reason)
            return there

        return on_loop(self._post, mark)

    # ------------------------------------------------------------------------------------------- on the loop

    def _there(self, copy: Copy) -> bool:
        return any(
            other.memory is copy.memory and other.record.created == copy.record.created and other.step == copy.step
            for berth in self._berths()
            for other in berth
        )

    def _berths(self) -> Iterator[list[Copy]]:
        for run in self._runs:
            for rank, berth in run.berths.items():
                yield _sealed(self, ImageId(run.folder.facts.run, rank), berth, "host", run)
        if self.guests is not None:
            for image, berth in self.guests.berths():
                yield _sealed(self, image, berth, "replica", None)


def _sealed(copies: Copies, image: ImageId, berth: Berth, tier: str, run: Run | None) -> list[Copy]:
    found = [(memory, memory.record_of(slot.step)) for memory in berth.tiers() for slot in memory.slots.sealed()]
    newest = max((record.step for _, record in found), default=-1)
    return [
        Copy(image, tier, record, memory, copies, record.step == newest, bool(memory.damage(record.step)), run)
        for memory, record in found
    ]
