"""One writer a run folder, on any number of nodes that see it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from zerostall.errors import RunBusyError
from zerostall.telemetry import say_once
from zerostall.tiers.modes import LOCK_MODE, OWN, Modes

LOCK = "run.lock"
_TRIES = 100
_PAUSE = 0.01
_MOST_NAME = 256


class FolderLock:
    """Holds `<where>/run.lock` until `close` or the end of the process, however it ends.

    Args:
        holder: a name that no other holder has; it stays in the file, so that the next one knows who was there.

    Attributes:
        before: the holder before this one; "" where nobody says.

    Raises:
        RunBusyError: another process holds it.
    """

    def __init__(self, where: Path, modes: Modes = OWN, holder: str = "") -> None:
        self.before = ""
        self._fd = _opened(where / LOCK, modes)
        try:
            if not self._lock():
                readers = _readers(self._fd)
                self.close()
                raise _busy(where, readers)
        except OSError as error:
            # Some network file systems have no locks: one writer is then the user's promise.
            say_once(f"lock:{where}", "%s: this file system has no locks (%s); keep to one job a folder", where, error)
            return
        if holder:
            self.before = os.pread(self._fd, _MOST_NAME, 0).decode(errors="replace").strip()
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{holder}\n".encode(), 0)
            os.fsync(self._fd)  # other nodes are to see it

    def _lock(self) -> bool:
        """An agent lets go a moment after its trainer has ended: it is asked more than once."""
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(_PAUSE)
        return False

    def is_of(self, where: Path) -> bool:
        """Is it still the lock that others would find there?"""
        try:
            there = (where / LOCK).stat()
        except OSError:
            return False
        mine = os.fstat(self._fd)
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _busy(where: Path, readers: str) -> RunBusyError:
    if readers:
        return RunBusyError(
            f"process {readers} has locked {where / LOCK} for reading, which no agent does",
            hint="end it; no other user may open that file from now on",
        )
    return RunBusyError(
        f"another agent writes to {where}", hint="end the other job, or give this one a folder of its own"
    )


def holder_of(where: Path) -> str:
    """Who holds the folder, or held it last; "" where nobody says."""
    try:
        with (where / LOCK).open("rb") as file:
            return file.read(_MOST_NAME).decode(errors="replace").strip()
    except OSError:
        return ""


def _opened(path: Path, modes: Modes) -> int:
    """The file, made if need be."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        fd, new = os.open(path, flags | os.O_EXCL, LOCK_MODE), True
    except FileExistsError:
        fd, new = os.open(path, flags | os.O_NOFOLLOW, LOCK_MODE), False
    modes.lock(fd, new=new)
    return fd


def _readers(fd: int) -> str:
    """Who has locked the file for reading, which no agent does; "" where nobody is known to."""
    facts = os.fstat(fd)
    place = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
    pids: list[str] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            match line.split():
                case [_, "FLOCK", _, "READ", pid, where, *_] if where == place:
                    pids.append(pid)
    return ", ".join(pids)
