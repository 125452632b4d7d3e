"""Where the agent is found: the lock that makes it the one of its folder, and the socket it listens on.

Temporary folders get swept. A socket that is gone is made anew; an agent whose lock was taken away, and whose place
another has taken, is *displaced*: it serves whom it has, and leaves when they do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from typing import TYPE_CHECKING

from zerostall.errors import ZerostallError
from zerostall.telemetry import log
from zerostall.wire import rendezvous

if TYPE_CHECKING:
    from pathlib import Path


class Door:
    """Raises (on construction): BlockingIOError when another agent has the folder."""

    def __init__(self, folder: Path) -> None:
        self.displaced = False
        self._folder = folder
        self._path = rendezvous.socket_path(folder)
        self._lock = _locked(folder)
        self.listener = self._listen()

    def check(self) -> bool:
        """Make sure that the agent can be found; True when the listener is another one than before."""
        if self.displaced or (_is(self._lock, rendezvous.lock_path(self._folder)) and self._path.exists()):
            return False
        try:
            rendezvous.private_folder(self._folder)
            if not _is(self._lock, rendezvous.lock_path(self._folder)):
                self._lock, old = _locked(self._folder), self._lock
                os.close(old)
            self.listener.close()
            self.listener = self._listen()
        except BlockingIOError:
            log.warning("another agent serves %s by now: this one leaves when its trainers do", self._folder)
            self.displaced = True
            self.listener.close()
            return False
        except (OSError, ZerostallError) as error:
            log.warning("%s: cannot be found there, trying again: %s", self._path, error)
            return False
        log.warning("%s was gone and is made anew", self._path)
        return True

    def close(self) -> None:
        if not self.displaced:
            self.listener.close()
            if _is(self._lock, rendezvous.lock_path(self._folder)):
                self._path.unlink(missing_ok=True)

    def _listen(self) -> socket.socket:
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            listener.bind(os.fspath(self._path))
            self._path.chmod(0o600)  # the folder is private anyway; the umask is the whole process's, so it stays
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
        return listener


def _locked(folder: Path) -> int:
    lock = os.open(rendezvous.lock_path(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _is(fd: int, path: Path) -> bool:
    """Is the open file the one that has this name?"""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False
