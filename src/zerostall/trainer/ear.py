"""What the agent says, handed to who has to know. On the link's thread; keeps no checkpointer alive."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostall.wire import messages as m

if TYPE_CHECKING:
    from zerostall.telemetry import Stats
    from zerostall.trainer.ledger import Ledger
    from zerostall.trainer.memory import Shelf
    from zerostall.trainer.pace import Pace


class Ear:
    """See `link.Listener`."""

    def __init__(self, shelf: Shelf, ledger: Ledger, pace: Pace, stats: Stats) -> None:
        self._shelf = shelf
        self._ledger = ledger
        self._pace = pace
        self._stats = stats

    def heard(self, event: m.FromAgent) -> None:
        match event:
            case m.Granted(slot=slot):
                self._shelf.grant(slot)
            case m.Leased():
                self._shelf.leased()
            case m.Hold(epoch=epoch, step=step):
                self._pace.hold(epoch, step)
            case m.Plan(epoch=epoch, step=step, leave=leave):
                self._pace.agreed(epoch, step, leave=leave)
            case m.Spoiled():
                self._pace.spoiled()
                self._ledger.heard(event)
            case _:
                self._ledger.heard(event)

    def adoption(self) -> tuple[m.Adopt, int] | None:
        return self._shelf.adoption()

    def not_adopted(self) -> None:
        self._shelf.forget()

    def reconnected(self) -> list[m.Message]:
        self._stats.agent_restarts += 1
        return [m.Promise(step=saving.step, created=saving.created, tier=tier) for saving, tier in self._ledger.urged()]
