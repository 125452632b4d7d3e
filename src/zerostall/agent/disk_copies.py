"""An image on disk that somebody doubts: what is damaged of it is written anew where it lies."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.agent.good_copies import GoodCopy, Target
from zerostall.agent.loop_call import Post, on_loop
from zerostall.errors import FormatError, SnapshotNotFoundError, StorageError
from zerostall.tiers.host import stride_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerostall.agent.copies import Copies
    from zerostall.agent.run import Run
    from zerostall.agent.runs import Runs
    from zerostall.core.manifest import Record
    from zerostall.core.placement import ImageId
    from zerostall.tiers.contract import Stored


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
        start, nbytes = self._extent(chunk)
        data = memoryview(bytearray(nbytes))
        with contextlib.closing(self.run.folder.disk.bytes_of(self.record.step, self.image.rank, self.stored)) as file:
            with contextlib.suppress(OSError):
                os.posix_fadvise(file.fileno(), start, nbytes, os.POSIX_FADV_DONTNEED)
            file.read_into(data, start)
        return native.crc32c(data) == self.record.checksums[chunk]

    @contextlib.contextmanager
    def target(self, chunk: int) -> Iterator[Target]:
        """Memory for the chunk; what is right of it is written to the file at the end."""
        start, nbytes = self._extent(chunk)
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

    def _extent(self, chunk: int) -> tuple[int, int]:
        start = chunk * self.record.chunk_bytes
        return start, min(self.record.chunk_bytes, self.record.nbytes - start)

    def _write(self, data: memoryview, start: int) -> None:
        """Over what is damaged. Whether the file still is this very image is asked once it is open."""
        path = self.run.folder.disk.bytes_of(self.record.step, self.image.rank, self.stored).path
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if not self.there() or not self.run.folder.taken():
                    raise SnapshotNotFoundError(f"{self} is not this agent's to write any more")
                written = 0
                while written < len(data):
                    written += os.pwrite(fd, data[written:], start + written)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise StorageError(f"{path} cannot be written anew: {error.strerror}", errno=error.errno) from error


class DiskCopies:
    """Any thread."""

    def __init__(self, runs: Runs, copies: Copies, post: Post) -> None:
        self._runs = runs
        self._copies = copies
        self._post = post
        self._marks: dict[tuple[ImageId, float], str] = {}

    def of(self, image: ImageId, step: int) -> list[DiskCopy]:
        """That of one image, where this agent holds the folder. CorruptError where its record is damaged, too."""
        runs = on_loop(self._post, lambda: [run for run in self._runs if self._mine(run, image)])
        return [DiskCopy(image, run.folder.disk.open(step, image.rank), run, self._marks) for run in runs]

    def in_memory(self, wanted: DiskCopy) -> Iterator[GoodCopy]:
        """The same image in this node's memory."""
        for copy in self._copies.of(wanted.image, wanted.record.step):
            if copy.record == wanted.record and not copy.damaged:

                def bring(target: Target, chunk: int, copy=copy) -> None:
                    start, nbytes = copy.extent(chunk)
                    with copy.target(chunk) as here:
                        target.view(start, nbytes)[:] = here.view(start, nbytes)

                yield GoodCopy("this node's memory", bring)

    @staticmethod
    def _mine(run: Run, image: ImageId) -> bool:
        return run.folder.facts.run == image.run and not run.url and run.folder.taken()
