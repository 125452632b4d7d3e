"""What the disk below a folder gives, and what our writer and reader make of it: the same bytes, taking turns.

A disk may give half as much a minute later, or while somebody else uses it. So each turn of ours has one of the bare
way right before or after it, and it is these pairs that are compared.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from zerostall import native
from zerostall.core import neighbours
from zerostall.core.layout import CHUNK
from zerostall.core.neighbours import Share
from zerostall.errors import CorruptError
from zerostall.flow import bare_disk
from zerostall.tiers.files import free_bytes, no_room, real, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable

_WAIT = 3600.0
_ROOM = 2
"""Files of that size that are there at once."""


class Way(msgspec.Struct, frozen=True):
    """One way of moving the bytes; medians.

    Attributes:
        rate: bytes a second.
        processor: seconds of processors a gigabyte (10^9 bytes).
    """

    rate: float
    processor: float


class DiskSpeed(msgspec.Struct, frozen=True):
    """What was measured.

    Attributes:
        threads: on both sides.
        bare_write, bare_read: O_DIRECT and nothing else; None where the file system refuses that.
        write, read: ours, each chunk with its checksum. Writes end with fsync.
        write_share, read_share: what part of the bare speed ours reach, from neighbours in time.
        fell_back: why ours went through the page cache; empty where they did not.
    """

    folder: str
    nbytes: int
    rounds: int
    threads: int
    write: Way
    read: Way
    bare_write: Way | None
    bare_read: Way | None
    write_share: Share | None
    read_share: Share | None
    fell_back: str


def measure(where: Path, nbytes: int, *, rounds: int = 9, threads: int = 8) -> DiskSpeed:
    """Write and read files of that size in a folder that is removed again.

    Raises:
        StorageError: nothing can be written there, or there is no room.
    """
    nbytes = max(nbytes // CHUNK, 1) * CHUNK
    if free_bytes(where) < _ROOM * nbytes:
        raise no_room(where, "the files to measure with", _ROOM * nbytes)
    with (
        storage_errors(where, "the files to measure with", _ROOM * nbytes),
        tempfile.TemporaryDirectory(prefix=".zerostall-bench-", dir=where) as folder,
    ):
        found = samples(Path(folder), nbytes, rounds=rounds, threads=threads)

    def way_of(name: str) -> Way | None:
        if name not in found.walls:
            return None
        rate = nbytes / statistics.median(found.walls[name])
        return Way(rate, statistics.median(found.processors[name]) / nbytes * 1e9)

    write, read = way_of("write"), way_of("read")
    assert write is not None and read is not None
    return DiskSpeed(
        folder=str(real(where)),
        nbytes=nbytes,
        rounds=rounds,
        threads=threads,
        write=write,
        read=read,
        bare_write=way_of("bare write"),
        bare_read=way_of("bare read"),
        write_share=found.share("write"),
        read_share=found.share("read"),
        fell_back=found.fell_back,
    )


@dataclass(frozen=True, slots=True)
class Samples:
    """Seconds by the clock and of processors, by what was done: "bare write", "write", "bare read", "read"."""

    walls: dict[str, list[float]]
    processors: dict[str, list[float]]
    fell_back: str

    def share(self, name: str) -> Share | None:
        """What part of the bare speed a way of ours reaches; None where there is no bare one."""
        floor = self.walls.get(f"bare {name}")
        return None if floor is None else neighbours.share(floor, self.walls[name])


def samples(folder: Path, nbytes: int, *, rounds: int, threads: int) -> Samples:
    """Each way once a round, in a folder that is the caller's; a round before them is not counted.

    The bare ones only where O_DIRECT is taken; one and the other of a pair come first in turn.
    """
    data = bare_disk.buffer(nbytes)
    segment = native.Segment("zerostall-bench", nbytes)
    pool = native.Pool("zerostall-bench", threads)
    awaited = native.Pool("zerostall-bench", threads, awaited=True)  # as the disk tier reads
    try:
        segment.view(0, nbytes)[:] = data
        sums = [native.crc32c(data[at : at + CHUNK]) for at in range(0, nbytes, CHUNK)]
        ours = _Ours(folder / "ours", segment, nbytes, sums, pool, awaited)
        ways: dict[str, Callable[[], float]] = {"write": ours.write, "read": ours.read}
        pairs = [["write"], ["read"]]
        if _takes_direct(folder / "bare"):
            ways["bare write"] = lambda: bare_disk.write(folder / "bare", data, threads)
            ways["bare read"] = lambda: bare_disk.read(folder / "bare", data, threads)
            pairs = [["bare write", "write"], ["bare read", "read"]]
        walls: dict[str, list[float]] = {name: [] for pair in pairs for name in pair}
        processors: dict[str, list[float]] = {name: [] for name in walls}
        for turn in range(rounds + 1):
            for name in [name for pair in pairs for name in (reversed(pair) if turn % 2 else pair)]:
                before = _processor()
                seconds = ways[name]()
                if turn:
                    walls[name].append(seconds)
                    processors[name].append(_processor() - before)
    finally:
        pool.close()
        awaited.close()
        segment.close()
    return Samples(walls, processors, ours.fell_back)


class _Ours:
    # As the bare ways do it; what was written before is removed before the clock begins, which takes half as long
    # as writing.
    def __init__(
        self,
        path: Path,
        segment: native.Segment,
        nbytes: int,
        sums: list[int],
        writing: native.Pool,
        reading: native.Pool,
    ) -> None:
        self.fell_back = ""
        self._path, self._segment, self._nbytes, self._sums = path, segment, nbytes, sums
        self._writing, self._reading = writing, reading

    def write(self) -> float:
        self._path.unlink(missing_ok=True)
        start = time.perf_counter()
        fd = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            job = native.FileWrite(
                self._writing,
                fd,
                self._segment.address,
                self._nbytes,
                chunk_bytes=CHUNK,
                checksums=self._sums,
                direct=True,
            )
            job.wait(_WAIT)
            os.fsync(fd)
        finally:
            os.close(fd)
        self.fell_back = job.fell_back or ""
        return time.perf_counter() - start

    def read(self) -> float:
        start = time.perf_counter()
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            job = native.FileRead(
                self._reading,
                fd,
                self._segment.address,
                self._nbytes,
                chunk_bytes=CHUNK,
                checksums=self._sums,
                direct=True,
            )
            job.wait(_WAIT)
        finally:
            os.close(fd)
        if job.bad:
            raise CorruptError(f"{self._path}: what was read is not what was written: this disk cannot be trusted")
        return time.perf_counter() - start


def _takes_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    return True


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
