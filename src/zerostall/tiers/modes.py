"""The modes of files and folders of a run: those that the trainer's umask asks for, whoever started the agent."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerostall.telemetry import say_once

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Modes:
    """`umask` None: this process's own, which the system applies by itself."""

    umask: int | None = None

    def file(self, fd: int) -> None:
        """Give a file that was just made its mode."""
        if self.umask is not None:
            self._change(fd, 0o666)

    def folder(self, path: Path) -> None:
        """Give a folder that was just made its mode; its group's bit stays as the folder above decided."""
        if self.umask is not None:
            self._change(path, 0o777 | (path.stat().st_mode & stat.S_ISGID))

    def _change(self, what: int | Path, mode: int) -> None:
        assert self.umask is not None
        try:
            os.chmod(what, mode & ~self.umask)  # noqa: PTH101 - a descriptor, too
        except OSError as error:
            say_once("modes", "this file system does not let modes be set: %s", error.strerror)


OWN = Modes()
