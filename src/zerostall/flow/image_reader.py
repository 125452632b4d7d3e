"""One image file, read so that no byte is given out before its chunk's checksum was found right."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core.safetensors import header_nbytes
from zerostall.errors import CapacityError, CorruptError, FormatError, StorageError
from zerostall.tiers.files import opened

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

    from zerostall.tiers.contract import Stored


class ImageReader:
    """Reads the image at `path`, of which `stored` tells the layout and the checksums. One thread.

    Uses one buffer of a chunk's size, whatever the image's. A context manager, which closes the file.

    Raises:
        CorruptError: the file is missing, or has another size than its record says.
        StorageError: it cannot be read.
    """

    def __init__(self, path: Path, stored: Stored) -> None:
        self.path = path
        self.stored = stored
        self._chunk_bytes = stored.record.chunk_bytes
        self._held = -1
        self._stack = contextlib.ExitStack()
        try:
            self._fd = self._stack.enter_context(opened_image_file(path, stored.record.nbytes))
            # The file has that many bytes, but a sparse one may be larger than memory.
            self._memory = buffer(min(self._chunk_bytes, stored.record.nbytes))
        except BaseException:
            self._stack.close()
            raise
        self._buffer = memoryview(self._memory)

    def __enter__(self) -> ImageReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    @property
    def chunks(self) -> int:
        """How many chunks the image has."""
        return len(self.stored.record.checksums)

    def chunk_size(self, index: int) -> int:
        """How many bytes a chunk has."""
        return min(self._chunk_bytes, self.stored.record.nbytes - index * self._chunk_bytes)

    def chunk(self, index: int) -> memoryview:
        """The bytes of a chunk, checked; good until the next call of this object's.

        Raises:
            CorruptError: they fail their checksum, or the file has become shorter.
        """
        start = index * self._chunk_bytes
        view = self._buffer[: self.chunk_size(index)]
        if index != self._held:
            self._held = -1
            read_exactly(self._fd, view, start, self.path)
            if native.crc32c(view) != self.stored.record.checksums[index]:
                raise CorruptError(f"{self.path}: chunk {index} (from byte {start}) fails its checksum")
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
                return f"{self.path} begins with another header than its layout has"
            at += len(piece)
        return ""


@contextlib.contextmanager
def opened_image_file(path: Path, nbytes: int) -> Iterator[int]:
    """An image's file for reading. CorruptError where it is missing or does not have `nbytes` bytes."""
    with contextlib.ExitStack() as stack:
        try:
            fd = stack.enter_context(opened(path))
        except FileNotFoundError:
            raise CorruptError(f"{path} is missing") from None
        size = os.fstat(fd).st_size
        if size != nbytes:
            raise CorruptError(f"{path} has {size} bytes, its record says {nbytes}")
        yield fd


def buffer(nbytes: int) -> mmap.mmap | bytearray:
    """Memory for `nbytes` bytes, page aligned. CapacityError where there is none."""
    if nbytes == 0:
        return bytearray()
    try:
        return mmap.mmap(-1, nbytes)
    except (OSError, OverflowError, MemoryError) as error:
        raise CapacityError(f"no memory for {nbytes} bytes: {error}") from None


def read_exactly(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` with a file's bytes from `offset` on.

    Raises:
        CorruptError: the file ends before that.
        StorageError: the operating system refused.
    """
    while view:
        try:
            count = os.preadv(fd, [view], offset)
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}", errno=error.errno) from error
        if count == 0:
            raise CorruptError(f"{path} ends at byte {offset}, {len(view)} bytes too early")
        view, offset = view[count:], offset + count


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
