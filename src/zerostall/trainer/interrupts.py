"""Ctrl-C is raised between any two calls of the training thread: what it may leave behind."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading


def let_go(condition: threading.Condition) -> None:
    """This thread holds the condition no more, where it was interrupted when it had just taken it.

    `with condition` does not help: its `__enter__` is Python's, and is interrupted before the block begins.
    """
    with contextlib.suppress(RuntimeError):  # it is not this thread's, or no longer
        while True:
            condition.release()
