"""What is left over in a run's folder: by a writer that died, or since it could not be removed yet."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.core import steps as names
from zerostall.errors import FormatError
from zerostall.telemetry import log
from zerostall.tiers.files import fsync_folder, remove_tree

if TYPE_CHECKING:
    from collections.abc import Callable


class Leftovers:
    """Folders that are removed now, or as soon as they can be. Not thread-safe."""

    def __init__(self) -> None:
        self._folders: set[Path] = set()

    def remove(self, folder: Path) -> bool:
        """False when it is left for later. Never raises."""
        gone = remove_tree(folder)
        (self._folders.discard if gone else self._folders.add)(folder)
        return gone

    def leave(self, folder: Path) -> None:
        """To be removed later."""
        self._folders.add(folder)

    def spare(self, folder: Path) -> None:
        """Something else has that name now."""
        self._folders.discard(folder)

    def remove_again(self) -> None:
        """Try once more to remove what could not be removed before."""
        for folder in list(self._folders):
            self.remove(folder)


def bring_back_swapped(where: Path, created: Callable[[Path], float]) -> None:
    """One that died while it put a new folder in an old one's place left a step's old and new folder, both staged.

    `created`: when what is in a folder was saved; FormatError or OSError where it is not whole.
    """
    staged: dict[int, list[tuple[float, Path]]] = {}
    for step, folder in staged_folders(where):
        if (where / names.step_folder(step)).exists():
            continue
        with contextlib.suppress(FormatError, OSError):
            staged.setdefault(step, []).append((created(folder), folder))
    for step, folders in staged.items():
        _, newest = max(folders)
        newest.rename(where / names.step_folder(step))
        log.warning("%s: step %d was being replaced when its writer died: %s is it now", where, step, newest.name)
    if staged:
        fsync_folder(where)


def staged_folders(where: Path) -> list[tuple[int, Path]]:
    """Folders beside those of steps, each with the step whose place it was to take, or has given up."""
    with contextlib.suppress(FileNotFoundError), os.scandir(where) as entries:
        found = [(names.parse_staging(entry.name), entry) for entry in entries]
        return [(one[0], Path(entry.path)) for one, entry in found if one and entry.is_dir(follow_symlinks=False)]
    return []


def remove_partials(folder: Path) -> list[str]:
    """Remove files that are not whole; their names."""
    removed: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for path in [path for path in folder.iterdir() if names.parse_partial(path.name) is not None]:
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed
