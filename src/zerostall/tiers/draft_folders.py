"""Where the images of a step are put until it is committed."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from zerostall.core import steps as names
from zerostall.tiers.files import fsync_folder
from zerostall.tiers.step_files import committed

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.tiers.leftovers import Leftovers
    from zerostall.tiers.step_files import StepFiles


def new_beside(where: Path, step: int) -> Path:
    """A folder of a name of its own, beside the step's."""
    return where / names.staging_folder(step, secrets.token_hex(4))


def swap(where: Path, step: int, new: Path) -> Path:
    """Put a folder in the place of the step's, for good; where that one lies now, to be removed.

    In between the step is absent: who dies then leaves it to `leftovers.bring_back_swapped`. Where it fails, both lie
    where they lay.
    """
    final, old = where / names.step_folder(step), new_beside(where, step)
    final.rename(old)
    try:
        new.rename(final)
        fsync_folder(where)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            final.rename(new)
        old.rename(final)
        raise
    return old


class DraftFolders:
    """A step's own folder, or one beside it while a committed step of that number is there. Not thread-safe."""

    def __init__(self, files: StepFiles, left: Leftovers) -> None:
        self._files = files
        self._left = left
        self._begun: set[int] = set()
        self._beside: dict[int, Path] = {}

    def begin(self, step: int) -> Path:
        """The folder of that step's draft, which need not be there yet. What an earlier life left in it is removed."""
        final = self._files.folder(step)
        folder = self._beside.get(step)
        if folder is None and committed(final):
            folder = self._beside[step] = new_beside(self._files.where, step)
        elif folder is None and step not in self._begun:
            self._left.remove(final)
            self._left.spare(final)  # of an earlier life: nothing of it may get into this one
        self._begun.add(step)
        return folder or final

    def folder(self, step: int) -> Path:
        """Where it was put; its own folder if nothing was."""
        return self._beside.get(step) or self._files.folder(step)

    def join(self, step: int, folder: Path) -> None:
        """Go on with the draft that another process has begun there."""
        self._begun.add(step)
        if folder != self._files.folder(step):
            self._beside[step] = folder

    def leave(self, step: int) -> None:
        """It is committed, or another's to commit."""
        self._begun.discard(step)
        self._beside.pop(step, None)

    def abandon(self, step: int) -> None:
        """Remove it, if it is not committed. Never raises."""
        final, beside = self._files.folder(step), self._beside.get(step)
        if beside is not None:
            self._left.remove(beside)
        elif step in self._begun and not committed(final):
            self._left.remove(final)
        self.leave(step)

    def take_place(self, step: int) -> None:
        """The draft beside the step's folder takes its place. In between the step is absent, never mixed."""
        self._left.remove(swap(self._files.where, step, self.folder(step)))
