"""One image, read so that no byte is given out before its chunk's checksum was found right."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core.safetensors import header_nbytes
from zerostall.errors import CapacityError, CorruptError, FormatError
from zerostall.tiers.files import read_exactly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

    from zerostall.tiers.contract import ImageBytes, Stored


class ImageReader:
    """Reads an image, of which `stored` tells the layout and the checksums. One thread.

    Uses one buffer of a chunk's size, whatever the image's. A context manager, which closes `source`.
    """

    def __init__(self, source: ImageBytes, stored: Stored) -> None:
        self.label = source.label
        self.stored = stored
        self._source = source
        self._chunk_bytes = stored.record.chunk_bytes
        self._held = -1
        # The image has that many bytes, but a sparse file may be larger than memory.
        self._memory = buffer(min(self._chunk_bytes, stored.record.nbytes))
        self._buffer = memoryview(self._memory)

    def __enter__(self) -> ImageReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._source.close()

    @property
    def chunks(self) -> int:
        """How many chunks the image has."""
        return len(self.stored.record.checksums)

    def chunk_size(self, index: int) -> int:
        """How many bytes a chunk has."""
        return self.stored.record.extent(index)[1]

    def chunk(self, index: int) -> memoryview:
        """The bytes of a chunk, checked; good until the next call of this object's.

        Raises:
            CorruptError: they fail their checksum, or the file has become shorter.
        """
        start = index * self._chunk_bytes
        view = self._buffer[: self.chunk_size(index)]
        if index != self._held:
            self._held = -1
            self._source.read_into(view, start)
            if native.crc32c(view) != self.stored.record.checksums[index]:
                raise CorruptError(f"{self.label}: chunk {index} (from byte {start}) fails its checksum")
            self._held = index
        return view

    def read(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a range, checked, in pieces; each is good until the next is asked for.

        Raises:
            CorruptError: as `chunk`.
        """
        end = offset + nbytes
        while offset < end:
            index, begin = divmod(offset, self._chunk_bytes)
            piece = self.chunk(index)[begin : begin + end - offset]
            offset += len(piece)
            yield piece

    def header_problem(self) -> str:
        """In words, why the image does not begin with the header its layout makes; empty where it does."""
        header = self.stored.layout.header
        at = 0
        for piece in self.read(0, len(header)):
            if piece != header[at : at + len(piece)]:
                return f"{self.label} begins with another header than its layout has"
            at += len(piece)
        return ""


def buffer(nbytes: int) -> mmap.mmap | bytearray:
    """Memory for `nbytes` bytes, page aligned. CapacityError where there is none."""
    if nbytes == 0:
        return bytearray()
    try:
        return mmap.mmap(-1, nbytes)
    except (OSError, OverflowError, MemoryError) as error:
        raise CapacityError(f"no memory for {nbytes} bytes: {error}") from None


def read_header(fd: int, path: Path) -> tuple[bytes, int]:
    """The header of a safetensors file, its length in front, and the file's size.

    Raises:
        FormatError, CorruptError: naming the file.
    """
    size = os.fstat(fd).st_size
    prefix = bytearray(min(8, size))
    read_exactly(fd, memoryview(prefix), 0, path)
    try:
        header = bytearray(header_nbytes(bytes(prefix), size))
    except CorruptError as error:
        raise CorruptError(f"{path}: {error}") from None
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    read_exactly(fd, memoryview(header), 0, path)
    return bytes(header), size
