"""What several ranks measure together: the time of the slowest, and what of their time is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from zerostall.config import runtime_dir
from zerostall.wire import channel, rendezvous

PATIENCE = 300.0


def every_rank(value: float) -> list[float]:
    """All ranks' values."""
    every: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def slowest(value: float) -> float:
    """The largest of all ranks' values."""
    return max(every_rank(value))


def together(call: Callable[[], object]) -> float:
    """Seconds until the last rank is through, all beginning at once."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    call()
    return slowest(time.perf_counter() - start)


class Allowance:
    """The time that a way of dealing out has, from `begin` to `end` by `time.monotonic()`; all ranks answer alike."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin = begin
        self._end = end

    def share(self, of_the_rest: float) -> float:
        """Where in all of it a share of what is left ends."""
        gone = (slowest(time.monotonic()) - self._begin) / (self._end - self._begin)
        return gone + of_the_rest * (1.0 - gone)

    def has(self, seconds: float, *, share: float = 1.0) -> bool:
        """Whether so many more seconds fit into a share of it."""
        return slowest(time.monotonic()) + seconds < self._begin + share * (self._end - self._begin)


def end_agent() -> None:
    """What is in memory goes, and nothing more of it to the disk."""
    if (connection := rendezvous.connect(runtime_dir())) is not None:
        pid, _ = channel.peer(connection.socket)
        os.kill(pid, signal.SIGKILL)
        connection.close()
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)


def kill_agent() -> None:
    """As `end_agent`, when all ranks are there."""
    dist.barrier()
    if dist.get_rank() == 0:
        end_agent()
    dist.barrier()
