"""What is left over in a run's folder: by a writer that died, or since it could not be removed yet."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.errors import FormatError
from zerostall.telemetry import log
from zerostall.tiers.files import fsync_folder, read_file, remove_tree

if TYPE_CHECKING:
    from zerostall.tiers.step_files import StepFiles


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


def bring_back_swapped(files: StepFiles) -> None:
    """One that died while it put a new folder in an old one's place left a step's old and new folder, both staged."""
    staged: dict[int, list[tuple[float, Path]]] = {}
    for entry in files.entries():
        parsed = names.parse_staging(entry.name)
        if parsed is None or files.folder(parsed[0]).exists():
            continue
        with contextlib.suppress(FormatError, OSError):
            path = Path(entry.path) / names.MANIFEST
            manifest = manifests.decode_manifest(read_file(path), source=str(path))
            staged.setdefault(parsed[0], []).append((manifest.created, Path(entry.path)))
    for step, folders in staged.items():
        _, newest = max(folders)
        newest.rename(files.folder(step))
        log.warning("%s: step %d was being replaced when its writer died: %s is it now", files.where, step, newest.name)
    if staged:
        fsync_folder(files.where)


def remove_partials(folder: Path) -> list[str]:
    """Remove files that are not whole; their names."""
    removed: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for path in [path for path in folder.iterdir() if names.parse_partial(path.name) is not None]:
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed
