"""The bytes of one image, wherever they lie, for whoever sends them on."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Protocol

from zerostall import native
from zerostall.errors import CorruptError, StorageError
from zerostall.tiers.files import opened

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.core.manifest import Record
    from zerostall.tiers.contract import Image, Stored


class ImageBytes(Protocol):
    """Any thread may ask for any range.

    Attributes:
        label: what messages call it.
    """

    label: str

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of a range; good as long as this object is.

        Raises:
            CorruptError: there are fewer.
            StorageError: they cannot be read.
        """
        ...


class MemoryBytes:
    """An image in memory that somebody holds; nothing is copied."""

    def __init__(self, image: Image) -> None:
        self.label = f"step {image.record.step}, rank {image.record.rank} in memory"
        self._all = memoryview((ctypes.c_char * image.record.nbytes).from_address(image.address)).cast("B")

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._all[offset : offset + nbytes]


class FileBytes:
    """An image in a file. A context manager; each range is read into memory of its own."""

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self._path = path
        self._opened = opened(path)
        try:
            self._fd = self._opened.__enter__()
        except FileNotFoundError:
            raise CorruptError(f"{path} is missing") from None

    def __enter__(self) -> FileBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.__exit__(None, None, None)

    def view(self, offset: int, nbytes: int) -> memoryview:
        data = memoryview(bytearray(nbytes))
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(self._fd, [data[done:]], offset + done)
            except OSError as error:
                raise StorageError(f"cannot read {self._path}: {error.strerror}", errno=error.errno) from error
            if count == 0:
                raise CorruptError(f"{self._path} ends at byte {offset + done}, {nbytes - done} bytes too early")
            done += count
        return data


def checked(source: ImageBytes, record: Record, chunks: tuple[int, int]) -> memoryview:
    """The bytes of a run of chunks, each with the checksum that the record tells.

    Raises:
        CorruptError: one fails it.
    """
    first, end = chunks
    start = first * record.chunk_bytes
    view = source.view(start, min(end * record.chunk_bytes, record.nbytes) - start)
    for index in range(first, end):
        at = (index - first) * record.chunk_bytes
        if native.crc32c(view[at : at + record.chunk_bytes]) != record.checksums[index]:
            raise CorruptError(f"{source.label}: chunk {index} fails its checksum")
    return view


def same_image(one: Stored, other: Stored) -> bool:
    """Whether both are the very same image."""
    return one.record == other.record and one.layout.digest == other.layout.digest
