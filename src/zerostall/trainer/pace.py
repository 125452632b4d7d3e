"""Where this rank is in the course of saves that all ranks take: the names of saves, and steps that all hold off."""

from __future__ import annotations

from zerostall.core.roll import Save


class Pace:
    """Names are given on the training thread; a hold is set on the link's.

    Every rank makes the same calls, so every rank gives a save the same name, whether it skips it or not.
    """

    def __init__(self, epoch: int) -> None:
        self._latest = Save(epoch, -1)
        self._hold = (epoch, 0)

    @property
    def epoch(self) -> int:
        """How often the ranks have agreed where to go on from."""
        return self._latest.epoch

    def begin_anew(self) -> None:
        """All ranks have agreed to go on from another step."""
        self._latest = Save(self.epoch + 1, -1)

    def next(self, step: int) -> Save:
        """The name of the save that begins now."""
        turn = self._latest.turn + 1 if self._latest.step == step else 0
        self._latest = Save(self.epoch, step, turn)
        return self._latest

    def hold(self, epoch: int, step: int) -> None:
        """Skip all saves of steps before this one."""
        self._hold = max(self._hold, (epoch, step))

    def held(self, save: Save) -> str:
        """Why to skip a save though there may be a slot for it; empty where nothing is against it."""
        epoch, step = self._hold
        if save.epoch == epoch and save.step < step:
            return f"another rank had no slot free; all save again from step {step} on"
        return ""
