"""One committed step into the remote tier, from wherever it is."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.core.candidates import Past
from zerostall.telemetry import log
from zerostall.tiers.contract import Stored
from zerostall.tiers.image_bytes import MemoryBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from zerostall.core.manifest import Manifest
    from zerostall.tiers.contract import Image, ImageBytes, RunTier
    from zerostall.tiers.remote import RemoteTier

Rank = tuple[Stored, "ImageBytes"]


@dataclass(frozen=True, slots=True)
class Load:
    """A committed step that somebody has taken hold of.

    Attributes:
        manifest: of the step; called where reading may take a while.
        rank: one rank's image; its bytes are closed by whoever asked for them.
        pinned: whether retention must leave it alone; called as `manifest`.
        close: let go of the step.
        created: rank → when that rank saved it, as far as it is known without reading.
        replace: whether one of its number may be replaced.
    """

    manifest: Callable[[], Manifest]
    rank: Callable[[int], Rank]
    pinned: Callable[[], bool]
    close: Callable[[], None]
    created: Mapping[int, float]
    replace: bool

    @classmethod
    def of_run(cls, run: RunTier, step: int, created: Mapping[int, float]) -> Load:
        """A step on disk. What is there is the truth: one of its number in the remote tier is replaced."""

        def rank(number: int) -> Rank:
            stored = run.open(step, number)
            return stored, run.bytes_of(step, number, stored)

        return cls(lambda: run.manifest(step), rank, lambda: run.pinned(step), lambda: None, created, replace=True)

    @classmethod
    def of_memory(
        cls, manifest: Manifest, images: list[Image], *, pinned: bool, replace: bool, close: Callable[[], None]
    ) -> Load:
        """A step in host memory, each rank's image held."""
        created = {image.record.rank: image.record.created for image in images}

        def rank(number: int) -> Rank:
            image = images[number]
            return Stored(image.layout, image.record), MemoryBytes(image)

        return cls(lambda: manifest, rank, lambda: pinned, close, created, replace)


@dataclass(frozen=True, slots=True)
class Carried:
    """A step that is in the remote tier now, and those that were set aside for it."""

    manifest: Manifest
    aside: tuple[int, ...]


def carry(remote: RemoteTier, load: Load) -> Carried:
    """Carry every rank's image, then commit the step. What an attempt before has brought is not carried again.

    Steps there of a higher number are of a past that the run has left, for it is at this step now: they are set aside.

    Raises:
        StorageError: the store refused; trying again goes on from what is there.
        CorruptError, SnapshotNotFoundError: the step is damaged or gone where it comes from.
        StepExistsError: another writer has one of that number.
    """
    manifest = load.manifest()
    for number in range(manifest.world):
        with _rank(load, number) as (stored, source):
            remote.carry(stored, source)
    later = [step for step in remote.steps() if step > manifest.step]
    left = [Past(step, created) for step, created in remote.created_of(later).items() if created < manifest.created]
    if left:
        log.warning(
            "%s: training went back before steps %s: they are set aside", remote.where, [one.step for one in left]
        )
        remote.set_aside(left)
    remote.commit(manifest, replace=load.replace, pin=load.pinned())
    return Carried(manifest, tuple(one.step for one in left))


@contextlib.contextmanager
def _rank(load: Load, number: int) -> Iterator[Rank]:
    stored, source = load.rank(number)
    try:
        yield stored, source
    finally:
        source.close()
