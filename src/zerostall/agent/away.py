"""Trainers whose connection broke though they live: they come back, or are given up.

A step that other ranks have sealed waits for them meanwhile, as it would if they were slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.wire.channel import process_lives

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerostall.agent.berth import Berth
    from zerostall.agent.client import Client

RETURN_SECONDS = 60.0
"""How long a trainer that lives may take to come back: it does so at once, if it is not stopped."""
_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _Absence:
    pid: int
    until: float


class Away:
    """Driven by the agent's loop.

    Args:
        ended: hears that a rank's trainer is gone, and why.
        alive: whether a process is there.
    """

    def __init__(
        self,
        berths: Mapping[int, Berth],
        ended: Callable[[int, str], None],
        alive: Callable[[int], bool] | None = None,
    ) -> None:
        self._berths = berths
        self._ended = ended
        self._alive = process_lives if alive is None else alive
        self._absent: dict[int, _Absence] = {}

    def parted(self, rank: int, client: Client, now: float) -> None:
        """The connection of a rank's trainer has ended."""
        if client.leaving or not self._alive(client.pid):
            self._ended(rank, f"its trainer, process {client.pid}, has ended")
        else:
            self._absent[rank] = _Absence(client.pid, now + RETURN_SECONDS)

    def look(self, now: float) -> None:
        """Give up those that have ended since, or have not come back in time."""
        for rank, absence in list(self._absent.items()):
            berth = self._berths.get(rank)
            if berth is not None and berth.client is not None:
                del self._absent[rank]
            elif not self._alive(absence.pid):
                del self._absent[rank]
                self._ended(rank, f"its trainer, process {absence.pid}, has ended")
            elif now >= absence.until:
                del self._absent[rank]
                why = f"its trainer, process {absence.pid}, has lost its connection and did not come back"
                self._ended(rank, f"{why} in {RETURN_SECONDS:.0f} s")

    def look_in(self) -> float | None:
        """Seconds until somebody should look; None where nobody is away."""
        return _LOOK_SECONDS if self._absent else None
