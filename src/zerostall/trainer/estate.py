"""What a checkpointer has taken of this process and its agent: threads, memory, hooks, its place in the run's folder.

`close` lets go of all that. A checkpointer that is dropped without it is collected on any thread, in the middle of
anything, with whatever locks that thread holds. So its finalizer only passes the estate on, by a queue that needs no
lock, to the *heir*: a thread that is there as long as there are checkpointers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import warnings
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING

from zerostall.errors import AgentError, WaitTimeoutError, ZerostallError
from zerostall.telemetry import log
from zerostall.wire import messages as m

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.trainer.ledger import Ledger
    from zerostall.trainer.link import Link
    from zerostall.trainer.lockers import Lockers
    from zerostall.trainer.mappings import Mappings
    from zerostall.trainer.memory import Shelf
    from zerostall.trainer.preemption import Preemption
    from zerostall.trainer.saves import Saves

FLUSH_SECONDS = 600.0


class Estate:
    """Knows no checkpointer, and is alive when its own is dead.

    Attributes:
        over: it has been let go of.
    """

    def __init__(
        self,
        where: Path | str,
        saves: Saves,
        ledger: Ledger,
        link: Link,
        lockers: Lockers,
        shelf: Shelf,
        mappings: Mappings,
        preemption: Preemption,
    ) -> None:
        self.where = where
        self.over = False
        self._saves = saves
        self._ledger = ledger
        self._link = link
        self._lockers = lockers
        self._shelf = shelf
        self._mappings = mappings
        self._preemption = preemption
        self._made_at = _caller()
        self._pid = os.getpid()
        self._heir: _Heir | None = None

    def begin(self) -> None:
        """Start all threads and put all hooks in their places. Wherever this ends, `shut` may follow."""
        _Heir.trust(self)
        self._saves.begin()
        self._preemption.begin()

    def flush(self, timeout: float) -> None:
        """Wait until the newest snapshot is where it is durable; raises what `Checkpointer.close` does."""
        deadline = time.monotonic() + timeout
        self._saves.let_go()
        self._saves.settle(timeout)
        newest = self._ledger.await_newest(deadline)
        if newest is not None:
            with contextlib.suppress(AgentError, WaitTimeoutError):  # the step is safe, and so is what is left over
                self._link.ask(m.Tidy, timeout=max(0.0, deadline - time.monotonic()))
        self._ledger.raise_unreported()

    def shut(self, *, training: bool = True) -> None:
        """Let go of everything. `training`: on the thread that takes the steps of the optimizers."""
        if self.over:
            return
        self.over = True
        try:
            self._saves.guard.remove(training=training)
            self._preemption.close()
            self._saves.end()
            self._link.close()
            self._lockers.close()
            self._saves.close()
            self._ledger.forget()
            self._shelf.forget()
            self._mappings.keep_only(None)
        finally:
            if self._heir is not None:
                self._heir.release(self)

    def dropped(self) -> None:
        """Nobody holds the checkpointer any more. On any thread, whatever it is doing: takes no lock, does nothing."""
        if not self.over and self._heir is not None and self._pid == os.getpid():
            self._heir.inherit(self)

    def see_out(self) -> None:
        """What `close` would have done, on a thread of its own."""
        filename, line = self._made_at
        said = f"the Checkpointer of {self.where} was dropped without close(): leave its `with`, or close() it"
        log.warning("%s:%d: %s", filename, line, said)
        with contextlib.suppress(ResourceWarning):  # as an error it would end this thread, and nothing else
            warnings.warn_explicit(said, ResourceWarning, filename, line)
        self.end_quietly(training=False)

    def end_quietly(self, *, training: bool) -> None:
        """Flush and shut where nobody is left to catch an error."""
        try:
            if not training:
                self._saves.await_capture()
            self.flush(FLUSH_SECONDS)
        except Exception as error:  # noqa: BLE001 - nobody is left to catch it
            log.error("%s: the last snapshot did not reach the disk: %s", self.where, error)
        finally:
            self.shut(training=training)


class _Heir:
    """Sees dropped checkpointers out, and at the end of the interpreter all that are left. One at a time serves.

    It comes with the first checkpointer and goes with the last.
    """

    now: _Heir | None = None
    _lock = threading.Lock()  # never taken by a finalizer

    def __init__(self) -> None:
        self._queue: SimpleQueue[Estate | threading.Event | None] = SimpleQueue()
        self._living: weakref.WeakSet[Estate] = weakref.WeakSet()
        self._leaving: dict[Estate, threading.Thread] = {}
        self._thread = threading.Thread(target=self._serve, name="zerostall heir", daemon=True)
        atexit.register(self._at_exit)

    @classmethod
    def trust(cls, estate: Estate) -> None:
        """From now on, and until `release`, it is seen out if it is dropped."""
        with cls._lock:
            if cls.now is None:
                cls.now = cls()
            heir = estate._heir = cls.now  # first of all: `release` may have to follow from here on
            heir._living.add(estate)
            if not heir._thread.is_alive():
                heir._thread.start()

    def release(self, estate: Estate) -> None:
        with self._lock:
            self._living.discard(estate)
            self._leaving.pop(estate, None)
            if self._living:
                return
            if _Heir.now is self:
                _Heir.now = None
            self._queue.put(None)
        atexit.unregister(self._at_exit)

    def inherit(self, estate: Estate) -> None:
        """Any thread, at any moment: `SimpleQueue.put` is reentrant for that."""
        self._queue.put(estate)

    def await_dropped(self, where: Path | str | None, seconds: float) -> None:
        """Wait until what was dropped before now has been seen out: of that folder, or all."""
        deadline = time.monotonic() + seconds
        seen = threading.Event()
        with self._lock:
            if not self._living:
                return
            self._queue.put(seen)
        seen.wait(seconds)
        with self._lock:
            threads = [
                thread for estate, thread in self._leaving.items() if where is None or _same(where, estate.where)
            ]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self) -> None:
        while (heard := self._queue.get()) is not None:
            if isinstance(heard, threading.Event):
                heard.set()
                continue
            thread = threading.Thread(target=heard.see_out, name="zerostall close", daemon=True)
            with self._lock:
                self._leaving[heard] = thread
            thread.start()
            del heard, thread  # kept no longer than it lives

    def _at_exit(self) -> None:
        """An interpreter that ends normally waits for what is under way."""
        with self._lock:
            left = [estate for estate in self._living if not estate.over and estate not in self._leaving]
        for estate in left:
            print("zerostall: waiting for the last snapshot to reach the disk", file=sys.stderr)
            try:
                estate.flush(FLUSH_SECONDS)
            except Exception as error:  # noqa: BLE001 - nobody is left to catch it
                print(f"zerostall: the last snapshot did not reach the disk: {error}", file=sys.stderr)
            finally:
                estate.shut()
        self.await_dropped(None, FLUSH_SECONDS)


def await_dropped(where: Path | str) -> None:
    """A checkpointer of that folder that was dropped in this process lets go of it first."""
    if (heir := _Heir.now) is not None:
        heir.await_dropped(where, FLUSH_SECONDS)


def flush_newest(ledger: Ledger) -> None:
    """What is captured already goes to disk, for there will be no more. On a thread of its own."""
    newest = ledger.newest()
    try:
        if newest is not None:
            newest.wait("disk", timeout=FLUSH_SECONDS)
    except ZerostallError as error:
        log.error("the last snapshot did not get to disk: %s", error)


def _same(one: Path | str, other: Path | str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def _caller() -> tuple[str, int]:
    """Where the user made the checkpointer."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "zerostall":
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _forget_heir() -> None:
    """In a forked child: the threads are the parent's, and what there is to be waited for."""
    heir, _Heir.now = _Heir.now, None
    _Heir._lock = threading.Lock()
    if heir is not None:
        atexit.unregister(heir._at_exit)


os.register_at_fork(after_in_child=_forget_heir)
