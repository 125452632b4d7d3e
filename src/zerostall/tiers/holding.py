"""What run a folder holds: for the agent that takes it, and for who does not have it (see `core.heirs`)."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.heirs import Holding
from zerostall.errors import ForeignStepError, FormatError, VersionError
from zerostall.tiers import readings
from zerostall.tiers.files import read_file
from zerostall.tiers.step_files import committed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerostall.core.manifest import Manifest, RunFacts


@dataclass(frozen=True, slots=True)
class Told:
    """What run a folder is of. `problem`: why only its steps tell; "" where run.json does."""

    facts: RunFacts
    problem: str


def holding_of(folder: Path) -> Holding | None:
    """None where nothing of a run is there.

    Raises:
        FormatError: what is there does not say of which run it is.
        OSError: the folder cannot be looked at.
    """
    steps = _steps(folder)
    told = _told(folder, steps)
    return None if told is None else Holding(told.facts, _newest(steps, told.facts.run))


def run_of(folder: Path) -> Told | None:
    """As `holding_of`."""
    return _told(folder, _steps(folder))


def _told(folder: Path, steps: Mapping[int, Path]) -> Told | None:
    """By run.json, else by what most of the steps say whose manifest is whole; of as many, by the newest."""
    path = folder / names.RUN
    damage: FormatError | None = None
    try:
        return Told(manifests.decode_run(read_file(path), source=str(path)), "")
    except FileNotFoundError:
        pass
    except VersionError:
        raise
    except FormatError as error:
        damage = error
    found: list[Manifest] = []
    for step in sorted(steps, reverse=True):
        path = steps[step] / names.MANIFEST
        with contextlib.suppress(FormatError, OSError):
            found.append(readings.manifest_of(step, read_file(path), str(path)))
    facts = readings.run_told_by(found)
    if facts is not None:
        return Told(facts, str(damage or "run.json is missing"))
    if damage is not None:
        raise damage  # nothing here says that it was ever ours
    return None


def _steps(folder: Path) -> dict[int, Path]:
    try:
        with os.scandir(folder) as entries:
            found = [(names.parse_step(entry.name), Path(entry.path)) for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return {}
    return {step: path for step, path in found if step is not None and committed(path)}


def _newest(steps: Mapping[int, Path], run: str) -> int:
    """The newest that is not another run's; -1 where there is none."""
    for step in sorted(steps, reverse=True):
        path = steps[step] / names.MANIFEST
        try:
            readings.manifest_of(step, read_file(path), str(path), run)
        except ForeignStepError:
            continue
        except (FormatError, OSError):
            pass  # damaged, or just gone: it counts as the run's
        return step
    return -1


def step_here(folder: Path) -> int | None:
    """The step that this folder itself is: whoever names it means the run's, which is the one above."""
    return names.parse_step(folder.name) if (folder / names.MANIFEST).is_file() else None
