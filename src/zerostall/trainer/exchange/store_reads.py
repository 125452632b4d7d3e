"""Images that are no files here, but in a store, into new tensors: chunk by chunk, each once for all ranks of a group.

A chunk goes to its tensors when it has come and its checksum is right, while others are on their way.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zerostall import config
from zerostall.trainer.exchange.passing_on import agree, pass_on

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerostall.flow.checked_images import CheckedImage
    from zerostall.trainer.exchange.filling import Place

ROUND = 64 << 20
"""What one rank reads before it passes it on."""


@dataclass(slots=True)
class _Chunk:
    """One of an image, and where which of its bytes belong: (from byte, target)."""

    image: CheckedImage
    index: int
    parts: list[tuple[int, torch.Tensor]] = field(default_factory=list)


def fill_from_images(
    wanted: Sequence[tuple[CheckedImage, Sequence[Place]]],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read all places of all images; on a group every rank a part of the chunks, which it then gives to all others.

    Every rank of the group gives the same places in the same order. What a store gives is paid for, and is slower than
    ranks of one node are to each other: no chunk is read by two of them.

    Raises:
        CorruptError: a chunk fails its checksum or is not there; on every rank of the group.
        StorageError: the store cannot be read.
    """
    chunks = [chunk for image, places in wanted for chunk in _chunks(image, places)]
    with _Threads(device) as threads:
        if group is None:
            for done in threads.begin(chunks):
                done.result()
            return
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        bites = list(_bites(chunks))
        rounds = [bites[first : first + size] for first in range(0, len(bites), size)]
        reading: list[Future[None]] = []
        for number, turn in enumerate([*rounds, []]):  # one round is read while the one before is passed on
            problem = _problem(reading)
            reading = threads.begin(turn[rank]) if rank < len(turn) and not problem else []
            if number:
                agree(problem, device, group)
                before = rounds[number - 1]
                pass_on([[target for chunk in bite for _, target in chunk.parts] for bite in before], device, group)


def _chunks(image: CheckedImage, places: Sequence[Place]) -> Iterator[_Chunk]:
    """Those of an image that have something of these places, rising."""
    size = image.stored.record.chunk_bytes
    found: dict[int, _Chunk] = {}
    for place in places:
        at, end = place.offset, place.offset + place.target.numel()
        while at < end:
            index, begin = divmod(at, size)
            until = min(end, (index + 1) * size)
            part = place.target[at - place.offset : until - place.offset]
            found.setdefault(index, _Chunk(image, index)).parts.append((begin, part))
            at = until
    yield from (found[index] for index in sorted(found))


def _bites(chunks: Sequence[_Chunk]) -> Iterator[list[_Chunk]]:
    bite: list[_Chunk] = []
    nbytes = 0
    for chunk in chunks:
        bite.append(chunk)
        nbytes += chunk.image.chunk_size(chunk.index)
        if nbytes >= ROUND:
            yield bite
            bite, nbytes = [], 0
    if bite:
        yield bite


def _problem(reading: Sequence[Future[None]]) -> str:
    """Wait for all of it; what went wrong first, in words."""
    errors = [error for done in reading if (error := done.exception()) is not None]
    return f"{type(errors[0]).__name__}: {errors[0]}" if errors else ""


class _Threads:
    """Bring chunks to tensors, several at a time; each thread has memory for one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(config.restore_threads(), "zerostall-load")
        self._memory = threading.local()

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def begin(self, chunks: Sequence[_Chunk]) -> list[Future[None]]:
        return [self._threads.submit(self._bring, chunk) for chunk in chunks]

    def _bring(self, chunk: _Chunk) -> None:
        size = chunk.image.chunk_size(chunk.index)
        _, target = chunk.parts[0]
        if target.device.type == "cpu" and target.numel() == size:  # all of it, right to where it belongs
            chunk.image.load(chunk.index, _view(target))
            return
        memory = getattr(self._memory, "chunk", None)
        if memory is None or memory.numel() < size:
            pinned = self._device.type == "cuda"
            memory = self._memory.chunk = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        chunk.image.load(chunk.index, _view(memory[:size]))
        for begin, target in chunk.parts:
            target.copy_(memory[begin : begin + target.numel()])


def _view(flat: torch.Tensor) -> memoryview:
    return memoryview((ctypes.c_char * flat.numel()).from_address(flat.data_ptr())).cast("B")
