"""Training's step times as its saves tell them, and for how much of them something else was under way."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from zerostall.core.effect import Stretch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class StepTimes:
    """Of one run. Any thread.

    Args:
        clock: seconds, never set back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._spent = 0.0
        self._before: tuple[int, float, float, float] | None = None  # step, when it was saved, by our clock, spent

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """As long as this lasts, the other thing is under way."""
        with self._lock:
            if self._under_way == 0:
                self._since = self._clock()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                if self._under_way == 0:
                    self._spent += self._clock() - self._since

    def saved(self, step: int, created: float) -> Stretch | None:
        """A step was saved at that time; the stretch since the one before. None where that tells nothing."""
        with self._lock:
            now = self._clock()
            spent = self._spent + (now - self._since if self._under_way else 0.0)
            before, self._before = self._before, (step, created, now, spent)
        if before is None or step <= before[0] or created <= before[1] or now <= before[2]:
            return None  # the first; or training went back, or the clock was set
        return Stretch((created - before[1]) / (step - before[0]), min(1.0, (spent - before[3]) / (now - before[2])))

    def interrupted(self) -> None:
        """Training has stopped: what passes until the next save is no step."""
        with self._lock:
            self._before = None
