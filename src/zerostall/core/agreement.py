"""What ranks must have in common before they save together, and which of them are given up: pure decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def difference(terms: Sequence[Mapping[str, str]]) -> str:
    """Return in words what the first rank that differs from rank 0 has chosen otherwise; empty where all agree.

    Args:
        terms: of every rank, in order: what it chose, by name, spelled out.
    """
    first = terms[0]
    for rank, chosen in enumerate(terms):
        odd = [name for name in [*first, *chosen] if chosen.get(name) != first.get(name)]
        if odd:
            name = odd[0]
            return f"rank {rank} has {name}={chosen.get(name)}, rank 0 has {name}={first.get(name)}"
    return ""


@dataclass(slots=True)
class Awaited:
    """Ranks that are waited for since `began`, and when each was last seen to be alive.

    Attributes:
        patience: seconds without a sign of life after which a rank is late.
    """

    began: float
    patience: float
    _seen: dict[int, tuple[int, float]] = field(default_factory=dict)

    def late(self, beats: Mapping[int, int], now: float) -> list[int]:
        """Return the ranks to give up, of those that are missing now.

        Args:
            beats: of each missing rank, how often its pulse has beaten: what changes is alive, however slow.
        """
        for rank, beat in beats.items():
            seen = self._seen.get(rank)
            if seen is None:
                self._seen[rank] = (beat, self.began)
            elif seen[0] != beat:
                self._seen[rank] = (beat, now)
        return [rank for rank in beats if now - self._seen[rank][1] > self.patience]
