"""The runs of this node, and what they share: memory, threads for the disk, and who yields to whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall import native
from zerostall.agent.run import Run
from zerostall.flow.governor import Governor
from zerostall.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zerostall.agent.client import NodeClient
    from zerostall.agent.loop_call import Post
    from zerostall.flow.budget import Budget

DISK_THREADS = 8
"""Blocks that are on their way to or from a disk at once: each waits there, and only one or two are being checked."""


class Runs:
    """Driven by the agent's loop; iterating gives the runs.

    Args:
        drains: see `Governor`.
        post: runs a call on the loop's thread.
        watch: has the loop serve the agent of another node, too.
    """

    def __init__(
        self, budget: Budget, drains: Callable[[], int], post: Post, watch: Callable[[NodeClient], None]
    ) -> None:
        self.budget = budget
        self.pool = native.Pool("disk", DISK_THREADS)
        self.governor = Governor(drains, self.capturing)
        self._post = post
        self._watch = watch
        self._runs: dict[Path, Run] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def at(self, where: Path) -> Run | None:
        """The run in that folder, if it is open; also where the folder was moved, and its old path leads there."""
        run = self._runs.get(where)
        return run or next((one for one in self if one.folder.taken() and _same_folder(one.where, where)), None)

    def open(self, where: Path, world: int, url: str) -> Run:
        """The run in that folder. Raises what `Run` does."""
        run = Run(where, world, self.budget, self.pool, self._post, self.governor, url, self._watch)
        self._runs[where] = run
        return run

    def advance(self) -> None:
        """Do whatever can be done now."""
        for run in self:
            run.advance()

    def retry_in(self) -> float | None:
        """Seconds until `advance` has something to do that no message announces; None when it has not."""
        return min((wait for run in self if (wait := run.retry_in()) is not None), default=None)

    def busy(self) -> bool:
        """Is something under way, and not just waiting for its time?"""
        return any(run.busy() and run.retry_in() is None for run in self)

    def capturing(self) -> int:
        """How many trainers here are being read from just now. Any thread."""
        berths = (berth for run in list(self._runs.values()) for berth in list(run.berths.values()))
        return sum(berth.capturing() for berth in berths)

    def reclaim(self) -> bool:
        """Take back the memory of berths whose trainer is gone and whose images are on disk; True if there was some."""
        freed = 0
        for run in self:
            if run.attached() or run.busy() or any(berth.reading() for berth in run.berths.values()):
                continue
            for rank in list(run.berths):
                freed += run.berths.pop(rank).close()
        if freed:
            log.info("%d bytes of memory of runs without a trainer were taken back", freed)
        return freed > 0

    def close(self) -> None:
        """Wait for what is under way, then give back all memory and folders."""
        for run in self:
            run.close()
        self.pool.close()


def _same_folder(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False  # one is not there
