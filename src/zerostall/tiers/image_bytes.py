"""The bytes of one image in memory, in a file, in a store; see `contract.ImageBytes`."""

from __future__ import annotations

import contextlib
import ctypes
import os
from concurrent.futures import wait
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.errors import CorruptError
from zerostall.tiers.files import opened, read_exactly

if TYPE_CHECKING:
    from concurrent.futures import Executor
    from pathlib import Path

    from zerostall.core.manifest import Record
    from zerostall.tiers.contract import Image, ImageBytes
    from zerostall.tiers.store import Store

_RANGE = 4 << 20
"""Bytes of one request to a store, where several go at once."""


class MemoryBytes:
    """An image in memory that somebody holds."""

    def __init__(self, image: Image) -> None:
        self.label = f"step {image.record.step}, rank {image.record.rank} in memory"
        self._all = memoryview((ctypes.c_char * image.record.nbytes).from_address(image.address)).cast("B")

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes themselves."""
        return self._all[offset : offset + nbytes]

    def read_into(self, view: memoryview, offset: int) -> None:
        view[:] = self.view(offset, len(view))

    def close(self) -> None:
        pass


class FileBytes:
    """An image in a file, which is open as long as this object is."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.label = str(path)
        self.path = path
        self._stack = contextlib.ExitStack()
        try:
            self._fd = self._stack.enter_context(opened(path))
        except FileNotFoundError:
            raise CorruptError(f"{path} is missing") from None
        size = os.fstat(self._fd).st_size
        if size != nbytes:
            self._stack.close()
            raise CorruptError(f"{path} has {size} bytes, its record says {nbytes}")

    def read_into(self, view: memoryview, offset: int) -> None:
        read_exactly(self._fd, view, offset, self.path)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        self._stack.close()


class ObjectBytes:
    """An image in a store; what is asked for comes in several ranges at once."""

    def __init__(self, store: Store, name: str, nbytes: int, hands: Executor) -> None:
        self.label = store.address(name)
        self._store = store
        self._name = name
        self._hands = hands
        size = store.size(name)
        if size is None:
            raise CorruptError(f"{self.label} is missing")
        if size != nbytes:
            raise CorruptError(f"{self.label} has {size} bytes, its record says {nbytes}")

    def read_into(self, view: memoryview, offset: int) -> None:
        starts = range(0, len(view), _RANGE)
        ranges = [
            self._hands.submit(self._store.read_range, self._name, offset + start, view[start : start + _RANGE])
            for start in starts
        ]
        try:
            for done in ranges:
                done.result()
        except FileNotFoundError:
            raise CorruptError(f"{self.label} is missing") from None
        finally:
            for one in ranges:
                one.cancel()
            wait(ranges)

    def close(self) -> None:
        pass


def checked(source: ImageBytes, record: Record, chunks: tuple[int, int]) -> memoryview:
    """The bytes of a run of chunks, each with the checksum that the record tells.

    Raises:
        CorruptError: one fails it.
    """
    first, end = chunks
    start = first * record.chunk_bytes
    size = min(end * record.chunk_bytes, record.nbytes) - start
    if isinstance(source, MemoryBytes):
        view = source.view(start, size)  # nothing is copied
    else:
        view = memoryview(bytearray(size))
        source.read_into(view, start)
    for index in range(first, end):
        at = (index - first) * record.chunk_bytes
        if native.crc32c(view[at : at + record.chunk_bytes]) != record.checksums[index]:
            raise CorruptError(f"{source.label}: chunk {index} fails its checksum")
    return view
