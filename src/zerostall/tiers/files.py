"""Small file work done right: errors that name the path, whole files, durable names, and nothing through a link."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zerostall.core import steps as names
from zerostall.errors import CorruptError, FormatError, StorageError
from zerostall.telemetry import log, say_once
from zerostall.tiers.modes import OWN, Modes

if TYPE_CHECKING:
    from collections.abc import Callable

_Written = TypeVar("_Written")
_MAX_JSON = 1 << 30  # a record or layout over this is not ours
_RETRIED = (errno.ESTALE, errno.EBUSY, errno.ENOTEMPTY, errno.EEXIST)


@contextlib.contextmanager
def storage_errors(path: Path, what: str, needed: int, *, doing: str = "write"):
    """Turn errors of the system, and of native code, into `StorageError` that names the path, and the room if it lacks.

    `needed` bytes are what it would have taken; 0 where nobody knows.
    """
    try:
        yield
    except FormatError:
        raise
    except OSError as error:
        if isinstance(error, StorageError) and error.filename is not None:
            raise  # it names its path already
        number = error.errno or (error.args[0] if error.args and isinstance(error.args[0], int) else 0)
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise no_room(path, what, needed, number) from error
        reason = error.strerror or str(error.args[0] if error.args else error)
        raise _named(StorageError(f"cannot {doing} {what} at {path}: {reason}", errno=number), path) from error


def _named(error: StorageError, path: Path) -> StorageError:
    error.filename = os.fspath(path)
    return error


def no_room(path: Path, what: str, needed: int, number: int = errno.ENOSPC) -> StorageError:
    room = f"{needed} bytes needed, {free_bytes(path)} free" if needed else f"{free_bytes(path)} bytes free"
    error = StorageError(
        f"no room for {what} at {path}: {room} ({os.strerror(number)})",
        errno=number,
        hint="free some space, or keep fewer steps; the next save tries again",
    )
    return _named(error, path)


def real(path: str | os.PathLike[str]) -> Path:
    """The whole path without links, as far as it exists.

    Links that lead round in a circle stay: whoever opens the path is told so (`Path.resolve` raises RuntimeError).
    """
    return Path(os.path.realpath(path))


def free_bytes(path: Path) -> int:
    """Bytes an ordinary user may still write below `path`."""
    while not path.exists() and path != path.parent:
        path = path.parent
    facts = os.statvfs(path)
    if facts.f_blocks == 0:
        return sys.maxsize  # some network file systems do not say
    return facts.f_bavail * facts.f_frsize


def require_room(where: Path, needed: int) -> None:
    if free_bytes(where) < needed:
        raise no_room(where, "the image", needed)


def read_file(path: Path, most: int = _MAX_JSON) -> bytes:
    """A small file, whole. FormatError when it is too large to be one of ours."""
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        if size > most:
            raise FormatError(f"{path} has {size} bytes; files of its kind stay under {most}")
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(most)


@contextlib.contextmanager
def opened(path: Path):
    """A regular file opened for reading; never through a link, never a device."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise FormatError(f"{path} is a link, and links are not followed") from error
        raise _named(StorageError(f"cannot read {path}: {error.strerror}", errno=error.errno), path) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise FormatError(f"{path} is not a regular file")
        yield fd
    finally:
        os.close(fd)


def read_exactly(fd: int, view: memoryview, offset: int, path: Path) -> None:
    """Fill `view` with a file's bytes from `offset` on.

    Raises:
        CorruptError: the file ends before that.
        StorageError: the operating system refused.
    """
    while view:
        try:
            count = os.preadv(fd, [view], offset)
        except OSError as error:
            raise _named(StorageError(f"cannot read {path}: {error.strerror}", errno=error.errno), path) from error
        if count == 0:
            raise CorruptError(f"{path} ends at byte {offset}, {len(view)} bytes too early")
        view, offset = view[count:], offset + count


def write_file(path: Path, data: bytes, modes: Modes = OWN) -> None:
    """Write a small file and fsync it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        modes.file(fd)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def write_by(path: Path, write: Callable[[int], _Written], modes: Modes = OWN) -> _Written:
    """Make a file, let `write` fill it, and fsync it; nothing is left of one that fails. Returns what `write` does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        modes.file(fd)
        written = write(fd)
        os.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()  # a full disk gets its room back at once
        raise
    finally:
        os.close(fd)
    return written


def write_whole(path: Path, data: bytes, modes: Modes = OWN) -> None:
    """Write a small file so that it is there whole or not at all, and durable."""
    partial = path.with_name(names.partial_file(path.name, secrets.token_hex(4)))
    try:
        write_file(partial, data, modes)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    fsync_folder(path.parent)


def make_folder(folder: Path, modes: Modes = OWN) -> None:
    """Create a folder and what is missing above it, all of it durable."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            modes.folder(path)
        try:
            fsync_folder(path.parent)
        except PermissionError as error:  # one may create in a folder that one may not open
            say_once(f"fsync:{path.parent}", "%s: cannot be made durable: %s", path, error.strerror)


def discard(path: Path) -> bool:
    """Remove a file whose absence must be durable; False, and a line in the log, when it cannot be removed."""
    try:
        _retried(path.unlink)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        log.warning("%s: could not be removed and is left: %s", path, error)
        return False
    try:
        fsync_folder(path.parent)
    except OSError as error:
        log.warning("%s: removed, but that may not be durable: %s", path, error)
    return True


def fsync_folder(folder: Path) -> None:
    """Make names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        say_once(f"fsync:{folder}", "%s: this file system cannot fsync a folder (%s)", folder, error.strerror)
    finally:
        os.close(fd)


def remove_tree(folder: Path) -> bool:
    """Remove a folder and what is in it, or a link in its place, but not what that leads to.

    False, and a line in the log, when something could not be removed.
    """
    if not os.path.lexists(folder):
        return True
    try:
        _retried(folder.unlink if folder.is_symlink() else lambda: shutil.rmtree(folder))
    except OSError as error:
        if not os.path.lexists(folder):
            return True
        log.warning("%s: could not be removed and is left: %s", folder, error)
        return False
    return True


def _retried(removal: Callable[[], None]) -> None:
    """Network file systems refuse to remove for a moment what somebody holds open or has just removed."""
    for wait in (0.0, 0.01):
        try:
            removal()
            return
        except OSError as error:
            if error.errno not in _RETRIED:
                raise
            time.sleep(wait)
    removal()
