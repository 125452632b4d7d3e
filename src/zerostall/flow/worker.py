"""A named thread that does one thing after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from zerostall.telemetry import log

Task = Callable[[], None]


class Worker:
    """Runs tasks in order on its own thread; at most `bound` wait.

    A task handles its own errors; one that escapes is logged with its trace and ends nothing.
    """

    def __init__(self, name: str, *, bound: int = 64) -> None:
        self._tasks: queue.Queue[Task | None] = queue.Queue(bound)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queue a task.

        Raises:
            queue.Full: `bound` tasks wait already.
        """
        self._tasks.put_nowait(task)

    def close(self, timeout: float | None = None) -> bool:
        """Let what is queued finish and end the thread; False when it is still at work after `timeout` seconds."""
        self._tasks.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # noqa: BLE001 - a bug in a task must not silence the tasks behind it
                log.exception("%s: a task failed", self._thread.name)
