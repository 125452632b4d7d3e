"""Ctrl-C is raised between any two calls of the training thread: what it may leave behind."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading

    from zerostall import native


def ended(thread: threading.Thread, seconds: float) -> bool:
    """Wait for a thread that has been told to end; whether it needs nothing any more.

    One whose `start` was interrupted may never begin, or is about to: it must look first whether it is to end.
    """
    if thread.ident is None:
        return True
    try:
        thread.join(seconds)
    except RuntimeError:  # it is beginning just now
        return False
    return not thread.is_alive()


def give_up(capture: native.Capture) -> None:
    """Return when what was begun in vain writes into its slot no more and reads no tensor: its devices neither."""
    capture.cancel()
    with contextlib.suppress(Exception):  # it came to nothing anyway
        capture.wait(None)


def let_go(condition: threading.Condition) -> None:
    """This thread holds the condition no more, where it was interrupted when it had just taken it.

    `with condition` does not help: its `__enter__` is Python's, and is interrupted before the block begins.
    """
    with contextlib.suppress(RuntimeError):  # it is not this thread's, or no longer
        while True:
            condition.release()
