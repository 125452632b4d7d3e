"""How fast images go to other nodes: at the rate that is set, less where training uses the link."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from zerostall.core import yielding
from zerostall.core.yielding import Allowance, Window
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from zerostall.flow.link_meter import LinkMeter


class Pace:
    """Spreads bytes over time, over all connections. Any thread.

    Args:
        rate: most bytes a second; None for no bound.
        meter: of the link that they take; None where nobody yields.

    Attributes:
        sent: bytes, since the agent started.
    """

    def __init__(self, rate: float | None, meter: LinkMeter | None = None) -> None:
        self.sent = 0
        self._bound = rate
        self._meter = meter
        self._allowance = Allowance(rate, "nothing has been sent yet" if meter else "the link has no meter")
        self._capacity = meter.nominal if meter else 0.0
        self._windows: deque[Window] = deque(maxlen=yielding.REMEMBERED)
        self._before: tuple[float, int, int] | None = None
        self._next = 0.0
        self._lock = threading.Lock()

    def pass_by(self, nbytes: int) -> None:
        """Count bytes that go out, and wait for their turn."""
        with self._lock:
            now = time.monotonic()
            self._look(now)
            self.sent += nbytes
            rate = self._allowance.rate
            if rate is None:
                return
            turn = max(self._next, now)
            self._next = turn + nbytes / rate
        time.sleep(max(0.0, turn - now))

    def words(self) -> str:
        """How fast, and why."""
        rate, reason = self._allowance.rate, self._allowance.reason
        return f"images go out at {'any rate' if rate is None else f'most {rate / 1e6:.0f} MB/s'}: {reason}"

    def _look(self, now: float) -> None:
        """What has left the device since the last look, if that is long enough ago."""
        before = self._before
        if self._meter is None or (before is not None and now - before[0] < yielding.WINDOW_SECONDS):
            return
        try:
            total = self._meter.sent()
        except (OSError, ValueError) as error:
            say_once(
                f"meter {self._meter.name}", "images yield to nobody: %s cannot be read: %s", self._meter.name, error
            )
            self._meter = None
            self._windows.clear()
            self._allowance = Allowance(self._bound, "the link's meter cannot be read")
            return
        self._before = now, total, self.sent
        if before is None:
            return
        at, counted, images = before
        self._windows.append(Window(now - at, max(0, total - counted), self.sent - images))
        self._capacity = yielding.capacity(self._meter.nominal, self._windows, self._capacity)
        self._allowance = yielding.allow(self._windows, self._capacity, self._bound)
