"""What exports that were killed have left beside the files that they were to make."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from typing import TYPE_CHECKING

from zerostall.tiers.files import remove_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PARTIAL = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial", re.DOTALL)


def partial(name: str, nonce: str) -> str:
    """What a file is called as long as it is not whole; `nonce` is of eight hexadecimal digits."""
    return f".{name[:200]}.{nonce}.partial"


@contextlib.contextmanager
def swept(folder: Path, ours: Callable[[str], bool]) -> Iterator[None]:
    """Rid a folder of partial files whose names `ours` takes, unless somebody else is within such a block there.

    Whoever writes in the folder holds a lock on it that all may share, and only who is alone removes anything. Where
    folders cannot be locked (some network file systems) nothing is removed.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _sweep(folder, ours)
            fcntl.flock(fd, fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def _sweep(folder: Path, ours: Callable[[str], bool]) -> None:
    for path in list(folder.iterdir()):
        found = _PARTIAL.fullmatch(path.name)
        if found is None or not ours(found[1]):
            continue
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)
