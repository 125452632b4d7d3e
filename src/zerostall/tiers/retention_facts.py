"""What retention asks of the committed steps in a run's folder."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from zerostall.core import steps as names
from zerostall.core.retention import StepFacts
from zerostall.errors import ForeignStepError, FormatError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerostall.tiers.step_files import StepFiles


class RetentionFacts:
    """Each manifest is read once, and again where it is another file."""

    def __init__(self, files: StepFiles) -> None:
        self._files = files
        self._known: dict[int, tuple[tuple[int, int], StepFacts, bool]] = {}

    def of(self, steps: Iterable[int]) -> dict[int, StepFacts]:
        """Of those that are there."""
        found: dict[int, StepFacts] = {}
        for step in steps:
            with contextlib.suppress(OSError):
                found[step] = self._read(step)[0]
        return found

    def strangers(self, steps: Iterable[int]) -> set[int]:
        """Those that are another run's; none where nobody can say whose the folder is."""
        found = set[int]()
        for step in steps if self._files.run() is not None else ():
            with contextlib.suppress(OSError):
                if self._read(step)[1]:
                    found.add(step)
        return found

    def forget(self, step: int) -> None:
        self._known.pop(step, None)

    def _read(self, step: int) -> tuple[StepFacts, bool]:
        about = (self._files.folder(step) / names.MANIFEST).lstat()
        which, known = (about.st_ino, about.st_mtime_ns), self._known.get(step)
        if known is None or known[0] != which:
            try:
                known = which, StepFacts.of(self._files.manifest(step)), False
            except FormatError as error:
                known = which, StepFacts(step), isinstance(error, ForeignStepError)
            self._known[step] = known
        return known[1:]
