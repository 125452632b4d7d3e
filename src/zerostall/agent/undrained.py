"""Of one run: whose images are still in a vault, and who waits until none is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerostall.agent.berth import Berth


class Undrained:
    """Driven by the agent's loop.

    Args:
        lost: hears that a rank's trainer is gone, and why. Not before what it had stowed is drained: a step that all
            ranks have stowed is clean then, though all of them were killed.
    """

    def __init__(self, berths: Mapping[int, Berth], lost: Callable[[int, str], None]) -> None:
        self._berths = berths
        self._lost = lost
        self._ended: dict[int, str] = {}
        self._waiting: list[Callable[[], None]] = []

    def any(self) -> bool:
        """Is an image on its way from a vault to host memory?"""
        return any(berth.draining() for berth in self._berths.values())

    def when_none(self, call: Callable[[], None]) -> None:
        """Call once nothing is on its way from a vault; now, if nothing is."""
        self._waiting.append(call)
        self.look()

    def ended(self, rank: int, reason: str) -> None:
        """A rank's trainer is gone."""
        self._ended[rank] = reason
        self.look()

    def look(self) -> None:
        """A vault has emptied a place, or will not."""
        for rank in list(self._ended):
            berth = self._berths.get(rank)
            if berth is not None and berth.draining():
                continue
            reason = self._ended.pop(rank)
            if berth is None or berth.client is None:
                self._lost(rank, reason)
        if self._waiting and not self.any():
            calls, self._waiting = self._waiting, []
            for call in calls:
                call()
