"""Fresh processes for a few milliseconds each: forked from one that has imported everything (see warm.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

TESTS = Path(__file__).parent.parent
NOTHING = Path(os.devnull)
PATIENCE = 60.0


class Nursery:
    """Starts children of one kind (see MODULES in warm.py); `close` kills those that are left."""

    def __init__(self, kind: str, environment: Mapping[str, str]) -> None:
        path = os.pathsep.join([str(TESTS), *sys.path])
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "crash" / "warm.py"), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "PYTHONPATH": path},
            text=True,
        )
        self._children: list[Child] = []
        self._one_at_a_time = threading.Lock()
        self._answer()

    def start(
        self,
        *words: object,
        environment: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        source: Path = NOTHING,
        folder: Path | None = None,
    ) -> Child:
        """A child that runs `main` of its kind with these words, in that environment and in that folder or this one.

        As a process that is started here it gets our umask.
        What it prints is appended to `output`; standard error, too, if `errors` is not given. It reads `source`.
        """
        texts = list(map(str, words))
        files = {
            "output": str(output),
            "errors": str(errors or output),
            "source": str(source),
            "folder": str(folder or Path.cwd()),
        }
        os.umask(mask := os.umask(0))
        pid = self.ask({"start": texts, "environment": dict(environment), "umask": mask, **files})["pid"]
        self._children.append(Child(self, pid, texts, output))
        return self._children[-1]

    def ask(self, request: Mapping[str, object]) -> dict:
        with self._one_at_a_time:
            self._pipe(self._process.stdin).write(json.dumps(request) + "\n")
            self._pipe(self._process.stdin).flush()
            return self._answer()

    def close(self) -> None:
        for child in self._children:
            child.kill()
        self._pipe(self._process.stdin).close()
        self._pipe(self._process.stdout).close()
        self._process.wait(PATIENCE)

    def _answer(self) -> dict:
        return json.loads(self._pipe(self._process.stdout).readline())

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


@dataclass(eq=False)
class Child:
    """One process. `code` is its exit code (negative: the signal) once it was seen to have ended."""

    nursery: Nursery
    pid: int
    words: list[str]
    output: Path
    code: int | None = None

    def ended(self) -> bool:
        if self.code is None:
            self.code = self.nursery.ask({"look": self.pid})["code"]
        return self.code is not None

    def wait(self, seconds: float = PATIENCE) -> int:
        deadline = time.monotonic() + seconds
        while not self.ended():
            assert time.monotonic() < deadline, f"process {self.pid} is still there; it said:\n{self.printed()}"
            time.sleep(0.002)
        assert self.code is not None
        return self.code

    def signal(self, number: int) -> None:
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.signal(signal.SIGKILL)
        self.wait()

    def printed(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""
