"""What has been done for a run."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from zerostall.wire.cluster import HISTOGRAM


@dataclass(slots=True)
class Tally:
    """Since this agent started; only rising."""

    sealed_bytes: int = 0
    stored_bytes: int = 0
    stalls: list[int] = field(default_factory=lambda: [0] * (len(HISTOGRAM) + 1))

    def held_up(self, seconds: Iterable[float]) -> None:
        """Training was held so long, each time."""
        for each in seconds:
            self.stalls[bisect.bisect_left(HISTOGRAM, each)] += 1
