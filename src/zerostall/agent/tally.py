"""What has been done for a run."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from zerostall.wire.cluster import HISTOGRAM

if TYPE_CHECKING:
    from collections.abc import Iterable


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
