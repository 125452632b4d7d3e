"""Threads save and restore one at a time, in the process that made the checkpointer, and until it is closed."""

from __future__ import annotations

import os
import threading

from zerostall.native import FORKS


class Turn:
    """Its attributes are for `save` itself, where each function of Python's costs a microsecond.

    Attributes:
        lock: held by the thread that saves or restores.
        inside: whether one does; seen by whoever has the lock, it is that very thread.
        closed: nobody may any more.
        forks: `FORKS[0]` where this was made.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.inside = False
        self.closed = False
        self.forks = FORKS[0]
        self._pid = os.getpid()

    def refuse(self, verb: str) -> None:
        """It was closed while the caller waited for its turn, or the caller has the turn already."""
        self.require_open()
        raise RuntimeError(
            f"{verb}() was called while this very thread saves or restores: by a state_dict() or load_state_dict() "
            "of the state, or by a signal's handler (for those, there is preempt=...)"
        )

    def require_open(self) -> None:
        if self.closed:
            raise ValueError("this checkpointer is closed")
        if self.forks != FORKS[0]:
            raise ValueError(f"this checkpointer belongs to process {self._pid}; a forked child needs its own")
