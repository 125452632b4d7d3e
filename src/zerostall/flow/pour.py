"""Writing a large file block by block, on a few threads: read, checksummed and written a block at a time.

Memory: a block a thread, whatever the size of the file.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall import native
from zerostall.core import checksum
from zerostall.flow.image_reader import buffer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from zerostall.flow.readable import Source

BLOCK = 4 << 20
"""Bytes that are written as one; a chunk of an image is a whole number of them."""

THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the file something goes: `nbytes` bytes of `content`, from byte `offset` on."""

    offset: int
    nbytes: int
    content: Source


@dataclass(frozen=True, slots=True)
class Part:
    """What goes into one block: bytes `start` and following of a content, from byte `at` of the block on."""

    at: int
    nbytes: int
    content: Source
    start: int


def pour(fd: int, places: Iterable[Place], nbytes: int, told: Callable[[int], None] | None = None) -> list[int]:
    """Write `places`, which leave no hole from byte 0 to `nbytes`, and return the CRC-32C of each block.

    `told` hears, on the calling thread, how many bytes more are written. The first error ends it and is raised.
    """
    spare: deque[memoryview] = deque()
    gone = threading.Event()

    def write(number: int, parts: Sequence[Part]) -> int:
        if gone.is_set():
            return 0
        try:
            block = spare.pop()
        except IndexError:
            block = memoryview(buffer(BLOCK))
        size = sum(part.nbytes for part in parts)
        for part in parts:
            part.content.read_into(block[part.at : part.at + part.nbytes], part.start)
        data = block[:size]
        crc = native.crc32c(data)
        _write_at(fd, data, number * BLOCK)
        spare.append(block)
        return crc

    sums: list[int] = []
    waiting: deque[tuple[Future[int], int]] = deque()

    def first_done() -> None:
        future, size = waiting.popleft()
        sums.append(future.result())
        if told is not None:
            told(size)

    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(THREADS, thread_name_prefix="zerostall-pour"))
        stack.callback(gone.set)  # runs before the threads are waited for
        for number, parts in enumerate(blocks(places, nbytes)):
            waiting.append((threads.submit(write, number, parts), sum(part.nbytes for part in parts)))
            if len(waiting) > 2 * THREADS:
                first_done()
        while waiting:
            first_done()
    return sums


def chunk_sums(sums: Sequence[int], nbytes: int, chunk_bytes: int) -> list[int]:
    """The CRC-32C of each chunk, from those of the blocks of a file of `nbytes` bytes."""
    each = chunk_bytes // BLOCK
    chunks: list[int] = []
    for first in range(0, len(sums), each):
        total = sums[first]
        for number in range(first + 1, min(first + each, len(sums))):
            total = checksum.combine(total, sums[number], min(BLOCK, nbytes - number * BLOCK))
        chunks.append(total)
    return chunks


def blocks(places: Iterable[Place], nbytes: int) -> Iterator[list[Part]]:
    """Yield what goes into each block of a file; `places` in the order of their bytes."""
    parts: list[Part] = []
    at = 0
    for place in places:
        if place.offset != at:
            raise ValueError(f"a hole from byte {at} to {place.offset}")
        start = 0
        while start < place.nbytes:
            within = at % BLOCK
            size = min(BLOCK - within, place.nbytes - start)
            parts.append(Part(within, size, place.content, start))
            at, start = at + size, start + size
            if at % BLOCK == 0:
                yield parts
                parts = []
    if at != nbytes:
        raise ValueError(f"the parts end at byte {at}, the file at {nbytes}")
    if parts:
        yield parts


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
