"""What one rank has of one vault, on the agent's side: asked for, had, lost, and asked for again."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

from zerostall.core import backoff
from zerostall.core.places import Places
from zerostall.telemetry import say_once
from zerostall.tiers.host import PAGE
from zerostall.wire import lockers as w

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerostall.agent.vaults import Vaults
    from zerostall.core.candidates import Past
    from zerostall.tiers.host import HostTier

PLACES = 2
"""One is captured into while the other is emptied."""
_MOST_FAILURES = 5


Answer = w.Written | w.NotStraight | w.Stuck


class Holder(Protocol):
    """Whose it is. Called on the agent's loop."""

    def came(self, locker: Locker) -> None:
        """There are places."""

    def refused(self, locker: Locker, reason: str) -> None:
        """The vault lends none."""

    def gone(self, locker: Locker, key: int, reason: str) -> None:
        """Its vault is, with what was in the locker of that key."""

    def emptied(self, emptied: w.Emptied) -> None: ...

    def mirrored(self, order: int) -> None: ...

    def stuck(self, order: int, reason: str) -> None: ...


class Locker:
    """Driven by the agent's loop; see `vaults.Renter`.

    Attributes:
        gpu: in whose memory; "" where none is asked for.
        key, handle: of the memory; 0 while none is asked for, and empty while none is there.
        places: what is in it; another table whenever the memory is another.
        last_error: why there was none, last.
    """

    def __init__(self, vaults: Vaults, holder: Holder, whose: str) -> None:
        self._vaults = vaults
        self._holder = holder
        self._whose = whose
        self._shown: set[int] = set()
        self._writes: dict[int, Callable[[Answer], None]] = {}
        self._failures = 0
        self._retry_at = 0.0
        self.gpu = ""
        self.stride = 0
        self.key = 0
        self.handle = b""
        self.places = Places(0)
        self.last_error = ""

    @property
    def nbytes(self) -> int:
        return len(self.places) * self.stride

    def ask(self, gpu: str, nbytes: int) -> None:
        """For places for images of so many bytes; not again where that was asked for already."""
        if self.key:
            return
        self.gpu, self.stride, self._failures = gpu, -(-max(nbytes, 1) // PAGE) * PAGE, 0
        self._ask()

    def _ask(self) -> None:
        self._retry_at = 0.0
        self.key = secrets.randbits(62) | 1
        self._vaults.lend(self.gpu, w.Lend(key=self.key, stride=self.stride, places=PLACES), self)

    def give_back(self) -> None:
        """It is needed no longer."""
        key = self._forget()
        if key:
            self._vaults.take_back(self.gpu, key)
        self._retry_at = 0.0
        self.gpu = ""

    def _forget(self) -> int:
        key, self.key, self.handle, self.places = self.key, 0, b"", Places(0)
        self._shown.clear()
        writes, self._writes = self._writes, {}
        for order, then in writes.items():
            then(w.Stuck(id=order, reason="the vault is gone"))
        return key

    def advance(self, now: float) -> None:
        """Ask again where it is time."""
        if self._retry_at and now >= self._retry_at:
            self._ask()

    def show(self, tier: HostTier) -> None:
        """That host memory will be drained to."""
        if self.handle and tier.key not in self._shown:
            self._shown.add(tier.key)
            show = w.Show(key=tier.key, nbytes=tier.segment.nbytes, stride=tier.stride)
            self._vaults.show(self.gpu, show, tier.segment.fileno())

    def hide(self, key: int) -> None:
        """That host memory goes."""
        if key in self._shown:
            self._shown.discard(key)
            self._vaults.hide(key)

    def told(self) -> w.Locker:
        """What the trainer hears of it."""
        return w.Locker(key=self.key, gpu=self.gpu, handle=self.handle, stride=self.stride, places=len(self.places))

    def lend(self, past: Past) -> tuple[w.Kept, Callable[[], None]] | None:
        """Where that very image lies here, if it does; it stays until the function is called."""
        place = self.places.hold(past)
        if place is None:
            return None
        kept = w.Kept(gpu=self.gpu, handle=self.handle, offset=place.index * self.stride, runs=place.runs)
        return kept, partial(self.places.release, place.index)

    def order(self, order: w.Drain | w.Mirror) -> None:
        self._vaults.order(self.gpu, order, self)

    def write(self, order: w.Write, then: Callable[[Answer], None]) -> None:
        """Have the vault write to a file that it was shown; then `then` is called."""
        self._writes[order.id] = then
        self._vaults.write(self.gpu, order, self)

    def end(self, reason: str) -> None:
        """Its vault does nothing any more."""
        self._vaults.end(self.gpu, reason)

    # --------------------------------------------------------------------------------------------- what the vault says

    def opened(self, opened: w.Opened) -> None:
        self.handle, self.places = opened.handle, Places(opened.places)
        self._holder.came(self)

    def declined(self, reason: str) -> None:
        self.key, self.last_error = 0, reason
        say_once(
            f"no locker on {self.gpu} for {self._whose}",
            "%s has no locker in the memory of %s: %s",
            self._whose,
            self.gpu,
            reason,
        )
        self._holder.refused(self, reason)

    def emptied(self, emptied: w.Emptied) -> None:
        self._failures = 0
        self._holder.emptied(emptied)

    def mirrored(self, order: int) -> None:
        self._failures = 0
        self._holder.mirrored(order)

    def stuck(self, order: int, reason: str) -> None:
        self.last_error = reason
        self._holder.stuck(order, reason)

    def written(self, answer: Answer) -> None:
        if then := self._writes.pop(answer.id, None):
            then(answer)

    def lost(self, reason: str) -> None:
        self._failures += 1
        self.last_error = reason
        gpu = self.gpu
        self._holder.gone(self, self._forget(), reason)
        if self._failures <= _MOST_FAILURES:
            self._retry_at = time.monotonic() + backoff.pause(self._failures, 0.5)
        else:
            say_once(f"vault {gpu} given up", "the vault of %s is given up: %s", gpu, reason)
