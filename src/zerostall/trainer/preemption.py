"""A signal that the machine will be taken away: one last save that all ranks agree on, and then out."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from numbers import Real
from typing import TYPE_CHECKING, Any

from zerostall.telemetry import log
from zerostall.trainer import interrupts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TWICE_SECONDS = 1.0
"""A launcher and its scheduler often send the same signal each: one that comes so soon after the first is the same."""


def signal_numbers(signals: Sequence[str | int], grace: float) -> tuple[int, ...]:
    """What the user wrote, checked."""
    if not isinstance(grace, Real) or not 0 < grace < float("inf"):
        raise ValueError(f"grace={grace!r} is not a number of seconds")
    if not isinstance(signals, (list, tuple, set, frozenset)):
        raise ValueError(f"preempt={signals!r}: say preempt=({signals or 'SIGTERM'!r},)")
    if signals and threading.current_thread() is not threading.main_thread():
        raise ValueError("preempt= needs the main thread: only it may handle signals")
    return tuple(_number(one) for one in signals)


class Preemption:
    """Handles the signals from `begin` to `close`, on the main thread only.

    The first signal makes all ranks save once more and leave: `announced` is called, on a thread of its own. Another
    one, later than a second after, ends the process at once. Where training does not come to its last step in `grace`
    seconds, `flush` is called, and the handlers of before get the signal. Forked children ignore the first one: a data
    loader that died now would take training with it.
    """

    def __init__(
        self,
        signals: Sequence[int],
        grace: float,
        announced: Callable[[], None],
        flush: Callable[[], None],
    ) -> None:
        self.received = 0
        self._signals = signals
        self._grace = grace
        self._announced = announced
        self._flush = flush
        self._pid = os.getpid()
        self._first = 0.0
        self._over = False
        self._wake = -1
        self._earlier: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._run, name="zerostall preempt", daemon=True)

    def begin(self) -> None:
        if not self._signals:
            return
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        for number in self._signals:
            self._earlier[number] = signal.getsignal(number)  # noted first: Ctrl-C may come in between
            signal.signal(number, self._handle)
        self._thread.start()

    def close(self) -> None:
        """Put the handlers of before back; one of them that is a function gets the signal that has come."""
        if self._over or self._pid != os.getpid():
            return
        self._over = True
        self._put_back()
        if self._wake < 0:
            self._announced = self._flush = _nothing  # they know who made this
            return
        os.eventfd_write(self._wake, 1)
        if self._thread is not threading.current_thread() and interrupts.ended(self._thread, 5.0):
            os.close(self._wake)
            self._announced = self._flush = _nothing
        earlier = self._earlier.get(self.received)
        if callable(earlier):
            earlier(self.received, None)

    def _handle(self, number: int, frame: object) -> None:
        """Only marks and wakes: it may interrupt the main thread anywhere."""
        now = time.monotonic()
        again = self.received != 0 and now - self._first > _TWICE_SECONDS
        if self._pid != os.getpid():
            if again:
                _end(number)
            self.received, self._first = number, self._first or now
            return
        if self._over:
            self._pass_on(number, frame)
        elif again:
            _end(number)
        elif self.received == 0:
            self.received, self._first = number, now
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        if self._over:
            return
        os.eventfd_read(self._wake)
        if self._over:
            return
        log.warning(
            "%s: all ranks save once more and leave; at most %.0f s from now", _name(self.received), self._grace
        )
        self._announced()
        if _readable(self._wake, self._grace):
            return
        log.error("no step has ended in %.0f s: what is saved already goes to disk, and then this is over", self._grace)
        self._flush()
        self._over = True
        os.kill(os.getpid(), self.received)  # to the handler, on the main thread, which passes it on

    def _pass_on(self, number: int, frame: object) -> None:
        """To the handler of before."""
        earlier = self._earlier[number]
        self._put_back()
        if callable(earlier):
            earlier(number, frame)
        elif earlier != signal.SIG_IGN:
            _end(number)

    def _put_back(self) -> None:
        for number, earlier in self._earlier.items():
            with contextlib.suppress(ValueError):  # not on the main thread: the handler stays, and passes on
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


def _nothing() -> None:
    """What is called when it is over."""


def _end(number: int) -> None:
    """End this process as the signal does when nobody handles it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _readable(fd: int, seconds: float) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


def _number(one: str | int) -> int:
    try:
        number = signal.Signals[one] if isinstance(one, str) else signal.Signals(one)
    except (KeyError, ValueError):
        raise ValueError(f"preempt={one!r} is no signal; say 'SIGTERM', for instance") from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"{number.name} cannot be handled")
    return int(number)


def _name(number: int) -> str:
    return signal.Signals(number).name
