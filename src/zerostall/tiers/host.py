"""The host tier: one rank's images in shared memory that outlives its trainer.

The trainer captures straight into a slot that was granted to it, so `put` of an image that already lies in the granted
slot only seals it; an image that lies elsewhere is copied.
"""

from __future__ import annotations

import ctypes
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core.slots import Phase, Slots
from zerostall.errors import CapacityError, CorruptError, FormatError, SnapshotNotFoundError, StepExistsError
from zerostall.tiers.contract import Image, Stored
from zerostall.wire.notice import Notice

if TYPE_CHECKING:
    from zerostall.core.layout import Layout
    from zerostall.core.manifest import Manifest, Record

PAGE = 4096


def stride_of(layout: Layout) -> int:
    """Bytes of one slot: the image, up to a whole page."""
    return -(-max(layout.nbytes, 1) // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Held:
    """A sealed image that stays as it is until `HostTier.release(held)`."""

    slot: int
    image: Image
    offset: int


class HostTier:
    """Images of one layout in one segment; see `contract.Tier`. One thread drives it, any may read a held image."""

    name = "host"

    def __init__(self, layout: Layout, segment: native.Segment, count: int, pool: native.Pool) -> None:
        self.layout = layout
        self.segment = segment
        self.key = secrets.randbits(63)  # tells this memory from any other, also across agents
        self.stride = stride_of(layout)
        if segment.nbytes < self.stride * count:
            raise FormatError(f"a segment of {segment.nbytes} bytes cannot hold {count} slots of {self.stride}")
        self.notice = Notice.of(segment.fileno(), segment.nbytes, self.stride * count)
        self.slots = Slots(count)
        self._pool = pool
        self._records: dict[int, Record] = {}
        self._manifests: dict[int, Manifest] = {}
        self._damage: dict[int, str] = {}
        self._outdone: dict[int, Manifest] = {}  # by slot: of images whose step was saved anew

    # -------------------------------------------------------------------------------------------------- verbs

    def put(self, image: Image) -> None:
        if not image.layout.same(self.layout):
            raise FormatError("the image has another layout than this segment")
        slot = self._slot_at(image.address)
        if slot is None:
            grant = self.slots.grant()
            if grant.index is None:
                raise CapacityError(f"no slot for step {image.record.step}: {grant.reason}", hint="use more slots")
            slot = grant.index
            ctypes.memmove(self.address(slot), image.address, image.layout.nbytes)
        self.seal(slot, image.record)

    def commit(self, manifest: Manifest, *, replace: bool = False) -> None:
        step = manifest.step
        slot = self.slots.at_step(step)
        if slot is None:
            raise FormatError(f"step {step} has no image to commit in host memory")
        if step in self._manifests and not replace:
            raise StepExistsError(f"step {step} is in host memory already", hint="save with if_exists='replace'")
        self._manifests[step] = manifest
        self.slots.settle(step)
        self._outdone = {index: one for index, one in self._outdone.items() if one.step > step}

    def steps(self) -> list[int]:
        return sorted(step for step in self._manifests if self.slots.at_step(step) is not None)

    def manifest(self, step: int) -> Manifest:
        manifest = self._manifests.get(step)
        if manifest is None or self.slots.at_step(step) is None:
            raise SnapshotNotFoundError(f"no step {step} in host memory")
        return manifest

    def open(self, step: int, rank: int) -> Stored:
        self.manifest(step)
        record = self.record_of(step)
        if record.rank != rank:
            raise SnapshotNotFoundError(f"this host memory is rank {record.rank}'s, not rank {rank}'s")
        return Stored(self.layout, record)

    def get(self, step: int, rank: int, address: int) -> Stored:
        stored = self.open(step, rank)
        held = self.hold(step)
        try:
            ctypes.memmove(address, held.image.address, self.layout.nbytes)
        finally:
            self.release(held)
        record = stored.record
        check = native.Verify(self._pool, address, record.nbytes, record.chunk_bytes, record.checksums)
        check.wait(None)
        if check.bad:
            raise CorruptError(f"step {step} in host memory: chunk {check.bad[0]} fails its checksum")
        return stored

    def evict(self, step: int) -> None:
        self.forget_outdone(step)
        self.unseal(step)

    # -------------------------------------------------------------------------------------- beyond the contract

    def address(self, slot: int) -> int:
        return self.segment.address + slot * self.stride

    def seal(self, slot: int, record: Record) -> None:
        """The granted slot holds the whole image that `record` describes."""
        mine = self.layout
        if (record.layout, record.begins, record.nbytes) != (mine.digest, mine.begins, mine.nbytes):
            raise FormatError("the record is of another layout than this segment")
        before, clean = self.slots.at_step(record.step), self._manifests.pop(record.step, None)
        self.slots.seal(slot, record.step, outdo=clean is not None)
        if before is not None and clean is not None:
            self._outdone[before.index] = clean
        self._records[slot] = record
        self._damage.pop(slot, None)
        held = {s.step for s in self.slots.sealed()}
        for step in [step for step in self._manifests if step not in held]:
            del self._manifests[step]

    def unseal(self, step: int) -> None:
        """The newest image of `step` came to nothing: the one of that number before it counts, if it was clean."""
        self._manifests.pop(step, None)
        if (slot := self.slots.at_step(step)) is not None:
            self._damage.pop(slot.index, None)
        if (before := self.slots.restore(step)) is not None:
            self._manifests[step] = self._outdone.pop(before.index)

    def outdone(self, step: int) -> Manifest | None:
        """Of the image of `step` that was clean when it was saved anew, while that new one is not yet."""
        slot = self.slots.outdone(step)
        return self._outdone[slot.index] if slot is not None else None

    def forget_outdone(self, step: int) -> None:
        if (slot := self.slots.outdone(step)) is not None:
            del self._outdone[slot.index]
            self._damage.pop(slot.index, None)
            self.slots.forget(slot.index)

    def hold(self, step: int) -> Held:
        """Keep the image of `step` as it is while somebody reads it."""
        slot = self.slots.at_step(step)
        if slot is None:
            raise SnapshotNotFoundError(f"no step {step} in host memory")
        self.slots.hold(slot.index)
        image = Image(self.layout, self._records[slot.index], self.address(slot.index))
        return Held(slot.index, image, slot.index * self.stride)

    def release(self, held: Held) -> None:
        self.slots.release(held.slot)

    def held(self) -> bool:
        """Is any image being read, brought or promised to a slower tier?"""
        return any(slot.readers or slot.promised or slot.phase is Phase.filling for slot in self.slots.table)

    def mark(self, step: int, damage: str) -> None:
        """Say what is wrong with the image of `step`; "" for nothing any more."""
        slot = self.slots.at_step(step)
        if slot is not None and damage:
            self._damage[slot.index] = damage
        elif slot is not None:
            self._damage.pop(slot.index, None)

    def damage(self, step: int) -> str:
        """What is wrong with the image of `step`; "" where nothing is known to be."""
        slot = self.slots.at_step(step)
        return self._damage.get(slot.index, "") if slot is not None else ""

    def reading(self) -> bool:
        """Does somebody read any of its images?"""
        return any(slot.readers for slot in self.slots.table)

    def _slot_at(self, address: int) -> int | None:
        offset = address - self.segment.address
        if 0 <= offset < self.stride * self.slots.count and offset % self.stride == 0:
            return offset // self.stride
        return None

    def record_of(self, step: int) -> Record:
        slot = self.slots.at_step(step)
        if slot is None:
            raise SnapshotNotFoundError(f"no step {step} in host memory")
        return self._records[slot.index]
