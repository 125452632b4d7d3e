"""A file that is there whole or not at all: written beside its place, made durable, then given its name."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import TYPE_CHECKING

from zerostall.errors import StorageError
from zerostall.flow import swept
from zerostall.tiers.files import free_bytes, fsync_folder, no_room, storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class NewFile:
    """What `new_file` gives: a descriptor to write to, in order."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of it, behind what was written before."""
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(self.fd, view) :]


@contextlib.contextmanager
def new_file(out: Path, *, overwrite: bool, nbytes: int = 0) -> Iterator[NewFile]:
    """Yield a file that takes the name `out` when the block ends well; otherwise nothing is left of it.

    Raises:
        StorageError: `out` is there and `overwrite` was not said; no room for `nbytes`; the disk refused.
    """
    out = out.absolute()
    if out.is_dir():
        raise StorageError(f"{out} is a folder", errno=errno.EISDIR)
    if os.path.lexists(out) and not overwrite:
        raise _there_already(out)
    if not out.parent.is_dir():
        raise StorageError(f"{out.parent} is no folder", errno=errno.ENOENT)
    if nbytes > free_bytes(out.parent):
        raise no_room(out, out.name, nbytes)
    partial = out.with_name(swept.partial(out.name, secrets.token_hex(4)))
    with storage_errors(out, out.name, nbytes), swept.swept(out.parent, lambda name: name == out.name[:200]):
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            try:
                yield NewFile(fd, partial)
                os.fsync(fd)
            finally:
                os.close(fd)
            _give_name(partial, out, overwrite=overwrite)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        fsync_folder(out.parent)


def _give_name(partial: Path, out: Path, *, overwrite: bool) -> None:
    if overwrite:
        partial.replace(out)
        return
    try:
        os.link(partial, out)  # unlike a rename, fails where somebody else was faster
    except FileExistsError:
        raise _there_already(out) from None
    except OSError:  # a file system without hard links
        if os.path.lexists(out):
            raise _there_already(out) from None
        partial.replace(out)
    else:
        partial.unlink()


def _there_already(out: Path) -> StorageError:
    return StorageError(
        f"{out} is there already", errno=errno.EEXIST, hint="choose another name, or say overwrite=True (--overwrite)"
    )
