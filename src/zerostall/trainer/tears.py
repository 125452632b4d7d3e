"""Whether something changed while a snapshot was read: the sealer looks, then training, or once more the sealer."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from itertools import accumulate, repeat
from types import FrameType
from typing import Protocol

import msgspec

from zerostall.core.tears import UNKNOWN, Moment, Place, settled


def place_of(thread: int) -> Place | None:
    """What that thread is executing; None: it has ended. No frame is kept, for it would keep what is in it.

    All frames are taken by one call of C's, in which no other thread runs. Where one does, between a generator's frame
    and its caller's, Python 3.11 looks for the caller where it no longer is, and finds anything: a function, say.
    """
    first = sys._current_frames().get(thread)
    if first is None:
        return None
    frames: list[object] = []
    with contextlib.suppress(AttributeError):  # the outermost has no caller, which has none itself
        frames.extend(accumulate(repeat("f_back"), getattr, initial=first))
    found = [(id(frame.f_code), frame.f_lasti) for frame in frames if isinstance(frame, FrameType)]
    return tuple(found) if len(found) == len(frames) - 1 and frames[-1] is None else UNKNOWN


class Changed(Protocol):
    def __call__(self, *, exchanged: bool) -> list[str]: ...


class Tears(msgspec.Struct, eq=False):
    """Of one snapshot. `changed` names what was written to since it was begun, or has other memory.

    torch counts a version up at the *end* of an operation, so that the first look may miss one that is under way.
    The finding is final once the thread that saves has looked for itself, or all that was under way has ended. Until
    then every change is a tear: which came first, it or the last byte that was read, is not known. Any thread.
    `lock`: may be one for many, since `save` would have to make it.
    """

    changed: Changed
    thread: int
    lock: threading.Lock = msgspec.field(default_factory=threading.Lock)
    place: Callable[[int], Place | None] = place_of
    clock: Callable[[], float] = time.monotonic
    final: bool = False
    _found: list[str] | None = None
    _late: list[str] = []
    _read: Moment | None = None

    def found(self) -> list[str]:
        """What counts for the seal: what training found if it was first, else what has changed by now.

        To be asked when everything has been read.
        """
        with self.lock:
            if self._found is None:
                self._read = self._now()
                self._found = self.changed(exchanged=True)
            return self._found

    def look(self) -> list[str]:
        """Look for the last time: the thread that saves has come by, so that nothing of its own is under way.

        Returns what is `late`.
        """
        with self.lock:  # not `acquire`, after which Ctrl-C may be raised: all later saves would wait for the lock
            if not self.final:
                self._look()
            return self._late

    def look_again(self) -> bool:
        """Look for the last time if nothing can be under way any more; whether the finding is final now."""
        with self.lock:
            if not self.final and self._read is not None:
                now = self._now()
                if settled(self._read, now).final:
                    self._look()
                elif self._read.place == UNKNOWN:
                    self._read = now  # nothing is read then either
            return self.final

    @property
    def late(self) -> list[str]:
        """What was found although nothing was for the seal: the sealed image cannot be trusted. Until it is `told`."""
        with self.lock:
            return self._late

    def told(self) -> None:
        """Those know who have to: whoever was interrupted before that tells them once more."""
        with self.lock:
            self._late = []

    def _look(self) -> None:
        # Other memory is seen at once: what has it only after the first look had been read.
        changed = self.changed(exchanged=self._found is None)
        if self._found is None:
            self._found = changed
        elif not self._found:
            self._late = changed
        self.final = True

    def _now(self) -> Moment:
        return Moment(self.clock(), self.place(self.thread))
