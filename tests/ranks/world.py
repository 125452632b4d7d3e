"""Starts ranks and hears what they say."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from crash.nursery import Child, Nursery

_numbers = itertools.count(1)


class Ranks:
    """The ranks of one attempt. `rank[k]` is a child; `said(k)` what it printed."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        environment: Mapping[str, str],
        size: int,
        scenario: str,
        *words: object,
        of_rank: Mapping[int, Mapping[str, str]] | None = None,
        meeting: str = "",
    ) -> None:
        number = next(_numbers)
        meeting = meeting or f"file://{folder}/store-{number}"
        self.size = size
        self.rank: list[Child] = [
            nursery.start(
                *(scenario, rank, size, meeting, *words),
                environment={**environment, **(of_rank or {}).get(rank, {})},
                output=folder / f"said-{number}-{rank}",
            )
            for rank in range(size)
        ]

    def wait(self) -> list[str]:
        """What each rank said, once all have ended well."""
        for rank, child in enumerate(self.rank):
            code = child.wait(300)
            assert code == 0, f"rank {rank} ended with {code}\n{self.report()}"
        return [self.said(rank) for rank in range(self.size)]

    def said(self, rank: int) -> str:
        return self.rank[rank].printed()

    def report(self) -> str:
        """What became of each of them: the one that failed first is rarely the one that is noticed first."""
        ends = [f"with {child.code}" if child.ended() else "not yet" for child in self.rank]
        return "\n".join(f"-- rank {rank}, ended {end}:\n{self.said(rank)}" for rank, end in enumerate(ends))

    def kill(self) -> None:
        """All at once, as a machine does."""
        for child in self.rank:
            if not child.ended():
                os.kill(child.pid, signal.SIGKILL)
        for child in self.rank:
            child.wait()


Start = Callable[..., Ranks]
"""Starts the ranks of an attempt: how many, a scenario's name and its words."""

StartOn = Callable[..., Ranks]
"""Starts a rank on each of these nodes."""
