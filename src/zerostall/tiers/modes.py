"""The modes of files and folders of a run: those that the trainer's umask asks for, whoever started the agent."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from pathlib import Path

LOCK_MODE = 0o622
"""To make a lock with: for a moment nobody reads it who should not."""


@dataclass(frozen=True, slots=True)
class Modes:
    """`umask` None: this process's own, which the system applies by itself."""

    umask: int | None = None

    def file(self, fd: int) -> None:
        """Give a file that was just made its mode."""
        if self.umask is not None:
            self._change(fd, 0o666)

    def lock(self, fd: int, *, new: bool) -> None:
        """Give a lock its mode: `new`, it was just made, with `LOCK_MODE`; else it may be of an older version.

        Whoever can open a file can hold a lock on it, be it for reading only. So nobody reads it who may not write it.
        """
        facts = os.fstat(fd)
        mode = stat.S_IMODE(facts.st_mode)
        if new and self.umask is not None:
            mode = LOCK_MODE & ~self.umask
        mode = mode & ~0o444 | (mode & 0o222) << 1
        if mode != stat.S_IMODE(facts.st_mode) and facts.st_uid == os.geteuid():
            self._set(fd, mode)

    def folder(self, path: Path) -> None:
        """Give a folder that was just made its mode; its group's bit stays as the folder above decided."""
        if self.umask is not None:
            self._change(path, 0o777 | (path.stat().st_mode & stat.S_ISGID))

    def _change(self, what: int | Path, mode: int) -> None:
        assert self.umask is not None
        self._set(what, mode & ~self.umask)

    def _set(self, what: int | Path, mode: int) -> None:
        try:
            os.chmod(what, mode)  # noqa: PTH101 - a descriptor, too
        except OSError as error:
            say_once("modes", "this file system does not let modes be set: %s", error.strerror)


OWN = Modes()
