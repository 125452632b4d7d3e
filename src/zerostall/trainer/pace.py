"""Where this rank is in the course of steps that all ranks take, and what they have agreed to do at one to come.

Every rank makes the same calls, so every rank gives a save the same name, whether it skips it or not. A step that all
are to save is agreed ahead of time: one rank proposes it, as far ahead as news takes to get to all, and the agent tells
them. A rank that hears of it too late goes on without, and the next proposal reaches farther ahead.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING

from zerostall.core.roll import Save

if TYPE_CHECKING:
    from collections.abc import Callable

_NEWS_SECONDS = 0.25
"""Longer than it takes until all ranks have heard of a proposal."""
_FARTHEST = 1 << 16


class Pace:
    """Told of every step on the training thread; hears of others on the link's.

    Attributes:
        leave: the step at which all have agreed to leave, if they have.
        missed: set when this rank has heard of a step too late: the others are saving it.
    """

    def __init__(self, *, alone: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.missed = False
        self._alone = alone
        self._clock = clock
        self._lock = threading.Lock()
        self._latest = Save(0, -1)
        self._hold = (0, 0)
        self._step = -1
        self._first: tuple[int, float] | None = None
        self._reach = 1
        self._due: int | None = None
        self.leave: int | None = None

    @property
    def epoch(self) -> int:
        """How often the ranks have agreed where to go on from."""
        return self._latest.epoch

    def begin(self, epoch: int) -> None:
        """All ranks have agreed to go on from some step."""
        with self._lock:
            self._latest, self._step, self._first, self._due = Save(epoch, -1), -1, None, None

    def next(self, step: int) -> Save:
        """The name of the save that begins now."""
        latest = self._latest
        if self._first is None:
            self.reach(step)
        name = Save(latest.epoch, step, latest.turn + 1 if latest.step == step else 0)
        if self._alone:  # there is nobody to agree with
            self._latest = name
            return name
        with self._lock:  # what is agreed now either sees this step or is seen by it
            self._latest = name
        return name

    # ------------------------------------------------------------------------------------------ skipping together

    def hold(self, epoch: int, step: int) -> None:
        """Skip all saves of steps before this one."""
        self._hold = max(self._hold, (epoch, step))

    def held(self, save: Save) -> str:
        """Why to skip a save though there may be a slot for it; empty where nothing is against it."""
        epoch, step = self._hold
        if save.epoch == epoch and save.step < step:
            return f"another rank had no slot free; all save again from step {step} on"
        return ""

    # ------------------------------------------------------------------------------------------- saving together

    def reach(self, step: int) -> None:
        """This rank has finished so many steps."""
        with self._lock:
            self._step = max(self._step, step)
            if self._first is None:
                self._first = (step, self._clock())

    def ahead(self) -> int:
        """The step to propose now: one that no rank will have passed when it hears of it."""
        with self._lock:
            if self._alone:
                return self._at + 1
            first, began = self._first or (self._at, self._clock())
            each = (self._clock() - began) / max(1, self._at - first)
            news = _NEWS_SECONDS / each if each > 0 else _FARTHEST
            return self._at + self._reach * (1 + min(_FARTHEST, math.ceil(news)))

    def agreed(self, epoch: int, step: int, *, leave: bool) -> None:
        """All ranks are to save the first step they come to that is not before this one, and leave after it or not."""
        with self._lock:
            if epoch != self.epoch:
                return
            if self._at >= step and not self._alone:
                self.missed = True
                self._farther()
                if not leave:
                    return
            if leave:
                self.leave = step if self.leave is None else self.leave
            else:
                self._due = step

    def spoiled(self) -> None:
        """Some rank was without a save: perhaps it had heard of it too late."""
        with self._lock:
            self._farther()

    def due(self, step: int) -> bool:
        """Is this the step that all have agreed to save? True once for each."""
        with self._lock:
            if self._due is not None and step >= self._due:
                self._due = None
                return True
            return self.last(step)

    def last(self, step: int) -> bool:
        """Have all agreed to leave at this step, or before?"""
        return self.leave is not None and step >= self.leave

    @property
    def _at(self) -> int:
        return max(self._step, self._latest.step)

    def _farther(self) -> None:
        self._reach = min(2 * self._reach, _FARTHEST)

    @property
    def left(self) -> bool:
        """Has this rank come to the step after which all leave?"""
        return self.last(self._at)
