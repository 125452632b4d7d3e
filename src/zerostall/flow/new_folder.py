"""Files that appear in a folder together: written beside their places, made durable, named one after the other."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from typing import TYPE_CHECKING

from zerostall.errors import StorageError
from zerostall.flow import swept
from zerostall.flow.new_file import NewFile
from zerostall.tiers.files import free_bytes, fsync_folder, make_folder, no_room, remove_tree, storage_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class NewFolder:
    """What `new_folder` gives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._nonce, self._old_nonce = secrets.token_hex(4), secrets.token_hex(4)
        self.names: list[str] = []

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[NewFile]:
        """Yield a file that will have this name; those written first get theirs first."""
        partial = self.partial(name)
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        self.names.append(name)
        try:
            yield NewFile(fd, partial)
            os.fsync(fd)
        finally:
            os.close(fd)

    def partial(self, name: str) -> Path:
        return self.path / swept.partial(name, self._nonce)

    def outgoing(self, name: str) -> Path:
        """What an old file is called until all new ones have their names."""
        return self.path / swept.partial(name, self._old_nonce)


@contextlib.contextmanager
def new_folder(out: Path, *, overwrite: bool, nbytes: int, ours: Callable[[str], bool]) -> Iterator[NewFolder]:
    """Yield a folder for files that get their names when the block ends well; otherwise nothing is left of them.

    The name that was given last is what readers look for first, so it is the last to appear, and the old one of that
    name the first to go.

    Args:
        overwrite: files for which `ours` is true may be there already, and go.
        nbytes: how much room it will take.

    Raises:
        StorageError: such files are there and `overwrite` was not said; no room; the disk refused.
    """
    out = out.absolute()
    if out.exists() and not out.is_dir():
        raise StorageError(f"{out} is no folder", errno=errno.ENOTDIR)
    made = not out.exists()
    old = [] if made else sorted(path.name for path in out.iterdir() if ours(path.name))
    if old and not overwrite:
        raise StorageError(
            f"{out} holds {old[0]} already",
            errno=errno.EEXIST,
            hint="another folder, or overwrite=True (--overwrite)",
        )
    if not out.parent.is_dir():
        raise StorageError(f"{out.parent} is no folder", errno=errno.ENOENT)
    if nbytes > free_bytes(out.parent):
        raise no_room(out, out.name, nbytes)
    with storage_errors(out, out.name, nbytes), contextlib.ExitStack() as stack:
        make_folder(out)
        folder = NewFolder(out)
        try:
            stack.enter_context(swept.swept(out, ours))
            yield folder
            _give_names(folder, old)
        except BaseException:
            for name in folder.names:
                folder.partial(name).unlink(missing_ok=True)
            if made:
                with contextlib.suppress(OSError):
                    out.rmdir()
            raise


def _give_names(folder: NewFolder, old: list[str]) -> None:
    """The old files go, the new ones get their names; where that fails half way, the old ones have theirs again."""
    last = folder.names[-1]
    done: list[tuple[Path, Path]] = []

    def rename(before: Path, after: Path) -> None:
        before.rename(after)
        done.append((before, after))

    try:
        for name in sorted(old, key=lambda name: name != last):
            rename(folder.path / name, folder.outgoing(name))
        if old:
            fsync_folder(folder.path)
        for name in folder.names:
            if name == last:
                fsync_folder(folder.path)
            rename(folder.partial(name), folder.path / name)
        fsync_folder(folder.path)
    except BaseException:
        for before, after in reversed(done):
            with contextlib.suppress(OSError):
                after.rename(before)
        raise
    for name in old:
        with contextlib.suppress(OSError):  # the next one who writes here removes it
            folder.outgoing(name).unlink()


@contextlib.contextmanager
def moved_in(out: Path, *, overwrite: bool, nbytes: int, ours: Callable[[str], bool], last: str) -> Iterator[Path]:
    """Yield an empty folder beside `out`; what lies in it when the block ends well is moved to `out`, `last` at last.

    For writers that give files their names themselves. Arguments and errors as `new_folder`.
    """
    out = out.absolute()
    if not out.parent.is_dir():
        raise StorageError(f"{out.parent} is no folder", errno=errno.ENOENT)
    beside = out.with_name(swept.partial(out.name, secrets.token_hex(4)))
    with (
        swept.swept(out.parent, lambda name: name == out.name[:200]),
        new_folder(out, overwrite=overwrite, nbytes=nbytes, ours=ours) as folder,
    ):
        beside.mkdir()
        try:
            yield beside
            for path in sorted(beside.iterdir(), key=lambda path: (path.name == last, path.name)):
                path.rename(folder.partial(path.name))
                folder.names.append(path.name)
        finally:
            remove_tree(beside)
