"""Where the images of a step are put until it is committed."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from zerostall.core import steps as names
from zerostall.tiers.files import fsync_folder
from zerostall.tiers.step_files import committed

if TYPE_CHECKING:
    from pathlib import Path

    from zerostall.tiers.leftovers import Leftovers
    from zerostall.tiers.step_files import StepFiles


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
            folder = self._beside[step] = self.new_beside(step)
        elif folder is None and step not in self._begun:
            self._left.remove(final)
            self._left.spare(final)  # of an earlier life: nothing of it may get into this one
        self._begun.add(step)
        return folder or final

    def folder(self, step: int) -> Path:
        """Where it was put; its own folder if nothing was."""
        return self._beside.get(step) or self._files.folder(step)

    def new_beside(self, step: int) -> Path:
        """A folder of a name of its own, beside the step's."""
        return self._files.where / names.staging_folder(step, secrets.token_hex(4))

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
        old, final, draft = self.new_beside(step), self._files.folder(step), self.folder(step)
        final.rename(old)
        draft.rename(final)
        fsync_folder(self._files.where)
        self._left.remove(old)
