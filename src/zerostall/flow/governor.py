"""The one place that shares a node's disk and network: see `core.bandwidth` for who comes first."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from zerostall.core import bandwidth
from zerostall.core import effect as effects
from zerostall.core.bandwidth import Bucket, Traffic
from zerostall.core.effect import Effect
from zerostall.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerostall.core.bandwidth import Turn
    from zerostall.core.effect import Stretch


class Governor:
    """One an agent. Any thread.

    Args:
        drains: how many images are on their way from vaults to host memory; called by any thread.
        captures: how many trainers are being read from; called by any thread.
    """

    def __init__(self, drains: Callable[[], int] = lambda: 0, captures: Callable[[], int] = lambda: 0) -> None:
        self._drains = drains
        self._captures = captures
        self._condition = threading.Condition()
        self._restores = 0
        self._promised = 0

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """As long as this lasts, a trainer waits for bytes to come back."""
        with self._condition:
            self._restores += 1
        try:
            yield
        finally:
            with self._condition:
                self._restores -= 1
                self._condition.notify_all()

    @contextlib.contextmanager
    def writing(self, *, promised: bool) -> Iterator[None]:
        """As long as this lasts, a step is written to disk; `promised` if somebody waits for it."""
        with self._condition:
            self._promised += promised
        try:
            yield
        finally:
            with self._condition:
                self._promised -= promised
                self._condition.notify_all()

    def traffic(self) -> Traffic:
        with self._condition:
            return Traffic(self._restores, self._promised, self._drains(), self._captures())


class WritePace:
    """When one image may be written to disk, `promised` if somebody waits for it. One thread; see `contract.Pace`.

    Attributes:
        waited: seconds, for others.
    """

    def __init__(self, governor: Governor, *, promised: bool) -> None:
        self.waited = 0.0
        self._governor = governor
        self._promised = promised
        self._began = time.monotonic()

    def free(self) -> bool:
        return self._promised or self._turn(0.0).go

    def wait(self) -> None:
        start = time.monotonic()
        while not self._promised and not (turn := self._turn(time.monotonic() - start)).go:
            time.sleep(turn.again)
        self.waited += time.monotonic() - start

    def _turn(self, waiting: float) -> Turn:
        waited = self.waited + waiting
        at_it = max(0.0, time.monotonic() - self._began - waited)
        return bandwidth.write_turn(self._governor.traffic(), waited, at_it)


class Gate:
    """What one run's uploads pass, part by part: at most so many bytes a second, and after what comes first.

    Attributes:
        reason: why a part waits just now; empty when none does.
    """

    def __init__(self, governor: Governor, rate: float | None = None) -> None:
        self.reason = ""
        self._governor = governor
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._bucket: Bucket | None = None
        self._effect = Effect()
        self._pacing = threading.Lock()
        self._passed = time.monotonic()
        self.use(rate)

    def use(self, rate: float | None) -> None:
        """From now on, so many bytes a second."""
        with self._lock:
            if self._bucket is None or self._bucket.rate != rate:
                self._bucket = None if rate is None else Bucket.full(rate, time.monotonic())

    def heed(self, stretch: Stretch) -> str:
        """Training was seen beside uploads, or without them. Why they go slower or faster from now on, if they do."""
        before, self._effect = self._effect, effects.heed(self._effect, stretch)
        return self._effect.reason if self._effect.speed != before.speed else ""

    def __call__(self, nbytes: int) -> None:
        """Return when that many bytes may go.

        Raises:
            StorageError: the gate was closed.
        """
        start = time.monotonic()
        while not (turn := bandwidth.turn(self._governor.traffic(), time.monotonic() - start)).go:
            self._wait(turn.again, turn.reason)
        with self._lock:
            wait = 0.0
            if self._bucket is not None:
                self._bucket, wait = bandwidth.take(self._bucket, nbytes, time.monotonic())
        self._wait(wait, "the rate is bounded")
        with self._pacing:  # parts come on several threads: what passed since the last one took that long
            effect = self._effect
            self._wait(effects.rest(time.monotonic() - self._passed, effect.speed), effect.reason)
            self._passed = time.monotonic()
        self.reason = ""

    def close(self) -> None:
        """Nothing passes any more."""
        self._closed.set()

    def _wait(self, seconds: float, reason: str) -> None:
        if seconds > 0:
            self.reason = reason
        if self._closed.wait(seconds) if seconds > 0 else self._closed.is_set():
            raise StorageError("the upload was broken off: the agent leaves")
