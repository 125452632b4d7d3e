"""The floors that disk numbers are held against: an aligned O_DIRECT writer and reader that do nothing else."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHUNK = 16 << 20


def buffer(nbytes: int) -> memoryview:
    """Page-aligned memory, each page touched, filled with something no disk compresses away.

    In huge pages where there are some: the device's work per page is then least. Shared memory seldom gets them.
    """
    memory = new_memory(nbytes)
    block = os.urandom(1 << 20)
    for at in range(0, nbytes, len(block)):
        memory[at : at + len(block)] = block[: nbytes - at]
    return memory


def new_memory(nbytes: int) -> memoryview:
    """The same, untouched."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _in_threads(threads: int, work: Callable[[int], None]) -> None:
    failed: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except OSError as error:
            failed.append(error)

    running = [threading.Thread(target=guarded, args=(n,), name=f"bare {n}") for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise failed[0]


def write(path: Path, data: memoryview, threads: int) -> float:
    """Writes and fsyncs a new file; returns the seconds."""
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, len(data))

    def work(number: int) -> None:
        for at in range(number * CHUNK, len(data), threads * CHUNK):
            end = min(at + CHUNK, len(data))
            while at < end:
                at += os.pwrite(fd, data[at:end], at)

    _in_threads(threads, work)
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - start


def read(path: Path, data: memoryview, threads: int) -> float:
    """Reads a file past the page cache; returns the seconds."""
    start = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def work(number: int) -> None:
        for at in range(number * CHUNK, len(data), threads * CHUNK):
            end = min(at + CHUNK, len(data))
            while at < end:
                got = os.preadv(fd, [data[at:end]], at)
                if not got:
                    raise OSError(f"{path} ended at {at}")
                at += got

    _in_threads(threads, work)
    os.close(fd)
    return time.perf_counter() - start
