"""When to save: every so many steps, or seconds of one clock, decided alike on all ranks."""

from __future__ import annotations

import time
from numbers import Real
from typing import TYPE_CHECKING

from zerostall.core.steps import step_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.trainer.pace import Pace


class Every:
    """Call it after each step, on every rank: is this step to be saved?

    Seconds are rank 0's, by a clock that never jumps: it proposes a step a little ahead, and all save that one.
    `propose` tells all ranks of a step; `go_by` tells them that this rank has heard of one too late.
    """

    def __init__(
        self,
        pace: Pace,
        propose: Callable[[], None],
        go_by: Callable[[int], None],
        *,
        steps: int | None,
        seconds: float | None,
        decides: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if steps is None and seconds is None:
            raise ValueError("every() needs steps=, seconds=, or both")
        if steps is not None and step_number(steps) < 1:
            raise ValueError(f"steps={steps} is not a number of steps")
        if seconds is not None and (not isinstance(seconds, Real) or not 0 < seconds < float("inf")):
            raise ValueError(f"seconds={seconds!r} is not a number of seconds")
        self._pace = pace
        self._propose = propose
        self._go_by = go_by
        self._steps = steps
        self._seconds = seconds
        self._decides = decides
        self._clock = clock
        self._turn = clock() + (seconds or 0.0)

    def __call__(self, step: int) -> bool:
        """Is `step`, the number of finished steps, to be saved?"""
        self._pace.reach(step)
        if self._pace.missed:
            self._pace.missed = False
            self._go_by(step)
        if self._seconds is not None and self._decides and self._clock() >= self._turn:
            self._turn = self._clock() + self._seconds
            self._propose()
        return self._pace.due(step) or (self._steps is not None and step % self._steps == 0)
