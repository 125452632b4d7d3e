"""An image on disk that somebody doubts: what is damaged of it is written anew where it lies."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.agent.good_copies import GoodCopy, Target
from zerostall.agent.loop_call import Post, on_loop
from zerostall.core import steps as names
from zerostall.core.placement import ImageId
from zerostall.errors import CorruptError, FormatError, SnapshotNotFoundError, StorageError
from zerostall.tiers import past_cache, vouching
from zerostall.tiers.host import stride_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from zerostall.agent.copies import Copies
    from zerostall.agent.run import Run
    from zerostall.agent.runs import Runs
    from zerostall.core.manifest import Record
    from zerostall.tiers.contract import Stored
    from zerostall.tiers.disk import DiskTier

_LIST_SECONDS = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class DiskCopy:
    """One rank's image of a committed step in a folder that this agent holds. See `mending.Mendable`."""

    image: ImageId
    stored: Stored
    run: Run
    marks: dict[tuple[ImageId, float], str] = field(repr=False)
    tier: str = "disk"

    @property
    def record(self) -> Record:
        return self.stored.record

    def __str__(self) -> str:
        return f"step {self.record.step} of rank {self.image.rank} on disk"

    def there(self) -> bool:
        try:
            return self.run.folder.disk.open(self.record.step, self.image.rank).record == self.record
        except (SnapshotNotFoundError, FormatError, OSError):
            return False

    def sound(self, chunk: int) -> bool:
        """As the disk gives it, not as the kernel still remembers it, where the file system lets that be told."""
        start, nbytes = self.record.extent(chunk)
        try:
            file = self.run.folder.disk.bytes_of(self.record.step, self.image.rank, self.stored)
            with contextlib.closing(file):
                found = past_cache.checksum(file.fileno(), start, nbytes, file.path)
        except CorruptError:
            return False  # the file is missing, or has another size
        return found == self.record.checksums[chunk]

    @contextlib.contextmanager
    def target(self, chunk: int) -> Iterator[Target]:
        """Memory for the chunk; what is right of it is written to the file at the end."""
        start, nbytes = self.record.extent(chunk)
        segment = native.Segment("zerostall-mend", stride_of(self.stored.layout), populate=False)
        try:
            yield Target(segment)
            data = segment.view(start, nbytes)
            if native.crc32c(data) == self.record.checksums[chunk]:
                self._write(data, start)
        finally:
            segment.close()

    def damage(self) -> str:
        return self.marks.get((self.image, self.record.created), "")

    def mark(self, reason: str) -> bool:
        if reason:
            self.marks[self.image, self.record.created] = reason
        else:
            self.marks.pop((self.image, self.record.created), None)
        return True

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def chunks(self) -> int:
        return len(self.record.checksums)

    def _write(self, data: memoryview, start: int) -> None:
        """Over what is damaged. Whether the file still is this very image is asked once it is open."""
        path = self.run.folder.disk.image_path(self.record.step, self.image.rank)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            try:
                if not self.there() or not self.run.folder.taken():
                    raise SnapshotNotFoundError(f"{self} is not this agent's to write any more")
                written = 0
                while written < len(data):
                    written += os.pwrite(fd, data[written:], start + written)
                if os.fstat(fd).st_size != self.record.nbytes:
                    os.ftruncate(fd, self.record.nbytes)  # it was cut, or more than the image
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise StorageError(f"{path} cannot be written anew: {error.strerror}", errno=error.errno) from error


@dataclass(frozen=True, slots=True)
class DiskResident:
    """An image on disk of which no more is known than where it is, and when its step was committed.

    Attributes:
        name: tells it from all others.
    """

    image: ImageId
    step: int
    committed: float
    name: str


class DiskCopies:
    """Any thread."""

    def __init__(self, runs: Runs, copies: Copies, post: Post) -> None:
        self._runs = runs
        self._copies = copies
        self._post = post
        self._marks: dict[tuple[ImageId, float], str] = {}
        self._listed: tuple[float, list[DiskResident]] = (0.0, [])

    def runs(self, image: ImageId) -> list[Run]:
        """Those of the image's run whose folder this agent holds."""
        return on_loop(self._post, lambda: [run for run in self._runs if self._mine(run, image.run)])

    def of(self, image: ImageId, step: int) -> list[DiskCopy]:
        """That of one image, where this agent holds the folder. CorruptError where what vouches for it is damaged."""
        found = [(run, run.folder.disk) for run in self.runs(image)]
        return [DiskCopy(image, disk.open(step, image.rank), run, self._marks) for run, disk in found]

    def checked(self, resident: DiskResident) -> DiskCopy | None:
        """The image, once what vouches for it was read anew; None where it is there no more.

        Raises:
            FormatError: the manifest, the record or the layout is damaged.
        """
        try:
            for run in self.runs(resident.image):
                vouching.check(run.folder.disk, resident.step, resident.image.rank)
            return next(iter(self.of(resident.image, resident.step)), None)
        except SnapshotNotFoundError:
            return None

    def residents(self) -> list[DiskResident]:
        """Every image of this node's ranks in folders that this agent holds, as listed a while ago."""
        now = time.monotonic()
        if now >= self._listed[0]:
            self._listed = now + _LIST_SECONDS, [one for run in self._held() for one in _residents(*run)]
        return self._listed[1]

    def _held(self) -> list[tuple[str, Path, list[int], frozenset[int]]]:
        def held() -> list[tuple[str, DiskTier, frozenset[int]]]:
            runs = [run for run in self._runs if not run.url and run.folder.taken()]
            return [(run.folder.facts.run, run.folder.disk, run.here) for run in runs]

        return [(name, disk.where, disk.steps(), here) for name, disk, here in on_loop(self._post, held)]

    def in_memory(self, wanted: DiskCopy) -> Iterator[GoodCopy]:
        """The same image in this node's memory."""
        for copy in self._copies.of(wanted.image, wanted.record.step):
            if copy.record == wanted.record and not copy.damaged:

                def bring(target: Target, chunk: int, copy=copy) -> None:
                    start, nbytes = copy.record.extent(chunk)
                    with copy.target(chunk) as here:
                        target.view(start, nbytes)[:] = here.view(start, nbytes)

                yield GoodCopy("this node's memory", bring)

    @staticmethod
    def _mine(run: Run, name: str) -> bool:
        return run.folder.facts.run == name and not run.url and run.folder.taken()


def _residents(run: str, where: Path, steps: list[int], ranks: frozenset[int]) -> Iterator[DiskResident]:
    for step in steps:
        with contextlib.suppress(OSError):  # evicted meanwhile
            committed = (where / names.step_folder(step) / names.MANIFEST).lstat().st_mtime
            for rank in sorted(ranks):
                yield DiskResident(ImageId(run, rank), step, committed, f"disk/{run}/{rank}/{step}/{committed!r}")
