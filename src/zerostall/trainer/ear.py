"""What the agent says, handed to who has to know. On the link's thread; keeps no checkpointer alive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.wire import messages as m

if TYPE_CHECKING:
    from zerostall.telemetry import Stats
    from zerostall.trainer.ledger import Ledger
    from zerostall.trainer.lockers import Lockers
    from zerostall.trainer.memory import Shelf
    from zerostall.trainer.pace import Pace


class Ear:
    """See `link.Listener`."""

    def __init__(self, shelf: Shelf, ledger: Ledger, pace: Pace, stats: Stats, lockers: Lockers, rank: int) -> None:
        self._shelf = shelf
        self._lockers = lockers
        self._rank = rank
        self._ledger = ledger
        self._pace = pace
        self._stats = stats

    def heard(self, event: m.FromAgent) -> None:
        match event:
            case m.Granted():
                self._shelf.grant(event)
            case m.Drained():
                self._shelf.drained(event)
            case m.Locker() | m.NoLocker():
                self._lockers.heard(event)
            case m.Leased():
                self._shelf.leased()
            case m.Hold(epoch=epoch, step=step):
                self._pace.hold(epoch, step)
            case m.Plan(epoch=epoch, step=step, leave=leave):
                self._pace.agreed(epoch, step, leave=leave)
            case m.Spoiled():
                self._shelf.spoiled(event.step, event.created)
                self._pace.spoiled()
                self._ledger.heard(event)
            case _:
                self._ledger.heard(event)

    def adoption(self) -> tuple[m.Adopt, int] | None:
        adoption = self._shelf.adoption({saved.step for saved, _ in self._ledger.urged()})
        if adoption is None:
            self._lose_stowed()
        return adoption

    def not_adopted(self) -> None:
        self._lose_stowed()
        self._shelf.forget()

    def _lose_stowed(self) -> None:
        """What vaults had still to bring goes to memory that counts no longer."""
        for step, created in self._shelf.take_stowed():
            why = "the memory that a vault was to bring it to was not handed over to the next agent"
            self._ledger.heard(m.Spoiled(step=step, created=created, rank=self._rank, reason=why, kind="AgentError"))

    def reconnected(self) -> list[m.Message]:
        self._stats.agent_restarts += 1
        promises = [
            m.Promise(step=saved.step, created=saved.created, tier=tier) for saved, tier in self._ledger.urged()
        ]
        return [*self._shelf.revocations(), *self._lockers.again(), *promises]
