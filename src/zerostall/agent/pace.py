"""How fast images go to other nodes: at the rate that is set, less where training uses the link."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from zerostall.core import yielding
from zerostall.core.yielding import Allowance, Window
from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        self._windows: deque[tuple[float, Window]] = deque()  # each with its end
        self._before: tuple[float, int, int] | None = None
        self._next = 0.0
        self._on_their_way = 0
        self._idle_since = 0.0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def giving(self) -> Iterator[None]:
        """As long as this lasts, an image is on its way."""
        with self._lock:
            self._on_their_way += 1
            if self._on_their_way == 1:
                self._before = None  # a window in which nothing was to be sent says little
                if time.monotonic() - self._idle_since > yielding.IDLE_SECONDS:
                    self._glance()
        try:
            yield
        finally:
            with self._lock:
                self._on_their_way -= 1
                self._idle_since = time.monotonic()

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

    def _glance(self) -> None:
        """Begin anew: what goes on just now, while no image is on its way."""
        if self._meter is None:
            return
        self._windows.clear()
        self._look(time.monotonic())
        time.sleep(yielding.GLANCE_SECONDS)
        self._look(time.monotonic(), least=0.0)

    def _look(self, now: float, least: float = yielding.WINDOW_SECONDS) -> None:
        """What has left the device since the last look, if that is at least so long ago."""
        before = self._before
        if self._meter is None or (before is not None and now - before[0] < least):
            return
        try:
            total = self._meter.sent()
        except (OSError, ValueError) as error:
            name = self._meter.name
            say_once(f"meter {name}", "images yield to nobody: %s cannot be read: %s", name, error)
            self._meter = None
            self._allowance = Allowance(self._bound, "the link's meter cannot be read")
            return
        self._before = now, total, self.sent
        if before is None or now <= before[0]:
            return
        at, counted, images = before
        self._windows.append((now, Window(now - at, max(0, total - counted), self.sent - images)))
        while now - self._windows[0][0] > yielding.REMEMBERED_SECONDS:
            self._windows.popleft()
        windows = [window for _, window in self._windows]
        self._capacity = yielding.capacity(self._meter.nominal, windows, self._capacity)
        self._allowance = yielding.allow(windows, self._capacity, self._bound)
