"""train.py as a process that is watched, and killed without warning."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).parent / "train.py"
STEP = re.compile(r"step (\d+) loss ([\d.]+)")
RESTORED = re.compile(r"restored step (\d+) from (\w+) in ([\d.]+) ms")


@dataclass(frozen=True)
class Restored:
    """What a trainer said about its start. `at`: when; `seconds`: how long the restore took."""

    step: int
    tier: str
    seconds: float
    at: float


@dataclass(frozen=True)
class Killed:
    """The last step that was finished, and when the signal was sent."""

    step: int
    at: float


class Trainer:
    """One run of train.py. Times are of time.monotonic()."""

    def __init__(self, steps: int, out: Path | None) -> None:
        self.restored: Restored | None = None
        self.first_step_at: float | None = None
        self.digest = ""
        self._last_step = 0
        self._killed_at: float | None = None
        command = [sys.executable, str(SCRIPT), f"--steps={steps}", *([f"--out={out}"] if out else [])]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def steps(self) -> Iterator[tuple[int, float]]:
        """Number and loss of each step as it is finished, until the process ends.

        Raises:
            RuntimeError: it ended badly, though nobody killed it.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            now = time.monotonic()
            if match := STEP.match(line):
                self._last_step = int(match[1])
                self.first_step_at = self.first_step_at or now
                yield self._last_step, float(match[2])
            elif match := RESTORED.match(line):
                self.restored = Restored(int(match[1]), match[2], float(match[3]) / 1e3, now)
            elif line.startswith("digest "):
                self.digest = line.split()[1]
        code = self._process.wait()
        if code and self._killed_at is None:
            raise RuntimeError(f"the trainer ended with {code}")

    def kill(self) -> None:
        """SIGKILL, and wait for the end; what it still had printed counts as finished."""
        assert self._process.stdout is not None
        self._killed_at = time.monotonic()
        self._process.send_signal(signal.SIGKILL)
        for line in self._process.stdout:
            if match := STEP.match(line):
                self._last_step = int(match[1])
        self._process.wait()

    def kill_agent(self) -> None:
        """SIGKILL for the agent that this trainer used."""
        command = [sys.executable, "-m", "zerostall.cli", "agent", "status", "--json"]
        status = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        os.kill(status["pid"], signal.SIGKILL)

    @property
    def killed(self) -> Killed:
        """The last kill."""
        assert self._killed_at is not None
        return Killed(self._last_step, self._killed_at)
