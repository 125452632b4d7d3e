"""Bytes a second, from counters that only rise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerostall.wire.cluster import Counters

KEEP_SECONDS = 5.0
"""The rate is over at least so long, so that it does not jump with every step."""


@dataclass(slots=True)
class Rates:
    """A counter's rise over the last seconds. An agent that was restarted begins again at 0."""

    samples: list[tuple[float, Counters]] = field(default_factory=list)

    def update(self, counters: Counters, now: float) -> None:
        if self.samples and counters.sealed_bytes < self.samples[-1][1].sealed_bytes:
            self.samples.clear()
        self.samples.append((now, counters))
        while len(self.samples) > 2 and now - self.samples[1][0] >= KEEP_SECONDS:
            del self.samples[0]

    def of(self, name: str) -> float:
        """The rate of one counter, 0 while there is only one sample."""
        if len(self.samples) < 2:
            return 0.0
        (start, first), (end, last) = self.samples[0], self.samples[-1]
        return max(0.0, (getattr(last, name) - getattr(first, name)) / max(end - start, 1e-9))
