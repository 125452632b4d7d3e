"""Bytes of files into new tensors, on the host or a device, as fast as the disk gives them; on one rank or on many."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zerostall import config, native
from zerostall.core import passing
from zerostall.errors import ZerostallError
from zerostall.telemetry import log
from zerostall.trainer import file_loads
from zerostall.trainer.exchange.passing_on import agree, pass_on

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerostall.core.passing import Way
    from zerostall.trainer.file_loads import File

ROUND = 256 << 20
"""What one rank reads before it passes it on. Many chunks: the one at either end may be read on two ranks."""

_AHEAD = 2
_HUGE = 2 << 20
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes `offset` and following of a file belong into `target`, flat bytes in one run."""

    offset: int
    target: torch.Tensor


@dataclass(slots=True)
class _Share:
    """Places of one file that one rank reads, in the order of their bytes."""

    file: File
    places: list[Place] = field(default_factory=list)
    nbytes: int = 0


def fill(
    wanted: Sequence[tuple[File, Sequence[Place]]], device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Read all places of all files; on a group, every rank a part, which it then gives to all others.

    Every rank of the group gives the same places in the same order. No two of one file may overlap. Where a first round
    shows that the group passes on more slowly than every rank could read, each reads the rest by itself.

    Raises:
        CorruptError: bytes fail their checksum or are not there; on every rank of the group.
        StorageError: a file cannot be read.
    """
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    # Alone, a file is read in one go, and no chunk twice.
    shares = [share for file, places in wanted for share in _cut(file, places, ROUND if size > 1 else None)]
    with contextlib.closing(_Reader(device)) as reader:
        if size == 1:
            for share in shares:
                reader.begin(share)
            while reader.busy:
                reader.end()
            return
        assert group is not None
        rounds = [shares[first : first + size] for first in range(0, len(shares), size)]
        begun, refused = time.perf_counter(), ""
        for number, turn in enumerate([*rounds, []]):  # one round is read while the one before is passed on
            problem = refused or (reader.problem() if number else "")
            read_seconds = time.perf_counter() - begun
            if rank < len(turn) and not problem:
                try:
                    reader.begin(turn[rank])
                except (ZerostallError, OSError) as error:  # the others, which wait for this rank, are told next
                    refused = f"{type(error).__name__}: {error}"
            if not number:
                continue
            agree(problem, device, group)
            begun = time.perf_counter()
            pass_on([[place.target for place in share.places] for share in rounds[number - 1]], device, group)
            if number == 1 and len(rounds) > 2:
                if device.type == "cuda":
                    torch.cuda.current_stream(device).synchronize()  # NCCL has only been asked
                nbytes = sum(share.nbytes for share in rounds[0])
                if not _way(nbytes, read_seconds, time.perf_counter() - begun, device, group).together:
                    theirs = [share for owner, share in enumerate(turn) if owner != rank]  # mine is being read
                    _alone([*theirs, *(share for some in rounds[2:] for share in some)], reader, device, group)
                    return


def new_bytes(nbytes: int, device: torch.device, offset: int = 0) -> torch.Tensor:
    """Memory for one tensor, that lies at `offset` of a file.

    On the host a large one gets huge pages, where there are some (small ones cost more than reading), and lies within
    its page as in the file, so that the file is read right into it.
    """
    if device.type != "cpu" or nbytes < 2 * _HUGE:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        memory = mmap.mmap(-1, nbytes + _HUGE + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # a process has only so many mappings (vm.max_map_count); malloc needs fewer
        return torch.empty(nbytes, dtype=torch.uint8)
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE
    within = offset % _PAGE
    huge = (within + nbytes + _HUGE // 2) // _HUGE * _HUGE  # the last one where it is at least half full
    # Where the kernel has none the memory is as good, and slower to come by.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, begin, min(huge, len(memory) - begin))
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=begin + within)


class _Reader:
    """Reads shares on threads of its own, the next one beginning before the one before has ended."""

    def __init__(self, device: torch.device) -> None:
        self._pool = native.Pool("zerostall-load", config.read_threads(), awaited=True)
        self._device: native.Device | None = None
        if device.type == "cuda":
            self._device = native.Device(device.index if device.index is not None else torch.cuda.current_device())
            # New memory may be what kernels that were queued before still use.
            torch.cuda.current_stream(device).synchronize()
        self._staging: list[native.Staging] = []
        self._jobs: deque[tuple[native.Load, native.Staging, File]] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def begin(self, share: _Share) -> None:
        """Begin to read, once there is staging memory for it."""
        if len(self._jobs) == _AHEAD:
            self.end()
        file, places = share.file, [place for place in share.places if place.target.numel()]
        plan = native.Plan(
            nbytes=file.nbytes,
            header=b"",
            chunk_bytes=file.chunk_bytes,
            offsets=[place.offset for place in places],
            sizes=[place.target.numel() for place in places],
        )
        tensors = native.Tensors([place.target for place in places], [False] * len(places))
        tensors.refresh()
        staging = self._staging.pop() if self._staging else native.Staging(self._pool.threads, self._device)
        device = self._device if places else None
        job = file_loads.begin(self._pool, file, plan, tensors, range(len(places)), staging=staging, device=device)
        self._jobs.append((job, staging, file))

    def end(self) -> None:
        """Wait for the share that was begun first. Raises what went wrong with it, naming the file."""
        job, staging, file = self._jobs.popleft()
        file_loads.end(job, file)
        self._staging.append(staging)

    def problem(self) -> str:
        """Wait for all that was begun; what went wrong, in words."""
        try:
            while self._jobs:
                self.end()
        except (ZerostallError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def close(self) -> None:
        self._jobs.clear()  # letting go of a job ends it
        self._pool.close()
        self._staging.clear()
        if self._device is not None:
            self._device.close()


def _cut(file: File, places: Sequence[Place], most: int | None) -> Iterator[_Share]:
    share = _Share(file)
    for place in sorted(places, key=lambda place: place.offset):
        share.places.append(place)
        share.nbytes += place.target.numel()
        if most is not None and share.nbytes >= most:
            yield share
            share = _Share(file)
    if share.places:
        yield share


def _way(nbytes: int, read_seconds: float, pass_seconds: float, device: torch.device, group: dist.ProcessGroup) -> Way:
    """How to go on, the same on every rank."""
    seconds = torch.tensor([read_seconds, pass_seconds], dtype=torch.float32, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    slowest = seconds.tolist()
    way = passing.choose(dist.get_world_size(group), nbytes, slowest[0], slowest[1])
    log.info("%s", way.reason)
    return way


def _alone(shares: Sequence[_Share], reader: _Reader, device: torch.device, group: dist.ProcessGroup) -> None:
    """Read these, besides what is being read, and hear of what went wrong on any rank."""
    problem = ""
    try:
        for share in shares:
            reader.begin(share)
    except (ZerostallError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
    agree(problem or reader.problem(), device, group)
