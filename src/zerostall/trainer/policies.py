"""Which policy each snapshot is taken with, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from zerostall import memory
from zerostall.core import guarding
from zerostall.core.guarding import Choice, Facts
from zerostall.telemetry import log

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerostall.config import Policy
    from zerostall.telemetry import Stats


class Policies:
    """What was asked for; with "auto", what is chosen anew at each save and said when it is another one.

    Attributes:
        asked: by the user.
        choice: for the snapshot in progress.
        most_bytes: memory that guards and flips may take.
        redirects: whether the guard may do anything else with pending chunks than have them read.
        flips: whether an optimizer flips if it is asked to.
    """

    def __init__(self, asked: Policy, most_bytes: int, stats: Stats) -> None:
        self.asked = asked
        self.most_bytes = most_bytes
        self._stats = stats
        self.flips = False
        self._spare_bytes = most_bytes
        self._on_device = False
        if asked == "auto":
            self._take(Choice("overlap", "nothing has been measured yet"))
        else:
            self._take(Choice(asked, "it was asked for", most_bytes))

    @property
    def offers_flips(self) -> bool:
        return self.asked in ("flip", "auto")

    def freeze_bytes(self, spared: int = 0) -> int:
        """Memory the guard may move pending chunks to, when it spares so many bytes."""
        return max(0, self.choice.nbytes - spared) if self.redirects else 0

    def reserve_bytes(self) -> int:
        """Memory to have of each device for chunks that the guard moves aside."""
        return self.choice.nbytes if self.choice.policy == "freeze" else 0

    def see(self, ordinals: Iterable[int]) -> None:
        """Look how much memory is free, on these devices or, where there is none, in host memory."""
        free = [torch.cuda.mem_get_info(ordinal)[0] for ordinal in ordinals]
        self._on_device = bool(free)
        self._spare_bytes = min(self.most_bytes, *(nbytes // 2 for nbytes in free or [memory.available()]))

    def judge(self, nbytes: int) -> bool:
        """Choose for a snapshot of so many bytes; whether another policy than before."""
        if self.asked != "auto":
            return False
        before = self.choice.policy
        self._take(
            guarding.choose(
                Facts(
                    nbytes=nbytes,
                    drain_seconds=_newest(self._stats.drain_seconds),
                    free_seconds=_newest(self._stats.free_seconds),
                    spare_bytes=self._spare_bytes,
                    flips=self.flips and self._on_device,
                )
            )
        )
        if self.choice.policy == before:
            return False
        log.info("policy 'auto' goes from %s to %s: %s", before, self.choice.policy, self.choice.reason)
        return True

    def _take(self, choice: Choice) -> None:
        self.choice = choice
        self.redirects = choice.policy != "overlap"
        self._stats.policy, self._stats.policy_reason = choice.policy, choice.reason


def _newest(samples: list[float]) -> float | None:
    return samples[-1] if samples else None
