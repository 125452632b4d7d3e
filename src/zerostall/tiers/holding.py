"""What run a folder holds, for who does not have it; see `core.heirs`."""

from __future__ import annotations

import os
from pathlib import Path

from zerostall.core import layout as layouts
from zerostall.core import manifest as manifests
from zerostall.core import steps as names
from zerostall.core.heirs import Holding
from zerostall.core.manifest import RunFacts
from zerostall.errors import FormatError, VersionError
from zerostall.tiers.files import read_file
from zerostall.tiers.step_files import committed


def holding_of(folder: Path) -> Holding | None:
    """None where nothing of a run is there.

    Raises:
        FormatError: what is there does not say of which run it is.
        OSError: the folder cannot be looked at.
    """
    steps = _steps(folder)
    newest = max(steps, default=-1)
    path = folder / names.RUN
    damage: FormatError | None = None
    try:
        return Holding(manifests.decode_run(read_file(path), source=str(path)), newest)
    except FileNotFoundError:
        pass
    except VersionError:
        raise
    except FormatError as error:
        damage = error
    for step in sorted(steps, reverse=True):
        try:
            path = steps[step] / names.MANIFEST
            run = manifests.decode_manifest(read_file(path), source=str(path)).run
        except (FormatError, FileNotFoundError):
            continue
        return Holding(RunFacts(run=run, name="", fingerprint=layouts.fingerprint([])), newest)
    if damage is not None:
        raise damage
    return None


def _steps(folder: Path) -> dict[int, Path]:
    try:
        with os.scandir(folder) as entries:
            found = [(names.parse_step(entry.name), Path(entry.path)) for entry in entries if entry.is_dir()]
    except FileNotFoundError:
        return {}
    return {step: path for step, path in found if step is not None and committed(path)}
